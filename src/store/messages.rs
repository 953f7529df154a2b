//! Messages and dead letters, many at a time.

use std::collections::HashMap;

use serde_json::json;
use uuid::Uuid;

use super::inspect::{listed, spliced};
use super::{Conn, Micros, StoreError};
use crate::broker::{segment, time};

/// Most partitions of one listing; the ones written last.
const MAX_PARTITIONS: i64 = 2_000;

/// What of the messages is asked for.
#[derive(Default)]
pub struct Asked<'a> {
    /// Of this queue.
    pub queue: Option<&'a str>,
    /// Of this partition, by name.
    pub partition: Option<&'a str>,
    /// Of this namespace.
    pub namespace: Option<&'a str>,
    /// Of this task.
    pub task: Option<&'a str>,
    /// Stored at or after this time.
    pub from: Option<Micros>,
    /// Stored before this time.
    pub to: Option<Micros>,
    /// In this state.
    pub status: Option<&'a str>,
    /// Page size.
    pub limit: usize,
    /// Messages to pass over.
    pub offset: usize,
}

/// How far the groups are in a partition.
struct State {
    named: i64,
    named_min: Option<i64>,
    queue_mode: Option<i64>,
    lease: Option<Micros>,
}

impl State {
    fn kind(&self) -> &'static str {
        match (self.queue_mode.is_some(), self.named) {
            (true, 0) => "queue",
            (true, _) => "hybrid",
            (false, 0) => "none",
            (false, _) => "bus",
        }
    }

    fn of(&self, offset: i64) -> &'static str {
        let slowest = if self.named > 0 { self.named_min } else { self.queue_mode };
        if slowest.is_some_and(|committed| committed >= offset) {
            "completed"
        } else if self.lease.is_some() {
            "processing"
        } else {
            "pending"
        }
    }
}

/// A page of messages, newest first. Takes no lock.
pub fn list(conn: &mut Conn, asked: &Asked<'_>) -> Result<String, StoreError> {
    let wanted = (asked.offset + asked.limit) as i64;
    let rows = conn.query(
        "SELECT p.id, p.name, q.name, q.namespace, q.task, q.priority, s.base_offset, s.count, s.created_at, s.codec, s.data
         FROM (SELECT p.id, p.name, p.queue_id FROM partition p JOIN queue q ON q.id = p.queue_id
               WHERE ($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR p.name = $2)
                 AND ($3::text IS NULL OR q.namespace = $3) AND ($4::text IS NULL OR q.task = $4)
                 AND ($5::timestamptz IS NULL OR p.written_at > $5 - interval '1 minute')
               ORDER BY p.written_at DESC LIMIT $8) p
         JOIN queue q ON q.id = p.queue_id
         CROSS JOIN LATERAL (
             SELECT s.base_offset, s.count, s.created_at, s.codec, s.data FROM segment s
             WHERE s.partition_id = p.id AND ($5::timestamptz IS NULL OR s.created_at >= $5)
               AND ($6::timestamptz IS NULL OR s.created_at < $6)
             ORDER BY s.base_offset DESC LIMIT $7) s
         ORDER BY s.created_at DESC, p.id, s.base_offset DESC LIMIT $7",
        &[
            &asked.queue, &asked.partition, &asked.namespace, &asked.task, &asked.from, &asked.to, &wanted, &MAX_PARTITIONS,
        ],
    )?;
    let mut ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    ids.sort_unstable();
    ids.dedup();
    let states = states(conn, &ids)?;
    let none = State { named: 0, named_min: None, queue_mode: None, lease: None };
    let dead = dead_offsets(conn, &ids)?;
    let (mut messages, mut passed, mut kind, mut named) = (Vec::new(), 0, "none", 0);
    'rows: for row in &rows {
        let (partition, base): (Uuid, i64) = (row.get(0), row.get(6));
        let state = states.get(&partition).unwrap_or(&none);
        (kind, named) = if messages.is_empty() { (state.kind(), state.named) } else { (kind, named) };
        let Ok(raw) = segment::unpack(row.get(9), row.get(10)) else { continue };
        let frames: Vec<_> = segment::frames(&raw).flatten().collect();
        for (n, frame) in frames.iter().enumerate().rev() {
            let offset = base + n as i64;
            let status =
                if dead.contains_key(&(partition, offset)) { "dead_letter" } else { state.of(offset) };
            if asked.status.is_some_and(|wanted| wanted != status) {
                continue;
            }
            passed += 1;
            if passed <= asked.offset {
                continue;
            }
            let mut buffer = [0; 36];
            let transaction = frame.transaction_id(&mut buffer);
            let (queue, name): (&str, &str) = (row.get(2), row.get(1));
            let rest = json!({
                "id": frame.message_id, "transactionId": transaction,
                "txnHash": format!("{:032x}", segment::transaction_hash(transaction)),
                "partitionId": partition, "queuePath": format!("{queue}/{name}"), "queue": queue, "partition": name,
                "namespace": row.get::<_, &str>(3), "task": row.get::<_, &str>(4), "status": status, "queueStatus": status,
                "busStatus": {"consumedBy": if status == "completed" { state.named } else { 0 }, "totalGroups": state.named},
                "traceId": frame.trace_id, "producerSub": frame.producer_sub, "queuePriority": row.get::<_, i32>(5),
                "payloadAvailable": true, "segment": {"seq": base, "frameIdx": n},
                "createdAt": time::format_micros(row.get::<_, Micros>(8).0),
                "leaseExpiresAt": state.lease.map(|at| time::format_micros(at.0)),
                "isEncrypted": false,
            });
            messages.push(spliced(&rest, &[("data", frame.payload), ("payload", frame.payload)]));
            if messages.len() == asked.limit {
                break 'rows;
            }
        }
    }
    let rest = json!({
        "total": messages.len(),
        "mode": {"hasQueueMode": kind == "queue" || kind == "hybrid", "busGroupsCount": named, "type": kind},
    });
    Ok(spliced(&rest, &[("messages", listed(&messages).as_bytes())]))
}

