//! A filter: delivers the messages whose fields match, and passes over the others.
//!
//! Settings, all of which must hold:
//! - `where`: one comparison or several, separated by `;`: `total >= 100`,
//!   `customer.region in eu,us`, `note exists`, `state != done`, `name ~ ann` (contains).
//!   `in` takes a list, `exists` and `missing` no value.
//! - `otherwise` (`skip`): what becomes of the rest: `skip` or `dead-letter`.
//!
//! A path is field names separated by dots; a number in it is an index into a list. A
//! field that is not there matches nothing but `!=` and `missing`.

wit_bindgen::generate!({ path: "../../wit/v1", world: "filter" });

use std::cell::RefCell;

use exports::waspmq::plugin::message_filter::{Context, Guest, Message, Verdict};
use serde_json::Value;

#[derive(Clone, Copy, PartialEq)]
enum Operator {
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    Contains,
    Exists,
    Missing,
}

struct Condition {
    path: Vec<String>,
    operator: Operator,
    values: Vec<String>,
}

#[derive(Default)]
struct Settings {
    conditions: Vec<Condition>,
    dead_letter: bool,
}

thread_local! {
    static SETTINGS: RefCell<Settings> = RefCell::default();
}

const WORDS: [(&str, Operator); 12] = [
    ("<=", Operator::LessOrEqual),
    (">=", Operator::GreaterOrEqual),
    ("!=", Operator::Unequal),
    ("==", Operator::Equal),
    ("=", Operator::Equal),
    ("<", Operator::Less),
    (">", Operator::Greater),
    ("~", Operator::Contains),
    ("in", Operator::In),
    ("contains", Operator::Contains),
    ("exists", Operator::Exists),
    ("missing", Operator::Missing),
];

fn parse(text: &str) -> Result<Condition, String> {
    let text = text.trim();
    let (path, rest) = text.split_once(char::is_whitespace).ok_or_else(|| {
        format!("where: \"{text}\" is not FIELD OPERATOR VALUE, with spaces between them")
    })?;
    let rest = rest.trim();
    let (word, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let Some((_, operator)) = WORDS.iter().find(|(name, _)| *name == word) else {
        let known: Vec<&str> = WORDS.iter().map(|(name, _)| *name).collect();
        return Err(format!("where: \"{word}\" is not one of {}", known.join(" ")));
    };
    let value = value.trim();
    let values = match operator {
        Operator::In => value.split(',').map(|one| unquoted(one.trim())).collect(),
        Operator::Exists | Operator::Missing => Vec::new(),
        _ => vec![unquoted(value)],
    };
    if values.iter().any(String::is_empty) && !value.contains('"') {
        return Err(format!("where: \"{text}\" has no value"));
    }
    let path = path.split('.').map(str::to_owned).collect();
    Ok(Condition { path, operator: *operator, values })
}

fn unquoted(text: &str) -> String {
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text).to_owned()
}

impl Condition {
    fn holds(&self, payload: &Value) -> bool {
        let mut at = Some(payload);
        for name in &self.path {
            at = at.and_then(|value| match value {
                Value::Array(list) => name.parse::<usize>().ok().and_then(|index| list.get(index)),
                value => value.get(name),
            });
        }
        let Some(value) = at else {
            return matches!(self.operator, Operator::Unequal | Operator::Missing);
        };
        match self.operator {
            Operator::Exists => true,
            Operator::Missing => false,
            Operator::In | Operator::Equal => self.values.iter().any(|wanted| equal(value, wanted)),
            Operator::Unequal => !self.values.iter().any(|wanted| equal(value, wanted)),
            Operator::Contains => match value {
                Value::String(text) => text.contains(&self.values[0]),
                Value::Array(list) => list.iter().any(|one| equal(one, &self.values[0])),
                _ => false,
            },
            ordered => order(value, &self.values[0]).is_some_and(|found| match ordered {
                Operator::Less => found.is_lt(),
                Operator::LessOrEqual => found.is_le(),
                Operator::Greater => found.is_gt(),
                _ => found.is_ge(),
            }),
        }
    }
}

fn equal(value: &Value, wanted: &str) -> bool {
    match value {
        Value::String(text) => text == wanted,
        Value::Number(number) => {
            number.to_string() == wanted || wanted.parse::<f64>().is_ok_and(|wanted| number.as_f64() == Some(wanted))
        }
        Value::Bool(truth) => wanted == if *truth { "true" } else { "false" },
        Value::Null => wanted == "null",
        _ => false,
    }
}

fn order(value: &Value, wanted: &str) -> Option<std::cmp::Ordering> {
    match value {
        Value::Number(number) => number.as_f64()?.partial_cmp(&wanted.parse::<f64>().ok()?),
        // Times in RFC 3339 are ordered as texts, too.
        Value::String(text) => Some(text.as_str().cmp(wanted)),
        _ => None,
    }
}

struct JsonMatch;

impl Guest for JsonMatch {
    fn init(settings: Vec<(String, String)>) -> Result<(), String> {
        let mut parsed = Settings::default();
        for (key, value) in settings {
            match (key.as_str(), value.as_str()) {
                ("where", text) => {
                    for one in text.split(';').filter(|one| !one.trim().is_empty()) {
                        parsed.conditions.push(parse(one)?);
                    }
                }
                ("otherwise", "skip") => parsed.dead_letter = false,
                ("otherwise", "dead-letter") => parsed.dead_letter = true,
                ("otherwise", other) => {
                    return Err(format!("otherwise must be skip or dead-letter, got \"{other}\""));
                }
                (other, _) => return Err(format!("json-match has the settings where and otherwise, got \"{other}\"")),
            }
        }
        if parsed.conditions.is_empty() {
            return Err("where is required, for example \"total >= 100\"".to_owned());
        }
        SETTINGS.with(|settings| *settings.borrow_mut() = parsed);
        Ok(())
    }

    fn filter(_: Context, messages: Vec<Message>) -> Result<Vec<Verdict>, String> {
        SETTINGS.with(|settings| {
            let settings = settings.borrow();
            let judge = |message: &Message| {
                let matches = serde_json::from_slice::<Value>(&message.payload)
                    .is_ok_and(|payload| settings.conditions.iter().all(|condition| condition.holds(&payload)));
                match (matches, settings.dead_letter) {
                    (true, _) => Verdict::Deliver,
                    (false, false) => Verdict::Skip,
                    (false, true) => Verdict::DeadLetter("it does not match the filter of its group".to_owned()),
                }
            };
            Ok(messages.iter().map(judge).collect())
        })
    }
}

export!(JsonMatch);
