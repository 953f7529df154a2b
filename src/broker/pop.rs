//! A pop: its parameters, and its answer.

use std::time::Duration;

use uuid::Uuid;

use super::error::ApiError;
use super::plugin::{Binding, Kind};
use super::push::{check_name, push_json_text, push_uuid};
use super::query::{Query, shorten};
use super::segment::{self, CorruptSegment};
use super::time;

/// The group of a pop that names none.
pub const QUEUE_MODE: &str = "__QUEUE_MODE__";
/// Most messages one pop may ask for.
pub const MAX_BATCH: i64 = 10_000;

/// Which partitions a pop may claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PopTarget {
    /// Any partition of a queue.
    Queue(String),
    /// One partition of a queue.
    Partition(String, String),
    /// Every queue with this namespace and task (`None`: any).
    Discovery {
        /// Namespace to match.
        namespace: Option<String>,
        /// Task to match.
        task: Option<String>,
    },
}

/// Where a group that is seen for the first time starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartAt {
    /// At the oldest retained message.
    Oldest,
    /// At the end: only what is pushed from now on.
    Now,
    /// At the first segment committed at or after this time, in microseconds since the Unix epoch.
    Time(i64),
}

/// A parsed pop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PopRequest {
    /// What to claim from.
    pub target: PopTarget,
    /// The consumer group; [`QUEUE_MODE`] when the call named none.
    pub group: String,
    /// Most messages, 1 to [`MAX_BATCH`].
    pub batch: u32,
    /// Most partitions that yield messages; `u32::MAX` = no cap. Always 1 for a targeted pop.
    pub partitions: u32,
    /// Move the cursor at once, without a lease.
    pub auto_ack: bool,
    /// How long to wait for a message; `None`: answer at once.
    pub wait: Option<Duration>,
    /// This call's lease in seconds; `None`: the queue's.
    pub lease_seconds: Option<u32>,
    /// Used on the group's first contact only. Always `Oldest` for [`QUEUE_MODE`].
    pub start: StartAt,
    /// Which selector orders the candidates.
    pub selector: SelectorChoice,
    /// `hint.NAME=VALUE` parameters, for selectors.
    pub hints: Vec<(String, String)>,
    /// The filter that the group has, or gets on its first contact.
    pub filter: Option<Box<Binding>>,
    /// The answer says which plugins had a hand in it.
    pub explain: bool,
}

/// Which selector a pop asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SelectorChoice {
    /// The group's, else the queue's.
    Bound,
    /// The built-in order (`selector=none`).
    BuiltIn,
    /// Its own.
    Own(Box<Binding>),
}

/// Messages of one partition, as claimed, in offset order.
#[derive(Debug)]
pub struct Delivery {
    /// Queue name.
    pub queue: String,
    /// Partition name.
    pub partition: String,
    /// Partition id.
    pub partition_id: Uuid,
    /// How often this batch has been delivered, this time included.
    pub attempt: i32,
    /// Whole segments that cover the span.
    pub segments: Vec<SegmentSlice>,
}

/// The part of a stored segment that a claim covers.
#[derive(Debug)]
pub struct SegmentSlice {
    /// Commit time in microseconds since the Unix epoch.
    pub created_us: i64,
    /// How `data` is stored: see [`super::segment`].
    pub codec: i16,
    /// The stored bytes of the whole segment.
    pub data: Vec<u8>,
    /// Messages to leave out at its start.
    pub skip: usize,
    /// Messages of the span after those.
    pub take: usize,
    /// Which of them are delivered; `None`: all.
    pub only: Option<Vec<bool>>,
}

/// What the command line decides about pops.
#[derive(Debug, Clone, Copy)]
pub struct PopDefaults {
    /// Where a group starts that does not say (`--default-subscription-mode`).
    pub start: StartAt,
    /// Longest wait (`--max-wait-ms`).
    pub max_wait: Duration,
}

/// A batch that does not say how many.
const DEFAULT_BATCH: i64 = 200;
/// A wait that does not say how long, in milliseconds.
const DEFAULT_WAIT_MS: i64 = 30_000;
/// Most `hint.` parameters of one pop.
const MAX_HINTS: usize = 16;
/// Longest lease in seconds: a year.
const MAX_LEASE_SECONDS: i64 = 31_536_000;

