//! Discovery pops: one pop over every queue of a namespace and a task.
//!
//! A discovery key has a home core, which keeps its queues and its waiting pops. A
//! pop travels as a [`Visit`] from owner to owner of the (queue, group)s, claims
//! at each under one lease until it is full, and comes home to be answered or to
//! wait. An owner that it left without work keeps a *watcher* and tells the home of
//! the next wake.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::engine::{Engine, store_error};
use super::inbox::{Message, PopJob};
use super::leases;
use super::owner_of_group;
use crate::broker::answer::Reply;
use crate::broker::pop::{self, PopTarget};
use crate::store::StoreError;
use crate::store::group::QueueInfo;

/// The queues of a key are looked up again after this time while somebody waits or asks.
const REFRESH_EVERY: Duration = Duration::from_secs(2);
/// Look-ups of one key that somebody caused are at least this far apart.
const REFRESH_GAP: Duration = Duration::from_millis(50);
/// A key that nobody has asked for in this time is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(300);
/// Pops of one key that travel at the same time.
const MAX_TRAVELLING: usize = 32;
/// Queue names remembered as seen, so that a mark of a new one causes a look-up.
const MAX_SEEN: usize = 100_000;

/// What a discovery pop looks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DiscoveryKey {
    /// Namespace to match.
    pub namespace: Option<String>,
    /// Task to match.
    pub task: Option<String>,
    /// The group.
    pub group: Arc<str>,
}

/// A discovery pop on its way.
pub struct Visit {
    /// Its key.
    pub key: Arc<DiscoveryKey>,
    /// The core it comes home to.
    pub home: usize,
    /// Its place among the waiting pops there.
    pub seq: u64,
    /// The pop.
    pub job: Box<PopJob>,
    /// The lease of all it claims.
    pub lease: Uuid,
    /// Queues still to visit, next one last.
    pub route: Vec<Arc<str>>,
    /// What it claimed.
    pub deliveries: Vec<pop::Delivery>,
    /// Per delivery: first offset, and how long the lease lasts in milliseconds.
    pub spans: Vec<(i64, u64)>,
    /// Messages it still takes.
    pub left: u32,
    /// Partitions it still takes.
    pub partitions_left: u32,
    /// What went wrong, if something did.
    pub failed: Option<Reply>,
    /// An owner no longer knew its (queue, group).
    pub stale: bool,
    /// Wakes of the key when it set out.
    pub wakes: u64,
}

struct State {
    queues: Vec<QueueInfo>,
    looked_at: Option<Instant>,
    looking: bool,
    /// Look again when the look under way has come back.
    again: bool,
    /// Everything is opened again by the next look.
    reopen: bool,
    jobs: BTreeMap<u64, Box<PopJob>>,
    /// Those that wait for the queues, or for their turn to travel.
    fresh: BTreeSet<u64>,
    travelling: usize,
    wakes: u64,
    turn: usize,
    used_at: Instant,
}

/// The discovery keys at home on one core.
#[derive(Default)]
pub struct Discovery {
    states: HashMap<Arc<DiscoveryKey>, State>,
    seen: HashSet<Arc<str>>,
    stale: bool,
}

impl Discovery {
    /// A mark of a queue that no group of this core reads: it may be new, and one of a waiting key's.
    pub fn note_unwatched_queue(&mut self, queue: &Arc<str>) {
        if self.states.is_empty() || self.seen.contains(queue) {
            return;
        }
        if self.seen.len() >= MAX_SEEN {
            self.seen.clear();
        }
        self.seen.insert(queue.clone());
        self.stale = true;
    }

    /// When something is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.stale {
            return Some(Instant::now() + Duration::from_millis(5));
        }
        self.states
            .values()
            .map(|state| {
                let deadline = state.jobs.values().filter_map(|job| job.deadline()).min();
                let refresh = match (state.jobs.is_empty(), state.looked_at) {
                    (true, _) => state.used_at + FORGET_AFTER,
                    (false, Some(at)) => at + REFRESH_EVERY,
                    (false, None) => state.used_at + REFRESH_EVERY,
                };
                deadline.map_or(refresh, |at| at.min(refresh))
            })
            .min()
    }

    /// A group was deleted: its keys start anew.
    pub fn forget_group(&mut self, group: &str) {
        for (key, state) in &mut self.states {
            if &*key.group == group {
                state.reopen = true;
                state.looked_at = None;
            }
        }
        self.stale = true;
    }
}

