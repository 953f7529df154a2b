//! Acks: what waits becomes one call per wave, one commit; and lease renewals.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::engine::{BUSY_LIMIT, Engine, store_error};
use super::inbox::{AckJob, ExtendJob, Settled};
use crate::broker::ack::{self, AckOutcome, AckStatus, INVALID_LEASE};
use crate::broker::answer::Reply;
use crate::store::StoreError;
use crate::store::ack::{Ack, AckAction, AckVerdict, Snapshot};

/// When an ack whose cursor's row was locked elsewhere is tried again.
const BUSY_RETRY: Duration = Duration::from_millis(2);
/// Most items of one call; the rest is the next one.
const MAX_CALL_ITEMS: usize = 20_000;

const NOT_FOUND: &str = "consumer not found";
const ALREADY_COMMITTED: &str = "already committed: the cursor moved past this message before this ack";
const UNRESOLVABLE: &str = "unresolvable: transaction not in the ack window (hash purged or never pushed); if leased, the message redelivers";

/// Acks of one request, some of them perhaps settled already.
pub struct DeferredAck {
    job: Box<AckJob>,
    group: Arc<str>,
    outcomes: Vec<Option<AckOutcome>>,
}

impl From<Box<AckJob>> for DeferredAck {
    fn from(job: Box<AckJob>) -> Self {
        // Refused by the parser: nothing is asked of the database.
        let outcomes =
            job.request.items.iter().map(|item| item.refused.is_some().then(AckOutcome::default)).collect();
        Self { group: job.request.group.as_str().into(), job, outcomes }
    }
}

/// The items of one call that concern one (partition, group).
struct Unit {
    partition: Uuid,
    group: Arc<str>,
    lease: Option<Uuid>,
    only_completed: bool,
    /// (index into the work, item, its offset once it is known)
    members: Vec<(usize, usize, Option<i64>)>,
    /// What may have to be dead-lettered.
    snapshot: Option<Snapshot>,
}

impl Engine {
    /// Settles everything that waits.
    pub(super) fn run_acks(&mut self) {
        if self.acks.is_empty() || !self.link.is_up() {
            return;
        }
        let mut work = std::mem::take(&mut self.acks);
        let mut busy: Vec<(usize, usize)> = Vec::new();
        loop {
            let wave = wave_of(&work, &busy);
            if wave.is_empty() {
                break;
            }
            if !self.run_wave(wave, &mut work, &mut busy) {
                break;
            }
        }
        let now = Instant::now();
        for waiting in work {
            if waiting.outcomes.iter().all(Option::is_some) {
                self.answer_ack(waiting);
            } else if !self.link.is_up() {
                // Held until the connection is back.
                self.acks.push(waiting);
            } else if now - waiting.job.arrived < BUSY_LIMIT {
                self.busy_acks.push((now + BUSY_RETRY, waiting));
            } else {
                self.refuse_ack(waiting, "its cursor has been locked by another session for too long, nothing was changed; repeat the call");
            }
        }
    }

    /// One call. False: the connection is gone.
    fn run_wave(
        &mut self,
        mut wave: Vec<Unit>,
        work: &mut [DeferredAck],
        busy: &mut Vec<(usize, usize)>,
    ) -> bool {
        if let Err(error) = self.resolve(&mut wave, work) {
            return self.wave_failed(wave, work, busy, &error);
        }
        while !wave.is_empty() {
            let verdicts = match self.call_ack(&wave, work) {
                Ok(verdicts) => verdicts,
                Err(error) => return self.wave_failed(wave, work, busy, &error),
            };
            let mut again = Vec::new();
            for (mut unit, verdict) in wave.into_iter().zip(verdicts) {
                match verdict {
                    AckVerdict::Snapshot(offset) if unit.snapshot.is_none() => {
                        match self.snapshot(&unit, offset, work) {
                            Ok(snapshot) => unit.snapshot = Some(snapshot),
                            Err(error) => {
                                if !self.wave_failed(vec![unit], work, busy, &error) {
                                    return false;
                                }
                                continue;
                            }
                        }
                        again.push(unit);
                    }
                    // The budget or the cursor changed between the two calls.
                    AckVerdict::Snapshot(_) => {
                        unit.snapshot = None;
                        again.push(unit);
                    }
                    AckVerdict::Busy => busy.extend(unit.members.iter().map(|m| (m.0, m.1))),
                    verdict => self.settle_unit(&unit, &verdict, work),
                }
            }
            wave = again;
        }
        true
    }