impl PopRequest {
    /// Reads a pop's parameters. Parameters it does not know are ignored. `target` comes
    /// from the path; of a discovery the namespace and task are read here.
    pub fn parse(target: PopTarget, query: &Query<'_>, defaults: &PopDefaults) -> Result<Self, ApiError> {
        let target = match target {
            PopTarget::Discovery { .. } => {
                let own = |name: &str| query.text(name).map(|text| text.map(|text| text.into_owned()));
                let (namespace, task) = (own("namespace")?, own("task")?);
                if namespace.is_none() && task.is_none() {
                    return Err(ApiError::bad_request("namespace or task is required"));
                }
                PopTarget::Discovery { namespace, task }
            }
            PopTarget::Queue(queue) => {
                check_name("queue", &queue)?;
                PopTarget::Queue(queue)
            }
            PopTarget::Partition(queue, partition) => {
                check_name("queue", &queue)?;
                check_name("partition", &partition)?;
                PopTarget::Partition(queue, partition)
            }
        };
        let batch = query.integer("batch")?.unwrap_or(DEFAULT_BATCH);
        if !(1..=MAX_BATCH).contains(&batch) {
            return Err(ApiError::bad_request(format!(
                "batch must be between 1 and {MAX_BATCH}, got {batch}"
            )));
        }
        let partitions = match (&target, query.integer("partitions")?) {
            (PopTarget::Partition(..), _) | (_, None) => 1,
            (_, Some(n)) if n <= 0 => u32::MAX,
            (_, Some(n)) => u32::try_from(n).unwrap_or(u32::MAX),
        };
        let group = match query.text("consumerGroup")? {
            None => QUEUE_MODE.to_owned(),
            Some(group) => {
                check_name("consumerGroup", &group)?;
                group.into_owned()
            }
        };
        let timeout_ms = query.integer("timeout")?.unwrap_or(DEFAULT_WAIT_MS);
        if timeout_ms < 0 {
            return Err(ApiError::bad_request(format!(
                "timeout must be 0 or more milliseconds, got {timeout_ms}"
            )));
        }
        let wait = Duration::from_millis(timeout_ms as u64).min(defaults.max_wait);
        let wait = (query.boolean("wait", false)? && !wait.is_zero()).then_some(wait);
        let lease_seconds = match query.integer("leaseSeconds")? {
            Some(n) if n > MAX_LEASE_SECONDS => {
                return Err(ApiError::bad_request(format!(
                    "leaseSeconds must be at most {MAX_LEASE_SECONDS}, got {n}"
                )));
            }
            Some(n) if n > 0 => Some(n as u32),
            _ => None,
        };
        let start = start_at(query, defaults.start)?;
        let start = if group == QUEUE_MODE { StartAt::Oldest } else { start };
        let selector = match query.text("selector")?.as_deref() {
            None => SelectorChoice::Bound,
            Some("none") => SelectorChoice::BuiltIn,
            Some(_) => Binding::from_query(Kind::Selector, query)?
                .map_or(SelectorChoice::Bound, |own| SelectorChoice::Own(Box::new(own))),
        };
        let filter = Binding::from_query(Kind::Filter, query)?.map(Box::new);
        if filter.is_some() && matches!(target, PopTarget::Discovery { .. }) {
            return Err(ApiError::bad_request(
                "filter belongs to a group and a queue: bind it there, a pop over a namespace cannot register it",
            ));
        }
        let hints = query.with_prefix("hint.")?;
        if hints.len() > MAX_HINTS {
            return Err(ApiError::bad_request(format!("at most {MAX_HINTS} hints, got {}", hints.len())));
        }
        Ok(Self {
            target,
            group,
            batch: batch as u32,
            partitions,
            auto_ack: query.boolean("autoAck", false)?,
            wait,
            lease_seconds,
            start,
            selector,
            hints,
            filter,
            explain: query.boolean("explain", false)?,
        })
    }
}

/// `subscriptionFrom`, else `subscriptionMode`, else the default.
fn start_at(query: &Query<'_>, default: StartAt) -> Result<StartAt, ApiError> {
    if let Some(from) = query.text("subscriptionFrom")? {
        let from = from.trim();
        if from.eq_ignore_ascii_case("now") {
            return Ok(StartAt::Now);
        }
        return time::parse_rfc3339(from).map(StartAt::Time).ok_or_else(|| {
            ApiError::bad_request(format!(
                "subscriptionFrom must be now or an RFC 3339 time, got \"{}\"",
                shorten(from)
            ))
        });
    }
    match query.text("subscriptionMode")? {
        None => Ok(default),
        Some(mode) => match mode.trim().to_ascii_lowercase().as_str() {
            "new" | "new-only" | "new_only" | "newonly" => Ok(StartAt::Now),
            _ => Ok(StartAt::Oldest),
        },
    }
}

/// The body of a pop's answer, and what the acks to come will name.
pub struct PopAnswer {
    /// The JSON.
    pub body: Vec<u8>,
    /// Messages in it.
    pub messages: usize,
    /// Per delivery: xxh3-128 of the messages' transaction ids, in offset order.
    pub hashes: Vec<Vec<u128>>,
}