impl Engine {
    pub(super) fn accept_discovery(&mut self, job: Box<PopJob>) {
        let PopTarget::Discovery { namespace, task } = &job.request.target else { return };
        let key = DiscoveryKey { namespace: namespace.clone(), task: task.clone(), group: job.group.clone() };
        let now = self.now;
        let seq = self.next_seq();
        let key = match self.discovery.states.get_key_value(&key) {
            Some((key, _)) => key.clone(),
            None => {
                let key = Arc::new(key);
                let state = State {
                    queues: Vec::new(),
                    looked_at: None,
                    looking: false,
                    again: false,
                    reopen: false,
                    jobs: BTreeMap::new(),
                    fresh: BTreeSet::new(),
                    travelling: 0,
                    wakes: 0,
                    turn: 0,
                    used_at: now,
                };
                self.discovery.states.insert(key.clone(), state);
                key
            }
        };
        let Some(state) = self.discovery.states.get_mut(&key) else { return };
        state.used_at = now;
        state.jobs.insert(seq, job);
        state.fresh.insert(seq);
        if state.looked_at.is_none_or(|at| at + REFRESH_EVERY <= now) {
            self.look_up(&key);
        }
        self.send_out(&key);
    }

    fn look_up(&mut self, key: &Arc<DiscoveryKey>) {
        let Some(state) = self.discovery.states.get_mut(key) else { return };
        if state.looking {
            state.again = true;
            return;
        }
        let Some(start) = state.jobs.values().next().map(|job| job.request.start) else { return };
        state.looking = true;
        let known = if std::mem::take(&mut state.reopen) {
            Vec::new()
        } else {
            state.queues.iter().map(|info| info.id).collect()
        };
        self.admin.discover(self.index, key.clone(), start, known);
    }

    /// The queues of a key have been found.
    pub(super) fn discovered(&mut self, key: &Arc<DiscoveryKey>, result: Result<Vec<QueueInfo>, StoreError>) {
        let now = self.now;
        let Some(state) = self.discovery.states.get_mut(key) else { return };
        state.looking = false;
        let again = std::mem::take(&mut state.again);
        match result {
            Ok(queues) => {
                let known: HashSet<Uuid> = state.queues.iter().map(|info| info.id).collect();
                let more = queues.iter().any(|info| !known.contains(&info.id));
                state.queues = queues;
                let first = state.looked_at.is_none();
                state.looked_at = Some(now);
                if more || first {
                    state.wakes += 1;
                    state.fresh.extend(state.jobs.keys().copied());
                }
                if again {
                    self.look_up(key);
                }
                self.send_out(key);
            }
            Err(error) => {
                self.metrics.database_errors.inc();
                let reply = Reply::from(&store_error(&error));
                (state.looked_at, state.reopen) = (None, true);
                for seq in std::mem::take(&mut state.fresh) {
                    if let Some(job) = state.jobs.remove(&seq) {
                        job.reply.send(reply.clone());
                    }
                }
            }
        }
    }

    /// Lets fresh pops travel.
    fn send_out(&mut self, key: &Arc<DiscoveryKey>) {
        let cores = self.peers.len();
        loop {
            let home = self.index;
            let Some(state) = self.discovery.states.get_mut(key) else { return };
            if state.looked_at.is_none() || state.travelling >= MAX_TRAVELLING {
                return;
            }
            let Some(seq) = state.fresh.pop_first() else { return };
            let Some(job) = state.jobs.remove(&seq) else { continue };
            if job.reply.is_gone() {
                job.reply.send(Reply::no_content());
                continue;
            }
            // Every pop starts at another queue, so that none starves.
            let mut route: Vec<Arc<str>> =
                state.queues.iter().map(|info| info.name.as_str().into()).collect();
            if !route.is_empty() {
                state.turn = (state.turn + 1) % route.len();
                route.rotate_left(state.turn);
            }
            state.travelling += 1;
            let visit = Box::new(Visit {
                key: key.clone(),
                home,
                seq,
                lease: leases::new_lease_id(home),
                left: job.request.batch,
                partitions_left: job.request.partitions,
                job,
                route,
                deliveries: Vec::new(),
                spans: Vec::new(),
                failed: None,
                stale: false,
                wakes: state.wakes,
            });
            self.forward(visit, cores);
        }
    }

