//! Pushes: everything that waits becomes one append, one commit.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::dedup::Dedup;
use super::engine::{BUSY_LIMIT, Engine, store_error};
use super::inbox::{LaneHashes, Mark, Message, PushJob};
use super::lanes::Lane;
use crate::broker::answer::Reply;
use crate::broker::error::ApiError;
use crate::broker::push::{self, PushStatus};
use crate::broker::queue_options::namespace_and_task_of;
use crate::broker::segment;
use crate::store::StoreError;
use crate::store::push::{Append, AppendVerdict, GAP_MESSAGES, HashRun};

/// Most bytes of frames of one append; a single larger push goes alone.
const MAX_CALL_BYTES: usize = 16 * 1024 * 1024;
/// Attempts at one append: each but the last learns something (a duplicate, a deleted queue).
const MAX_ATTEMPTS: usize = 12;
/// When a push whose partition's row was locked elsewhere is tried again.
const BUSY_RETRY: Duration = Duration::from_millis(2);
/// Segments of hashes that a core reads itself; more are read on the admin side.
const INLINE_SEGMENTS: i64 = 256;
/// Most pushes that wait for one lane's hashes.
const MAX_WAITING: usize = 10_000;

/// Where a message of a call is: job, lane, entry.
type Place = (usize, usize, usize);

/// What is to become of a message.
#[derive(Clone, Copy)]
enum Fate {
    /// Written.
    New,
    /// The same as an earlier message of this call.
    Repeat(Place),
    /// The same as a stored message with this id.
    Stored(Uuid),
}

/// The new messages of one partition.
struct Part {
    queue: Arc<str>,
    name: Arc<str>,
    known: Option<i64>,
    items: Vec<Place>,
}

/// Duplicates that were looked up: the original's id, or `None` if it was none.
type Judged = HashMap<(Uuid, u128), Option<Uuid>>;

/// One attempt at an append.
struct Plan {
    parts: BTreeMap<Uuid, Part>,
    fates: Vec<Vec<Vec<Fate>>>,
    suspects: Vec<(Uuid, i64, u128)>,
}

impl Engine {
    /// Stores everything that waits.
    pub(super) fn run_pushes(&mut self) {
        let mut jobs = std::mem::take(&mut self.pushes);
        while !jobs.is_empty() && self.link.is_up() {
            let (mut taken, mut bytes) = (0, 0);
            for job in &jobs {
                bytes += job.request.lanes.iter().map(|lane| lane.frames.len()).sum::<usize>();
                if taken > 0 && bytes > MAX_CALL_BYTES {
                    break;
                }
                taken += 1;
            }
            let rest = jobs.split_off(taken);
            self.store_pushes(jobs);
            jobs = rest;
        }
        // Held until the connection is back.
        self.pushes.append(&mut jobs);
    }

    fn store_pushes(&mut self, mut jobs: Vec<Box<PushJob>>) {
        let mut judged = Judged::new();
        for _ in 0..MAX_ATTEMPTS {
            jobs = self.resolve_lanes(jobs);
            if jobs.is_empty() {
                return;
            }
            let mut plan = self.plan(&jobs, &judged);
            if !plan.suspects.is_empty() {
                if let Err(error) = self.judge(&plan.suspects, false, &mut judged) {
                    return self.push_failed(jobs, &error);
                }
                plan = self.plan(&jobs, &judged);
            }
            let verdicts = match self.append(&jobs, &plan) {
                Ok(verdicts) => verdicts,
                Err(error) => return self.push_failed(jobs, &error),
            };
            if verdicts.iter().all(|(_, verdict)| matches!(verdict, AppendVerdict::Stored { .. })) {
                return self.pushed(jobs, plan, verdicts);
            }
            match self.learn(jobs, &plan, verdicts, &mut judged) {
                Ok(again) => jobs = again,
                Err((jobs, error)) => return self.push_failed(jobs, &error),
            }
        }
        let error = ApiError::unavailable(
            "too much is changing in these queues, nothing was stored; repeat the call",
        );
        for job in jobs {
            job.reply.send(Reply::from(&error));
        }
    }

