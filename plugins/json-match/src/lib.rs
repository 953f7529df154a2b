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
use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
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
    fn holds(&self, found: Option<&Value>) -> bool {
        let Some(value) = found else {
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

/// What is below a path.
fn below<'v>(value: &'v Value, path: &[String]) -> Option<&'v Value> {
    path.iter().try_fold(value, |value, name| match value {
        Value::Array(list) => name.parse::<usize>().ok().and_then(|index| list.get(index)),
        value => value.get(name),
    })
}

/// Reads a payload for the values that the conditions ask for, and passes over the rest:
/// a third of the time that it takes to build all of it.
struct Walk<'a> {
    conditions: &'a [Condition],
    /// Those whose path leads here.
    active: Vec<usize>,
    depth: usize,
    found: &'a mut [Option<Value>],
}

impl Walk<'_> {
    fn step(&mut self, active: Vec<usize>) -> Walk<'_> {
        Walk { conditions: self.conditions, active, depth: self.depth + 1, found: self.found }
    }

    /// The conditions whose path goes on with this name.
    fn leading_to(&self, name: &str) -> Vec<usize> {
        let goes_on = |index: &&usize| self.conditions[**index].path[self.depth] == name;
        self.active.iter().filter(goes_on).copied().collect()
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.active.iter().all(|index| self.conditions[*index].path.len() > self.depth) {
            return deserializer.deserialize_any(self);
        }
        let value = Value::deserialize(deserializer)?;
        for index in self.active {
            self.found[index] = below(&value, &self.conditions[index].path[self.depth..]).cloned();
        }
        Ok(())
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("any JSON")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(active) = map.next_key_seed(Key(&self))? {
            if active.is_empty() {
                map.next_value::<IgnoredAny>()?;
            } else {
                map.next_value_seed(self.step(active))?;
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        for index in 0.. {
            let active = self.leading_to(&index.to_string());
            let there = if active.is_empty() {
                seq.next_element::<IgnoredAny>()?.is_some()
            } else {
                seq.next_element_seed(self.step(active))?.is_some()
            };
            if !there {
                break;
            }
        }
        Ok(())
    }

    // Nothing is below these.
    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }
    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }
    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }
    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }
    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// A name in an object: the conditions that it leads to.
struct Key<'k, 'a>(&'k Walk<'a>);

impl<'de> DeserializeSeed<'de> for Key<'_, '_> {
    type Value = Vec<usize>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<usize>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_, '_> {
    type Value = Vec<usize>;

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Vec<usize>, E> {
        Ok(self.0.leading_to(name))
    }
}

impl Settings {
    fn matches(&self, payload: &[u8]) -> bool {
        let mut found = vec![None; self.conditions.len()];
        let active = (0..self.conditions.len()).collect();
        let walk = Walk { conditions: &self.conditions, active, depth: 0, found: &mut found };
        let mut deserializer = serde_json::Deserializer::from_slice(payload);
        walk.deserialize(&mut deserializer).is_ok()
            && self.conditions.iter().zip(&found).all(|(condition, value)| condition.holds(value.as_ref()))
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
                let matches = settings.matches(&message.payload);
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
