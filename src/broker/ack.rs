//! An ack: parsing, and its answer.

use uuid::Uuid;

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
