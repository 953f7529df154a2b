//! Pops: parking, choosing candidates, claiming for many at once, answering.

use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::discovery::Visit;
use super::engine::{Engine, GroupKey, group_mut, group_or_new, store_error};
use super::filtering::{ClaimedSpan, ToJudge};
use super::group::{Pages, Phase};
use super::inbox::{PopJob, Settled, start_mode};
use super::leases::{Span, new_lease_id};
use super::ring::Verdict;
use super::selecting::select;
use crate::broker::answer::{Delivery as Written, Reply};
use crate::broker::error::ApiError;
use crate::broker::plugin::Binding;
use crate::broker::pop::{self, Delivery, PopTarget, SegmentSlice, StartAt};
use crate::store::StoreError;
use crate::store::claim::{self, Claim, ClaimVerdict, ClaimedSegment};
use crate::store::group::QueueInfo;

/// Pops of one claim.
const MAX_POPS: usize = 64;
/// Candidates of one pop in one claim.
const MAX_CANDIDATES: usize = 1_000;
/// Candidates of one claim.
const MAX_CALL_CANDIDATES: usize = 4_000;
/// Claims of one turn; what is left goes on in the next, after the pushes and acks that came meanwhile.
const MAX_ROUNDS: usize = 8;
/// No further claim is begun in a turn after this time.
const MAX_TURN: Duration = Duration::from_millis(20);
/// When a partition whose cursor row is locked elsewhere is tried again, in milliseconds.
const BUSY_MS: u64 = 5;
/// A window ends early with this many messages; as in the migration.
const WINDOW_MESSAGES: u64 = 100;
/// Partition ids remembered per group for its targeted pops.
const MAX_KNOWN: usize = 10_000;

/// One pop's share of a claim.
pub struct Attempt {
    pub(super) key: GroupKey,
    pop: Popper,
    pub(super) lease: Uuid,
    candidates: Vec<Uuid>,
    /// Judges what is claimed.
    filter: Option<Arc<Binding>>,
}

impl Attempt {
    /// Messages and partitions that its pop still takes.
    pub(super) fn room(&self) -> (u32, u32) {
        self.pop.room()
    }

    /// Remembers what a plugin did for it.
    pub(super) fn explain(&mut self, what: impl FnOnce() -> serde_json::Value) {
        let job = match &mut self.pop {
            Popper::Waiting(_, job) => job,
            Popper::Visiting(visit) => &mut visit.job,
        };
        if job.request.explain {
            job.explanation.push(what());
        }
    }

    /// Whether its pop commits at once.
    pub(super) fn auto_ack(&self) -> bool {
        self.pop.job().request.auto_ack
    }
}

enum Popper {
    Waiting(u64, Box<PopJob>),
    Visiting(Box<Visit>),
}

impl Popper {
    fn job(&self) -> &PopJob {
        match self {
            Popper::Waiting(_, job) => job,
            Popper::Visiting(visit) => &visit.job,
        }
    }

    /// Messages and partitions it still takes.
    fn room(&self) -> (u32, u32) {
        match self {
            Popper::Waiting(_, job) => (job.request.batch, job.request.partitions),
            Popper::Visiting(visit) => (visit.left, visit.partitions_left),
        }
    }
}

