//! The loop of a core thread: drain the inbox, fuse by kind, answer, repeat.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::acking::DeferredAck;
use super::admin::Admin;
use super::discovery::Discovery;
use super::group::{GroupState, Pages, Phase, RECHECK_LAST, RESEED_EVERY, WAKE_TICK};
use super::hints::HintSender;
use super::inbox::{ExtendJob, Mark, Message, Opened, PushJob, Settled};
use super::lanes::Lanes;
use super::leases::Leases;
use super::link::Link;
use super::metrics::Metrics;
use super::popping::Attempt;
use super::ring::Ring;
use super::{Registry, owner_of_group};
use crate::broker::answer::Reply;
use crate::broker::error::ApiError;
use crate::broker::segment::Packer;
use crate::plugins::library::Library;
use crate::plugins::pool::Pool;
use crate::store::{Conn, StoreError};

/// Most requests of one turn.
const MAX_DRAIN: usize = 2_048;
/// Longest wait for as many requests as the last turn had.
const FUSE_WAIT: Duration = Duration::from_micros(150);
/// How long requests are held while a lost connection is being replaced, before they are refused.
const DOWN_GRACE: Duration = Duration::from_secs(2);
/// How long a request is tried again while a row it needs is locked elsewhere.
pub const BUSY_LIMIT: Duration = Duration::from_secs(5);

/// A (queue, group).
pub type GroupKey = (Arc<str>, Arc<str>);

/// What a core thread owns.
pub struct Engine {
    pub(super) index: usize,
    pub(super) inbox: Receiver<Message>,
    pub(super) peers: Arc<[Sender<Message>]>,
    pub(super) admin: Admin,
    pub(super) hints: HintSender,
    pub(super) registry: Arc<Registry>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) link: Link,
    pub(super) packer: Packer,
    pub(super) pool: Pool,
    pub(super) library: Arc<Library>,
    pub(super) start: Instant,
    pub(super) now: Instant,

    pub(super) lanes: Lanes,
    pub(super) leases: Leases,
    pub(super) groups: HashMap<Arc<str>, HashMap<Arc<str>, GroupState>>,
    pub(super) discovery: Discovery,
    pub(super) dirty: HashSet<GroupKey>,
    pub(super) timers: BinaryHeap<Reverse<(Instant, GroupKey)>>,
    pub(super) next_seq: u64,
    /// Counts turns of groups that read far.
    pub(super) turns: usize,

    pub(super) pushes: Vec<Box<PushJob>>,
    pub(super) acks: Vec<DeferredAck>,
    pub(super) extends: Vec<ExtendJob>,
    pub(super) visiting: Vec<Attempt>,
    pub(super) busy_pushes: Vec<(Instant, Box<PushJob>)>,
    pub(super) busy_acks: Vec<(Instant, DeferredAck)>,
    last_turn: usize,
    stopping: bool,
}

impl Engine {
    #[allow(clippy::too_many_arguments)] // made in one place
    pub(super) fn new(
        index: usize,
        inbox: Receiver<Message>,
        peers: Arc<[Sender<Message>]>,
        admin: Admin,
        hints: HintSender,
        registry: Arc<Registry>,
        metrics: Arc<Metrics>,
        link: Link,
        library: Arc<Library>,
    ) -> Self {
        let now = Instant::now();
        let pool = Pool::new(library.host.clone(), library.limits.clone(), library.current());
        Self {
            index,
            inbox,
            peers,
            admin,
            hints,
            registry,
            metrics,
            link,
            packer: Packer::new(),
            pool,
            library,
            start: now,
            now,
            lanes: Lanes::default(),
            leases: Leases::default(),
            groups: HashMap::new(),
            discovery: Discovery::default(),
            dirty: HashSet::new(),
            timers: BinaryHeap::new(),
            next_seq: 0,
            turns: 0,
            pushes: Vec::new(),
            acks: Vec::new(),
            extends: Vec::new(),
            visiting: Vec::new(),
            busy_pushes: Vec::new(),
            busy_acks: Vec::new(),
            last_turn: 1,
            stopping: false,
        }
    }

    /// Runs until it is told to stop.
    pub(super) fn run(mut self) {
        while self.drain() {
            self.turn();
        }
        self.stop();
    }

