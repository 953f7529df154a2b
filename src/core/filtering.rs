//! Filters in a pop: the claim comes first, then the filter judges its messages
//! with no row lock held, then one call trims all claims to what is delivered.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use uuid::Uuid;

use super::engine::{Engine, GroupKey, group_mut};
use super::popping::Attempt;
use super::ring;
use crate::broker::answer::Reply;
use crate::broker::error::ApiError;
use crate::broker::plugin::{Binding, OnError, Trim, Verdict, trim};
use crate::broker::pop::{Delivery, SegmentSlice};
use crate::broker::segment::{self, CODEC_RAW, CorruptSegment};
use crate::plugins::{Cause, PluginError, message_filter};
use crate::store::StoreError;
use crate::store::ack::Snapshot;
use crate::store::plugin::{TrimVerdict, Trimmed};

/// Messages of one filter call.
const CALL_MESSAGES: usize = 256;
/// Payload bytes of one filter call; a message alone may have more.
const CALL_BYTES: usize = 1024 * 1024;
/// Most messages that a scan reads ahead of its pop's batch in one claim: some
/// milliseconds of work, so that other pops of the core are not kept waiting.
pub const SCAN_MESSAGES: u32 = 500;
/// A group that reads so many messages more than its pops take reads far.
const FAR: u32 = 200;
/// Most partitions that a scan claims at once.
pub const SCAN_PARTITIONS: u32 = 32;
/// A partition whose filter failed is tried again after this time, in milliseconds.
const FAILED_MS: u64 = 1_000;
/// How often a trim is tried whose cursor's row is locked elsewhere, and the pause between.
const BUSY_TRIES: usize = 5;
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// How far a group's pops read ahead, from what its filter let through of late.
#[derive(Debug, Default, Clone, Copy)]
pub struct Scan {
    messages: u32,
    partitions: u32,
    /// Most of what was read last was not delivered.
    yields_little: bool,
}

impl Scan {
    /// What to claim for a pop that takes so many messages and partitions.
    pub fn claim(&self, batch: u32, partitions: u32) -> (u32, u32) {
        (batch.max(self.messages), partitions.max(self.partitions))
    }

    /// Whether its claims are so large that they are made one at a time.
    pub fn is_far(&self) -> bool {
        self.messages >= FAR && self.yields_little
    }

    /// Learns from one pop: messages judged, and of them delivered.
    fn learn(&mut self, batch: u32, judged: u32, delivered: u32) {
        self.yields_little = u64::from(delivered) * 4 < u64::from(judged);
        if delivered == 0 {
            self.messages = (self.messages.max(batch) * 2).min(SCAN_MESSAGES);
            self.partitions = (self.partitions.max(1) * 2).min(SCAN_PARTITIONS);
        } else {
            let wanted = u64::from(batch) * u64::from(judged) / u64::from(delivered);
            self.messages = wanted.min(u64::from(SCAN_MESSAGES)) as u32;
            self.partitions /= 2;
        }
    }
}

/// A claimed span, as the claim returned it.
pub struct ClaimedSpan {
    /// Its messages.
    pub delivery: Delivery,
    /// First offset.
    pub first: i64,
    /// Last offset.
    pub end: i64,
    /// How long its lease lasts, in milliseconds.
    pub lasts_ms: u64,
    /// Messages behind it.
    pub remaining: u64,
    /// Some of those are visible already.
    pub more: bool,
}

/// An attempt whose claims have to be judged.
pub struct ToJudge {
    /// The attempt.
    pub attempt: Attempt,
    /// Its filter.
    pub filter: Arc<Binding>,
    /// What it claimed.
    pub spans: Vec<ClaimedSpan>,
}

/// One claim on its way through.
struct Judged {
    span: ClaimedSpan,
    /// `None`: nobody has room for it, or its filter failed.
    trim: Option<Trim>,
    failed: bool,
    /// What has to be changed in the database.
    change: Option<Trimmed>,
}