impl Engine {
    pub(super) fn accept_pop(&mut self, mut job: Box<PopJob>) {
        let (queue, partition) = match &job.request.target {
            PopTarget::Discovery { .. } => return self.accept_discovery(job),
            PopTarget::Queue(queue) => (queue.as_str(), None),
            PopTarget::Partition(queue, partition) => (queue.as_str(), Some(partition.clone())),
        };
        let key: GroupKey = match self.groups.get_key_value(queue) {
            Some((queue, _)) => (queue.clone(), job.group.clone()),
            None => (queue.into(), job.group.clone()),
        };
        let (now, index) = (self.now, self.index);
        let seq = self.next_seq();
        let group = group_or_new(&mut self.groups, &key, now);
        group.used_at = now;
        if let Some(filter) = &job.request.filter
            && !job.filter_agreed
        {
            let own =
                group.info.as_ref().and_then(|info| info.groups.get(&*key.1)).and_then(|own| own[1].as_ref());
            if own.is_none_or(|own| own.key != filter.key) {
                self.admin.register_filter(index, key, job, self.library.clone());
                return;
            }
        }
        if !group.has_waiters() {
            group.backoff = super::group::RECHECK_FIRST;
            group.recheck_at = now + group.backoff;
        }
        let (impatient, start) = (job.request.wait.is_none(), job.request.start);
        job.fill_until = None;
        group.park(seq, job);
        match partition {
            None if group.phase == Phase::Unseen => {
                group.phase = Phase::Opening;
                self.admin.open(index, key.clone(), start);
            }
            None => {
                // Without a candidate there is nothing to do but to wait.
                if impatient || group.ring.has_ready() {
                    self.dirty.insert(key.clone());
                }
            }
            Some(partition) => {
                group.targeted_ready.push(partition.as_str().into());
                self.dirty.insert(key.clone());
            }
        }
        self.schedule(&key);
    }

    /// The filter that a pop names is its group's now.
    pub(super) fn filter_agreed(&mut self, mut job: Box<PopJob>, info: QueueInfo) {
        let key: GroupKey = (info.name.as_str().into(), job.group.clone());
        let now = self.now;
        group_or_new(&mut self.groups, &key, now).info = Some(info);
        job.filter_agreed = true;
        self.accept_pop(job);
    }

    /// A discovery pop has arrived at an owner.
    pub(super) fn visit(&mut self, mut visit: Box<Visit>) {
        let Some(queue) = visit.route.pop() else { return };
        let key = (queue, visit.key.group.clone());
        self.visiting.push(Attempt {
            key,
            lease: visit.lease,
            pop: Popper::Visiting(visit),
            candidates: Vec::new(),
            filter: None,
        });
    }

    /// Serves waiting pops from the groups that may have something for them.
    pub(super) fn serve_pops(&mut self) {
        let until = Instant::now() + MAX_TURN;
        for _ in 0..MAX_ROUNDS {
            if !self.link.is_up() {
                return;
            }
            let attempts = self.attempts(false);
            if attempts.is_empty() {
                break;
            }
            self.claim(attempts);
            self.now = Instant::now();
            if self.now >= until {
                break;
            }
        }
        // A group whose filter lets little through reads far: one step of one such group a
        // turn, in a claim of its own, so that it delays nobody by more than that.
        if self.link.is_up() {
            let attempts = self.attempts(true);
            if !attempts.is_empty() {
                self.claim(attempts);
                self.now = Instant::now();
            }
        }
        let keys: Vec<GroupKey> = self.dirty.iter().cloned().collect();
        for key in keys {
            if self.round_over(&key) {
                self.dirty.remove(&key);
            }
        }
    }

    /// Answers the impatient when nothing is left to try. True: the group is through.
    fn round_over(&mut self, key: &GroupKey) -> bool {
        self.continue_pages(key);
        let Some(group) = group_mut(&mut self.groups, key) else { return true };
        let more = (group.ring.has_ready()
            && group.wildcard.iter().any(|seq| !group.is_filling(*seq) && !group.withheld.contains(seq)))
            || !group.targeted_ready.is_empty();
        if more {
            return group.phase == Phase::Opening && group.targeted_ready.is_empty();
        }
        let looking =
            group.phase == Phase::Opening || (group.phase == Phase::Open && group.pages == Pages::Loading);
        let impatient: Vec<u64> = group.impatient.iter().copied().collect();
        for seq in impatient {
            if looking && group.wildcard.contains(&seq) {
                continue;
            }
            if let Some(job) = group.unpark(seq) {
                self.metrics.pop_empty.inc();
                job.reply.send(Reply::no_content());
            }
        }
        self.schedule(key);
        true
    }

