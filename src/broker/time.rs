//! Times as they are on the wire: RFC 3339 in UTC.

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;

fn at(us: i64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(us) * 1_000).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// `2026-07-30T09:12:44.881204Z`, from microseconds since the Unix epoch.
pub fn format_micros(us: i64) -> String {
    let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");
    at(us).format(format).unwrap_or_default()
}

/// `2026-07-30T09:12:44.881Z`, from microseconds since the Unix epoch.
pub fn format_millis(us: i64) -> String {
    let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");
    at(us).format(format).unwrap_or_default()
}

/// Microseconds since the Unix epoch of an RFC 3339 time. Also takes a space
/// for the `T`, which a `+` in a query becomes, and a date alone (its midnight, UTC).
pub fn parse_rfc3339(text: &str) -> Option<i64> {
    let text = text.trim();
    let parsed = OffsetDateTime::parse(text, &Rfc3339)
        .or_else(|_| OffsetDateTime::parse(&format!("{text}Z"), &Rfc3339))
        .or_else(|_| OffsetDateTime::parse(&format!("{text}T00:00:00Z"), &Rfc3339))
        .or_else(|_| OffsetDateTime::parse(&text.replacen(' ', "+", 1), &Rfc3339))
        .ok()?;
    i64::try_from(parsed.unix_timestamp_nanos().div_euclid(1_000)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_with_all_their_digits() {
        assert_eq!(format_micros(1_785_402_764_881_204), "2026-07-30T09:12:44.881204Z");
        assert_eq!(format_micros(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(format_millis(1_785_402_764_881_204), "2026-07-30T09:12:44.881Z");
    }

    #[test]
    fn what_is_written_is_read() {
        for us in [0, 1, 1_785_402_764_881_204, -5_000_001] {
            assert_eq!(parse_rfc3339(&format_micros(us)), Some(us));
        }
        assert_eq!(parse_rfc3339("2026-07-30T11:12:44.881204+02:00"), Some(1_785_402_764_881_204));
        assert_eq!(parse_rfc3339("2026-07-30T11:12:44.881204 02:00"), Some(1_785_402_764_881_204));
        assert_eq!(parse_rfc3339("2026-07-30"), Some(1_785_369_600_000_000));
        for bad in ["", "yesterday", "2026-13-01T00:00:00Z", "2026-07-30T25:00:00Z"] {
            assert_eq!(parse_rfc3339(bad), None, "{bad}");
        }
    }
}