    /// Takes what has arrived; waits if nothing has. False: it is time to end.
    fn drain(&mut self) -> bool {
        let until = self.next_deadline();
        let mut taken = match self.inbox.recv_deadline(until) {
            Ok(message) => self.accept(message),
            Err(RecvTimeoutError::Timeout) => 0,
            Err(RecvTimeoutError::Disconnected) => return false,
        };
        let mut wait_until = None;
        while taken < MAX_DRAIN && !self.stopping {
            match self.inbox.try_recv() {
                Ok(message) => taken += self.accept(message),
                Err(_) if taken > 0 && taken < self.last_turn => {
                    // The requests that shared the last commit are about to come
                    // again: their clients have just been answered.
                    let until = *wait_until.get_or_insert_with(|| Instant::now() + FUSE_WAIT);
                    match self.inbox.recv_deadline(until) {
                        Ok(message) => taken += self.accept(message),
                        Err(_) => break,
                    }
                }
                Err(_) => break,
            }
        }
        if taken > 0 {
            self.last_turn = taken;
        }
        self.now = Instant::now();
        !self.stopping
    }

    /// Sorts one message into its kind. Returns how many requests it carries.
    fn accept(&mut self, message: Message) -> usize {
        match message {
            Message::Push(job) => self.pushes.push(job),
            Message::Ack(job) => self.acks.push(job.into()),
            Message::Extend(job) => self.extends.push(job),
            Message::Pop(job) => self.accept_pop(job),
            other => {
                self.accept_event(other);
                return 0;
            }
        }
        1
    }

    fn accept_event(&mut self, message: Message) {
        self.now = Instant::now();
        match message {
            Message::Visit(visit) => self.visit(visit),
            Message::Returned(visit) => self.returned(visit),
            Message::DiscoveryWake(key) => self.discovery_wake(&key),
            Message::Discovered(key, result) => self.discovered(&key, result),
            Message::Marked(marks) => self.apply_marks(&marks),
            Message::Settled(settled) => self.apply_settled(&settled),
            Message::Opened(opened) => self.apply_opened(opened),
            Message::Page(page) => {
                self.apply_page(&(page.queue, page.group), &page.pending, page.next, page.failed);
            }
            Message::Found(found) => {
                for (queue, group, partition) in found {
                    self.apply_seed(&(queue, group), std::slice::from_ref(&partition));
                }
            }
            Message::Hashes(hashes) => self.apply_hashes(hashes),
            Message::Connected(conn) => self.connected(*conn),
            Message::QueueMade => self.discovery_refresh(),
            Message::CatalogChanged => self.catalog_changed(),
            Message::QueueInfos(asked, infos) => self.apply_infos(&asked, infos),
            Message::QueueDeleted(queue) => self.forget_queue(&queue),
            Message::GroupForgotten(queue, group) => self.forget_group(queue.as_deref(), &group),
            Message::GroupMoved(queue, group) => self.group_moved(&(queue, group)),
            Message::FilterAgreed(job, info) => self.filter_agreed(job, *info),
            Message::Plugins(loaded) => self.pool.replace(loaded),
            Message::Stop => self.stopping = true,
            Message::Push(_) | Message::Pop(_) | Message::Ack(_) | Message::Extend(_) => {
                unreachable!("requests are sorted in accept")
            }
        }
    }

    /// One SQL call per kind of work.
    fn turn(&mut self) {
        if !self.link.is_up() && !self.hold_or_refuse() {
            return;
        }
        self.retry_busy();
        self.run_pushes();
        self.run_acks();
        self.run_extends();
        self.run_timers();
        self.serve_pops();
    }

    /// Without a connection: requests wait for a moment, then are refused.
    fn hold_or_refuse(&mut self) -> bool {
        self.link.ensure(&self.peers[self.index]);
        if self.link.down_for(self.now) >= DOWN_GRACE {
            self.refuse_all();
        }
        self.run_timers();
        false
    }

    fn refuse_all(&mut self) {
        let text = self.link.refusal();
        let reply = Reply::from(&ApiError::unavailable(&*text));
        self.metrics.database_errors.inc();
        for job in self.pushes.drain(..).chain(self.busy_pushes.drain(..).map(|(_, job)| job)) {
            job.reply.send(reply.clone());
        }
        let busy = std::mem::take(&mut self.busy_acks).into_iter().map(|(_, job)| job);
        for job in std::mem::take(&mut self.acks).into_iter().chain(busy) {
            self.refuse_ack(job, &text);
        }
        for job in self.extends.drain(..) {
            job.reply.send(reply.clone());
        }
        self.lanes.refuse_waiting(&reply);
        self.refuse_fresh_pops(&reply);
    }

