//! One (queue, consumer group) as its owning core knows it: the candidate ring,
//! the pops that wait, and when to look again.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::discovery::DiscoveryKey;
use super::filtering::Scan;
use super::inbox::PopJob;
use super::ring::Ring;
use super::selecting::FactTable;
use crate::broker::plugin::Binding;
use crate::broker::pop::PopTarget;
use crate::store::group::{PendingPartition, QueueInfo};

/// Wakes of one (queue, group) are at least this far apart.
pub const WAKE_TICK: Duration = Duration::from_millis(5);
/// Re-checks of parked pops start at this distance and double ...
pub const RECHECK_FIRST: Duration = Duration::from_millis(100);
/// ... up to this one.
pub const RECHECK_LAST: Duration = Duration::from_secs(5);
/// A group that nobody has asked for in this time is forgotten.
pub const UNLOAD_AFTER: Duration = Duration::from_secs(300);
/// All partitions are looked at again after this time.
pub const RESEED_EVERY: Duration = Duration::from_secs(600);
/// Most candidates of one ring; what is beyond is found again by a reseed.
pub const MAX_RING: usize = 200_000;
/// Reading further pages of candidates pauses above this ring size ...
pub const PAGE_ABOVE: usize = 20_000;
/// ... and goes on when fewer than this are ready.
pub const PAGE_BELOW: usize = 2_000;

/// Whether the group's first contact has been made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Only targeted pops so far.
    Unseen,
    /// The first contact is under way; pops wait for it.
    Opening,
    /// Subscribed, seeded.
    Open,
}

/// How far the look through all partitions has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pages {
    /// Through.
    Done,
    /// A page is being read.
    Loading,
    /// Goes on behind this name when the ring has room.
    Paused(Option<String>),
}

/// Pops that wait on one partition by name.
#[derive(Default)]
pub struct Targeted {
    /// Its id, when it is known to exist.
    pub partition: Option<Uuid>,
    /// Who waits, oldest first.
    pub waiting: BTreeSet<u64>,
}

/// See the module.
pub struct GroupState {
    /// First contact.
    pub phase: Phase,
    /// The queue, once it is known.
    pub info: Option<QueueInfo>,
    /// Partitions that probably have work.
    pub ring: Ring,
    /// The look through all partitions.
    pub pages: Pages,
    /// The page under way was read too early: look again.
    pub reload: bool,
    /// All waiting pops by arrival.
    pub jobs: BTreeMap<u64, Box<PopJob>>,
    /// Those of them that take any partition.
    pub wildcard: BTreeSet<u64>,
    /// Those that want one.
    pub targeted: HashMap<Arc<str>, Targeted>,
    /// Partitions to try for their targeted pops.
    pub targeted_ready: Vec<Arc<str>>,
    /// Pops that do not wait, to be dismissed when the round is over.
    pub impatient: BTreeSet<u64>,
    /// Ids of partitions that targeted pops have named.
    pub known: HashMap<Arc<str>, Uuid>,
    /// How far its pops read ahead of a filter.
    pub scan: Scan,
    /// Pops whose selector withheld everything that was ready, until there is news.
    pub withheld: HashSet<u64>,
    /// What selectors are told of partitions.
    pub facts: FactTable,
    /// Discovery keys (and their home core) to be told of the next wake.
    pub watchers: Vec<(usize, Arc<DiscoveryKey>)>,
    /// When waiting pops were last woken.
    pub last_wake: Option<Instant>,
    /// A wake that waits for its tick.
    pub gate_due: Option<Instant>,
    /// Distance of the re-checks.
    pub backoff: Duration,
    /// The next re-check.
    pub recheck_at: Instant,
    /// Last time somebody asked.
    pub used_at: Instant,
    /// The next full look.
    pub reseed_at: Instant,
    /// The earliest timer set for it.
    pub scheduled: Option<Instant>,
    deadlines: BTreeSet<(Instant, u64)>,
    fills: BTreeSet<(Instant, u64)>,
}