    /// Takes pops and candidates for one claim: of the groups that read far, one; or of all others.
    fn attempts(&mut self, far: bool) -> Vec<Attempt> {
        let mut attempts = Vec::new();
        let mut candidates = 0;
        let visiting = if far { Vec::new() } else { std::mem::take(&mut self.visiting) };
        for mut visiting in visiting {
            if attempts.len() >= MAX_POPS {
                self.visiting.push(visiting);
                continue;
            }
            let key = visiting.key.clone();
            let Popper::Visiting(visit) = &mut visiting.pop else { continue };
            let taken = match group_mut(&mut self.groups, &key) {
                Some(group) if group.phase == Phase::Open => {
                    group.used_at = self.now;
                    visiting.filter = group.filter(&key.1);
                    let (messages, partitions) =
                        group.reach(visiting.filter.as_ref(), visit.left, visit.partitions_left);
                    let most = (partitions as usize).min(MAX_CANDIDATES);
                    let taken =
                        match select(&mut self.pool, &mut self.link, group, &key, &mut visit.job, self.now) {
                            Ok(None) => group.ring.take(most, messages),
                            Ok(Some(order)) => group.ring.take_in_order(order, most, messages),
                            Err(reply) => {
                                visit.route.clear();
                                visit.failed = visit.deliveries.is_empty().then_some(reply);
                                Vec::new()
                            }
                        };
                    if taken.is_empty() && visit.job.request.wait.is_some() {
                        group.watch(visit.home, &visit.key);
                    }
                    taken
                }
                _ => {
                    visit.stale = true;
                    Vec::new()
                }
            };
            if taken.is_empty() {
                let Popper::Visiting(visit) = visiting.pop else { continue };
                self.forward(visit, self.peers.len());
                self.schedule(&key);
                continue;
            }
            candidates += taken.len();
            visiting.candidates = taken;
            attempts.push(visiting);
        }
        let mut unknown = Vec::new();
        let mut keys: Vec<GroupKey> = self.dirty.iter().cloned().collect();
        if far && keys.len() > 1 {
            // Each in its turn, whatever the order of the set.
            self.turns = self.turns.wrapping_add(1);
            keys.sort_unstable();
            let by = self.turns % keys.len();
            keys.rotate_left(by);
        }
        for key in keys {
            if attempts.len() >= MAX_POPS
                || candidates >= MAX_CALL_CANDIDATES
                || (far && !attempts.is_empty())
            {
                break;
            }
            let (now, core) = (self.now, self.index);
            let Some(group) = group_mut(&mut self.groups, &key) else { continue };
            if group.scan.is_far() != far {
                continue;
            }
            let mut names = std::mem::take(&mut group.targeted_ready);
            names.sort_unstable();
            names.dedup();
            for name in names {
                let Some(targeted) = group.targeted.get_mut(&name) else { continue };
                let Some(seq) = targeted.waiting.first().copied() else { continue };
                let Some(id) = targeted.partition.or_else(|| group.known.get(&name).copied()) else {
                    unknown.push((key.clone(), name));
                    continue;
                };
                targeted.partition = Some(id);
                if attempts.len() >= MAX_POPS {
                    group.targeted_ready.push(name);
                    continue;
                }
                if !group.ring.take_one(id) {
                    // Another pop of this claim has it; its verdict will tell.
                    continue;
                }
                let Some(job) = group.unpark(seq) else { continue };
                if job.reply.is_gone() {
                    job.reply.send(Reply::no_content());
                    group.ring.verdict(id, Verdict::NotReached, 0);
                    group.targeted_ready.push(name);
                    continue;
                }
                candidates += 1;
                let filter = group.filter(&key.1);
                attempts.push(Attempt {
                    key: key.clone(),
                    pop: Popper::Waiting(seq, job),
                    lease: new_lease_id(core),
                    candidates: vec![id],
                    filter,
                });
            }
            if group.phase != Phase::Open {
                continue;
            }
            let waiting: Vec<u64> = group.wildcard.iter().copied().collect();
            for seq in waiting {
                if attempts.len() >= MAX_POPS || candidates >= MAX_CALL_CANDIDATES || !group.ring.has_ready()
                {
                    break;
                }
                if group.should_fill(seq, now) || group.withheld.contains(&seq) {
                    continue;
                }
                let Some(mut job) = group.unpark(seq) else { continue };
                if job.reply.is_gone() {
                    job.reply.send(Reply::no_content());
                    continue;
                }
                let filter = group.filter(&key.1);
                let (messages, partitions) =
                    group.reach(filter.as_ref(), job.request.batch, job.request.partitions);
                let most = (partitions as usize).min(MAX_CANDIDATES);
                let taken = match select(&mut self.pool, &mut self.link, group, &key, &mut job, now) {
                    Ok(None) => group.ring.take(most, messages),
                    Ok(Some(order)) => group.ring.take_in_order(order, most, messages),
                    Err(reply) => {
                        job.reply.send(reply);
                        continue;
                    }
                };
                if taken.is_empty() {
                    // Its selector withholds all there is: it waits for news, as if there were nothing.
                    group.withheld.insert(seq);
                    group.park(seq, job);
                    continue;
                }
                candidates += taken.len();
                attempts.push(Attempt {
                    key: key.clone(),
                    pop: Popper::Waiting(seq, job),
                    lease: new_lease_id(core),
                    candidates: taken,
                    filter,
                });
            }
        }
        if !unknown.is_empty() {
            self.find_partitions(unknown);
        }
        attempts
    }