    /// When to wake up although nothing arrives.
    fn next_deadline(&mut self) -> Instant {
        if !self.dirty.is_empty() || !self.visiting.is_empty() {
            return Instant::now();
        }
        let far = Instant::now() + Duration::from_secs(60);
        let mut next = self.timers.peek().map_or(far, |Reverse((at, _))| *at);
        if let Some(at) =
            self.busy_pushes.iter().map(|(at, _)| *at).chain(self.busy_acks.iter().map(|(at, _)| *at)).min()
        {
            next = next.min(at);
        }
        if let Some(at) = self.discovery.next_deadline() {
            next = next.min(at);
        }
        if !self.link.is_up() {
            next = next.min(Instant::now() + Duration::from_millis(100));
        }
        next.min(far)
    }

    /// What was put off because a row was locked elsewhere, and is due.
    fn retry_busy(&mut self) {
        let now = self.now;
        for (at, job) in std::mem::take(&mut self.busy_pushes) {
            if at <= now { self.pushes.push(job) } else { self.busy_pushes.push((at, job)) }
        }
        for (at, job) in std::mem::take(&mut self.busy_acks) {
            if at <= now { self.acks.push(job) } else { self.busy_acks.push((at, job)) }
        }
    }

    /// Runs a call on the core's connection, and replaces the connection when it broke.
    pub(super) fn call<T>(
        &mut self,
        call: impl FnOnce(&mut Conn) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let result = self.link.call(call);
        if let Err(error) = &result {
            self.metrics.database_errors.inc();
            if error.is_connection() || error.is_read_only() {
                self.link.lost(error, self.now, &self.peers[self.index]);
            }
        }
        result
    }

    fn connected(&mut self, conn: Conn) {
        let was_down = self.link.connected(conn);
        if was_down {
            // Marks may have been missed, and calls whose outcome is not known
            // may have committed.
            let keys: Vec<GroupKey> = self.keys();
            for key in keys {
                self.reseed(&key);
            }
        }
    }

    pub(super) fn keys(&self) -> Vec<GroupKey> {
        self.groups
            .iter()
            .flat_map(|(queue, groups)| groups.keys().map(|group| (queue.clone(), group.clone())))
            .collect()
    }

    /// Starts a look through all partitions of a group's queue.
    pub(super) fn reseed(&mut self, key: &GroupKey) {
        let Some(group) = group_mut(&mut self.groups, key) else { return };
        if group.phase != Phase::Open || group.pages == Pages::Loading {
            return;
        }
        let Some(info) = group.info.clone() else { return };
        group.pages = Pages::Loading;
        self.admin.page(self.index, key.clone(), info.id, None);
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.now.saturating_duration_since(self.start).as_millis() as u64
    }

    // ---- what makes partitions candidates -------------------------------

    pub(super) fn apply_marks(&mut self, marks: &[Mark]) {
        for mark in marks {
            let Some(groups) = self.groups.get_mut(&mark.queue) else {
                self.discovery.note_unwatched_queue(&mark.queue);
                continue;
            };
            let mut wanted = Vec::new();
            for (name, group) in groups {
                let mut wants = false;
                for (partition, partition_name, messages) in &mark.partitions {
                    wants |= group.mark(*partition, partition_name, *messages);
                }
                if wants {
                    wanted.push(name.clone());
                }
            }
            for group in wanted {
                self.wake(&(mark.queue.clone(), group));
            }
        }
    }

    fn apply_settled(&mut self, settled: &Settled) {
        let key = (settled.queue.clone(), settled.group.clone());
        if let Some(group) = group_mut(&mut self.groups, &key)
            && group.settled(settled.partition, settled.pending, settled.committed)
        {
            self.wake(&key);
        }
    }

    /// Tells the owner of a (queue, group) that a partition may be claimable again.
    pub(super) fn settle(&mut self, settled: Settled) {
        let owner = owner_of_group(&settled.queue, &settled.group, self.peers.len());
        if owner == self.index {
            self.apply_settled(&settled);
        } else {
            let _ = self.peers[owner].send(Message::Settled(settled));
        }
    }