impl GroupState {
    /// A group seen for the first time by this core.
    pub fn new(now: Instant) -> Self {
        Self {
            phase: Phase::Unseen,
            info: None,
            ring: Ring::default(),
            pages: Pages::Done,
            reload: false,
            jobs: BTreeMap::new(),
            wildcard: BTreeSet::new(),
            targeted: HashMap::new(),
            targeted_ready: Vec::new(),
            impatient: BTreeSet::new(),
            known: HashMap::new(),
            scan: Scan::default(),
            withheld: HashSet::new(),
            facts: FactTable::default(),
            watchers: Vec::new(),
            last_wake: None,
            gate_due: None,
            backoff: RECHECK_FIRST,
            recheck_at: now,
            used_at: now,
            reseed_at: now + RESEED_EVERY,
            scheduled: None,
            deadlines: BTreeSet::new(),
            fills: BTreeSet::new(),
        }
    }

    /// The filter of its pops.
    pub fn filter(&self, name: &str) -> Option<Arc<Binding>> {
        self.info.as_ref()?.filter_of(name).cloned()
    }

    /// Messages and partitions to take from the ring for a pop that takes so many.
    pub fn reach(&self, filter: Option<&Arc<Binding>>, batch: u32, partitions: u32) -> (u64, u32) {
        match filter {
            None => (u64::from(batch), partitions),
            Some(_) => {
                let (batch, partitions) = self.scan.claim(batch, partitions);
                (u64::from(batch), partitions)
            }
        }
    }

    /// Lets a pop wait. `seq` is its place in the order of arrival.
    pub fn park(&mut self, seq: u64, job: Box<PopJob>) {
        if let Some(deadline) = job.deadline() {
            self.deadlines.insert((deadline, seq));
        } else {
            self.impatient.insert(seq);
        }
        if let Some(fill) = job.fill_until {
            self.fills.insert((fill, seq));
        }
        match &job.request.target {
            PopTarget::Partition(_, partition) => {
                if let Some(targeted) = self.targeted.get_mut(partition.as_str()) {
                    targeted.waiting.insert(seq);
                } else {
                    let waiting = BTreeSet::from([seq]);
                    self.targeted.insert(partition.as_str().into(), Targeted { partition: None, waiting });
                }
            }
            _ => {
                self.wildcard.insert(seq);
            }
        }
        self.jobs.insert(seq, job);
    }

    /// Takes a pop out, to be tried or answered.
    pub fn unpark(&mut self, seq: u64) -> Option<Box<PopJob>> {
        let job = self.jobs.remove(&seq)?;
        self.impatient.remove(&seq);
        self.withheld.remove(&seq);
        if let Some(deadline) = job.deadline() {
            self.deadlines.remove(&(deadline, seq));
        }
        if let Some(fill) = job.fill_until {
            self.fills.remove(&(fill, seq));
        }
        if let PopTarget::Partition(_, partition) = &job.request.target {
            if let Some(targeted) = self.targeted.get_mut(partition.as_str()) {
                targeted.waiting.remove(&seq);
                if targeted.waiting.is_empty() {
                    self.targeted.remove(partition.as_str());
                }
            }
        } else {
            self.wildcard.remove(&seq);
        }
        Some(job)
    }

    /// Starts the wait of a pop for a fuller batch.
    pub fn wait_for_more(&mut self, seq: u64, until: Instant) {
        if let Some(job) = self.jobs.get_mut(&seq) {
            job.fill_until = Some(until);
            self.fills.insert((until, seq));
        }
    }

    /// Whether a pop waits for a fuller batch.
    pub fn is_filling(&self, seq: u64) -> bool {
        self.jobs.get(&seq).is_some_and(|job| job.fill_until.is_some_and(|until| until > Instant::now()))
    }

    /// Whether a pop should wait for a fuller batch than there is (`minPopWaitTime`); starts its wait.
    pub fn should_fill(&mut self, seq: u64, now: Instant) -> bool {
        let Some(wait_ms) = self.info.as_ref().map(|info| info.min_pop_wait_ms).filter(|ms| *ms > 0) else {
            return false;
        };
        let Some(job) = self.jobs.get(&seq) else { return false };
        if job.request.batch <= 1 || self.ring.pending_estimate() >= u64::from(job.request.batch) {
            return false;
        }
        match (job.fill_until, job.deadline()) {
            (Some(until), _) => now < until,
            (None, None) => false,
            (None, Some(deadline)) => {
                // Delivered a moment before its own timeout, not after it.
                let until =
                    (now + Duration::from_millis(wait_ms as u64)).min(deadline - Duration::from_millis(20));
                self.wait_for_more(seq, until);
                now < until
            }
        }
    }

