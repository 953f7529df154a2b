//! An ack: parsing, and its answer.

use std::borrow::Cow;

use serde::Deserialize;
use uuid::Uuid;

use super::error::ApiError;
use super::pop::QUEUE_MODE;
use super::push::{bad_body, check_name, push_json_text};
use super::query::shorten;
use super::segment::transaction_hash;
use super::time;

/// What an ack under a lease is told that is not, or no longer, the partition's.
pub const INVALID_LEASE: &str = "invalid or expired lease";
/// Why a message is dead-lettered when nobody said why.
pub const EXHAUSTED: &str = "Retries exhausted";
/// Most items of one call.
pub const MAX_ITEMS: usize = 100_000;
/// Longest reason kept with a dead letter, in bytes.
const MAX_ERROR_BYTES: usize = 65_536;
/// A renewal that does not say for how long, in seconds.
const DEFAULT_EXTEND_SECONDS: i64 = 60;
/// Longest renewal in seconds: a year.
const MAX_EXTEND_SECONDS: i64 = 31_536_000;

/// What a consumer says about one message. The order is the precedence at one
/// offset: `DeadLetter` beats `Failed` beats `Retry`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AckStatus {
    /// Done.
    Completed,
    /// Hand it out again, at no cost.
    Retry,
    /// Hand it out again, at the cost of one unit of the retry budget.
    Failed,
    /// To the dead letters at once.
    DeadLetter,
}

impl AckStatus {
    /// How SQL knows it: 0 completed, 1 retry, 2 failed, 3 dead-letter; the higher wins.
    pub fn code(self) -> i16 {
        self as i16
    }
}

/// A parsed `ack` or `ack/batch`.
#[derive(Debug, Clone, PartialEq)]
pub struct AckRequest {
    /// The consumer group.
    pub group: String,
    /// In request order.
    pub items: Vec<AckItem>,
}

/// One acknowledgement.
#[derive(Debug, Clone, PartialEq)]
pub struct AckItem {
    /// As sent; echoed in the answer.
    pub transaction_id: String,
    /// xxh3-128 of the transaction id's bytes.
    pub hash: u128,
    /// The partition.
    pub partition_id: Uuid,
    /// The lease it is made under, if it names one.
    pub lease_id: Option<Uuid>,
    /// What is said.
    pub status: AckStatus,
    /// The reason, kept with a dead letter.
    pub error: Option<String>,
    /// Set when the item can change nothing (an unknown status, an id that is no UUID): its answer's error.
    pub refused: Option<String>,
}

/// The answer to one acknowledgement.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AckOutcome {
    /// Whether it was applied (or had been before).
    pub success: bool,
    /// Why not.
    pub error: Option<String>,
    /// The lease on its partition ended with this call.
    pub lease_released: bool,
    /// The message went to the dead letters.
    pub dead_lettered: bool,
    /// The message was dropped: budget spent, dead letters off.
    pub dropped: bool,
    /// It was done before.
    pub noop: bool,
}

/// One acknowledgement as sent. Every field may be absent or null.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Item<'a> {
    #[serde(borrow)]
    transaction_id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    partition_id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    status: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(super) consumer_group: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(super) lease_id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    error: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Batch<'a> {
    #[serde(borrow)]
    consumer_group: Option<Cow<'a, str>>,
    #[serde(borrow)]
    acknowledgments: Option<Vec<Item<'a>>>,
}

/// Parses the body of `POST /api/v1/ack`.
pub fn parse_single(body: &[u8]) -> Result<AckRequest, ApiError> {
    let text = std::str::from_utf8(body).map_err(bad_body)?;
    let item: Item<'_> = serde_json::from_str(text).map_err(bad_body)?;
    let group = group_of(item.consumer_group.as_deref())?;
    Ok(AckRequest { group, items: vec![item.check(0)?] })
}

/// Parses the body of `POST /api/v1/ack/batch`.
pub fn parse_batch(body: &[u8]) -> Result<AckRequest, ApiError> {
    let text = std::str::from_utf8(body).map_err(bad_body)?;
    let batch: Batch<'_> = serde_json::from_str(text).map_err(bad_body)?;
    let group = group_of(batch.consumer_group.as_deref())?;
    let items = batch.acknowledgments.unwrap_or_default();
    if items.len() > MAX_ITEMS {
        return Err(bad_body(format_args!(
            "{} acknowledgments are more than the {MAX_ITEMS} of one call",
            items.len()
        )));
    }
    let items =
        items.into_iter().enumerate().map(|(index, item)| item.check(index)).collect::<Result<_, _>>()?;
    Ok(AckRequest { group, items })
}