    pub(super) fn apply_seed(&mut self, key: &GroupKey, found: &[crate::store::group::PendingPartition]) {
        if let Some(group) = group_mut(&mut self.groups, key)
            && group.seed(found)
        {
            self.wake(key);
        }
    }

    fn apply_page(
        &mut self,
        key: &GroupKey,
        pending: &[crate::store::group::PendingPartition],
        next: Option<String>,
        failed: bool,
    ) {
        self.apply_seed(key, pending);
        let Some(group) = group_mut(&mut self.groups, key) else { return };
        if std::mem::take(&mut group.reload) {
            // It was read before the cursors were moved.
            group.pages = Pages::Done;
            return self.reseed(key);
        }
        group.pages = match next {
            // Tried again with the next re-check.
            _ if failed => Pages::Paused(next),
            None => {
                group.reseed_at = self.now + RESEED_EVERY;
                Pages::Done
            }
            Some(next) => Pages::Paused(Some(next)),
        };
        if !failed {
            self.continue_pages(key);
        }
        self.dirty.insert(key.clone());
    }

    /// Reads on where the look through all partitions paused, if there is room.
    pub(super) fn continue_pages(&mut self, key: &GroupKey) {
        let Some(group) = group_mut(&mut self.groups, key) else { return };
        if let Pages::Paused(after) = &group.pages
            && group.ring.len() < super::group::PAGE_ABOVE
            && group.ring.ready_len() < super::group::PAGE_BELOW
            && let Some(info) = &group.info
        {
            let (queue_id, after) = (info.id, after.clone());
            group.pages = Pages::Loading;
            self.admin.page(self.index, key.clone(), queue_id, after);
        }
    }

    fn apply_opened(&mut self, opened: Opened) {
        let key = (opened.queue, opened.group);
        let now = self.now;
        match opened.result {
            Ok(found) => {
                let group = group_or_new(&mut self.groups, &key, now);
                let queue_id = found.info.id;
                group.phase = Phase::Open;
                group.info = Some(found.info);
                self.registry.opened(&key, queue_id);
                self.apply_page(&key, &found.pending, found.next, false);
                self.schedule(&key);
            }
            Err(error) => {
                self.metrics.database_errors.inc();
                let reply = Reply::from(&store_error(&error));
                if let Some(group) = group_mut(&mut self.groups, &key) {
                    group.phase = Phase::Unseen;
                    let waiting: Vec<u64> = group.wildcard.iter().copied().collect();
                    for seq in waiting {
                        if let Some(job) = group.unpark(seq) {
                            job.reply.send(reply.clone());
                        }
                    }
                }
            }
        }
    }

    // ---- waking ----------------------------------------------------------

    /// Somebody may want what became ready: at once, or on the next tick if the
    /// last wake was less than a tick ago.
    pub(super) fn wake(&mut self, key: &GroupKey) {
        let now = self.now;
        let Some(group) = group_mut(&mut self.groups, key) else { return };
        group.backoff = super::group::RECHECK_FIRST;
        match group.last_wake {
            Some(last) if now < last + WAKE_TICK => {
                group.gate_due.get_or_insert(last + WAKE_TICK);
            }
            _ => {
                group.last_wake = Some(now);
                group.gate_due = None;
                self.metrics.wakes.inc();
                self.dirty.insert(key.clone());
                self.tell_watchers(key);
            }
        }
        self.schedule(key);
    }

    fn tell_watchers(&mut self, key: &GroupKey) {
        let Some(group) = group_mut(&mut self.groups, key) else { return };
        for (home, watcher) in std::mem::take(&mut group.watchers) {
            if home == self.index {
                self.discovery_wake(&watcher);
            } else {
                let _ = self.peers[home].send(Message::DiscoveryWake(watcher));
            }
        }
    }

    /// Sets the group's next timer.
    pub(super) fn schedule(&mut self, key: &GroupKey) {
        let start = self.start;
        let Some(group) = group_mut(&mut self.groups, key) else { return };
        let mut next = group.next_timer();
        if group.has_waiters()
            && let Some(due) = group.ring.next_due()
        {
            next = next.min(start + Duration::from_millis(due));
        }
        if group.scheduled.is_none_or(|at| next < at) {
            group.scheduled = Some(next);
            self.timers.push(Reverse((next, key.clone())));
        }
    }