    /// A call that failed changed nothing, or says that it is not known.
    fn push_failed(&mut self, jobs: Vec<Box<PushJob>>, error: &StoreError) {
        match error {
            StoreError::Unavailable(_) => self.pushes.extend(jobs),
            error if error.is_read_only() => self.pushes.extend(jobs),
            // One of them may be to blame; a timeout is everybody's.
            StoreError::Statement { code, .. } if jobs.len() > 1 && code != "57014" => {
                for job in jobs {
                    if self.link.is_up() { self.store_pushes(vec![job]) } else { self.pushes.push(job) }
                }
            }
            _ => {
                let reply = Reply::from(&store_error(error));
                for job in jobs {
                    job.reply.send(reply.clone());
                }
            }
        }
    }

    // ---- lanes --------------------------------------------------------------

    /// Looks up (or makes) the lanes that are not known; returns the pushes that
    /// can go on. The others wait for hashes, or are answered.
    fn resolve_lanes(&mut self, jobs: Vec<Box<PushJob>>) -> Vec<Box<PushJob>> {
        let mut missing: Vec<(&str, &str)> = Vec::new();
        let mut seen = HashSet::new();
        for lane in jobs.iter().flat_map(|job| &job.request.lanes) {
            if self.lanes.get(&lane.queue, &lane.partition).is_none()
                && seen.insert((&*lane.queue, &*lane.partition))
            {
                missing.push((&lane.queue, &lane.partition));
            }
        }
        if !missing.is_empty() {
            let wanted: Vec<crate::store::push::Lane<'_>> = missing
                .iter()
                .map(|(queue, partition)| {
                    let (namespace, task) = namespace_and_task_of(queue);
                    crate::store::push::Lane { queue, namespace, task, partition }
                })
                .collect();
            let result = self.call(|conn| crate::store::push::resolve_partitions(conn, &wanted));
            match result {
                Ok(found) => {
                    for (lane, found) in wanted.iter().zip(found) {
                        self.add_lane(lane.queue, lane.partition, found);
                    }
                }
                Err(error) => {
                    self.push_failed(jobs, &error);
                    return Vec::new();
                }
            }
        }
        self.hold_for_hashes(jobs)
    }

    fn add_lane(&mut self, queue: &str, partition: &str, found: crate::store::push::ResolvedLane) {
        let window_seconds = found.dedup_window_seconds;
        let mut lane = Lane {
            queue: queue.into(),
            name: partition.into(),
            partition: found.partition_id,
            window_seconds,
            dedup: (window_seconds > 0).then(|| Dedup::new(window_seconds, 0)),
            loading: false,
            waiting: Vec::new(),
        };
        // Few messages are compared by SQL, which then hands over their hashes.
        if window_seconds > 0 && found.next_offset > GAP_MESSAGES {
            let id = found.partition_id;
            let loaded = self
                .call(|conn| crate::store::push::load_hashes(conn, id, 0, window_seconds, INLINE_SEGMENTS));
            match loaded {
                Ok(Some((next, runs))) if (runs.len() as i64) < INLINE_SEGMENTS => {
                    lane.dedup = Some(remember(window_seconds, next, &runs));
                }
                _ => {
                    lane.loading = true;
                    self.admin.load_hashes(
                        self.index,
                        queue.to_owned(),
                        partition.to_owned(),
                        id,
                        window_seconds,
                    );
                }
            }
        }
        self.lanes.insert(lane);
    }

    fn hold_for_hashes(&mut self, jobs: Vec<Box<PushJob>>) -> Vec<Box<PushJob>> {
        let mut ready = Vec::with_capacity(jobs.len());
        for job in jobs {
            let loading = job.request.lanes.iter().position(|lane| {
                self.lanes.get(&lane.queue, &lane.partition).is_some_and(|known| known.loading)
            });
            let Some(at) = loading else {
                ready.push(job);
                continue;
            };
            let (queue, partition) = (&job.request.lanes[at].queue, &job.request.lanes[at].partition);
            match self.lanes.get_mut(queue, partition) {
                Some(lane) if lane.waiting.len() < MAX_WAITING => lane.waiting.push(job),
                _ => {
                    let error = ApiError::unavailable(format!(
                        "more than {MAX_WAITING} pushes wait for partition \"{partition}\" of \"{queue}\", nothing was stored; repeat the call"
                    ));
                    job.reply.send(Reply::from(&error));
                }
            }
        }
        ready
    }