/// A group's name, or the group of those that name none.
pub fn group_of(name: Option<&str>) -> Result<String, ApiError> {
    match name {
        None | Some("") => Ok(QUEUE_MODE.to_owned()),
        Some(name) => {
            check_name("consumerGroup", name)?;
            Ok(name.to_owned())
        }
    }
}

impl Item<'_> {
    /// Checks what can be checked without the database. What makes the whole body
    /// unusable is a 400; what only this item's answer is about is in `refused`.
    pub fn check(self, index: usize) -> Result<AckItem, ApiError> {
        let Some(partition) = self.partition_id.filter(|id| !id.is_empty()) else {
            return Err(bad_body(format_args!("partitionId of item {index} is required")));
        };
        let Some(transaction_id) = self.transaction_id.filter(|id| !id.is_empty()) else {
            return Err(bad_body(format_args!("transactionId of item {index} is required")));
        };
        let mut refused = None;
        let partition_id = Uuid::parse_str(&partition).unwrap_or_else(|_| {
            refused = Some(format!("unresolvable: partitionId \"{}\" is not a UUID", shorten(&partition)));
            Uuid::nil()
        });
        let lease_id = match self.lease_id.as_deref() {
            None | Some("") => None,
            Some(text) => Uuid::parse_str(text).map(Some).unwrap_or_else(|_| {
                refused = Some(INVALID_LEASE.to_owned());
                None
            }),
        };
        let status = match self.status.as_deref() {
            None | Some("completed" | "success" | "acked" | "ok") => AckStatus::Completed,
            Some("retry") => AckStatus::Retry,
            Some("failed") => AckStatus::Failed,
            Some("dlq") => AckStatus::DeadLetter,
            Some(other) => {
                refused = Some(format!("unknown status \"{}\"", shorten(other)));
                AckStatus::Completed
            }
        };
        let error = self.error.map(|text| {
            let mut end = text.len().min(MAX_ERROR_BYTES);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            // PostgreSQL's text cannot hold it.
            text[..end].replace('\0', "\u{fffd}")
        });
        Ok(AckItem {
            hash: transaction_hash(&transaction_id),
            transaction_id: transaction_id.into_owned(),
            partition_id,
            lease_id,
            status,
            error,
            refused,
        })
    }
}

/// The body of the 200: one element per item, in request order.
pub fn answer(request: &AckRequest, outcomes: &[AckOutcome]) -> Vec<u8> {
    let mut out = Vec::with_capacity(2 + request.items.len() * 140);
    out.push(b'[');
    for (index, (item, outcome)) in request.items.iter().zip(outcomes).enumerate() {
        if index > 0 {
            out.push(b',');
        }
        let error = item.refused.as_ref().or(outcome.error.as_ref());
        let flag = |value: bool| if value && item.refused.is_none() { "true" } else { "false" };
        out.extend_from_slice(b"{\"index\":");
        out.extend_from_slice(itoa::Buffer::new().format(index).as_bytes());
        out.extend_from_slice(b",\"transactionId\":");
        push_json_text(&mut out, &item.transaction_id);
        out.extend_from_slice(b",\"success\":");
        out.extend_from_slice(flag(outcome.success).as_bytes());
        out.extend_from_slice(b",\"error\":");
        match error {
            None => out.extend_from_slice(b"null"),
            Some(error) => push_json_text(&mut out, error),
        }
        out.extend_from_slice(b",\"leaseReleased\":");
        out.extend_from_slice(flag(outcome.lease_released).as_bytes());
        out.extend_from_slice(b",\"dlq\":");
        out.extend_from_slice(flag(outcome.dead_lettered).as_bytes());
        out.extend_from_slice(b",\"noop\":");
        out.extend_from_slice(flag(outcome.noop).as_bytes());
        if outcome.dropped && item.refused.is_none() {
            out.extend_from_slice(b",\"dropped\":true");
        }
        out.push(b'}');
    }
    out.push(b']');
    out
}

#[derive(Deserialize)]
struct Extend {
    seconds: Option<i64>,
}