    /// Looks up partitions that targeted pops name.
    fn find_partitions(&mut self, names: Vec<(GroupKey, Arc<str>)>) {
        for (key, name) in names {
            let Some(group) = group_mut(&mut self.groups, &key) else { continue };
            let info = group.info.clone();
            let queue = key.0.clone();
            let wanted = name.clone();
            let found = self.call(move |conn| {
                let info = match info {
                    Some(info) => Some(info),
                    None => crate::store::group::find_queue(conn, &queue)?,
                };
                let Some(info) = info else { return Ok((None, None)) };
                let id = crate::store::group::find_partition(conn, info.id, &wanted)?;
                Ok((Some(info), id))
            });
            let Some(group) = group_mut(&mut self.groups, &key) else { continue };
            match found {
                Ok((info, id)) => {
                    if group.info.is_none() {
                        group.info = info;
                    }
                    let Some(targeted) = group.targeted.get_mut(&name) else { continue };
                    match id {
                        Some(id) => {
                            targeted.partition = Some(id);
                            if group.known.len() >= MAX_KNOWN {
                                group.known.clear();
                            }
                            group.known.insert(name.clone(), id);
                            group.targeted_ready.push(name);
                        }
                        None => {
                            for seq in &targeted.waiting {
                                if let Some(job) = group.jobs.get_mut(seq) {
                                    job.partition_was_missing = true;
                                }
                            }
                        }
                    }
                }
                // Tried again when the database is back.
                Err(error) if error.is_connection() => group.targeted_ready.push(name),
                Err(error) => {
                    let reply = Reply::from(&store_error(&error));
                    let waiting: Vec<u64> = group
                        .targeted
                        .get(&name)
                        .map(|t| t.waiting.iter().copied().collect())
                        .unwrap_or_default();
                    for job in waiting.into_iter().filter_map(|seq| group.unpark(seq)) {
                        job.reply.send(reply.clone());
                    }
                }
            }
        }
    }

