//! A push: parsing, and its answer.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::error::ApiError;
use super::segment::{self, Frame};

/// Most items of one push call.
pub const MAX_ITEMS: usize = 10_000;
/// Longest queue, partition or group name in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// Longest transaction id in bytes.
pub const MAX_TRANSACTION_ID_BYTES: usize = 65_535;
/// Deepest nesting of a payload.
pub const MAX_JSON_DEPTH: usize = 128;
/// The partition of an item that names none.
pub const DEFAULT_PARTITION: &str = "Default";
/// Upper bound of `--max-body`: a segment, compressed or not, must fit one PostgreSQL value (1 GiB).
pub const MAX_BODY_BYTES: usize = 512 * 1024 * 1024;

/// A parsed push: its messages grouped by (queue, partition), already framed.
#[derive(Debug)]
pub struct PushRequest {
    /// One lane per (queue, partition) named, in order of first mention.
    pub lanes: Vec<PushLane>,
    /// Items of the call, in every lane together.
    pub items: usize,
}

/// The messages of one push for one partition, in body order.
#[derive(Debug)]
pub struct PushLane {
    /// Queue name.
    pub queue: String,
    /// Partition name.
    pub partition: String,
    /// The messages.
    pub entries: Vec<PushEntry>,
    /// Their frames (see [`super::segment`]), back to back in entry order.
    pub frames: Vec<u8>,
}

/// One message of a push.
#[derive(Debug)]
pub struct PushEntry {
    /// Position in the body, for the answer.
    pub index: u32,
    /// The id the broker gave it (UUID v7).
    pub message_id: Uuid,
    /// The client's transaction id; `None`: it is the message id's text.
    pub transaction_id: Option<String>,
    /// xxh3-128 of the transaction id's bytes.
    pub hash: u128,
    /// Its frame's bytes in `PushLane::frames`.
    pub frame: std::ops::Range<usize>,
}

/// What became of one item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushStatus {
    /// Committed and durable.
    Queued,
    /// Nothing written: the id is that of the stored original.
    Duplicate(Uuid),
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    items: Vec<Item<'a>>,
}

/// One item as sent. Unknown keys are ignored.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Item<'a> {
    #[serde(borrow)]
    queue: Cow<'a, str>,
    partition: Option<Cow<'a, str>>,
    #[serde(borrow)]
    payload: Option<&'a RawValue>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    transaction_id: Option<String>,
    // Kept if it is a UUID, else ignored: the reference takes any value here.
    #[serde(borrow)]
    trace_id: Option<&'a RawValue>,
}

/// Parses the body of `POST /api/v1/push`. A 400 if it breaks any rule of a push;
/// `producer_sub` comes from a checked token, never from the body.
pub fn parse(body: &[u8], producer_sub: Option<&str>) -> Result<PushRequest, ApiError> {
    let text = std::str::from_utf8(body).map_err(bad_body)?;
    let body: Body<'_> = serde_json::from_str(text).map_err(bad_body)?;
    let items = body.items.len();
    if items > MAX_ITEMS {
        return Err(bad_body(format_args!("{items} items are more than the {MAX_ITEMS} of one call")));
    }
    let mut building = Building::default();
    for (index, item) in body.items.into_iter().enumerate() {
        // The published client's own suite holds that only a transaction's push carries a trace id.
        let item = Item { trace_id: None, ..item };
        building.add(index, item, producer_sub)?;
    }
    Ok(building.finish())
}

/// A 400 about a body.
pub fn bad_body(what: impl std::fmt::Display) -> ApiError {
    ApiError::bad_request(format!("bad body: {what}"))
}

/// A push that grows item by item.
#[derive(Default)]
pub struct Building {
    lanes: Vec<PushLane>,
    index: HashMap<String, HashMap<String, usize>>,
    items: usize,
    last: usize,
}

impl Building {
    /// Adds one item, or says what is wrong with it.
    pub fn add(&mut self, index: usize, item: Item<'_>, producer_sub: Option<&str>) -> Result<(), ApiError> {
        let name = |what: &str, value: &str| {
            check_name(what, value).map_err(|e| bad_body(format_args!("item {index}: {e}")))
        };
        let partition = item.partition.unwrap_or(Cow::Borrowed(DEFAULT_PARTITION));
        let own = item.transaction_id;
        match own.as_deref().map(str::len) {
            Some(0) => return Err(bad_body(format_args!("transactionId of item {index} is empty"))),
            Some(length) if length > MAX_TRANSACTION_ID_BYTES => {
                return Err(bad_body(format_args!(
                    "transactionId of item {index} exceeds the {MAX_TRANSACTION_ID_BYTES}-byte limit"
                )));
            }
            _ => {}
        }
        if own.as_deref().is_some_and(|id| id.bytes().any(|byte| byte < 0x20)) {
            return Err(bad_body(format_args!("transactionId of item {index} contains a control character")));
        }
        let payload = item.payload.or(item.data).map_or("null", RawValue::get);
        if is_deeper_than(payload, MAX_JSON_DEPTH) {
            return Err(bad_body(format_args!(
                "the payload of item {index} is nested deeper than {MAX_JSON_DEPTH} levels"
            )));
        }
        let same =
            self.lanes.get(self.last).is_some_and(|l| l.queue == *item.queue && l.partition == *partition);
        if !same {
            name("queue", &item.queue)?;
            name("partition", &partition)?;
            self.last = self.lane(&item.queue, &partition);
        }
        let lane = &mut self.lanes[self.last];
        let message_id = Uuid::now_v7();
        let trace_id = item.trace_id.and_then(|raw| Uuid::parse_str(raw.get().trim_matches('"')).ok());
        let frame = Frame {
            message_id,
            trace_id,
            own_transaction_id: own.as_deref(),
            producer_sub,
            payload: payload.as_bytes(),
        };
        let start = lane.frames.len();
        segment::write_frame(&mut lane.frames, &frame);
        let hash = frame.hash();
        let frame = start..lane.frames.len();
        lane.entries.push(PushEntry { index: index as u32, message_id, transaction_id: own, hash, frame });
        self.items += 1;
        Ok(())
    }