    /// A call that failed changed nothing, or says that it is not known. False: stop for now.
    fn wave_failed(
        &mut self,
        mut wave: Vec<Unit>,
        work: &mut [DeferredAck],
        busy: &mut Vec<(usize, usize)>,
        error: &StoreError,
    ) -> bool {
        match error {
            StoreError::Unavailable(_) => return false,
            error if error.is_read_only() => return false,
            StoreError::Statement { code, .. } if wave.len() > 1 && code != "57014" => {
                // One of them may be to blame.
                while let Some(unit) = wave.pop() {
                    if !self.run_wave(vec![unit], work, busy) {
                        return false;
                    }
                }
                return true;
            }
            _ => {}
        }
        for unit in wave {
            for (job, item, _) in unit.members {
                let text = store_error(error).message;
                work[job].outcomes[item] = Some(AckOutcome { error: Some(text), ..AckOutcome::default() });
            }
        }
        self.link.is_up()
    }

    // ---- finding offsets --------------------------------------------------------

    /// Finds the offsets: from the memory of leases, else from the database.
    fn resolve(&mut self, wave: &mut [Unit], work: &[DeferredAck]) -> Result<(), StoreError> {
        let mut unknown: Vec<(usize, usize)> = Vec::new();
        for (u, unit) in wave.iter_mut().enumerate() {
            let span = unit
                .lease
                .and_then(|lease| self.leases.get_mut(&lease))
                .filter(|lease| lease.group == unit.group)
                .and_then(|lease| lease.spans.iter_mut().find(|span| span.partition == unit.partition));
            match span {
                Some(span) => {
                    for (m, (job, item, offset)) in unit.members.iter_mut().enumerate() {
                        let found = span.offsets(work[*job].job.request.items[*item].hash);
                        *offset = choose(&found, span.committed);
                        if offset.is_none() {
                            unknown.push((u, m));
                        }
                    }
                }
                None => unknown.extend((0..unit.members.len()).map(|m| (u, m))),
            }
        }
        if unknown.is_empty() {
            return Ok(());
        }
        let partitions: Vec<Uuid> = unknown.iter().map(|(u, _)| wave[*u].partition).collect();
        let groups: Vec<Arc<str>> = unknown.iter().map(|(u, _)| wave[*u].group.clone()).collect();
        let groups: Vec<&str> = groups.iter().map(|group| &**group).collect();
        let hashes: Vec<u128> = unknown
            .iter()
            .map(|(u, m)| {
                let (job, item, _) = wave[*u].members[*m];
                work[job].job.request.items[item].hash
            })
            .collect();
        let found =
            self.call(|conn| crate::store::ack::resolve_offsets(conn, &partitions, &groups, &hashes))?;
        for ((u, m), (committed, offsets)) in unknown.into_iter().zip(found) {
            wave[u].members[m].2 = choose(&offsets, committed);
        }
        Ok(())
    }

    fn call_ack(&mut self, wave: &[Unit], work: &[DeferredAck]) -> Result<Vec<AckVerdict>, StoreError> {
        let mut args = Ack::default();
        for (index, unit) in wave.iter().enumerate() {
            args.partition.push(unit.partition);
            args.group.push(&unit.group);
            args.lease.push(unit.lease);
            for (job, item, offset) in &unit.members {
                let Some(offset) = offset else { continue };
                args.item.push(index as i32 + 1);
                args.offset.push(*offset);
                args.status.push(work[*job].job.request.items[*item].status.code());
            }
            if let Some(snapshot) = &unit.snapshot {
                args.snapshots.push(Snapshot { item: index as i32 + 1, ..snapshot.clone() });
            }
        }
        self.metrics.ack_commits.inc();
        self.call(|conn| crate::store::ack::ack(conn, &args))
    }

    /// The message as it goes to the dead letters.
    fn snapshot(&mut self, unit: &Unit, offset: i64, work: &[DeferredAck]) -> Result<Snapshot, StoreError> {
        let signals = || {
            unit.members
                .iter()
                .map(|(job, item, at)| (&work[*job].job.request.items[*item], *at))
                .filter(|(item, _)| item.status != AckStatus::Completed)
        };
        let said = signals()
            .filter(|(_, at)| *at == Some(offset))
            .chain(signals())
            .find_map(|(item, _)| item.error.clone())
            .unwrap_or_else(|| ack::EXHAUSTED.to_owned());
        let (partition, offsets) = ([unit.partition], [offset]);
        let mut found = self.call(|conn| crate::store::push::segments_at(conn, &partition, &offsets))?;
        if let Some(snapshot) = found.pop().flatten().and_then(|stored| Snapshot::of(&stored, offset, &said))
        {
            return Ok(snapshot);
        }
        // Retention took the message between its delivery and now: the cursor must
        // still get past it, and what is known of it is kept.
        let item = signals().find(|(_, at)| *at == Some(offset)).map(|(item, _)| item);
        Ok(Snapshot {
            item: 1,
            offset,
            message_id: Uuid::nil(),
            transaction_id: item.map_or_else(String::new, |item| item.transaction_id.clone()),
            hash: item.map_or(0, |item| item.hash).to_be_bytes().to_vec(),
            trace_id: None,
            producer_sub: None,
            payload: b"null".to_vec(),
            error: said + " (the message itself is no longer stored)",
            created: crate::store::Micros(0),
        })
    }

