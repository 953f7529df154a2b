//! `POST /api/v1/transaction`: one database transaction around a push and its acks.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use uuid::Uuid;

use super::admin::Outcome;
use super::router::App;
use crate::broker::ack::{EXHAUSTED, INVALID_LEASE};
use crate::broker::answer::Reply;
use crate::broker::push::PushLane;
use crate::broker::queue_options::namespace_and_task_of;
use crate::broker::segment::{self, Packer};
use crate::broker::transaction::{self, TransactionRequest};
use crate::core::acking::{choose, outcome_of};
use crate::core::inbox::{Mark, Settled};
use crate::store::ack::{Ack, AckVerdict, Snapshot};
use crate::store::messages::{self, DeadFilter};
use crate::store::push::{
    Append, AppendVerdict, GAP_MESSAGES, Lane, append, load_hashes, resolve_partitions, segments_at,
};
use crate::store::{Conn, StoreError};

/// How long a transaction is tried again while rows it needs are locked elsewhere.
const BUSY_LIMIT: Duration = Duration::from_secs(5);
/// Pause between the attempts.
const BUSY_PAUSE: Duration = Duration::from_millis(3);

/// What an attempt came to.
enum Attempt {
    /// Everything was applied; to be committed.
    Done { results: Vec<Value>, marks: Vec<Mark>, settled: Vec<Settled> },
    /// It cannot be applied: why.
    Refused(String),
    /// A row was locked elsewhere, or changed at the same moment.
    Again,
}

/// Runs a transaction on an admin connection.
pub fn run(app: &App, conn: &mut Conn, body: &[u8]) -> Outcome {
    let id = Uuid::now_v7();
    let failure = |status: u16, error: &str| {
        let body = json!({"transactionId": id, "success": false, "error": error, "results": []});
        Reply::json(status, body.to_string())
    };
    let request = match transaction::parse(body, None) {
        Ok(request) => request,
        Err(error) => return Ok(Ok(failure(error.status, &error.message))),
    };
    let until = Instant::now() + BUSY_LIMIT;
    loop {
        conn.run(|client| client.batch_execute("BEGIN"))?;
        let attempt = match try_once(conn, &request) {
            Ok(attempt) => attempt,
            Err(error) => {
                if !error.is_connection() {
                    let _ = conn.run(|client| client.batch_execute("ROLLBACK"));
                }
                return Err(error);
            }
        };
        match attempt {
            Attempt::Done { results, marks, settled } => {
                conn.run(|client| client.batch_execute("COMMIT"))?;
                app.cores.announce(marks);
                settled.into_iter().for_each(|settled| app.cores.settle(settled));
                let body = json!({"transactionId": id, "success": true, "results": results});
                return Ok(Ok(Reply::json(200, body.to_string())));
            }
            Attempt::Refused(why) => {
                conn.run(|client| client.batch_execute("ROLLBACK"))?;
                return Ok(Ok(failure(200, &format!("{why}; transaction rolled back"))));
            }
            Attempt::Again => {
                conn.run(|client| client.batch_execute("ROLLBACK"))?;
                if Instant::now() >= until {
                    return Err(StoreError::Unavailable(format!(
                        "rows of this transaction were locked elsewhere for {} seconds",
                        BUSY_LIMIT.as_secs()
                    )));
                }
                std::thread::sleep(BUSY_PAUSE);
            }
        }
    }
}

/// Pushes dead letters again, with fresh transaction ids, and removes them, in one transaction. Returns
/// the pushes' results; empty: there are none.
pub fn replay(app: &App, conn: &mut Conn, filter: &DeadFilter<'_>) -> Result<Vec<Value>, StoreError> {
    let until = Instant::now() + BUSY_LIMIT;
    loop {
        conn.run(|client| client.batch_execute("BEGIN"))?;
        let attempt = replay_once(conn, filter);
        match attempt {
            Ok(Attempt::Done { results, marks, .. }) => {
                conn.run(|client| client.batch_execute("COMMIT"))?;
                app.cores.announce(marks);
                return Ok(results);
            }
            Ok(Attempt::Again | Attempt::Refused(_)) if Instant::now() < until => {
                conn.run(|client| client.batch_execute("ROLLBACK"))?;
                std::thread::sleep(BUSY_PAUSE);
            }
            Ok(_) => {
                conn.run(|client| client.batch_execute("ROLLBACK"))?;
                return Err(StoreError::Unavailable(
                    "the partitions of the dead letters are locked".to_owned(),
                ));
            }
            Err(error) => {
                if !error.is_connection() {
                    let _ = conn.run(|client| client.batch_execute("ROLLBACK"));
                }
                return Err(error);
            }
        }
    }
}

