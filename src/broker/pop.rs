//! A pop: its parameters, and its answer.

use std::time::Duration;
use uuid::Uuid;

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
    /// Messages to deliver after those.
    pub take: usize,
}