    /// The tail of a lane's hashes has been read.
    pub(super) fn apply_hashes(&mut self, hashes: LaneHashes) {
        let (queue, partition) = (&hashes.lane.0, &hashes.lane.1);
        let Some(lane) = self.lanes.get_mut(queue, partition) else { return };
        if lane.partition != hashes.partition {
            return;
        }
        match hashes.result {
            Ok(Some((next, runs))) => {
                lane.dedup = Some(remember(lane.window_seconds, next, &runs));
                lane.loading = false;
                self.pushes.append(&mut lane.waiting);
            }
            Ok(None) => {
                let waiting = self.lanes.remove(queue, partition);
                self.pushes.extend(waiting);
            }
            Err(error) => {
                let reply = Reply::from(&store_error(&error));
                for job in self.lanes.remove(queue, partition) {
                    job.reply.send(reply.clone());
                }
            }
        }
    }

    // ---- one attempt ----------------------------------------------------------

    /// Says for every message whether it is new, and sorts the new ones by partition.
    fn plan(&self, jobs: &[Box<PushJob>], judged: &Judged) -> Plan {
        let mut plan =
            Plan { parts: BTreeMap::new(), fates: Vec::with_capacity(jobs.len()), suspects: Vec::new() };
        let mut seen: HashMap<(Uuid, usize, u128), Place> = HashMap::new();
        let single = jobs.len() == 1 && jobs[0].request.items == 1;
        for (j, job) in jobs.iter().enumerate() {
            let mut fates = Vec::with_capacity(job.request.lanes.len());
            for (l, named) in job.request.lanes.iter().enumerate() {
                let mut lane_fates = Vec::with_capacity(named.entries.len());
                let Some(lane) = self.lanes.get(&named.queue, &named.partition) else {
                    unreachable!("resolve_lanes returns only pushes whose lanes are known")
                };
                // Without a window only repeats inside one request are repeats.
                let scope = if lane.dedup.is_some() { usize::MAX } else { j };
                for (e, entry) in named.entries.iter().enumerate() {
                    let place = (j, l, e);
                    let mut fate = Fate::New;
                    if !single {
                        match seen.entry((lane.partition, scope, entry.hash)) {
                            std::collections::hash_map::Entry::Occupied(first) => {
                                fate = Fate::Repeat(*first.get())
                            }
                            std::collections::hash_map::Entry::Vacant(slot) => {
                                slot.insert(place);
                            }
                        }
                    }
                    if matches!(fate, Fate::New)
                        && let Some(dedup) = &lane.dedup
                    {
                        match judged.get(&(lane.partition, entry.hash)) {
                            Some(Some(original)) => fate = Fate::Stored(*original),
                            Some(None) => {}
                            None => {
                                if let Some(offset) = dedup.find(entry.hash) {
                                    plan.suspects.push((lane.partition, offset, entry.hash));
                                }
                            }
                        }
                    }
                    if matches!(fate, Fate::New) {
                        plan.parts
                            .entry(lane.partition)
                            .or_insert_with(|| Part {
                                queue: lane.queue.clone(),
                                name: lane.name.clone(),
                                known: lane.dedup.as_ref().map(Dedup::known),
                                items: Vec::new(),
                            })
                            .items
                            .push(place);
                    }
                    lane_fates.push(fate);
                }
                fates.push(lane_fates);
            }
            plan.fates.push(fates);
        }
        plan
    }

    /// Looks at the stored messages that new ones seem to repeat. `certain`: SQL
    /// has found them equal and inside the window.
    fn judge(
        &mut self,
        suspects: &[(Uuid, i64, u128)],
        certain: bool,
        judged: &mut Judged,
    ) -> Result<(), StoreError> {
        let partitions: Vec<Uuid> = suspects.iter().map(|s| s.0).collect();
        let offsets: Vec<i64> = suspects.iter().map(|s| s.1).collect();
        let found = self.call(|conn| crate::store::push::segments_at(conn, &partitions, &offsets))?;
        for ((partition, offset, hash), stored) in suspects.iter().zip(found) {
            let original = stored.filter(|stored| certain || stored.in_window).and_then(|stored| {
                let skip = (offset - stored.base_offset) as usize;
                message_at(stored.codec, &stored.data, skip, *hash)
            });
            judged.insert((*partition, *hash), original);
        }
        Ok(())
    }