    /// One claim for all attempts.
    fn claim(&mut self, attempts: Vec<Attempt>) {
        let mut arguments = Claim::default();
        for (n, attempt) in attempts.iter().enumerate() {
            let request = &attempt.pop.job().request;
            let (mut batch, mut partitions) = attempt.pop.room();
            if attempt.filter.is_some()
                && let Some(group) = group_mut(&mut self.groups, &attempt.key)
            {
                (batch, partitions) = group.scan.claim(batch, partitions);
            }
            arguments.group.push(&attempt.key.1);
            arguments.lease.push(attempt.lease);
            arguments.batch.push(batch as i32);
            arguments.partitions.push(partitions.min(i32::MAX as u32) as i32);
            arguments.lease_seconds.push(request.lease_seconds.map(|s| s as i32));
            // What a filter judges is committed by the trim.
            arguments.auto.push(request.auto_ack && attempt.filter.is_none());
            for candidate in &attempt.candidates {
                arguments.pop.push(n as i32 + 1);
                arguments.partition.push(*candidate);
            }
        }
        let result = self.call(|conn| claim::claim(conn, &arguments));
        drop(arguments);
        self.metrics.claims.inc();
        self.now = Instant::now();
        match result {
            Ok(verdicts) => self.claimed(attempts, verdicts),
            Err(error) => self.claim_failed(attempts, &error),
        }
    }

    fn claimed(&mut self, attempts: Vec<Attempt>, verdicts: Vec<ClaimVerdict>) {
        let mut verdicts = verdicts.into_iter();
        let mut unseeded: Vec<(Uuid, Arc<str>, StartAt)> = Vec::new();
        let now_ms = self.now_ms();
        let mut done = Vec::with_capacity(attempts.len());
        let mut to_judge = Vec::new();
        for attempt in attempts {
            let (mut deliveries, mut spans, mut claimed) = (Vec::new(), Vec::new(), Vec::new());
            let asked = self.asked(&attempt);
            let auto = attempt.pop.job().request.auto_ack;
            let mut gone = Vec::new();
            for candidate in &attempt.candidates {
                let Some(verdict) = verdicts.next() else { break };
                let mut windowed = false;
                if let Some(group) = group_mut(&mut self.groups, &attempt.key) {
                    windowed = group.info.as_ref().is_some_and(|info| info.window_buffer_seconds > 0);
                }
                let until = |ms: i64| now_ms + ms.max(0) as u64 + 1;
                let verdict = match verdict {
                    ClaimVerdict::Took {
                        partition,
                        first,
                        end,
                        attempt: nth,
                        lease_ms,
                        remaining,
                        segments,
                    } => {
                        let delivery = Delivery {
                            queue: attempt.key.0.to_string(),
                            partition,
                            partition_id: *candidate,
                            attempt: nth,
                            segments: slices(segments, first, end),
                        };
                        let lasts = lease_ms.unwrap_or(0).max(0);
                        self.served(&attempt.key, &delivery, remaining);
                        if attempt.filter.is_some() {
                            // Less than was asked for: what is behind it is not visible yet.
                            let more = remaining > 0 && asked.is_none_or(|batch| end - first + 1 >= batch);
                            claimed.push(ClaimedSpan {
                                delivery,
                                first,
                                end,
                                lasts_ms: lasts as u64,
                                remaining: remaining.max(0) as u64,
                                more,
                            });
                            continue;
                        }
                        deliveries.push(delivery);
                        spans.push((first, lasts as u64));
                        let until = (!auto).then(|| until(lasts));
                        Verdict::Took { until, end, remaining: remaining.max(0) as u64 }
                    }
                    ClaimVerdict::Empty => Verdict::Empty,
                    ClaimVerdict::Leased(ms) => Verdict::Leased { until: until(ms) },
                    ClaimVerdict::Later(ms) => {
                        Verdict::Later { until: until(ms), early_at: windowed.then_some(WINDOW_MESSAGES) }
                    }
                    ClaimVerdict::Unreached => Verdict::NotReached,
                    ClaimVerdict::Gone => {
                        gone.push(*candidate);
                        Verdict::Gone
                    }
                    ClaimVerdict::Busy => Verdict::Leased { until: now_ms + BUSY_MS },
                    ClaimVerdict::New => {
                        let job = attempt.pop.job();
                        let start =
                            if job.partition_was_missing { StartAt::Oldest } else { job.request.start };
                        unseeded.push((*candidate, attempt.key.1.clone(), start));
                        Verdict::NotReached
                    }
                };
                if let Some(group) = group_mut(&mut self.groups, &attempt.key) {
                    group.ring.verdict(*candidate, verdict, now_ms);
                }
            }
            if !gone.is_empty()
                && let Some(group) = group_mut(&mut self.groups, &attempt.key)
            {
                group.forget_partitions(&gone);
            }
            match attempt.filter.clone() {
                Some(filter) if !claimed.is_empty() => {
                    to_judge.push(ToJudge { attempt, filter, spans: claimed });
                }
                _ => done.push((attempt, deliveries, spans)),
            }
        }
        if !unseeded.is_empty() {
            self.seed_cursors(&unseeded);
        }
        for (attempt, deliveries, spans) in done {
            self.settle_attempt(attempt, deliveries, spans);
        }
        if !to_judge.is_empty() {
            self.run_filters(to_judge);
        }
    }