    /// A discovery key is to be told of the next wake.
    pub fn watch(&mut self, home: usize, key: &Arc<DiscoveryKey>) {
        if !self.watchers.iter().any(|(at, watching)| *at == home && watching == key) {
            self.watchers.push((home, key.clone()));
        }
    }

    /// Partitions that are no more.
    pub fn forget_partitions(&mut self, gone: &[Uuid]) {
        self.known.retain(|_, id| !gone.contains(id));
        for targeted in self.targeted.values_mut() {
            if targeted.partition.is_some_and(|id| gone.contains(&id)) {
                targeted.partition = None;
            }
        }
    }

    /// Pops whose time is over.
    pub fn overdue(&mut self, now: Instant) -> Vec<u64> {
        self.deadlines.iter().take_while(|(at, _)| *at <= now).map(|(_, seq)| *seq).collect()
    }

    /// Whether a pop has waited long enough for a fuller batch.
    pub fn fill_is_due(&mut self, now: Instant) -> bool {
        let mut due = false;
        while let Some((at, seq)) = self.fills.first().copied()
            && at <= now
        {
            self.fills.remove(&(at, seq));
            due = true;
        }
        due
    }

    /// Whether anybody waits for work here.
    pub fn has_waiters(&self) -> bool {
        !self.jobs.is_empty() || !self.watchers.is_empty()
    }

    /// A push committed messages to a partition. True if somebody may want them.
    pub fn mark(&mut self, partition: Uuid, name: &Arc<str>, messages: u64) -> bool {
        let mut wanted = !self.wildcard.is_empty() || !self.watchers.is_empty();
        if let Some(targeted) = self.targeted.get_mut(name) {
            targeted.partition = Some(partition);
            self.targeted_ready.push(name.clone());
            wanted = true;
        } else if self.phase == Phase::Unseen && !self.ring.contains(partition) {
            // Nobody but targeted pops has come by: the first contact will look at everything.
            return false;
        }
        if self.ring.len() >= MAX_RING && !self.ring.contains(partition) {
            if self.pages == Pages::Done {
                self.pages = Pages::Paused(None);
            }
        } else {
            if !self.ring.contains(partition) {
                self.facts.filled(partition);
            }
            self.ring.mark(partition, messages);
        }
        self.withheld.clear();
        wanted
    }

    /// A partition may be claimable again. True if somebody may want it.
    pub fn settled(&mut self, partition: Uuid, pending: bool, committed: i64) -> bool {
        if pending {
            self.ring.promote(partition);
            self.withheld.clear();
        } else {
            self.ring.finished(partition, committed);
        }
        self.note_targeted_ready();
        self.ring.has_ready() && self.has_waiters()
    }

    /// Partitions with work, from the database. True if somebody may want them.
    pub fn seed(&mut self, found: &[PendingPartition]) -> bool {
        if !found.is_empty() {
            self.withheld.clear();
        }
        for partition in found {
            if let Some(targeted) = self.targeted.get_mut(partition.name.as_str()) {
                targeted.partition = Some(partition.id);
                self.targeted_ready.push(partition.name.as_str().into());
            }
            if self.ring.len() >= MAX_RING && !self.ring.contains(partition.id) {
                if self.pages == Pages::Done {
                    self.pages = Pages::Paused(None);
                }
                break;
            }
            self.ring.seed(partition.id, partition.pending.max(1) as u64);
        }
        !found.is_empty() && self.has_waiters()
    }

    /// Moves what is due to ready. True if somebody may want it.
    pub fn advance(&mut self, now_ms: u64) -> bool {
        self.ring.advance(now_ms);
        self.note_targeted_ready();
        (self.ring.has_ready() || !self.targeted_ready.is_empty()) && self.has_waiters()
    }

    /// Lets targeted pops try whatever became ready.
    fn note_targeted_ready(&mut self) {
        for (name, targeted) in &self.targeted {
            if targeted.partition.is_some_and(|id| self.ring.is_ready(id)) {
                self.targeted_ready.push(name.clone());
            }
        }
    }

    /// When it has to be looked at next, whatever arrives.
    pub fn next_timer(&self) -> Instant {
        let mut next = if self.has_waiters() {
            self.recheck_at.min(self.reseed_at)
        } else {
            self.used_at + UNLOAD_AFTER
        };
        let due =
            [self.deadlines.first().map(|(at, _)| *at), self.fills.first().map(|(at, _)| *at), self.gate_due];
        for at in due.into_iter().flatten() {
            next = next.min(at);
        }
        next
    }
}