    fn append(
        &mut self,
        jobs: &[Box<PushJob>],
        plan: &Plan,
    ) -> Result<Vec<(usize, AppendVerdict)>, StoreError> {
        if plan.parts.is_empty() {
            return Ok(Vec::new());
        }
        let messages = |part: &Part| {
            segment::cut(part.items.iter().map(|(j, l, e)| {
                let lane = &jobs[*j].request.lanes[*l];
                let entry = &lane.entries[*e];
                (&lane.frames[entry.frame.clone()], entry.hash)
            }))
        };
        let runs: Vec<_> = plan.parts.values().map(messages).collect();
        let mut append = Append {
            ids: plan.parts.keys().copied().collect(),
            known: plan.parts.values().map(|part| part.known).collect(),
            counts: plan.parts.values().map(|part| part.items.len() as i32).collect(),
            ..Append::default()
        };
        for (partition, runs) in runs.iter().enumerate() {
            runs.iter().for_each(|run| append.add(partition, run, &mut self.packer));
        }
        self.metrics.push_commits.inc();
        self.call(|conn| crate::store::push::append(conn, &append))
    }

    /// Takes to heart why nothing was written. Returns the pushes to try again now.
    #[allow(clippy::type_complexity)] // the pushes go back to the caller with the error
    fn learn(
        &mut self,
        jobs: Vec<Box<PushJob>>,
        plan: &Plan,
        verdicts: Vec<(usize, AppendVerdict)>,
        judged: &mut Judged,
    ) -> Result<Vec<Box<PushJob>>, (Vec<Box<PushJob>>, StoreError)> {
        let parts: Vec<(&Uuid, &Part)> = plan.parts.iter().collect();
        let mut busy = HashSet::new();
        let mut certain = Vec::new();
        for (index, verdict) in verdicts {
            let (id, part) = parts[index];
            match verdict {
                AppendVerdict::Busy => {
                    busy.insert(*id);
                }
                AppendVerdict::Gone => {
                    let waiting = self.lanes.remove(&part.queue, &part.name);
                    self.pushes.extend(waiting);
                }
                AppendVerdict::Stale => {
                    if let Some(lane) = self.lanes.get_mut(&part.queue, &part.name) {
                        lane.loading = true;
                        let window = lane.window_seconds;
                        let (queue, name) = (part.queue.to_string(), part.name.to_string());
                        self.admin.load_hashes(self.index, queue, name, *id, window);
                    }
                }
                AppendVerdict::Duplicate { message, original } => {
                    let (j, l, e) = part.items[message];
                    certain.push((*id, original, jobs[j].request.lanes[l].entries[e].hash));
                }
                AppendVerdict::Stored { .. } | AppendVerdict::Held => {}
            }
        }
        if !certain.is_empty() {
            if let Err(error) = self.judge(&certain, true, judged) {
                return Err((jobs, error));
            }
            // Retention took it at this very moment: it is still a repeat.
            for (id, _, hash) in certain {
                judged.entry((id, hash)).or_insert(Some(Uuid::nil())).get_or_insert(Uuid::nil());
            }
        }
        Ok(if busy.is_empty() { jobs } else { self.defer_busy(jobs, &busy) })
    }