fn replay_once(conn: &mut Conn, filter: &DeadFilter<'_>) -> Result<Attempt, StoreError> {
    let dead = messages::lock_dead(conn, filter)?;
    // The payload's own bytes, spliced in: whatever was pushed once can be pushed again.
    let mut body = b"{\"operations\":[{\"type\":\"push\",\"items\":[".to_vec();
    for (n, letter) in dead.iter().enumerate() {
        let head = json!({"queue": letter.queue, "partition": letter.partition, "traceId": letter.trace_id})
            .to_string();
        body.extend_from_slice(if n > 0 { b"," } else { b"" });
        body.extend_from_slice(&head.as_bytes()[..head.len() - 1]);
        body.extend_from_slice(b",\"payload\":");
        body.extend_from_slice(&letter.payload);
        body.push(b'}');
    }
    body.extend_from_slice(b"]}]}");
    let request = transaction::parse(&body, None)
        .map_err(|error| StoreError::Statement { code: "22000".into(), message: error.message })?;
    let mut results = vec![Value::Null; request.results];
    match push(conn, &request, &mut results)? {
        Ok(marks) => {
            let ids: Vec<Uuid> = dead.iter().map(|letter| letter.id).collect();
            messages::delete_dead(conn, &ids)?;
            Ok(Attempt::Done { results, marks, settled: Vec::new() })
        }
        Err(attempt) => Ok(attempt),
    }
}

fn try_once(conn: &mut Conn, request: &TransactionRequest) -> Result<Attempt, StoreError> {
    let mut results = vec![Value::Null; request.results];
    let marks = match push(conn, request, &mut results)? {
        Ok(marks) => marks,
        Err(attempt) => return Ok(attempt),
    };
    match ack(conn, request, &mut results)? {
        Ok(settled) => Ok(Attempt::Done { results, marks, settled }),
        Err(attempt) => Ok(attempt),
    }
}

/// Appends everything. `Err`: what the attempt comes to instead.
fn push(
    conn: &mut Conn,
    request: &TransactionRequest,
    results: &mut [Value],
) -> Result<Result<Vec<Mark>, Attempt>, StoreError> {
    let lanes = &request.push.lanes;
    if lanes.is_empty() {
        return Ok(Ok(Vec::new()));
    }
    let wanted: Vec<Lane<'_>> = lanes
        .iter()
        .map(|lane| {
            let (namespace, task) = namespace_and_task_of(&lane.queue);
            Lane { queue: &lane.queue, namespace, task, partition: &lane.partition }
        })
        .collect();
    let found = resolve_partitions(conn, &wanted)?;
    let mut order: Vec<usize> = (0..lanes.len()).collect();
    order.sort_by_key(|l| found[*l].partition_id);
    let mut arguments = Append::default();
    let (mut runs, mut marks) = (Vec::new(), Vec::new());
    for l in &order {
        let (lane, known) = (&lanes[*l], &found[*l]);
        let window = known.dedup_window_seconds;
        let (mut stored, mut vouched) = (HashSet::new(), (window > 0).then_some(0));
        if window > 0 && known.next_offset > GAP_MESSAGES {
            let Some((next, runs)) = load_hashes(conn, known.partition_id, 0, window, i64::MAX)? else {
                return Ok(Err(Attempt::Again));
            };
            stored.extend(runs.iter().flat_map(|run| segment::hashes_of(&run.hashes)));
            vouched = Some(next);
        }
        let mut firsts: BTreeMap<u128, Uuid> = BTreeMap::new();
        let mut new = Vec::new();
        for entry in &lane.entries {
            let first = *firsts.entry(entry.hash).or_insert(entry.message_id);
            let repeats = window > 0 && first != entry.message_id;
            let transaction_id = entry.transaction_id.clone().unwrap_or_else(|| entry.message_id.to_string());
            let mut result = json!({
                "index": entry.index, "type": "push", "success": true, "transactionId": transaction_id,
                "messageId": if repeats { first } else { entry.message_id }, "queueName": lane.queue,
            });
            if repeats {
                result["duplicate"] = true.into();
            } else {
                if stored.contains(&entry.hash) {
                    return Ok(Err(duplicate(lane)));
                }
                new.push(entry);
            }
            results[entry.index as usize] = result;
        }
        arguments.ids.push(known.partition_id);
        arguments.known.push(vouched);
        arguments.counts.push(new.len() as i32);
        runs.push(segment::cut(new.iter().map(|entry| (&lane.frames[entry.frame.clone()], entry.hash))));
        let partition = (known.partition_id, Arc::from(lane.partition.as_str()), new.len() as u64);
        marks.push(Mark { queue: lane.queue.as_str().into(), partitions: vec![partition] });
    }
    let mut packer = Packer::new();
    for (partition, runs) in runs.iter().enumerate() {
        runs.iter().for_each(|run| arguments.add(partition, run, &mut packer));
    }
    let verdicts = append(conn, &arguments)?;
    for (at, verdict) in verdicts {
        match verdict {
            AppendVerdict::Stored { .. } => {}
            AppendVerdict::Duplicate { .. } => return Ok(Err(duplicate(&lanes[order[at]]))),
            _ => return Ok(Err(Attempt::Again)),
        }
    }
    Ok(Ok(marks))
}

