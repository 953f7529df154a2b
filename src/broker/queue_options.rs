//! A queue's options: their defaults, ranges, and the body of `configure`.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::plugin::{Binding, Kind as PluginKind};
use super::push::{bad_body, check_name};
use super::query::shorten;

/// Longest `minPopWaitTime` in milliseconds; longer ones are cut to it, as the reference does.
pub const MAX_MIN_POP_WAIT_MS: i64 = 60_000;

/// How an option's value is checked.
#[derive(Clone, Copy)]
enum Kind {
    /// A JSON boolean.
    Boolean,
    /// A whole number in this range.
    Integer(i64, i64),
    /// A whole number, brought into this range.
    Clamped(i64, i64),
}

/// Largest value that the database's column holds.
const MAX_INT: i64 = i32::MAX as i64;

macro_rules! options {
    ($($(#[$doc:meta])* $field:ident: $ty:ty = $default:expr, $key:literal, $kind:expr;)*) => {
        /// The options of a queue, as `configure` takes and answers them.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct QueueOptions {
            $($(#[$doc])* pub $field: $ty,)*
        }

        impl Default for QueueOptions {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        /// Keys and their checks.
        const KEYS: &[(&str, Kind)] = &[$(($key, $kind),)*];

        impl QueueOptions {
            /// All options by their names on the wire.
            pub fn to_json(&self) -> Value {
                json!({$($key: self.$field,)*})
            }

            /// Sets one option from a checked value; null is the default.
            fn set(&mut self, key: &str, value: &Value) {
                let default = Self::default();
                match key {
                    $($key => self.$field = Raw::of(value).unwrap_or(default.$field),)*
                    _ => {}
                }
            }
        }
    };
}

/// Reading a checked JSON value.
trait Raw: Sized {
    fn of(value: &Value) -> Option<Self>;
}

impl Raw for i32 {
    fn of(value: &Value) -> Option<Self> {
        value.as_i64().and_then(|n| n.try_into().ok())
    }
}

impl Raw for bool {
    fn of(value: &Value) -> Option<Self> {
        value.as_bool()
    }
}

options! {
    /// Seconds a claim is held.
    lease_time: i32 = 60, "leaseTime", Kind::Integer(1, MAX_INT);
    /// Explicit failures before a message is dead-lettered.
    retry_limit: i32 = 3, "retryLimit", Kind::Integer(0, MAX_INT);
    /// Dead-letter what has failed too often (either of the two).
    dead_letter_queue: bool = true, "deadLetterQueue", Kind::Boolean;
    /// Dead-letter what has failed too often (either of the two).
    dlq_after_max_retries: bool = true, "dlqAfterMaxRetries", Kind::Boolean;
    /// Seconds before a message is visible.
    delayed_processing: i32 = 0, "delayedProcessing", Kind::Integer(0, MAX_INT);
    /// Seconds a partition gathers messages before it is delivered.
    window_buffer: i32 = 0, "windowBuffer", Kind::Integer(0, MAX_INT);
    /// Milliseconds a waiting pop may wait for a fuller batch.
    min_pop_wait_time: i32 = 0, "minPopWaitTime", Kind::Clamped(0, MAX_MIN_POP_WAIT_MS);
    /// Switches the next two on.
    retention_enabled: bool = false, "retentionEnabled", Kind::Boolean;
    /// Seconds after which segments are dropped, consumed or not.
    retention_seconds: i32 = 0, "retentionSeconds", Kind::Integer(0, MAX_INT);
    /// Seconds after which segments are dropped that every group has finished.
    completed_retention_seconds: i32 = 0, "completedRetentionSeconds", Kind::Integer(0, MAX_INT);
    /// Seconds after which unconsumed segments are dropped.
    max_wait_time_seconds: i32 = 0, "maxWaitTimeSeconds", Kind::Integer(0, MAX_INT);
    /// Seconds in which a repeated transaction id is a duplicate.
    dedup_window_seconds: i32 = 3600, "dedupWindowSeconds", Kind::Integer(0, MAX_INT);
    /// Encrypt payloads at rest.
    encryption_enabled: bool = false, "encryptionEnabled", Kind::Boolean;
    /// Stored; for selectors.
    priority: i32 = 0, "priority", Kind::Integer(-MAX_INT, MAX_INT);
    /// Stored and echoed.
    ttl: i32 = 3600, "ttl", Kind::Integer(0, MAX_INT);
    /// Stored and echoed.
    max_size: i32 = 0, "maxSize", Kind::Integer(0, MAX_INT);
    /// Stored and echoed.
    retry_delay: i32 = 1000, "retryDelay", Kind::Integer(0, MAX_INT);
}

/// A parsed `configure`.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigureRequest {
    /// The queue; it is made if it is missing.
    pub queue: String,
    /// A new namespace; `None`: as it is, or from the name.
    pub namespace: Option<String>,
    /// A new task.
    pub task: Option<String>,
    /// Reset what is absent.
    pub replace: bool,
    patch: Map<String, Value>,
    /// A new selector, or none; `None`: as it is (with `replace`: none).
    pub selector: Option<Option<Binding>>,
    /// A new filter, or none; `None`: as it is (with `replace`: none).
    pub filter: Option<Option<Binding>>,
}

impl ConfigureRequest {
    /// The bindings after this request: selector, filter.
    pub fn bindings(
        &self,
        selector: Option<Binding>,
        filter: Option<Binding>,
    ) -> (Option<Binding>, Option<Binding>) {
        let after = |asked: &Option<Option<Binding>>, current: Option<Binding>| match asked {
            Some(asked) => asked.clone(),
            None if self.replace => None,
            None => current,
        };
        (after(&self.selector, selector), after(&self.filter, filter))
    }

    /// The options after this request.
    pub fn apply(&self, current: &QueueOptions) -> QueueOptions {
        let mut options = if self.replace { QueueOptions::default() } else { current.clone() };
        for (key, value) in &self.patch {
            options.set(key, value);
        }
        options
    }
}

/// Parses the body of `POST /api/v1/configure`. Without an `options` object the top-level
/// keys are the options. Keys it does not know are ignored, as published clients send more.
pub fn parse_configure(body: &[u8]) -> Result<ConfigureRequest, ApiError> {
    let body: Value = serde_json::from_slice(body).map_err(bad_body)?;
    let Some(top) = body.as_object() else {
        return Err(bad_body("it must be an object"));
    };
    let queue = match top.get("queue") {
        Some(Value::String(name)) if !name.is_empty() => name.clone(),
        _ => return Err(ApiError::bad_request("queue is required")),
    };
    check_name("queue", &queue)?;
    let options = match top.get("options") {
        None | Some(Value::Null) => top,
        Some(Value::Object(options)) => options,
        Some(other) => return Err(wrong("options", "an object", other)),
    };
    let text = |key: &str| match top.get(key).or_else(|| options.get(key)) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(Some(String::new())),
        Some(Value::String(text)) => check_name(key, text).map(|()| Some(text.clone())),
        Some(other) => Err(wrong(key, "a string", other)),
    };
    let (namespace, task) = (text("namespace")?, text("task")?);
    let replace = match top.get("mode") {
        None | Some(Value::Null) => false,
        Some(Value::String(mode)) if mode == "merge" => false,
        Some(Value::String(mode)) if mode == "replace" => true,
        Some(other) => return Err(wrong("mode", "\"merge\" or \"replace\"", other)),
    };
    let bound =
        |kind: PluginKind| options.get(kind.name()).map(|value| Binding::parse(kind, value)).transpose();
    let (selector, filter) = (bound(PluginKind::Selector)?, bound(PluginKind::Filter)?);
    let mut patch = Map::new();
    for (key, kind) in KEYS {
        let Some(value) = options.get(*key) else { continue };
        patch
            .insert((*key).to_owned(), if value.is_null() { Value::Null } else { check(key, *kind, value)? });
    }
    if patch.get("encryptionEnabled") == Some(&Value::Bool(true)) {
        return Err(ApiError::bad_request(
            "encryptionEnabled: true is not supported: this version cannot encrypt",
        ));
    }
    Ok(ConfigureRequest { queue, namespace, task, replace, patch, selector, filter })
}

fn check(key: &str, kind: Kind, value: &Value) -> Result<Value, ApiError> {
    match kind {
        Kind::Boolean if value.is_boolean() => Ok(value.clone()),
        Kind::Boolean => Err(wrong(key, "true or false", value)),
        Kind::Integer(low, high) | Kind::Clamped(low, high) => {
            // Clients write 60.0 for 60.
            let whole = value.as_i64().or_else(|| {
                let number = value.as_f64()?;
                (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
            });
            match (whole, kind) {
                (Some(n), Kind::Clamped(..)) => Ok(n.clamp(low, high).into()),
                (Some(n), _) if (low..=high).contains(&n) => Ok(n.into()),
                _ => Err(wrong(key, &format!("a whole number from {low} to {high}"), value)),
            }
        }
    }
}

fn wrong(key: &str, expected: &str, got: &Value) -> ApiError {
    ApiError::bad_request(format!("{key} must be {expected}, got {}", shorten(&got.to_string())))
}

/// The namespace and the task of a queue that nobody configured: `a.b.c` has `a` and
/// `b`; a name without a dot is its own namespace and has no task.
pub fn namespace_and_task_of(name: &str) -> (&str, &str) {
    match name.split_once('.') {
        None => (name, ""),
        Some((namespace, rest)) => (namespace, rest.split('.').next().unwrap_or("")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(body: Value) -> QueueOptions {
        parse_configure(body.to_string().as_bytes()).unwrap().apply(&QueueOptions::default())
    }

    fn refusal(body: Value) -> String {
        parse_configure(body.to_string().as_bytes()).unwrap_err().message
    }

    #[test]
    fn a_configure_merges_resets_and_replaces() {
        let first = parse_configure(
            br#"{"queue":"q","options":{"leaseTime":5,"retryLimit":0,"deadLetterQueue":false}}"#,
        )
        .unwrap();
        let set = first.apply(&QueueOptions::default());
        assert_eq!((set.lease_time, set.retry_limit, set.dead_letter_queue), (5, 0, false));
        let reset = parse_configure(br#"{"queue":"q","options":{"leaseTime":null}}"#).unwrap().apply(&set);
        assert_eq!((reset.lease_time, reset.retry_limit), (60, 0));
        let replaced =
            parse_configure(br#"{"queue":"q","options":{"ttl":1},"mode":"replace"}"#).unwrap().apply(&set);
        assert_eq!(replaced, QueueOptions { ttl: 1, ..QueueOptions::default() });
        assert_eq!(options(json!({"queue": "q", "leaseTime": 9.0})).lease_time, 9);
    }

    #[test]
    fn values_are_checked_and_named() {
        assert_eq!(refusal(json!({"options": {}})), "queue is required");
        assert_eq!(
            refusal(json!({"queue": "q", "options": {"leaseTime": 0}})),
            "leaseTime must be a whole number from 1 to 2147483647, got 0"
        );
        assert_eq!(
            refusal(json!({"queue": "q", "options": {"retentionEnabled": "yes"}})),
            "retentionEnabled must be true or false, got \"yes\""
        );
        assert!(refusal(json!({"queue": "q", "options": []})).contains("options must be an object"));
        assert!(refusal(json!({"queue": "q", "options": {"selector": 7}})).contains("selector"));
        assert!(refusal(json!({"queue": "q", "filter": {"plugin": "No"}})).contains("\"No\""));
        assert_eq!(
            options(json!({"queue": "q", "options": {"minPopWaitTime": 90_000}})).min_pop_wait_time,
            60_000
        );
        assert_eq!(options(json!({"queue": "q", "options": {"minPopWaitTime": -5}})).min_pop_wait_time, 0);
        assert_eq!(QueueOptions::default().to_json().as_object().unwrap().len(), 17);
    }

    #[test]
    fn bindings_are_set_kept_and_taken_away() {
        let parse = |body: Value| parse_configure(body.to_string().as_bytes()).unwrap();
        let set = parse(json!({"queue": "q", "options": {"filter": {"plugin": "f", "settings": {"a": 1}}}}));
        let (selector, filter) = set.bindings(None, None);
        assert_eq!(selector, None);
        let filter = filter.unwrap();
        assert_eq!((filter.plugin.as_str(), filter.settings["a"].as_str()), ("f", "1"));
        let kept = parse(json!({"queue": "q", "options": {}})).bindings(None, Some(filter.clone()));
        assert_eq!(kept.1, Some(filter.clone()));
        let gone =
            parse(json!({"queue": "q", "options": {"filter": null}})).bindings(None, Some(filter.clone()));
        assert_eq!(gone.1, None);
        let replaced = parse(json!({"queue": "q", "mode": "replace"})).bindings(None, Some(filter));
        assert_eq!(replaced.1, None);
    }

    #[test]
    fn namespaces_come_from_names() {
        assert_eq!(namespace_and_task_of("a.b.c"), ("a", "b"));
        assert_eq!(namespace_and_task_of("a.b"), ("a", "b"));
        assert_eq!(namespace_and_task_of("plain"), ("plain", ""));
    }
}