    // ---- outcomes -----------------------------------------------------------------

    fn settle_unit(&mut self, unit: &Unit, verdict: &AckVerdict, work: &mut [DeferredAck]) {
        let refusal = match verdict {
            AckVerdict::Missing => Some(NOT_FOUND),
            AckVerdict::Lease => Some(INVALID_LEASE),
            _ => None,
        };
        for (job, item, offset) in &unit.members {
            let status = work[*job].job.request.items[*item].status;
            let outcome = match refusal {
                Some(text) => AckOutcome { error: Some(text.to_owned()), ..AckOutcome::default() },
                None => outcome_of(*offset, status, verdict),
            };
            if outcome.success {
                self.metrics.acked_messages.inc()
            } else {
                self.metrics.ack_failures.inc()
            }
            work[*job].outcomes[*item] = Some(outcome);
        }
        let AckVerdict::Applied { queue, after, released, action, pending, .. } = verdict else { return };
        if *action == AckAction::DeadLettered {
            self.metrics.dead_letters.inc();
        }
        if let Some(lease) = unit.lease {
            if *released {
                self.leases.release(lease, unit.partition);
            } else if let Some(lease) = self.leases.get_mut(&lease)
                && let Some(span) = lease.spans.iter_mut().find(|span| span.partition == unit.partition)
            {
                span.committed = *after;
            }
        }
        if *released {
            self.settle(Settled {
                queue: queue.as_str().into(),
                group: unit.group.clone(),
                partition: unit.partition,
                pending: *pending,
                committed: *after,
            });
        }
    }

    /// Answers a request; what is not settled by now is not going to be.
    pub(super) fn answer_ack(&mut self, waiting: DeferredAck) {
        if waiting.outcomes.iter().any(Option::is_none) {
            let text = self.link.refusal();
            return self.refuse_ack(waiting, &text);
        }
        self.metrics.acks.inc();
        let outcomes: Vec<AckOutcome> = waiting.outcomes.into_iter().flatten().collect();
        let failed = |o: &AckOutcome| o.error.as_deref().is_some_and(is_database_error);
        let reply = match outcomes.first() {
            // All for the same reason, and it is the database's: no answer per item hides that.
            Some(first) if outcomes.iter().all(failed) => {
                let mut error =
                    crate::broker::error::ApiError::unavailable(first.error.clone().unwrap_or_default());
                if error.message.contains("may or may not") {
                    error.code = "outcome_unknown";
                }
                Reply::from(&error)
            }
            _ => Reply::json(200, ack::answer(&waiting.job.request, &outcomes)),
        };
        waiting.job.reply.send(reply);
    }

    pub(super) fn refuse_ack(&mut self, mut waiting: DeferredAck, text: &str) {
        if waiting.outcomes.iter().all(Option::is_none) {
            let error = crate::broker::error::ApiError::unavailable(text);
            waiting.job.reply.send(Reply::from(&error));
            return;
        }
        for outcome in &mut waiting.outcomes {
            outcome
                .get_or_insert_with(|| AckOutcome { error: Some(text.to_owned()), ..AckOutcome::default() });
        }
        self.answer_ack(waiting);
    }

    // ---- renewals -----------------------------------------------------------------

    /// Renews leases: from memory where they are, else by looking for them.
    pub(super) fn run_extends(&mut self) {
        if !self.link.is_up() {
            return;
        }
        for job in std::mem::take(&mut self.extends) {
            self.extend(job);
        }
    }