/// Parses the body of a lease renewal: seconds from now. None at all means the default.
pub fn parse_extend(body: &[u8]) -> Result<u32, ApiError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(DEFAULT_EXTEND_SECONDS as u32);
    }
    let extend: Extend = serde_json::from_slice(body).map_err(bad_body)?;
    let seconds = extend.seconds.unwrap_or(DEFAULT_EXTEND_SECONDS);
    if seconds > MAX_EXTEND_SECONDS {
        return Err(ApiError::bad_request(format!(
            "seconds must be at most {MAX_EXTEND_SECONDS}, got {seconds}"
        )));
    }
    Ok(seconds.max(1) as u32)
}

/// The body of a renewal's answer. `until`: the earliest expiry, in microseconds since the Unix epoch.
pub fn extend_answer(lease: &str, renewed: u64, until: Option<i64>) -> Vec<u8> {
    let until = until.map(time::format_micros);
    serde_json::json!({
        "leaseId": lease, "success": renewed > 0, "renewed": renewed,
        "newExpiresAt": until, "expiresAt": until, "lease_expires_at": until,
    })
    .to_string()
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: &str = "01890a5d-ac96-774b-bcce-b302099a8057";

    fn single(rest: &str) -> AckItem {
        parse_single(format!(r#"{{"transactionId":"t","partitionId":"{P}"{rest}}}"#).as_bytes())
            .unwrap()
            .items
            .remove(0)
    }

    #[test]
    fn statuses_and_their_other_names() {
        for completed in
            ["", r#","status":null"#, r#","status":"success""#, r#","status":"acked""#, r#","status":"ok""#]
        {
            assert_eq!((single(completed).status, single(completed).refused), (AckStatus::Completed, None));
        }
        assert_eq!(single(r#","status":"dlq""#).status, AckStatus::DeadLetter);
        assert_eq!(single(r#","status":"done""#).refused.as_deref(), Some("unknown status \"done\""));
    }

    #[test]
    fn ids_that_are_none_refuse_their_item_only() {
        let body = r#"{"consumerGroup":"g","acknowledgments":[{"transactionId":"a","partitionId":"x"},
            {"transactionId":"b","partitionId":"01890a5d-ac96-774b-bcce-b302099a8057","leaseId":"nope"},
            {"transactionId":"c","partitionId":"01890a5d-ac96-774b-bcce-b302099a8057","leaseId":""}]}"#;
        let request = parse_batch(body.as_bytes()).unwrap();
        assert_eq!(request.group, "g");
        assert!(request.items[0].refused.as_deref().unwrap().starts_with("unresolvable"));
        assert_eq!(request.items[1].refused.as_deref(), Some(INVALID_LEASE));
        assert_eq!((request.items[2].lease_id, &request.items[2].refused), (None, &None));
        let outcomes = vec![AckOutcome { success: true, noop: true, ..Default::default() }; 3];
        let json: serde_json::Value = serde_json::from_slice(&answer(&request, &outcomes)).unwrap();
        assert_eq!((&json[0]["success"], &json[2]["success"]), (&false.into(), &true.into()));
        assert_eq!((&json[1]["error"], &json[1]["noop"]), (&INVALID_LEASE.into(), &false.into()));
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = |body: &str| parse_batch(body.as_bytes()).unwrap_err().message;
        assert_eq!(
            error(r#"{"acknowledgments":[{"transactionId":"a"}]}"#),
            "bad body: partitionId of item 0 is required"
        );
        assert!(error(r#"{"acknowledgments":[{"partitionId":"a"}]}"#).contains("transactionId of item 0"));
        assert!(parse_batch(b"{}").unwrap().items.is_empty());
        assert_eq!(answer(&parse_batch(b"{}").unwrap(), &[]), b"[]");
    }

    #[test]
    fn renewals() {
        assert_eq!(parse_extend(b"").unwrap(), 60);
        assert_eq!(parse_extend(b"{}").unwrap(), 60);
        assert_eq!(parse_extend(br#"{"seconds":-5}"#).unwrap(), 1);
        assert_eq!(parse_extend(br#"{"seconds":"x"}"#).unwrap_err().status, 400);
        let json: serde_json::Value = serde_json::from_slice(&extend_answer("l", 0, None)).unwrap();
        assert_eq!((&json["success"], &json["expiresAt"]), (&false.into(), &serde_json::Value::Null));
    }
}