    /// Sends a visit to its next owner, or home.
    pub(super) fn forward(&mut self, visit: Box<Visit>, cores: usize) {
        let full = visit.left == 0 || visit.partitions_left == 0 || visit.failed.is_some();
        let (to, message) = match visit.route.last() {
            Some(queue) if !full => (owner_of_group(queue, &visit.key.group, cores), Message::Visit(visit)),
            _ => (visit.home, Message::Returned(visit)),
        };
        // Its own core too: the inbox keeps the turns short.
        let _ = self.peers[to].send(message);
    }

    /// A discovery pop has come home.
    pub(super) fn returned(&mut self, visit: Box<Visit>) {
        let key = visit.key.clone();
        let took = !visit.deliveries.is_empty();
        let (mut woken, mut known) = (false, false);
        if let Some(state) = self.discovery.states.get_mut(&key) {
            state.travelling = state.travelling.saturating_sub(1);
            woken = state.wakes != visit.wakes;
            known = true;
            if visit.stale {
                state.reopen = true;
                state.looked_at = None;
            }
        }
        if took {
            self.deliver(visit.job, visit.lease, &visit.deliveries, &visit.spans);
            // There may be more: the next one tries at once.
            if let Some(state) = self.discovery.states.get_mut(&key)
                && let Some(seq) = state.jobs.keys().next().copied()
            {
                state.fresh.insert(seq);
            }
        } else if let Some(reply) = visit.failed {
            visit.job.reply.send(reply);
        } else if !known || (visit.job.request.wait.is_none() && !visit.stale) {
            self.metrics.pop_empty.inc();
            visit.job.reply.send(Reply::no_content());
        } else if let Some(state) = self.discovery.states.get_mut(&key) {
            let (seq, stale) = (visit.seq, visit.stale);
            state.jobs.insert(seq, visit.job);
            if woken || stale {
                state.fresh.insert(seq);
            }
            if stale {
                self.look_up(&key);
            }
        }
        self.send_out(&key);
    }

    /// A watched (queue, group) has work.
    pub(super) fn discovery_wake(&mut self, key: &Arc<DiscoveryKey>) {
        let Some(state) = self.discovery.states.get_mut(key) else { return };
        state.wakes += 1;
        if let Some(seq) = state.jobs.keys().next().copied() {
            state.fresh.insert(seq);
        }
        self.send_out(key);
    }

    /// There may be new queues.
    pub(super) fn discovery_refresh(&mut self) {
        self.discovery.stale = true;
    }

    pub(super) fn run_discovery_timers(&mut self) {
        let now = self.now;
        let stale = std::mem::take(&mut self.discovery.stale);
        let keys: Vec<Arc<DiscoveryKey>> = self.discovery.states.keys().cloned().collect();
        for key in keys {
            let Some(state) = self.discovery.states.get_mut(&key) else { continue };
            let over: Vec<u64> = state
                .jobs
                .iter()
                .filter(|(_, job)| job.deadline().is_some_and(|at| at <= now) || job.reply.is_gone())
                .map(|(seq, _)| *seq)
                .collect();
            for seq in over {
                state.fresh.remove(&seq);
                if let Some(job) = state.jobs.remove(&seq) {
                    self.metrics.pop_empty.inc();
                    job.reply.send(Reply::no_content());
                }
            }
            if state.jobs.is_empty() {
                if state.travelling == 0 && state.used_at + FORGET_AFTER <= now {
                    self.discovery.states.remove(&key);
                } else if stale {
                    // The next pop looks first.
                    state.looked_at = None;
                }
                continue;
            }
            let age = state.looked_at.map_or(REFRESH_EVERY, |at| now.saturating_duration_since(at));
            if age >= REFRESH_EVERY || (stale && age >= REFRESH_GAP) {
                // Not `None`: pops go on travelling to the queues that are known.
                state.looked_at = state.looked_at.map(|_| now);
                self.look_up(&key);
            } else if stale {
                self.discovery.stale = true;
            }
        }
    }

    /// Answers all waiting discovery pops with nothing.
    pub(super) fn dismiss_discovery(&mut self) {
        for (_, state) in self.discovery.states.drain() {
            for job in state.jobs.into_values() {
                job.reply.send(Reply::no_content());
            }
        }
    }
}