    /// Messages that a filtered attempt asked for, where what is stored may not be visible yet.
    fn asked(&mut self, attempt: &Attempt) -> Option<i64> {
        let group = group_mut(&mut self.groups, &attempt.key)?;
        let delayed = group.info.as_ref().is_some_and(|info| info.delayed_seconds > 0);
        let (batch, _) = group.scan.claim(attempt.room().0, 1);
        delayed.then_some(i64::from(batch))
    }

    /// Ends an attempt whose claims led to nothing but an error.
    pub(super) fn refuse_attempt(&mut self, attempt: Attempt, reply: &Reply) {
        match attempt.pop {
            Popper::Waiting(_, job) => {
                job.reply.send(reply.clone());
            }
            Popper::Visiting(mut visit) => {
                if visit.deliveries.is_empty() {
                    visit.failed = Some(reply.clone());
                }
                visit.route.clear();
                self.forward(visit, self.peers.len());
            }
        }
    }

    /// Makes missing cursors; their partitions are tried again in the next round.
    fn seed_cursors(&mut self, unseeded: &[(Uuid, Arc<str>, StartAt)]) {
        let partitions: Vec<Uuid> = unseeded.iter().map(|u| u.0).collect();
        let groups: Vec<&str> = unseeded.iter().map(|u| &*u.1).collect();
        let (modes, times): (Vec<_>, Vec<_>) = unseeded.iter().map(|u| start_mode(u.2)).unzip();
        if let Err(error) = self.call(|conn| claim::seed_cursors(conn, &partitions, &groups, &modes, &times))
        {
            tracing::warn!(%error, "cannot make cursors");
        }
    }