impl Engine {
    /// Judges, trims, and settles attempts.
    pub(super) fn run_filters(&mut self, work: Vec<ToJudge>) {
        let mut done = Vec::with_capacity(work.len());
        for ToJudge { attempt, filter, spans } in work {
            let (judged, failure) = self.judge_attempt(&attempt, &filter, spans);
            done.push((attempt, filter, judged, failure));
        }
        if let Err(error) = self.trim_all(&mut done) {
            // Nothing is delivered of which it is not known what became of it.
            let now_ms = self.now_ms();
            for (attempt, _, judged, _) in done {
                for claim in &judged {
                    let until = now_ms + claim.span.lasts_ms;
                    self.verdict(
                        &attempt.key,
                        claim.span.delivery.partition_id,
                        ring::Verdict::Leased { until },
                    );
                }
                self.refuse_attempt(attempt, &Reply::from(&super::engine::store_error(&error)));
            }
            return;
        }
        for (attempt, filter, judged, failure) in done {
            self.settle_judged(attempt, &filter, judged, failure);
        }
    }

    /// Calls the filter for each claim of an attempt, until the pop is full.
    fn judge_attempt(
        &mut self,
        attempt: &Attempt,
        filter: &Binding,
        spans: Vec<ClaimedSpan>,
    ) -> (Vec<Judged>, Option<PluginError>) {
        let auto = attempt.auto_ack();
        let (mut room, mut partitions) = attempt.room();
        let (mut judged, mut failure) = (Vec::with_capacity(spans.len()), None);
        let (batch, mut seen, mut delivered) = (room, 0u32, 0u32);
        for mut span in spans {
            if room == 0 || partitions == 0 {
                judged.push(Judged { span, trim: None, failed: false, change: None });
                continue;
            }
            let verdicts = match self.verdicts(&attempt.key, filter, &mut span, room as usize, auto) {
                Ok(verdicts) => verdicts,
                Err(error) => {
                    let text = &error.text;
                    tracing::debug!(plugin = %filter.plugin, queue = %attempt.key.0, %text, "a filter failed");
                    failure = Some(error);
                    judged.push(Judged { span, trim: None, failed: true, change: None });
                    continue;
                }
            };
            let trim = trim(&verdicts, room as usize, auto);
            seen += verdicts.len() as u32;
            delivered += trim.delivered.len() as u32;
            room -= trim.delivered.len() as u32;
            if !trim.delivered.is_empty() && partitions != u32::MAX {
                partitions -= 1;
            }
            self.count(filter, &trim);
            judged.push(Judged { span, trim: Some(trim), failed: false, change: None });
        }
        if let Some(group) = group_mut(&mut self.groups, &attempt.key)
            && seen > 0
        {
            group.scan.learn(batch, seen, delivered);
        }
        (judged, failure)
    }