    fn extend(&mut self, job: ExtendJob) {
        let Ok(id) = Uuid::parse_str(&job.lease) else {
            job.reply.send(Reply::json(200, ack::extend_answer(&job.lease, 0, None)));
            return;
        };
        let Some(lease) = self.leases.get_mut(&id) else {
            self.admin.extend_unknown(id, job);
            return;
        };
        let group = lease.group.clone();
        let partitions: Vec<Uuid> = lease.spans.iter().map(|span| span.partition).collect();
        let seconds = job.seconds as i32;
        let result =
            self.call(|conn| crate::store::ack::extend_lease(conn, id, &partitions, &group, seconds));
        match result {
            Ok((renewed, expires)) => {
                if renewed > 0 {
                    self.leases.extend(id, Duration::from_secs(u64::from(job.seconds)));
                }
                let body = ack::extend_answer(&job.lease, renewed as u64, expires.map(|at| at.0));
                job.reply.send(Reply::json(200, body));
            }
            Err(StoreError::Unavailable(_)) => self.extends.push(job),
            Err(error) => {
                job.reply.send(Reply::from(&store_error(&error)));
            }
        }
    }
}

fn is_database_error(text: &str) -> bool {
    text.starts_with("the database") || text.starts_with("the connection to the database")
}

/// The lowest offset behind the cursor, else the highest at or below it.
pub(crate) fn choose(offsets: &[i64], committed: i64) -> Option<i64> {
    offsets.iter().find(|offset| **offset > committed).or(offsets.last()).copied()
}

/// The items for the next call: each (partition, group) at most once, except
/// that nothing but `completed` under one lease may share a place: those only
/// move the cursor, and the highest wins.
fn wave_of(work: &[DeferredAck], busy: &[(usize, usize)]) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let mut taken: HashMap<(Uuid, Arc<str>), usize> = HashMap::new();
    let mut items = 0;
    for (w, waiting) in work.iter().enumerate() {
        if items >= MAX_CALL_ITEMS {
            break;
        }
        for (partition, lease, members) in parts_of(w, waiting, busy) {
            let only_completed =
                members.iter().all(|m| waiting.job.request.items[m.1].status == AckStatus::Completed);
            items += members.len();
            match taken.get(&(partition, waiting.group.clone())) {
                None => {
                    taken.insert((partition, waiting.group.clone()), units.len());
                    units.push(Unit {
                        partition,
                        group: waiting.group.clone(),
                        lease,
                        only_completed,
                        members,
                        snapshot: None,
                    });
                }
                Some(unit) => {
                    let unit = &mut units[*unit];
                    if unit.lease == lease && unit.only_completed && only_completed {
                        unit.members.extend(members);
                    }
                }
            }
        }
    }
    units
}

type Members = Vec<(usize, usize, Option<i64>)>;

/// A request's open items by (partition, lease).
fn parts_of(w: usize, waiting: &DeferredAck, busy: &[(usize, usize)]) -> Vec<(Uuid, Option<Uuid>, Members)> {
    let mut parts: Vec<(Uuid, Option<Uuid>, Members)> = Vec::new();
    let mut index: HashMap<(Uuid, Option<Uuid>), usize> = HashMap::new();
    for (i, item) in waiting.job.request.items.iter().enumerate() {
        if waiting.outcomes[i].is_some() || (!busy.is_empty() && busy.contains(&(w, i))) {
            continue;
        }
        let part = *index.entry((item.partition_id, item.lease_id)).or_insert_with(|| {
            parts.push((item.partition_id, item.lease_id, Vec::new()));
            parts.len() - 1
        });
        parts[part].2.push((w, i, None));
    }
    parts
}

/// What one item is told.
pub(crate) fn outcome_of(offset: Option<i64>, status: AckStatus, verdict: &AckVerdict) -> AckOutcome {
    let AckVerdict::Applied { before, span_end, released, signal, action, .. } = verdict else {
        return AckOutcome { error: Some(UNRESOLVABLE.to_owned()), ..AckOutcome::default() };
    };
    match offset {
        Some(offset) if offset <= *before && status == AckStatus::Completed => {
            AckOutcome { success: true, noop: true, lease_released: *released, ..AckOutcome::default() }
        }
        Some(offset) if offset <= *before => {
            AckOutcome { error: Some(ALREADY_COMMITTED.to_owned()), ..AckOutcome::default() }
        }
        Some(offset) if offset <= *span_end => AckOutcome {
            success: true,
            lease_released: *released,
            dead_lettered: *signal == Some(offset) && *action == AckAction::DeadLettered,
            dropped: *signal == Some(offset) && *action == AckAction::Dropped,
            ..AckOutcome::default()
        },
        _ => AckOutcome { error: Some(UNRESOLVABLE.to_owned()), ..AckOutcome::default() },
    }
}