    pub(super) fn run_timers(&mut self) {
        self.now = Instant::now();
        self.leases.expire(self.now);
        while let Some(Reverse((at, _))) = self.timers.peek()
            && *at <= self.now
        {
            let Some(Reverse((at, key))) = self.timers.pop() else { break };
            self.run_group_timer(at, &key);
        }
        self.run_discovery_timers();
    }

    fn run_group_timer(&mut self, at: Instant, key: &GroupKey) {
        let (now, now_ms) = (self.now, self.now_ms());
        let Some(group) = group_mut(&mut self.groups, key) else { return };
        if group.scheduled != Some(at) {
            return; // An earlier one took its place.
        }
        group.scheduled = None;
        let mut wake = group.advance(now_ms) | group.fill_is_due(now);
        if group.gate_due.is_some_and(|due| due <= now) {
            group.gate_due = None;
            wake = true;
        }
        for seq in group.overdue(now) {
            if let Some(job) = group.unpark(seq) {
                self.metrics.pop_empty.inc();
                job.reply.send(Reply::no_content());
            }
        }
        if group.recheck_at <= now {
            group.backoff = (group.backoff * 2).min(RECHECK_LAST);
            group.recheck_at = now + group.backoff;
            let gone: Vec<u64> =
                group.jobs.iter().filter(|(_, job)| job.reply.is_gone()).map(|(seq, _)| *seq).collect();
            for seq in gone {
                if let Some(job) = group.unpark(seq) {
                    job.reply.send(Reply::no_content());
                }
            }
            if group.phase != Phase::Open {
                // Nobody else looks for partitions that only targeted pops read.
                let names: Vec<Arc<str>> = group.targeted.keys().cloned().collect();
                wake |= !names.is_empty();
                group.targeted_ready.extend(names);
            }
            wake |= group.ring.has_ready() && group.has_waiters();
            // What a selector withheld then, it may choose now.
            group.withheld.clear();
            self.continue_pages(key);
            if wake {
                // Not a wake by news: the distance of the re-checks goes on growing.
                self.dirty.insert(key.clone());
                self.tell_watchers(key);
                wake = false;
            }
        }
        let Some(group) = group_mut(&mut self.groups, key) else { return };
        if group.reseed_at <= now && group.has_waiters() {
            group.reseed_at = now + RESEED_EVERY;
            self.reseed(key);
        }
        self.unload_if_idle(key);
        if wake {
            self.wake(key);
        }
        self.schedule(key);
    }

    fn unload_if_idle(&mut self, key: &GroupKey) {
        let now = self.now;
        let Some(group) = group_mut(&mut self.groups, key) else { return };
        let idle = group.used_at + super::group::UNLOAD_AFTER <= now
            || (group.phase == Phase::Unseen && group.ring.is_empty());
        if idle && !group.has_waiters() && group.phase != Phase::Opening {
            self.remove_group(key);
        }
    }

    pub(super) fn remove_group(&mut self, key: &GroupKey) {
        if let Some(groups) = self.groups.get_mut(&key.0) {
            groups.remove(&key.1);
            if groups.is_empty() {
                self.groups.remove(&key.0);
            }
        }
        self.registry.closed(key);
        self.dirty.remove(key);
    }

    // ---- what others changed ----------------------------------------------

    fn catalog_changed(&mut self) {
        self.lanes.clear();
        let ids: HashSet<_> = self
            .groups
            .values()
            .flat_map(|g| g.values())
            .filter_map(|g| g.info.as_ref().map(|i| i.id))
            .collect();
        if !ids.is_empty() {
            self.admin.queue_infos(self.index, ids.into_iter().collect());
        }
        self.discovery_refresh();
    }

    fn apply_infos(&mut self, asked: &[uuid::Uuid], infos: Vec<crate::store::group::QueueInfo>) {
        let by_id: HashMap<_, _> = infos.into_iter().map(|info| (info.id, info)).collect();
        let mut deleted = Vec::new();
        for (queue, groups) in &mut self.groups {
            for group in groups.values_mut() {
                let Some(id) = group.info.as_ref().map(|info| info.id) else { continue };
                match by_id.get(&id) {
                    Some(info) => group.info = Some(info.clone()),
                    None if asked.contains(&id) => deleted.push(queue.clone()),
                    None => {}
                }
            }
        }
        for queue in deleted {
            self.forget_queue(&queue);
        }
    }