/// A message of this lane has been stored before.
fn duplicate(lane: &PushLane) -> Attempt {
    Attempt::Refused(format!("QDUP duplicate messages in queue {} partition {}", lane.queue, lane.partition))
}

/// The acks of one (partition, group): lease, and (index among the acks, offset).
type Unit = (Option<Uuid>, Vec<(usize, i64)>);

/// Applies every ack. `Err`: what the attempt comes to instead.
fn ack(
    conn: &mut Conn,
    request: &TransactionRequest,
    results: &mut [Value],
) -> Result<Result<Vec<Settled>, Attempt>, StoreError> {
    let failed = |partition: Uuid, group: &str, why: &str| {
        Attempt::Refused(format!("QTXN ack failed for partition {partition} group {group}: {why}"))
    };
    if let Some((_, group, item)) = request.acks.iter().find(|(_, _, item)| item.refused.is_some()) {
        return Ok(Err(failed(item.partition_id, group, item.refused.as_deref().unwrap_or_default())));
    }
    let partitions: Vec<Uuid> = request.acks.iter().map(|(_, _, item)| item.partition_id).collect();
    let groups: Vec<&str> = request.acks.iter().map(|(_, group, _)| group.as_str()).collect();
    let hashes: Vec<u128> = request.acks.iter().map(|(_, _, item)| item.hash).collect();
    if partitions.is_empty() {
        return Ok(Ok(Vec::new()));
    }
    let found = crate::store::ack::resolve_offsets(conn, &partitions, &groups, &hashes)?;
    let mut units: BTreeMap<(Uuid, &str), Unit> = BTreeMap::new();
    for (n, ((_, group, item), (committed, offsets))) in request.acks.iter().zip(found).enumerate() {
        let Some(offset) = choose(&offsets, committed) else {
            return Ok(Err(Attempt::Refused("QTXN ack references unknown transactionId".to_owned())));
        };
        let unit = units.entry((item.partition_id, group)).or_insert((item.lease_id, Vec::new()));
        if unit.0.is_some() && item.lease_id.is_some() && unit.0 != item.lease_id {
            return Ok(Err(failed(item.partition_id, group, INVALID_LEASE)));
        }
        unit.0 = unit.0.or(item.lease_id);
        unit.1.push((n, offset));
    }
    let mut settled = Vec::new();
    for ((partition, group), (lease, members)) in units {
        let mut snapshots = Vec::new();
        let verdict = loop {
            let arguments = Ack {
                partition: vec![partition],
                group: vec![group],
                lease: vec![lease],
                item: vec![1; members.len()],
                offset: members.iter().map(|(_, offset)| *offset).collect(),
                status: members.iter().map(|(n, _)| request.acks[*n].2.status.code()).collect(),
                snapshots: std::mem::take(&mut snapshots),
            };
            let repeated = !arguments.snapshots.is_empty();
            match crate::store::ack::ack(conn, &arguments)?.into_iter().next() {
                Some(AckVerdict::Snapshot(offset)) if !repeated => {
                    let said = members
                        .iter()
                        .find(|(_, at)| *at == offset)
                        .and_then(|(n, _)| request.acks[*n].2.error.clone());
                    let said = said.unwrap_or_else(|| EXHAUSTED.to_owned());
                    let stored = segments_at(conn, &[partition], &[offset])?.pop().flatten();
                    let Some(snapshot) = stored.and_then(|stored| Snapshot::of(&stored, offset, &said))
                    else {
                        return Ok(Err(failed(partition, group, "the message is no longer retained")));
                    };
                    snapshots.push(snapshot);
                }
                Some(verdict) => break verdict,
                None => return Ok(Err(Attempt::Again)),
            }
        };
        match &verdict {
            AckVerdict::Applied { queue, released, pending, after, .. } => {
                if *released {
                    let (queue, group) = (Arc::from(queue.as_str()), Arc::from(group));
                    settled.push(Settled { queue, group, partition, pending: *pending, committed: *after });
                }
            }
            AckVerdict::Missing => return Ok(Err(failed(partition, group, "consumer not found"))),
            AckVerdict::Lease => return Ok(Err(failed(partition, group, INVALID_LEASE))),
            AckVerdict::Busy | AckVerdict::Snapshot(_) => return Ok(Err(Attempt::Again)),
        }
        for (n, offset) in members {
            let (index, _, item) = &request.acks[n];
            let outcome = outcome_of(Some(offset), item.status, &verdict);
            if !outcome.success {
                return Ok(Err(failed(partition, group, outcome.error.as_deref().unwrap_or("refused"))));
            }
            results[*index] = json!({"index": index, "type": "ack", "success": true,
                "transactionId": item.transaction_id, "error": null, "dlq": outcome.dead_lettered});
        }
    }
    Ok(Ok(settled))
}