/// The body of a 200. `lease` is `None` for an auto-acked pop. `deliveries` must
/// not be empty. `explanation`: JSON objects, shown if the request asks for them. An
/// error if a stored segment cannot be read.
pub fn answer(
    request: &PopRequest,
    lease: Option<Uuid>,
    deliveries: &[Delivery],
    explanation: &[serde_json::Value],
) -> Result<PopAnswer, CorruptSegment> {
    let bytes: usize = deliveries.iter().flat_map(|d| &d.segments).map(|s| s.data.len()).sum();
    let mut out = Vec::with_capacity(1024 + bytes * 2);
    let first = &deliveries[0];
    let lease_text = lease.map_or_else(String::new, |id| id.to_string());
    let queue = if matches!(request.target, PopTarget::Discovery { .. }) { "" } else { &first.queue };
    out.extend_from_slice(b"{\"success\":true,\"queue\":");
    push_json_text(&mut out, queue);
    out.extend_from_slice(b",\"partition\":");
    push_json_text(&mut out, &first.partition);
    out.extend_from_slice(b",\"partitionId\":\"");
    push_uuid(&mut out, first.partition_id);
    out.extend_from_slice(b"\",\"leaseId\":\"");
    out.extend_from_slice(lease_text.as_bytes());
    out.extend_from_slice(b"\",\"consumerGroup\":");
    push_json_text(&mut out, &request.group);
    out.extend_from_slice(b",\"messages\":[");
    let (mut messages, mut hashes) = (0, Vec::with_capacity(deliveries.len()));
    for delivery in deliveries {
        // What is the same for all messages of a partition, made once.
        let mut tail = Vec::with_capacity(256);
        tail.extend_from_slice(b",\"partitionId\":\"");
        push_uuid(&mut tail, delivery.partition_id);
        tail.extend_from_slice(b"\",\"partition\":");
        push_json_text(&mut tail, &delivery.partition);
        tail.extend_from_slice(b",\"queue\":");
        push_json_text(&mut tail, &delivery.queue);
        tail.extend_from_slice(b",\"leaseId\":\"");
        tail.extend_from_slice(lease_text.as_bytes());
        tail.extend_from_slice(b"\",\"consumerGroup\":");
        push_json_text(&mut tail, &request.group);
        tail.extend_from_slice(b",\"deliveryAttempt\":");
        tail.extend_from_slice(itoa::Buffer::new().format(delivery.attempt).as_bytes());
        tail.push(b'}');
        let mut of_delivery = Vec::new();
        for slice in &delivery.segments {
            let created = time::format_micros(slice.created_us);
            let raw = segment::unpack(slice.codec, &slice.data)?;
            let mut frames = segment::frames(&raw);
            frames.skip_frames(slice.skip);
            for (n, frame) in frames.take(slice.take).enumerate() {
                let frame = frame?;
                let mut buffer = [0; 36];
                let transaction_id = frame.transaction_id(&mut buffer);
                of_delivery.push(segment::transaction_hash(transaction_id));
                if slice.only.as_ref().is_some_and(|only| !only[n]) {
                    continue;
                }
                if messages > 0 {
                    out.push(b',');
                }
                messages += 1;
                out.extend_from_slice(b"{\"id\":\"");
                push_uuid(&mut out, frame.message_id);
                out.extend_from_slice(b"\",\"transactionId\":");
                push_json_text(&mut out, transaction_id);
                out.extend_from_slice(b",\"traceId\":");
                match frame.trace_id {
                    None => out.extend_from_slice(b"null"),
                    Some(id) => {
                        out.push(b'"');
                        push_uuid(&mut out, id);
                        out.push(b'"');
                    }
                }
                out.extend_from_slice(b",\"data\":");
                out.extend_from_slice(frame.payload);
                out.extend_from_slice(b",\"producerSub\":");
                match frame.producer_sub {
                    None => out.extend_from_slice(b"null"),
                    Some(sub) => push_json_text(&mut out, sub),
                }
                out.extend_from_slice(b",\"createdAt\":\"");
                out.extend_from_slice(created.as_bytes());
                out.push(b'"');
                out.extend_from_slice(&tail);
            }
        }
        hashes.push(of_delivery);
    }
    out.extend_from_slice(b"],\"partitionsClaimed\":");
    out.extend_from_slice(itoa::Buffer::new().format(deliveries.len()).as_bytes());
    if request.explain {
        out.extend_from_slice(b",\"explain\":");
        out.extend_from_slice(serde_json::Value::from(explanation).to_string().as_bytes());
    }
    out.push(b'}');
    Ok(PopAnswer { body: out, messages, hashes })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: PopDefaults = PopDefaults { start: StartAt::Now, max_wait: Duration::from_secs(60) };

    fn parse(query: &str) -> Result<PopRequest, ApiError> {
        PopRequest::parse(PopTarget::Queue("q".into()), &Query::new(query), &DEFAULTS)
    }

    #[test]
    fn defaults_and_bounds() {
        let pop = parse("").unwrap();
        assert_eq!((pop.batch, pop.partitions, pop.group.as_str()), (200, 1, QUEUE_MODE));
        assert_eq!(
            (pop.wait, pop.auto_ack, pop.lease_seconds, pop.start),
            (None, false, None, StartAt::Oldest)
        );
        assert_eq!(parse("batch=0").unwrap_err().message, "batch must be between 1 and 10000, got 0");
        assert_eq!(parse("batch=10001").unwrap_err().message, "batch must be between 1 and 10000, got 10001");
        assert_eq!(parse("wait=maybe").unwrap_err().status, 400);
        assert_eq!(parse("wait=true").unwrap().wait, Some(Duration::from_secs(30)));
        assert_eq!(parse("wait=1&timeout=90000").unwrap().wait, Some(Duration::from_secs(60)));
        assert_eq!(parse("wait=true&timeout=0").unwrap().wait, None);
        assert_eq!(parse("partitions=0").unwrap().partitions, u32::MAX);
        assert_eq!(parse("leaseSeconds=-1").unwrap().lease_seconds, None);
        assert_eq!(parse("leaseSeconds=7&autopilot=true&frames=true").unwrap().lease_seconds, Some(7));
    }

    #[test]
    fn where_a_group_starts() {
        assert_eq!(parse("consumerGroup=g").unwrap().start, StartAt::Now);
        for mode in ["new", "NEW-ONLY", "%20new_only", "newonly"] {
            assert_eq!(
                parse(&format!("consumerGroup=g&subscriptionMode={mode}")).unwrap().start,
                StartAt::Now
            );
        }
        assert_eq!(parse("consumerGroup=g&subscriptionMode=all").unwrap().start, StartAt::Oldest);
        assert_eq!(parse("subscriptionMode=new").unwrap().start, StartAt::Oldest, "queue mode is always all");
        let from =
            parse("consumerGroup=g&subscriptionMode=all&subscriptionFrom=1970-01-01T00:00:01Z").unwrap();
        assert_eq!(from.start, StartAt::Time(1_000_000));
        assert!(parse("subscriptionFrom=yesterday").unwrap_err().message.contains("yesterday"));
    }

    #[test]
    fn a_discovery_needs_a_namespace_or_a_task() {
        let none = PopTarget::Discovery { namespace: None, task: None };
        let parse = |query| PopRequest::parse(none.clone(), &Query::new(query), &DEFAULTS);
        assert_eq!(parse("").unwrap_err().message, "namespace or task is required");
        let found = parse("task=b&partitions=3").unwrap();
        assert_eq!(found.target, PopTarget::Discovery { namespace: None, task: Some("b".into()) });
        assert_eq!(found.partitions, 3);
    }

    #[test]
    fn the_answer_holds_the_span_and_nothing_else() {
        let push = super::super::push::parse(
            br#"{"items":[{"queue":"q","payload":1},{"queue":"q","payload":{"a":[1.50]},"transactionId":"t\"1"},{"queue":"q","payload":3}]}"#,
            Some("me"),
        )
        .unwrap();
        let delivery = Delivery {
            queue: "q".into(),
            partition: "Default".into(),
            partition_id: Uuid::nil(),
            attempt: 2,
            segments: vec![SegmentSlice {
                created_us: 1_000_000,
                codec: segment::CODEC_RAW,
                data: push.lanes[0].frames.clone(),
                skip: 1,
                take: 1,
                only: None,
            }],
        };
        let lease = Uuid::from_u128(5);
        let answer = answer(&parse("").unwrap(), Some(lease), std::slice::from_ref(&delivery), &[]).unwrap();
        assert_eq!((answer.messages, answer.hashes), (1, vec![vec![segment::transaction_hash("t\"1")]]));
        assert!(String::from_utf8_lossy(&answer.body).contains(r#""data":{"a":[1.50]},"producerSub":"me""#));
        let json: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(json["partitionsClaimed"], 1);
        assert_eq!(json["messages"][0]["transactionId"], "t\"1");
        assert_eq!(json["messages"][0]["createdAt"], "1970-01-01T00:00:01.000000Z");
        assert_eq!(json["messages"][0]["deliveryAttempt"], 2);
        assert_eq!(
            (&json["leaseId"], &json["messages"][0]["leaseId"]),
            (&lease.to_string().into(), &lease.to_string().into())
        );
    }
}
