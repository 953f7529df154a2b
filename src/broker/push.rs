//! A push: parsing, and its answer.

use uuid::Uuid;

/// Most items of one push call.
pub const MAX_ITEMS: usize = 10_000;
/// Longest queue, partition or group name in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// Longest transaction id in bytes.
pub const MAX_TRANSACTION_ID_BYTES: usize = 65_535;
/// Deepest nesting of a payload.
pub const MAX_JSON_DEPTH: usize = 128;

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