    /// The verdicts on a span's messages, from its start to where nothing more can be delivered.
    fn verdicts(
        &mut self,
        (queue, group): &GroupKey,
        filter: &Binding,
        span: &mut ClaimedSpan,
        room: usize,
        auto: bool,
    ) -> Result<Vec<Verdict>, PluginError> {
        let corrupt = |error: CorruptSegment| PluginError { cause: Cause::Answer, text: error.to_string() };
        // Unpacked once, for the filter and for the answer.
        for slice in &mut span.delivery.segments {
            if slice.codec != CODEC_RAW {
                slice.data = segment::unpack(slice.codec, &slice.data).map_err(corrupt)?.into_owned();
                slice.codec = CODEC_RAW;
            }
        }
        let total = (span.end - span.first + 1) as usize;
        let now_ms = now_ms();
        let mut verdicts: Vec<Verdict> = Vec::with_capacity(total);
        let mut frames = Vec::with_capacity(total.min(4096));
        for slice in &span.delivery.segments {
            let mut of_slice = segment::frames(&slice.data);
            of_slice.skip_frames(slice.skip);
            for frame in of_slice.take(slice.take) {
                frames.push((slice.created_us.max(0) as u64 / 1000, frame.map_err(corrupt)?));
            }
        }
        let mut rest = frames.as_slice();
        let (mut delivered, mut over) = (0, false);
        while !rest.is_empty() && !over && delivered < room {
            let mut bytes = 0;
            let fits = rest
                .iter()
                .take(CALL_MESSAGES)
                .take_while(|(_, frame)| {
                    bytes += frame.payload.len();
                    bytes <= CALL_BYTES
                })
                .count()
                .max(1);
            let (now, later) = rest.split_at(fits);
            rest = later;
            let ids: Vec<String> = now.iter().map(|(_, frame)| frame.message_id.to_string()).collect();
            let messages: Vec<message_filter::Message<'_>> = now
                .iter()
                .zip(&ids)
                .map(|((created_ms, frame), id)| message_filter::Message {
                    id,
                    transaction_id: frame.own_transaction_id.unwrap_or(id),
                    created_ms: *created_ms,
                    payload: frame.payload,
                })
                .collect();
            let context = message_filter::Context {
                queue,
                partition: &span.delivery.partition,
                consumer_group: group,
                now_ms,
                attempt: span.delivery.attempt.max(1) as u32,
                more: !rest.is_empty() || span.more,
            };
            let judged = match self.pool.filter(filter, (queue, group), context, &messages) {
                Ok(judged) => judged,
                Err(_) if filter.on_error == OnError::Deliver => vec![Verdict::Deliver; now.len()],
                Err(error) => return Err(error),
            };
            for verdict in &judged {
                match verdict {
                    Verdict::Deliver => delivered += 1,
                    Verdict::Hold(_) => over = true,
                    Verdict::DeadLetter(_) if delivered > 0 && !auto => over = true,
                    _ => {}
                }
            }
            verdicts.extend(judged);
        }
        Ok(verdicts)
    }

    fn count(&self, filter: &Binding, trim: &Trim) {
        let Some(version) = self.pool.version(&filter.plugin) else { return };
        version.stats.delivered.fetch_add(trim.delivered.len() as u64, Relaxed);
        version.stats.skipped.fetch_add(trim.skipped as u64, Relaxed);
        version.stats.dead_lettered.fetch_add(trim.dead_letters.len() as u64, Relaxed);
        version.stats.held.fetch_add(u64::from(trim.hold_ms.is_some()), Relaxed);
        self.metrics.dead_letters.inc_by(trim.dead_letters.len() as u64);
    }

    /// One call for everything that has to be changed.
    fn trim_all(
        &mut self,
        done: &mut [(Attempt, Arc<Binding>, Vec<Judged>, Option<PluginError>)],
    ) -> Result<(), StoreError> {
        for (attempt, _, judged, _) in done.iter_mut() {
            for claim in judged.iter_mut() {
                claim.change = change(attempt, claim);
            }
        }
        for round in 0..BUSY_TRIES {
            let mut waiting: Vec<&mut Judged> = done
                .iter_mut()
                .flat_map(|(_, _, judged, _)| judged.iter_mut())
                .filter(|claim| claim.change.is_some())
                .collect();
            if waiting.is_empty() {
                return Ok(());
            }
            if round > 0 {
                std::thread::sleep(BUSY_PAUSE);
            }
            let changes: Vec<&Trimmed> = waiting.iter().filter_map(|claim| claim.change.as_ref()).collect();
            let result = self.link.call(|conn| crate::store::plugin::trim(conn, &changes));
            self.metrics.trims.inc();
            let verdicts = match result {
                Ok(verdicts) => verdicts,
                Err(error) => {
                    // Counted, and the connection replaced, as for any other call.
                    return self.call(|_| Err(error));
                }
            };
            for (claim, verdict) in waiting.iter_mut().zip(verdicts) {
                match verdict {
                    TrimVerdict::Trimmed => claim.change = None,
                    TrimVerdict::Busy => {}
                    TrimVerdict::Lost => {
                        // Somebody else may have it by now.
                        (claim.change, claim.trim, claim.failed) = (None, None, false);
                    }
                }
            }
        }
        // Locked for too long: the lease runs out by itself.
        for claim in done.iter_mut().flat_map(|(_, _, judged, _)| judged.iter_mut()) {
            if claim.change.take().is_some() {
                (claim.trim, claim.failed) = (None, false);
            }
        }
        Ok(())
    }

