//! What arrives at a core.

use std::sync::Arc;
use std::time::Instant;

use uuid::Uuid;

use super::discovery::{DiscoveryKey, Visit};
use crate::broker::ack::AckRequest;
use crate::broker::answer::ReplyHandle;
use crate::broker::pop::{PopRequest, PopTarget, StartAt};
use crate::broker::push::PushRequest;
use crate::store::group::{PendingPartition, QueueInfo};
use crate::store::{Conn, StoreError};

/// One message to a core.
pub enum Message {
    /// A push, for the owner of its first (queue, partition).
    Push(Box<PushJob>),
    /// A pop, for the owner of its (queue, group), or of its discovery key.
    Pop(Box<PopJob>),
    /// Acks, for the core that gave out the (first) lease.
    Ack(Box<AckJob>),
    /// A renewal, for the core that gave out the lease.
    Extend(ExtendJob),
    /// A discovery pop on its way from owner to owner.
    Visit(Box<Visit>),
    /// A discovery pop has come home.
    Returned(Box<Visit>),
    /// A watched (queue, group) has work for this discovery key.
    DiscoveryWake(Arc<DiscoveryKey>),
    /// Queues of a discovery key, opened for its group.
    Discovered(Arc<DiscoveryKey>, Result<Vec<QueueInfo>, StoreError>),
    /// Messages were committed.
    Marked(Arc<[Mark]>),
    /// A partition's lease ended, or its cursor moved otherwise.
    Settled(Settled),
    /// A group's first contact (here) is done.
    Opened(Opened),
    /// Another page of partitions with work.
    Page(Page),
    /// Partitions that the periodic look at the database found to have work.
    Found(Vec<(Arc<str>, Arc<str>, PendingPartition)>),
    /// The tail of hashes that a lane needs before it can be pushed to.
    Hashes(LaneHashes),
    /// A fresh connection.
    Connected(Box<Conn>),
    /// A queue was made by somebody: discovery keys look again.
    QueueMade,
    /// A queue's options changed, or it was deleted, somewhere: look it up again.
    CatalogChanged,
    /// What the look-up gave: the queues asked for, and those of them that there are.
    QueueInfos(Vec<Uuid>, Vec<QueueInfo>),
    /// A queue is gone: forget it, answer its waiting pops.
    QueueDeleted(Arc<str>),
    /// A group was deleted (on this queue, or everywhere): its next pop is a first contact.
    GroupForgotten(Option<Arc<str>>, Arc<str>),
    /// A group's cursors on a queue were moved: everything may have work, no lease is left.
    GroupMoved(Arc<str>, Arc<str>),
    /// The filter that a pop names is its group's now.
    FilterAgreed(Box<PopJob>, Box<QueueInfo>),
    /// Other plugins can be called from now on.
    Plugins(Arc<crate::plugins::library::Loaded>),
    /// Answer what waits, take no more, end.
    Stop,
}

/// A push under way.
pub struct PushJob {
    /// What to store.
    pub request: PushRequest,
    /// Where the answer goes.
    pub reply: ReplyHandle,
    /// When it arrived.
    pub arrived: Instant,
}

/// A pop under way, waiting or not.
pub struct PopJob {
    /// What is asked.
    pub request: PopRequest,
    /// The group, shared.
    pub group: Arc<str>,
    /// Where the answer goes.
    pub reply: ReplyHandle,
    /// When it arrived.
    pub arrived: Instant,
    /// Until when a fuller batch is waited for (`minPopWaitTime`).
    pub fill_until: Option<Instant>,
    /// The partition named did not exist when this pop arrived: whatever comes is new to it.
    pub partition_was_missing: bool,
    /// The filter it names is the group's.
    pub filter_agreed: bool,
    /// What plugins did for it, if it asks to be told.
    pub explanation: Vec<serde_json::Value>,
}

impl PopJob {
    /// The partition it names, if it is a targeted pop.
    pub fn partition(&self) -> Option<&str> {
        match &self.request.target {
            PopTarget::Partition(_, partition) => Some(partition),
            _ => None,
        }
    }

    /// When it is answered with nothing, if it waits at all.
    pub fn deadline(&self) -> Option<Instant> {
        self.request.wait.map(|wait| self.arrived + wait)
    }
}

/// Acks under way.
pub struct AckJob {
    /// What is said.
    pub request: AckRequest,
    /// Where the answer goes.
    pub reply: ReplyHandle,
    /// When it arrived.
    pub arrived: Instant,
}

/// A renewal under way.
pub struct ExtendJob {
    /// The lease, as sent (it is echoed).
    pub lease: String,
    /// By how many seconds from now.
    pub seconds: u32,
    /// Where the answer goes.
    pub reply: ReplyHandle,
}

/// Messages committed to one queue.
pub struct Mark {
    /// The queue.
    pub queue: Arc<str>,
    /// Partition, name, how many.
    pub partitions: Vec<(Uuid, Arc<str>, u64)>,
}

/// A partition may be claimable again for a group.
pub struct Settled {
    /// The queue.
    pub queue: Arc<str>,
    /// The group.
    pub group: Arc<str>,
    /// The partition.
    pub partition: Uuid,
    /// Whether messages are behind the cursor.
    pub pending: bool,
    /// The cursor.
    pub committed: i64,
}

/// A (queue, group) as the database has it.
pub struct Opened {
    /// The queue, by name.
    pub queue: Arc<str>,
    /// The group.
    pub group: Arc<str>,
    /// What was found, or why not.
    pub result: Result<OpenedGroup, StoreError>,
}

/// See [`Opened`].
pub struct OpenedGroup {
    /// The queue.
    pub info: QueueInfo,
    /// The first page of partitions with work.
    pub pending: Vec<PendingPartition>,
    /// Where the next page starts, if there is one.
    pub next: Option<String>,
}

/// See [`Message::Page`].
pub struct Page {
    /// The queue.
    pub queue: Arc<str>,
    /// The group.
    pub group: Arc<str>,
    /// Partitions with work.
    pub pending: Vec<PendingPartition>,
    /// Where the next page starts, if there is one.
    pub next: Option<String>,
    /// The page could not be read; `next` says where to try again.
    pub failed: bool,
}

/// See [`Message::Hashes`].
pub struct LaneHashes {
    /// Queue and partition, by name.
    pub lane: (String, String),
    /// Its partition's id.
    pub partition: Uuid,
    /// Next offset when the last page was read, and (base offset, created, hashes) runs; newest last.
    pub result: Result<Option<(i64, Vec<crate::store::push::HashRun>)>, StoreError>,
}

/// How a start is written in the database.
pub fn start_mode(start: StartAt) -> (&'static str, Option<crate::store::Micros>) {
    match start {
        StartAt::Oldest => ("all", None),
        StartAt::Now => ("new", None),
        StartAt::Time(us) => ("time", Some(crate::store::Micros(us))),
    }
}