fn states(conn: &mut Conn, partitions: &[Uuid]) -> Result<HashMap<Uuid, State>, StoreError> {
    let rows = conn.query(
        "SELECT k.partition_id, count(*) FILTER (WHERE k.group_name <> '__QUEUE_MODE__'),
                min(k.committed) FILTER (WHERE k.group_name <> '__QUEUE_MODE__'),
                max(k.committed) FILTER (WHERE k.group_name = '__QUEUE_MODE__'),
                max(k.lease_expires_at) FILTER (WHERE k.lease_expires_at > clock_timestamp())
         FROM consumer_cursor k WHERE k.partition_id = ANY ($1) GROUP BY k.partition_id",
        &[&partitions],
    )?;
    Ok(rows
        .iter()
        .map(|row| {
            let state =
                State { named: row.get(1), named_min: row.get(2), queue_mode: row.get(3), lease: row.get(4) };
            (row.get(0), state)
        })
        .collect())
}

fn dead_offsets(conn: &mut Conn, partitions: &[Uuid]) -> Result<HashMap<(Uuid, i64), ()>, StoreError> {
    let rows = conn.query(
        "SELECT partition_id, message_offset FROM dead_letter WHERE partition_id = ANY ($1)
         ORDER BY failed_at DESC LIMIT 100000",
        &[&partitions],
    )?;
    Ok(rows.iter().map(|row| ((row.get(0), row.get(1)), ())).collect())
}

/// Which dead letters are meant.
#[derive(Default)]
pub struct DeadFilter<'a> {
    /// Of this queue.
    pub queue: Option<&'a str>,
    /// Of this group.
    pub group: Option<&'a str>,
    /// Of this partition, by name.
    pub partition: Option<&'a str>,
    /// That failed at or after this time.
    pub from: Option<Micros>,
    /// That failed before this time.
    pub to: Option<Micros>,
    /// Of this message: its partition and transaction id.
    pub message: Option<(Uuid, &'a str)>,
    /// At most so many, oldest first.
    pub limit: i64,
}

/// The condition of a [`DeadFilter`], and how its parameters are numbered.
const DEAD: &str = "($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR d.group_name = $2)
    AND ($3::text IS NULL OR p.name = $3) AND ($4::timestamptz IS NULL OR d.failed_at >= $4)
    AND ($5::timestamptz IS NULL OR d.failed_at < $5) AND ($6::uuid IS NULL OR d.partition_id = $6)
    AND ($7::bytea IS NULL OR d.transaction_hash = $7)";

/// A dead letter, to be pushed again.
pub struct Dead {
    /// The row.
    pub id: Uuid,
    /// Its queue.
    pub queue: String,
    /// Its partition.
    pub partition: String,
    /// Its trace id.
    pub trace_id: Option<Uuid>,
    /// The payload, byte for byte.
    pub payload: Vec<u8>,
}

/// Locks dead letters until the transaction ends, and returns them.
pub fn lock_dead(conn: &mut Conn, f: &DeadFilter<'_>) -> Result<Vec<Dead>, StoreError> {
    let sql = format!(
        "SELECT d.id, q.name, p.name, d.trace_id, d.payload
         FROM dead_letter d JOIN partition p ON p.id = d.partition_id JOIN queue q ON q.id = p.queue_id
         WHERE {DEAD} ORDER BY d.failed_at, d.id LIMIT $8 FOR UPDATE OF d"
    );
    let partition = f.message.map(|(partition, _)| partition);
    let hash = f.message.map(|(_, id)| segment::transaction_hash(id).to_be_bytes().to_vec());
    let rows = conn.run(|client| {
        client.query(&sql, &[&f.queue, &f.group, &f.partition, &f.from, &f.to, &partition, &hash, &f.limit])
    })?;
    Ok(rows
        .iter()
        .map(|row| Dead {
            id: row.get(0),
            queue: row.get(1),
            partition: row.get(2),
            trace_id: row.get(3),
            payload: row.get(4),
        })
        .collect())
}

/// Deletes dead letters by id.
pub fn delete_dead(conn: &mut Conn, ids: &[Uuid]) -> Result<i64, StoreError> {
    let rows = conn.query(
        "WITH d AS (DELETE FROM dead_letter WHERE id = ANY ($1) RETURNING 1) SELECT count(*) FROM d",
        &[&ids],
    )?;
    Ok(rows[0].get(0))
}