    /// Applies what became of an attempt's claims to the ring, and delivers.
    fn settle_judged(
        &mut self,
        mut attempt: Attempt,
        filter: &Binding,
        judged: Vec<Judged>,
        failure: Option<PluginError>,
    ) {
        let (now_ms, auto) = (self.now_ms(), attempt.auto_ack());
        let version = self.pool.version(&filter.plugin).map(|version| version.sha256.clone());
        let queue = attempt.key.0.clone();
        attempt.explain(|| {
            let trims = || judged.iter().filter_map(|claim| claim.trim.as_ref());
            serde_json::json!({"filter": filter.plugin, "sha256": version, "queue": &*queue,
                "delivered": trims().map(|trim| trim.delivered.len()).sum::<usize>(),
                "skipped": trims().map(|trim| trim.skipped).sum::<usize>(),
                "deadLettered": trims().map(|trim| trim.dead_letters.len()).sum::<usize>()})
        });
        let (mut deliveries, mut spans) = (Vec::new(), Vec::new());
        for Judged { span, trim, failed, .. } in judged {
            let partition = span.delivery.partition_id;
            let total = (span.end - span.first + 1) as usize;
            let verdict = match &trim {
                None if failed => ring::Verdict::Later { until: now_ms + FAILED_MS, early_at: None },
                None => ring::Verdict::NotReached,
                Some(trim) => {
                    let over = if trim.leased > 0 { trim.leased } else { trim.finished };
                    let remaining = span.remaining + (total - over) as u64;
                    let end = span.first + over as i64 - 1;
                    match trim.hold_ms {
                        Some(ms) if trim.leased == 0 => {
                            ring::Verdict::Later { until: now_ms + u64::from(ms), early_at: None }
                        }
                        _ if trim.leased > 0 => {
                            ring::Verdict::Took { until: Some(now_ms + span.lasts_ms + 1), end, remaining }
                        }
                        _ => ring::Verdict::Took { until: None, end, remaining },
                    }
                }
            };
            self.verdict(&attempt.key, partition, verdict);
            let Some(trim) = trim.filter(|trim| !trim.delivered.is_empty()) else { continue };
            let end = trim.delivered.last().map_or(0, |last| last + 1);
            spans.push((span.first, span.lasts_ms));
            let mut delivery = span.delivery;
            keep(&mut delivery.segments, &trim.delivered, end);
            if auto {
                delivery.attempt = 1;
            }
            deliveries.push(delivery);
        }
        if let Some(error) = failure
            && deliveries.is_empty()
        {
            let what = if error.cause == Cause::Missing { "plugin_unavailable" } else { "plugin_failed" };
            let error = ApiError {
                status: 503,
                code: what,
                message: format!(
                    "filter \"{}\" failed ({}): {}; nothing was claimed, the call may be repeated",
                    filter.plugin,
                    error.cause.name(),
                    error.text
                ),
            };
            return self.refuse_attempt(attempt, &Reply::from(&error));
        }
        self.settle_attempt(attempt, deliveries, spans);
    }

    fn verdict(&mut self, key: &GroupKey, partition: Uuid, verdict: ring::Verdict) {
        let now_ms = self.now_ms();
        if let Some(group) = group_mut(&mut self.groups, key) {
            group.ring.verdict(partition, verdict, now_ms);
        }
    }
}