    fn lane(&mut self, queue: &str, partition: &str) -> usize {
        if let Some(at) = self.index.get(queue).and_then(|lanes| lanes.get(partition)) {
            return *at;
        }
        let at = self.lanes.len();
        self.index.entry(queue.to_owned()).or_default().insert(partition.to_owned(), at);
        self.lanes.push(PushLane {
            queue: queue.to_owned(),
            partition: partition.to_owned(),
            entries: Vec::new(),
            frames: Vec::new(),
        });
        at
    }

    /// The push.
    pub fn finish(self) -> PushRequest {
        PushRequest { lanes: self.lanes, items: self.items }
    }
}

/// The body of a 201: one element per item, in request order. `status` is asked
/// with (lane, entry).
pub fn answer(request: &PushRequest, status: impl Fn(usize, usize) -> PushStatus) -> Vec<u8> {
    let mut places = vec![(0, 0); request.items];
    for (l, lane) in request.lanes.iter().enumerate() {
        for (e, entry) in lane.entries.iter().enumerate() {
            places[entry.index as usize] = (l, e);
        }
    }
    let mut out = Vec::with_capacity(request.items * 220 + 2);
    out.push(b'[');
    for (index, (l, e)) in places.into_iter().enumerate() {
        let (lane, entry) = (&request.lanes[l], &request.lanes[l].entries[e]);
        let (message_id, status) = match status(l, e) {
            PushStatus::Queued => (entry.message_id, "queued"),
            PushStatus::Duplicate(original) => (original, "duplicate"),
        };
        if index > 0 {
            out.push(b',');
        }
        out.extend_from_slice(b"{\"index\":");
        out.extend_from_slice(itoa::Buffer::new().format(index).as_bytes());
        out.extend_from_slice(b",\"message_id\":\"");
        push_uuid(&mut out, message_id);
        out.extend_from_slice(b"\",\"transaction_id\":");
        match &entry.transaction_id {
            Some(own) => push_json_text(&mut out, own),
            None => {
                out.push(b'"');
                push_uuid(&mut out, entry.message_id);
                out.push(b'"');
            }
        }
        out.extend_from_slice(b",\"queueName\":");
        push_json_text(&mut out, &lane.queue);
        out.extend_from_slice(b",\"partition\":");
        push_json_text(&mut out, &lane.partition);
        out.extend_from_slice(b",\"status\":\"");
        out.extend_from_slice(status.as_bytes());
        out.extend_from_slice(b"\"}");
    }
    out.push(b']');
    out
}

/// Appends a UUID's text.
pub fn push_uuid(out: &mut Vec<u8>, id: Uuid) {
    out.extend_from_slice(id.hyphenated().encode_lower(&mut [0; 36]).as_bytes());
}

/// Appends a JSON string.
pub fn push_json_text(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("writing a string to memory cannot fail");
}

/// Checks a queue, partition or group name: 1 to 255 bytes without control characters.
pub fn check_name(what: &str, value: &str) -> Result<(), ApiError> {
    if value.is_empty() {
        return Err(ApiError::bad_request(format!(
            "{what} is empty; it must be 1 to {MAX_NAME_BYTES} bytes"
        )));
    }
    if value.len() > MAX_NAME_BYTES {
        return Err(ApiError::bad_request(format!(
            "{what} of {} bytes exceeds the {MAX_NAME_BYTES}-byte limit",
            value.len()
        )));
    }
    if let Some(c) = value.chars().find(|c| c.is_control()) {
        return Err(ApiError::bad_request(format!(
            "{what} contains the control character U+{:04X}",
            c as u32
        )));
    }
    Ok(())
}

