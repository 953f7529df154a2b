//! The partitions that this core pushes to, with what it remembers of their
//! transaction ids.

use std::collections::HashMap;
use std::sync::Arc;

use uuid::Uuid;

use super::dedup::Dedup;
use super::inbox::PushJob;
use crate::broker::answer::Reply;

/// Most lanes remembered by one core; above it all that are not in use are
/// forgotten, and looked up again when they are next pushed to.
const MAX_LANES: usize = 200_000;

/// One (queue, partition) as a pushing core knows it.
pub struct Lane {
    /// Queue name.
    pub queue: Arc<str>,
    /// Partition name.
    pub name: Arc<str>,
    /// The partition.
    pub partition: Uuid,
    /// Its queue's deduplication window in seconds; 0: off.
    pub window_seconds: i32,
    /// Its transaction ids; `None`: deduplication is off.
    pub dedup: Option<Dedup>,
    /// The tail of hashes is being read on the admin side.
    pub loading: bool,
    /// Pushes that wait for it.
    pub waiting: Vec<Box<PushJob>>,
}

/// All lanes of a core.
#[derive(Default)]
pub struct Lanes {
    by_queue: HashMap<Arc<str>, HashMap<Arc<str>, Lane>>,
    count: usize,
}

impl Lanes {
    /// A lane, if it is known.
    pub fn get(&self, queue: &str, partition: &str) -> Option<&Lane> {
        self.by_queue.get(queue)?.get(partition)
    }

    /// A lane, if it is known.
    pub fn get_mut(&mut self, queue: &str, partition: &str) -> Option<&mut Lane> {
        self.by_queue.get_mut(queue)?.get_mut(partition)
    }

    /// Remembers a lane.
    pub fn insert(&mut self, lane: Lane) {
        if self.count >= MAX_LANES {
            self.clear();
        }
        let replaced = self.by_queue.entry(lane.queue.clone()).or_default().insert(lane.name.clone(), lane);
        if replaced.is_none() {
            self.count += 1;
        }
    }

    /// Forgets a lane; returns the pushes that waited for it.
    pub fn remove(&mut self, queue: &str, partition: &str) -> Vec<Box<PushJob>> {
        let Some(lanes) = self.by_queue.get_mut(queue) else { return Vec::new() };
        let removed = lanes.remove(partition);
        if lanes.is_empty() {
            self.by_queue.remove(queue);
        }
        removed.map_or_else(Vec::new, |lane| {
            self.count -= 1;
            lane.waiting
        })
    }

    /// Forgets every lane that nobody waits for: options may have changed.
    pub fn clear(&mut self) {
        for lanes in self.by_queue.values_mut() {
            lanes.retain(|_, lane| lane.loading);
        }
        self.by_queue.retain(|_, lanes| !lanes.is_empty());
        self.count = self.by_queue.values().map(HashMap::len).sum();
    }

    /// Forgets a queue's lanes; returns the pushes that waited for them.
    pub fn forget_queue(&mut self, queue: &str) -> Vec<Box<PushJob>> {
        let lanes = self.by_queue.remove(queue).unwrap_or_default();
        self.count -= lanes.len();
        lanes.into_values().flat_map(|lane| lane.waiting).collect()
    }

    /// Answers the pushes that wait, all alike.
    pub fn refuse_waiting(&mut self, reply: &Reply) {
        for lane in self.by_queue.values_mut().flat_map(HashMap::values_mut) {
            for job in lane.waiting.drain(..) {
                job.reply.send(reply.clone());
            }
        }
    }

    /// Lanes remembered.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}