/// What a judged claim changes in the database; nothing if its lease is already what it should be.
///
/// Skipped messages at its start are then finished by the ack of what was delivered
/// behind them, instead of by a commit of their own: if that ack never comes, they are
/// judged again.
fn change(attempt: &Attempt, claim: &Judged) -> Option<Trimmed> {
    let span = &claim.span;
    let total = (span.end - span.first + 1) as usize;
    let (committed, end, dead_letters) = match &claim.trim {
        None => (span.first - 1, None, Vec::new()),
        Some(trim) => {
            if trim.leased == total && trim.dead_letters.is_empty() {
                return None;
            }
            let end = (trim.leased > 0).then(|| span.first + trim.leased as i64 - 1);
            (span.first - 1 + trim.finished as i64, end, snapshots(span, &trim.dead_letters))
        }
    };
    Some(Trimmed {
        partition: span.delivery.partition_id,
        group: attempt.key.1.to_string(),
        lease: attempt.lease,
        committed,
        end,
        claimed: span.end,
        dead_letters,
    })
}

fn snapshots(span: &ClaimedSpan, dead: &[(usize, String)]) -> Vec<Snapshot> {
    let mut found = Vec::with_capacity(dead.len());
    let mut dead = dead.iter().peekable();
    let mut n = 0;
    for slice in &span.delivery.segments {
        if dead.peek().is_none() {
            break;
        }
        let mut frames = segment::frames(&slice.data);
        frames.skip_frames(slice.skip);
        for frame in frames.take(slice.take) {
            if let Some((_, reason)) = dead.next_if(|(at, _)| *at == n)
                && let Ok(frame) = frame
            {
                let created = crate::store::Micros(slice.created_us);
                found.push(Snapshot::of_frame(&frame, span.first + n as i64, created, reason));
            }
            n += 1;
        }
    }
    found
}

/// Cuts the slices of a span to its first `end` messages, of which only these are delivered.
fn keep(slices: &mut Vec<SegmentSlice>, delivered: &[usize], end: usize) {
    let mut before = 0;
    for slice in slices.iter_mut() {
        let take = slice.take;
        slice.take = take.min(end.saturating_sub(before));
        let mut only = vec![false; slice.take];
        for n in delivered.iter().filter(|n| (before..before + slice.take).contains(*n)) {
            only[n - before] = true;
        }
        if only.iter().any(|kept| !kept) {
            slice.only = Some(only);
        }
        before += take;
    }
    slices.retain(|slice| slice.take > 0);
}

/// The clock that plugins are told.
pub fn now_ms() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_reads_further_the_less_it_finds() {
        let mut scan = Scan::default();
        assert_eq!(scan.claim(10, 1), (10, 1));
        for _ in 0..20 {
            scan.learn(10, 1000, 0);
        }
        assert_eq!(scan.claim(10, 1), (SCAN_MESSAGES, SCAN_PARTITIONS));
        scan.learn(10, 100, 50);
        assert_eq!(scan.claim(10, 1), (20, SCAN_PARTITIONS / 2));
        scan.learn(10, 10, 10);
        assert_eq!(scan.claim(10, 1).0, 10);
    }

    #[test]
    fn only_what_is_delivered_is_kept() {
        let slice =
            |skip, take| SegmentSlice { created_us: 0, codec: 0, data: Vec::new(), skip, take, only: None };
        let mut slices = vec![slice(2, 3), slice(0, 4), slice(0, 5)];
        keep(&mut slices, &[1, 2, 3], 4);
        assert_eq!(slices.len(), 2);
        assert_eq!((slices[0].take, slices[0].only.clone()), (3, Some(vec![false, true, true])));
        assert_eq!((slices[1].take, slices[1].only.clone()), (1, None));
    }
}