/// Whether valid JSON nests arrays and objects deeper than a limit.
fn is_deeper_than(json: &str, limit: usize) -> bool {
    // Most payloads have not even so many brackets.
    if json.len() <= limit {
        return false;
    }
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'[' | b'{' => {
                depth += 1;
                if depth > limit {
                    return true;
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message_of(body: &str) -> String {
        let error = parse(body.as_bytes(), None).unwrap_err();
        assert_eq!(error.status, 400);
        error.message
    }

    #[test]
    fn items_are_grouped_by_lane_and_keep_their_payload_bytes() {
        let body = r#"{"items":[{"queue":"a","payload":{"b": 1.0,"a":[ ]}},{"queue":"a","partition":"p","data":"x","transactionId":"t"},
                       {"queue":"a","partition":"Default"},{"queue":"a","traceId":"4bf92f35-77b3-4da6-a3ce-929d0e0e4736","payload":null}]}"#;
        let push = parse(body.as_bytes(), Some("me")).unwrap();
        assert_eq!((push.items, push.lanes.len()), (4, 2));
        assert_eq!((push.lanes[0].partition.as_str(), push.lanes[1].partition.as_str()), ("Default", "p"));
        assert_eq!(push.lanes[0].entries.iter().map(|e| e.index).collect::<Vec<_>>(), [0, 2, 3]);
        let frames: Vec<_> = segment::frames(&push.lanes[0].frames).map(Result::unwrap).collect();
        assert_eq!(frames[0].payload, br#"{"b": 1.0,"a":[ ]}"#);
        assert_eq!((frames[1].payload, frames[1].trace_id), (&b"null"[..], None));
        assert_eq!(frames[2].trace_id, None, "only a transaction's push carries a trace id");
        assert_eq!(frames[0].producer_sub, Some("me"));
        let range = push.lanes[1].entries[0].frame.clone();
        let frame = segment::frames(&push.lanes[1].frames[range]).next().unwrap().unwrap();
        assert_eq!((frame.own_transaction_id, frame.hash()), (Some("t"), segment::transaction_hash("t")));
    }

    #[test]
    fn a_refusal_names_the_item_the_value_and_the_limit() {
        assert!(message_of("{").starts_with("bad body: "));
        assert!(message_of(r#"{"items":[{}]}"#).contains("missing field `queue`"));
        assert!(message_of(r#"{}"#).contains("missing field `items`"));
        assert!(message_of(r#"{"items":[{"queue":"q"},{"queue":""}]}"#).contains("item 1: queue is empty"));
        assert!(
            message_of(r#"{"items":[{"queue":"a\u0007"}]}"#)
                .contains("item 0: queue contains the control character U+0007")
        );
        assert!(message_of(r#"{"items":[{"queue":"q","partition":"\u007f"}]}"#).contains("U+007F"));
        let long = "x".repeat(256);
        assert!(
            message_of(&format!(r#"{{"items":[{{"queue":"{long}"}}]}}"#))
                .contains("256 bytes exceeds the 255-byte limit")
        );
        let long = "x".repeat(65_536);
        let body = format!(r#"{{"items":[{{"queue":"q","transactionId":"{long}"}}]}}"#);
        assert_eq!(message_of(&body), "bad body: transactionId of item 0 exceeds the 65535-byte limit");
        assert!(parse(body.replace("xx\"", "x\"").as_bytes(), None).is_ok());
        let deep = |n: usize| {
            format!(r#"{{"items":[{{"queue":"q","payload":{}1{}}}]}}"#, "[".repeat(n), "]".repeat(n))
        };
        assert!(parse(deep(128).as_bytes(), None).is_ok());
        assert!(message_of(&deep(129)).contains("deeper than 128"));
        let many = format!(r#"{{"items":[{}]}}"#, vec![r#"{"queue":"q"}"#; 10_001].join(","));
        assert!(message_of(&many).contains("10001 items"));
        assert!(parse(b"{\"items\":[{\"queue\":\"\xff\"}]}", None).is_err());
    }

    #[test]
    fn brackets_in_strings_do_not_nest() {
        let text = format!("\"{}\\\"{}\"", "[".repeat(300), "{".repeat(300));
        assert!(!is_deeper_than(&text, MAX_JSON_DEPTH));
    }

    #[test]
    fn the_answer_is_in_request_order() {
        let body = r#"{"items":[{"queue":"q\"","partition":"b","transactionId":"one"},{"queue":"q\"","partition":"c"},{"queue":"q\"","partition":"b"}]}"#;
        let push = parse(body.as_bytes(), None).unwrap();
        let original = Uuid::from_u128(7);
        let out = answer(&push, |lane, entry| match (lane, entry) {
            (0, 1) => PushStatus::Duplicate(original),
            _ => PushStatus::Queued,
        });
        let out: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(out[0]["transaction_id"], "one");
        assert_eq!(out[1]["transaction_id"], out[1]["message_id"]);
        assert_eq!(out[2]["message_id"], original.to_string());
        let of = |key: &str| out.as_array().unwrap().iter().map(|e| e[key].clone()).collect::<Vec<_>>();
        assert_eq!(of("status"), ["queued", "queued", "duplicate"]);
        assert_eq!(of("partition"), ["b", "c", "b"]);
        assert_eq!(of("index"), [0, 1, 2]);
        assert_eq!(out[0]["queueName"], "q\"");
    }
}