    pub(super) fn settle_attempt(
        &mut self,
        attempt: Attempt,
        deliveries: Vec<Delivery>,
        spans: Vec<(i64, u64)>,
    ) {
        let Attempt { key, pop, lease, candidates, .. } = attempt;
        match pop {
            Popper::Waiting(seq, job) if deliveries.is_empty() => {
                let targeted = job.partition().map(Arc::<str>::from);
                let Some(group) = group_mut(&mut self.groups, &key) else {
                    job.reply.send(Reply::no_content());
                    return;
                };
                group.park(seq, job);
                // A cursor was made, or the partition is another one now.
                if let Some(name) = targeted
                    && let Some(id) = candidates.first()
                    && let Some(targeted) = group.targeted.get_mut(&name)
                {
                    if group.known.get(&name).is_some_and(|known| known == id) {
                        targeted.partition = Some(*id);
                    }
                    if group.ring.is_ready(*id) || targeted.partition.is_none() {
                        group.targeted_ready.push(name);
                    }
                }
                self.schedule(&key);
            }
            Popper::Waiting(_, job) => {
                let targeted = job.partition().map(Arc::<str>::from);
                self.deliver(job, lease, &deliveries, &spans);
                if let Some(name) = targeted
                    && let Some(group) = group_mut(&mut self.groups, &key)
                    && candidates.first().is_some_and(|id| group.ring.is_ready(*id))
                {
                    group.targeted_ready.push(name);
                }
            }
            Popper::Visiting(mut visit) => {
                let messages: usize = deliveries.iter().flat_map(|d| &d.segments).map(|s| s.take).sum();
                visit.left = visit.left.saturating_sub(messages as u32);
                visit.partitions_left = match visit.partitions_left {
                    u32::MAX => u32::MAX,
                    left => left.saturating_sub(deliveries.len() as u32),
                };
                visit.deliveries.extend(deliveries);
                visit.spans.extend(spans);
                if let Some(group) = group_mut(&mut self.groups, &key) {
                    // Somebody else's wake will be for what it did not take, or could not yet.
                    if visit.job.request.wait.is_some() || group.ring.has_ready() {
                        group.watch(visit.home, &visit.key);
                    }
                    if visit.deliveries.is_empty() && group.ring.has_ready() {
                        visit.route.push(key.0.clone());
                    }
                }
                self.schedule(&key);
                self.forward(visit, self.peers.len());
            }
        }
    }

    /// Answers a pop with what was claimed for it; gives it back if nobody is there to take it.
    /// `spans`: per delivery, its first offset and how long its lease lasts in milliseconds.
    pub(super) fn deliver(
        &mut self,
        job: Box<PopJob>,
        lease: Uuid,
        deliveries: &[Delivery],
        spans: &[(i64, u64)],
    ) {
        let lease = (!job.request.auto_ack).then_some(lease);
        let answer = match pop::answer(&job.request, lease, deliveries, &job.explanation) {
            Ok(answer) => answer,
            Err(error) => {
                tracing::error!(partition = %deliveries[0].partition_id, %error, "cannot deliver");
                let error = ApiError {
                    status: 500,
                    code: "corrupt",
                    message: format!("{error}; the claim stays leased until it expires"),
                };
                job.reply.send(Reply::from(&error));
                return;
            }
        };
        let group = job.group.clone();
        if let Some(lease) = lease {
            let lasts = spans.iter().map(|(_, lasts)| *lasts).max().unwrap_or(0);
            let remembered = deliveries
                .iter()
                .zip(spans)
                .zip(answer.hashes)
                .map(|((d, (first, _)), hashes)| {
                    Span::new(d.partition_id, d.queue.as_str().into(), *first, hashes)
                })
                .collect();
            self.leases.insert(lease, group.clone(), Duration::from_millis(lasts), remembered);
        }
        self.metrics.pops.inc();
        self.metrics.popped_messages.inc_by(answer.messages as u64);
        if job.reply.send(Reply::json(200, answer.body)) == Written::Gone
            && let Some(lease) = lease
        {
            self.give_back(lease, &group, deliveries);
        }
    }

    /// Ends a lease that nobody received.
    fn give_back(&mut self, lease: Uuid, group: &Arc<str>, deliveries: &[Delivery]) {
        let partitions: Vec<Uuid> = deliveries.iter().map(|delivery| delivery.partition_id).collect();
        let groups: Vec<&str> = vec![group; partitions.len()];
        let leases = vec![lease; partitions.len()];
        match self.call(|conn| claim::unclaim(conn, &partitions, &groups, &leases)) {
            Ok(_) => {
                for delivery in deliveries {
                    let (queue, partition) = (delivery.queue.as_str().into(), delivery.partition_id);
                    self.leases.release(lease, partition);
                    self.settle(Settled {
                        queue,
                        group: group.clone(),
                        partition,
                        pending: true,
                        committed: i64::MIN,
                    });
                }
            }
            Err(error) => tracing::warn!(%error, "cannot give back a claim; it expires"),
        }
    }