    /// The queue is gone: its waiting pops are answered with nothing.
    fn forget_queue(&mut self, queue: &Arc<str>) {
        let waiting = self.lanes.forget_queue(queue);
        self.pushes.extend(waiting);
        for (group, mut state) in self.groups.remove(queue).unwrap_or_default() {
            self.registry.closed(&(queue.clone(), group));
            dismiss_all(&mut state);
        }
        self.discovery_refresh();
    }

    fn forget_group(&mut self, queue: Option<&str>, group: &str) {
        let keys: Vec<GroupKey> = self
            .keys()
            .into_iter()
            .filter(|key| &*key.1 == group && queue.is_none_or(|q| &*key.0 == q))
            .collect();
        for key in keys {
            if let Some(state) = group_mut(&mut self.groups, &key) {
                dismiss_all(state);
            }
            self.remove_group(&key);
        }
        self.discovery.forget_group(group);
    }

    /// A group's cursors were moved: what is known of its partitions is worth nothing.
    fn group_moved(&mut self, key: &GroupKey) {
        let Some(group) = group_mut(&mut self.groups, key) else { return };
        // No claim is under way while a message is handled.
        group.ring = Ring::default();
        group.facts = super::selecting::FactTable::default();
        group.withheld.clear();
        let names: Vec<Arc<str>> = group.targeted.keys().cloned().collect();
        group.targeted_ready.extend(names);
        if group.pages == Pages::Loading {
            group.reload = true;
        } else {
            self.reseed(key);
        }
        self.dirty.insert(key.clone());
        self.tell_watchers(key);
    }

    /// Answers what waits, as the last thing.
    fn stop(&mut self) {
        self.now = Instant::now();
        while let Ok(message) = self.inbox.try_recv() {
            self.accept(message);
        }
        self.run_pushes();
        self.run_acks();
        self.run_extends();
        let reply = Reply::from(&ApiError::unavailable(
            "the broker is stopping, nothing was changed; repeat the call",
        ));
        for job in self.pushes.drain(..).chain(self.busy_pushes.drain(..).map(|(_, job)| job)) {
            job.reply.send(reply.clone());
        }
        let text = "the broker is stopping, nothing was changed; repeat the call";
        let busy = std::mem::take(&mut self.busy_acks).into_iter().map(|(_, job)| job);
        for job in std::mem::take(&mut self.acks).into_iter().chain(busy) {
            self.refuse_ack(job, text);
        }
        self.lanes.refuse_waiting(&reply);
        for key in self.keys() {
            if let Some(group) = group_mut(&mut self.groups, &key) {
                dismiss_all(group);
            }
        }
        self.dismiss_discovery();
    }

    pub(super) fn next_seq(&mut self) -> u64 {
        self.next_seq += 1;
        self.next_seq
    }
}

/// Answers all waiting pops with nothing.
fn dismiss_all(group: &mut GroupState) {
    let waiting: Vec<u64> = group.jobs.keys().copied().collect();
    for seq in waiting {
        if let Some(job) = group.unpark(seq) {
            job.reply.send(Reply::no_content());
        }
    }
}

/// A (queue, group)'s state.
pub(super) fn group_mut<'a>(
    groups: &'a mut HashMap<Arc<str>, HashMap<Arc<str>, GroupState>>,
    key: &GroupKey,
) -> Option<&'a mut GroupState> {
    groups.get_mut(&key.0)?.get_mut(&key.1)
}

/// A (queue, group)'s state, made if there is none.
pub(super) fn group_or_new<'a>(
    groups: &'a mut HashMap<Arc<str>, HashMap<Arc<str>, GroupState>>,
    key: &GroupKey,
    now: Instant,
) -> &'a mut GroupState {
    let of_queue = groups.entry(key.0.clone()).or_default();
    of_queue.entry(key.1.clone()).or_insert_with(|| GroupState::new(now))
}

/// A database error as a client sees it.
pub fn store_error(error: &StoreError) -> ApiError {
    match error {
        StoreError::OutcomeUnknown(_) => ApiError::outcome_unknown(error.to_string()),
        _ => ApiError::unavailable(error.to_string()),
    }
}
