//! Plugin bindings, and what a filter's verdicts do to a claimed span.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::error::ApiError;
use super::query::{Query, shorten};

/// Settings of one binding.
const MAX_SETTINGS: usize = 64;
/// Bytes of all names and values of one binding's settings.
const MAX_SETTINGS_BYTES: usize = 64 * 1024;
/// Longest hold in milliseconds: an hour.
pub const MAX_HOLD_MS: u32 = 3_600_000;

/// What a plugin can be bound as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Orders candidates.
    Selector,
    /// Judges messages.
    Filter,
}

impl Kind {
    /// Its name on the wire and in the database.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Selector => "selector",
            Kind::Filter => "filter",
        }
    }
}

/// What happens when a plugin fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OnError {
    /// Selector: the built-in order (its default). Filter: everything is delivered.
    Deliver,
    /// The pop answers 503 and nothing is claimed (a filter's default).
    Fail,
}

/// A plugin with its settings, bound to something.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Binding {
    /// The plugin's name.
    pub plugin: String,
    /// Its settings.
    pub settings: BTreeMap<String, String>,
    /// When it fails.
    pub on_error: OnError,
    /// Of kind, plugin and settings: bindings with the same one share an instance.
    pub key: u64,
}

/// Whether this can be a plugin's name: `[a-z0-9][a-z0-9-]{0,62}`.
pub fn is_plugin_name(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && !name.starts_with('-')
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

impl Binding {
    /// Reads a binding; null is none. A name alone is a binding without settings.
    pub fn parse(kind: Kind, value: &Value) -> Result<Option<Self>, ApiError> {
        let what = kind.name();
        let object = match value {
            Value::Null => return Ok(None),
            Value::String(name) => return Self::checked(kind, name, BTreeMap::new(), None).map(Some),
            Value::Object(object) => object,
            other => {
                return Err(ApiError::bad_request(format!(
                    "{what} must be a plugin's name, {{\"plugin\",\"settings\",\"onError\"}} or null, got {}",
                    shorten(&other.to_string())
                )));
            }
        };
        let Some(Value::String(name)) = object.get("plugin") else {
            return Err(ApiError::bad_request(format!("{what}.plugin is required")));
        };
        let mut settings = BTreeMap::new();
        match object.get("settings") {
            None | Some(Value::Null) => {}
            Some(Value::Object(given)) => {
                for (key, value) in given {
                    // A number, a list or a schema is handed over as its JSON text.
                    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                    settings.insert(key.clone(), text);
                }
            }
            Some(other) => {
                return Err(ApiError::bad_request(format!(
                    "{what}.settings must be an object, got {}",
                    shorten(&other.to_string())
                )));
            }
        }
        let on_error = match object.get("onError") {
            None | Some(Value::Null) => None,
            Some(Value::String(text)) => Some(text.as_str()),
            Some(other) => {
                return Err(ApiError::bad_request(format!(
                    "{what}.onError must be a string, got {}",
                    shorten(&other.to_string())
                )));
            }
        };
        Self::checked(kind, name, settings, on_error).map(Some)
    }

    /// From a pop's parameters: `filter=name`, `filter.KEY=VALUE`, `filter.onError` is a setting like others.
    pub fn from_query(kind: Kind, query: &Query<'_>) -> Result<Option<Self>, ApiError> {
        let Some(name) = query.text(kind.name())? else { return Ok(None) };
        let settings = query.with_prefix(&format!("{}.", kind.name()))?.into_iter().collect();
        Self::checked(kind, &name, settings, None).map(Some)
    }

    fn checked(
        kind: Kind,
        name: &str,
        settings: BTreeMap<String, String>,
        on_error: Option<&str>,
    ) -> Result<Self, ApiError> {
        let what = kind.name();
        if !is_plugin_name(name) {
            return Err(ApiError::bad_request(format!(
                "{what} \"{}\" is not a plugin's name: 1 to 63 of a-z, 0-9 and -",
                shorten(name)
            )));
        }
        let bytes: usize = settings.iter().map(|(key, value)| key.len() + value.len()).sum();
        if settings.len() > MAX_SETTINGS || bytes > MAX_SETTINGS_BYTES {
            return Err(ApiError::bad_request(format!(
                "{what} has {} settings of {bytes} bytes; at most {MAX_SETTINGS} of {MAX_SETTINGS_BYTES} bytes together",
                settings.len()
            )));
        }
        let on_error = match (kind, on_error) {
            (Kind::Selector, None | Some("ignore")) => OnError::Deliver,
            (Kind::Selector, Some("fail")) => OnError::Fail,
            (Kind::Filter, None | Some("block")) => OnError::Fail,
            (Kind::Filter, Some("deliver")) => OnError::Deliver,
            (Kind::Selector, Some(other)) => {
                return Err(ApiError::bad_request(format!(
                    "{what}.onError must be ignore or fail, got \"{}\"",
                    shorten(other)
                )));
            }
            (Kind::Filter, Some(other)) => {
                return Err(ApiError::bad_request(format!(
                    "{what}.onError must be block or deliver, got \"{}\"",
                    shorten(other)
                )));
            }
        };
        let key = key_of(kind, name, &settings);
        Ok(Self { plugin: name.to_owned(), settings, on_error, key })
    }

    /// As it is stored and shown.
    pub fn to_json(&self, kind: Kind) -> Value {
        let on_error = match (kind, self.on_error) {
            (Kind::Selector, OnError::Deliver) => "ignore",
            (Kind::Selector, OnError::Fail) => "fail",
            (Kind::Filter, OnError::Deliver) => "deliver",
            (Kind::Filter, OnError::Fail) => "block",
        };
        json!({"plugin": self.plugin, "settings": self.settings, "onError": on_error})
    }

    /// From what the database holds. What cannot be read binds a plugin that does not
    /// exist: a filter must not be forgotten because of a broken row.
    pub fn stored(kind: Kind, text: &str) -> Option<Self> {
        match serde_json::from_str::<Value>(text).ok().map(|value| Self::parse(kind, &value)) {
            Some(Ok(found)) => found,
            _ => Some(Self {
                plugin: "unreadable-binding".into(),
                settings: BTreeMap::new(),
                on_error: OnError::Fail,
                key: 0,
            }),
        }
    }
}

fn key_of(kind: Kind, plugin: &str, settings: &BTreeMap<String, String>) -> u64 {
    let mut hasher = xxhash_rust::xxh3::Xxh3::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    add(kind.name());
    add(plugin);
    for (key, value) in settings {
        add(key);
        add(value);
    }
    hasher.digest()
}

/// What a filter says of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The group gets it.
    Deliver,
    /// The group passes over it.
    Skip,
    /// The batch ends before it; look again in so many milliseconds.
    Hold(u32),
    /// To the dead letters, with this reason.
    DeadLetter(String),
}