    /// Puts off the pushes to partitions whose rows are locked elsewhere.
    fn defer_busy(&mut self, jobs: Vec<Box<PushJob>>, busy: &HashSet<Uuid>) -> Vec<Box<PushJob>> {
        let now = Instant::now();
        let mut again = Vec::new();
        for job in jobs {
            let blocked = job.request.lanes.iter().find(|l| {
                self.lanes.get(&l.queue, &l.partition).is_some_and(|lane| busy.contains(&lane.partition))
            });
            match blocked {
                None => again.push(job),
                Some(_) if now - job.arrived < BUSY_LIMIT => self.busy_pushes.push((now + BUSY_RETRY, job)),
                Some(lane) => {
                    let error = ApiError::unavailable(format!(
                        "partition \"{}\" of \"{}\" has been locked by another session for {} s, nothing was stored; repeat the call",
                        lane.partition,
                        lane.queue,
                        BUSY_LIMIT.as_secs()
                    ));
                    job.reply.send(Reply::from(&error));
                }
            }
        }
        again
    }

    /// Committed: remembered, announced, answered; in this order.
    fn pushed(&mut self, jobs: Vec<Box<PushJob>>, plan: Plan, verdicts: Vec<(usize, AppendVerdict)>) {
        let parts: Vec<(&Uuid, &Part)> = plan.parts.iter().collect();
        let mut marks: HashMap<Arc<str>, Vec<(Uuid, Arc<str>, u64)>> = HashMap::new();
        for (index, verdict) in verdicts {
            let AppendVerdict::Stored { base_offset, created, gap } = verdict else { continue };
            let (id, part) = parts[index];
            if let Some(dedup) =
                self.lanes.get_mut(&part.queue, &part.name).and_then(|lane| lane.dedup.as_mut())
            {
                if let Some(gap) = gap {
                    dedup.insert(dedup.known(), segment::hashes_of(&gap), created.0);
                }
                let hashes = part.items.iter().map(|(j, l, e)| jobs[*j].request.lanes[*l].entries[*e].hash);
                dedup.insert(base_offset, hashes, created.0);
            }
            marks.entry(part.queue.clone()).or_default().push((
                *id,
                part.name.clone(),
                part.items.len() as u64,
            ));
        }
        if !marks.is_empty() {
            self.hints.marked(&marks);
            self.announce(marks.into_iter().map(|(queue, partitions)| Mark { queue, partitions }).collect());
        }
        let id_of = |(j, l, e): Place| jobs[j].request.lanes[l].entries[e].message_id;
        let answer = |j: usize| {
            push::answer(&jobs[j].request, |lane, entry| match plan.fates[j][lane][entry] {
                Fate::New => PushStatus::Queued,
                Fate::Stored(original) => PushStatus::Duplicate(original),
                Fate::Repeat(first) => PushStatus::Duplicate(match plan.fates[first.0][first.1][first.2] {
                    Fate::Stored(original) => original,
                    _ => id_of(first),
                }),
            })
        };
        let bodies: Vec<Vec<u8>> = (0..jobs.len()).map(answer).collect();
        for (job, body) in jobs.into_iter().zip(bodies) {
            self.metrics.pushes.inc();
            job.reply.send(Reply::json(201, body));
        }
    }

    /// Tells every core that messages were committed.
    pub(super) fn announce(&mut self, marks: Vec<Mark>) {
        let messages: u64 = marks.iter().flat_map(|mark| &mark.partitions).map(|partition| partition.2).sum();
        self.metrics.pushed_messages.inc_by(messages);
        let marks: Arc<[Mark]> = marks.into();
        for (index, peer) in self.peers.iter().enumerate() {
            if index != self.index {
                // A core that has ended has no waiting pops.
                let _ = peer.send(Message::Marked(marks.clone()));
            }
        }
        self.apply_marks(&marks);
    }
}

/// A memory of everything inside the window.
fn remember(window_seconds: i32, next: i64, runs: &[HashRun]) -> Dedup {
    let mut dedup = Dedup::new(window_seconds, 0);
    for run in runs {
        dedup.insert(run.base_offset, segment::hashes_of(&run.hashes), run.created.0);
    }
    dedup.vouch(next);
    dedup
}

/// The id of the `skip`-th message of a segment, if its transaction id has this hash.
fn message_at(codec: i16, data: &[u8], skip: usize, hash: u128) -> Option<Uuid> {
    let raw = segment::unpack(codec, data).ok()?;
    let mut frames = segment::frames(&raw);
    frames.skip_frames(skip);
    let frame = frames.next()?.ok()?;
    (frame.hash() == hash).then_some(frame.message_id)
}