    fn claim_failed(&mut self, attempts: Vec<Attempt>, error: &StoreError) {
        let now_ms = self.now_ms();
        // Refused before anything happened: everything waits for the database to come back.
        let hold = matches!(error, StoreError::Unavailable(_)) || error.is_read_only();
        let reply = Reply::from(&store_error(error));
        for Attempt { key, pop, candidates, .. } in attempts {
            if let Some(group) = group_mut(&mut self.groups, &key) {
                for candidate in &candidates {
                    group.ring.verdict(*candidate, Verdict::NotReached, now_ms);
                }
            }
            match pop {
                Popper::Waiting(seq, job) if hold => {
                    let targeted = job.partition().map(Arc::<str>::from);
                    let Some(group) = group_mut(&mut self.groups, &key) else { continue };
                    group.park(seq, job);
                    group.targeted_ready.extend(targeted);
                    self.dirty.insert(key.clone());
                    self.schedule(&key);
                }
                Popper::Waiting(_, job) => {
                    job.reply.send(reply.clone());
                }
                Popper::Visiting(mut visit) => {
                    // What it has already claimed elsewhere is delivered.
                    if visit.deliveries.is_empty() {
                        visit.failed = Some(reply.clone());
                    }
                    visit.route.clear();
                    self.forward(visit, self.peers.len());
                }
            }
        }
    }

    /// Refuses the pops that arrived after the database was lost. Those that waited before keep waiting.
    pub(super) fn refuse_fresh_pops(&mut self, reply: &Reply) {
        let since = self.now.checked_sub(self.link.down_for(self.now)).unwrap_or(self.now);
        for key in self.keys() {
            let Some(group) = group_mut(&mut self.groups, &key) else { continue };
            let fresh: Vec<u64> = group
                .jobs
                .iter()
                .filter(|(_, job)| job.arrived >= since || job.request.wait.is_none())
                .map(|(seq, _)| *seq)
                .collect();
            for job in fresh.into_iter().filter_map(|seq| group.unpark(seq)) {
                job.reply.send(reply.clone());
            }
        }
        for visiting in std::mem::take(&mut self.visiting) {
            let Popper::Visiting(mut visit) = visiting.pop else { continue };
            if visit.deliveries.is_empty() {
                visit.failed = Some(reply.clone());
            }
            visit.route.clear();
            self.forward(visit, self.peers.len());
        }
    }
}

/// The parts of segments that a span covers.
fn slices(segments: Vec<ClaimedSegment>, first: i64, end: i64) -> Vec<SegmentSlice> {
    segments
        .into_iter()
        .filter_map(|segment| {
            let from = first.max(segment.base_offset);
            let to = end.min(segment.base_offset + i64::from(segment.count) - 1);
            (from <= to).then(|| SegmentSlice {
                created_us: segment.created.0,
                codec: segment.codec,
                data: segment.data,
                skip: (from - segment.base_offset) as usize,
                take: (to - from + 1) as usize,
                only: None,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Micros;

    #[test]
    fn a_span_is_cut_out_of_its_segments() {
        let segment = |base_offset, count| ClaimedSegment {
            base_offset,
            count,
            created: Micros(0),
            codec: 0,
            hashes: Vec::new(),
            data: Vec::new(),
        };
        let cut = slices(vec![segment(0, 10), segment(10, 5), segment(20, 5)], 7, 21);
        assert_eq!(cut.iter().map(|s| (s.skip, s.take)).collect::<Vec<_>>(), [(7, 3), (0, 5), (0, 2)]);
        assert!(slices(vec![segment(0, 3)], 5, 9).is_empty());
    }
}