/// What becomes of a claimed span. All numbers count messages from its start.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trim {
    /// Which messages are delivered, ascending.
    pub delivered: Vec<usize>,
    /// The cursor moves over so many.
    pub finished: usize,
    /// The lease ends with this many; 0: no lease stays.
    pub leased: usize,
    /// What goes to the dead letters now, and why. All below `finished`.
    pub dead_letters: Vec<(usize, String)>,
    /// Nothing is delivered before the message at `finished`, for so many milliseconds.
    pub hold_ms: Option<u32>,
    /// Messages that were passed over for good.
    pub skipped: usize,
}

/// Applies verdicts, given in order from the span's start. At most `room` messages
/// are delivered. `auto`: the cursor moves past everything that was judged.
pub fn trim(verdicts: &[Verdict], room: usize, auto: bool) -> Trim {
    let mut trim = Trim::default();
    let mut end = 0;
    for (n, verdict) in verdicts.iter().enumerate() {
        let leading = trim.delivered.is_empty();
        match verdict {
            // Behind the last message that fits nothing is judged, not even what would be skipped.
            _ if trim.delivered.len() >= room => break,
            Verdict::Deliver => {
                trim.delivered.push(n);
                trim.leased = n + 1;
            }
            Verdict::Skip => {
                if leading || auto {
                    trim.skipped += 1;
                }
            }
            Verdict::Hold(ms) => {
                if leading || auto {
                    trim.hold_ms = Some((*ms).clamp(1, MAX_HOLD_MS));
                }
                break;
            }
            Verdict::DeadLetter(reason) => {
                if !leading && !auto {
                    break;
                }
                trim.dead_letters.push((n, reason.clone()));
            }
        }
        end = n + 1;
    }
    trim.finished = match trim.delivered.first() {
        _ if auto => end,
        Some(first) => *first,
        None => end,
    };
    if auto {
        trim.leased = 0;
    }
    trim
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dead(reason: &str) -> Verdict {
        Verdict::DeadLetter(reason.to_owned())
    }

    #[test]
    fn verdicts_trim_a_span() {
        use Verdict::{Deliver as D, Hold, Skip as S};
        let t = trim(&[S, dead("a"), D, S, D, S], 10, false);
        assert_eq!(
            (t.delivered, t.finished, t.leased, t.dead_letters),
            (vec![2, 4], 2, 5, vec![(1, "a".to_owned())])
        );
        let t = trim(&[D, dead("a"), D], 10, false);
        assert_eq!((t.delivered, t.finished, t.leased, t.dead_letters), (vec![0], 0, 1, vec![]));
        let t = trim(&[S, S], 10, false);
        assert_eq!((t.finished, t.leased, t.hold_ms), (2, 0, None));
        let t = trim(&[S, Hold(0), D], 10, false);
        assert_eq!((t.finished, t.leased, t.hold_ms), (1, 0, Some(1)));
        let t = trim(&[D, Hold(5), D], 10, false);
        assert_eq!((t.delivered, t.finished, t.hold_ms), (vec![0], 0, None));
        let t = trim(&[D, D, S, D], 2, false);
        assert_eq!((t.delivered, t.leased), (vec![0, 1], 2));
        let t = trim(&[S, D, dead("b"), S, Hold(5), D], 10, true);
        assert_eq!((t.delivered, t.finished, t.leased, t.hold_ms), (vec![1], 4, 0, Some(5)));
        assert_eq!(t.dead_letters, [(2, "b".to_owned())]);
        assert_eq!(trim(&[S, dead("x")], 0, false), Trim::default());
    }

    fn verdict() -> impl Strategy<Value = Verdict> {
        prop_oneof![
            4 => Just(Verdict::Deliver),
            4 => Just(Verdict::Skip),
            1 => Just(Verdict::Hold(1)),
            2 => Just(dead("bad")),
        ]
    }

    /// What a consumer does with a batch.
    #[derive(Debug, Clone)]
    enum Step {
        /// Acks everything.
        Ack,
        /// Acks so many (capped) of the delivered, the lease then expires.
        AckSome(usize),
        /// Nacks, or crashes.
        GiveBack,
        /// The pop commits at once.
        Auto,
    }

    proptest! {
        /// Every message of a lane ends where its verdict says, in lane order, whatever the batches and failures.
        #[test]
        fn every_message_ends_where_its_verdict_says(
            verdicts in prop::collection::vec(verdict(), 1..60),
            steps in prop::collection::vec(
                (prop_oneof![Just(Step::Ack), (0usize..5).prop_map(Step::AckSome), Just(Step::GiveBack), Just(Step::Auto)], 1usize..12, 1usize..8),
                1..40),
        ) {
            let mut lane = verdicts.clone();
            let (mut cursor, mut dead_letters, mut acked) = (0, Vec::new(), Vec::<usize>::new());
            // The steps given, then acks until it is through.
            let steps = steps.into_iter().chain(std::iter::repeat_n((Step::Ack, 10, 10), 200));
            for (step, span, room) in steps {
                if cursor == lane.len() { break; }
                let end = (cursor + span).min(lane.len());
                let auto = matches!(step, Step::Auto);
                let t = trim(&lane[cursor..end], room, auto);
                prop_assert!(t.delivered.len() <= room);
                prop_assert!(t.dead_letters.iter().all(|(n, _)| *n < t.finished));
                dead_letters.extend(t.dead_letters.iter().map(|(n, _)| cursor + n));
                if t.hold_ms.is_some() {
                    // Its time has come.
                    lane[cursor + t.finished] = Verdict::Deliver;
                }
                let delivered: Vec<usize> = t.delivered.iter().map(|n| cursor + n).collect();
                let after = match step {
                    Step::Auto => { acked.extend(&delivered); cursor + t.finished }
                    _ if delivered.is_empty() => cursor + t.finished,
                    Step::Ack => { acked.extend(&delivered); cursor + t.leased }
                    Step::AckSome(n) => {
                        let n = n.min(delivered.len());
                        acked.extend(&delivered[..n]);
                        if n > 0 { delivered[n - 1] + 1 } else { cursor + t.finished }
                    }
                    Step::GiveBack => cursor + t.finished,
                };
                prop_assert!(after >= cursor);
                cursor = after;
            }
            // A hold behind a delivered message is met again as the head.
            prop_assert_eq!(cursor, lane.len());
            let expect = |want: fn(&Verdict) -> bool| -> Vec<usize> {
                lane.iter().enumerate().filter(|(_, v)| want(v)).map(|(n, _)| n).collect()
            };
            prop_assert_eq!(acked, expect(|v| matches!(v, Verdict::Deliver)));
            prop_assert_eq!(dead_letters, expect(|v| matches!(v, Verdict::DeadLetter(_))));
        }
    }
}
