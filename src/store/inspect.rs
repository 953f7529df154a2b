//! What operators look at: queues, partitions, messages, dead letters.

use serde_json::{Value, json};
use uuid::Uuid;

use super::{Conn, Micros, StoreError};
use crate::broker::pop::QUEUE_MODE;
use crate::broker::segment;
use crate::broker::time;

/// Per partition: retained, behind the slowest group, inside live leases, done, dead letters.
///
/// Named groups decide what is pending where there are any, so that an abandoned
/// queue-mode cursor neither hides nor invents a backlog.
const PARTITION_STATS: &str = "
    SELECT p.id, p.name, p.created_at, p.last_at, p.next_offset - p.start_offset AS total,
           p.next_offset - 1 - greatest(coalesce(k.named, k.queue_mode, p.start_offset - 1), p.start_offset - 1) AS pending,
           coalesce(k.processing, 0)::bigint AS processing,
           (SELECT count(*) FROM dead_letter d WHERE d.partition_id = p.id) AS dead,
           (SELECT s.created_at FROM segment s WHERE s.partition_id = p.id ORDER BY s.base_offset LIMIT 1) AS oldest,
           s.segments, s.messages, s.bytes
    FROM partition p
    CROSS JOIN LATERAL (
        SELECT min(k.committed) FILTER (WHERE k.group_name <> '__QUEUE_MODE__') AS named,
               max(k.committed) FILTER (WHERE k.group_name = '__QUEUE_MODE__') AS queue_mode,
               sum(CASE WHEN k.lease_expires_at > clock_timestamp()
                   THEN greatest(k.batch_end - greatest(k.committed, p.start_offset - 1), 0) ELSE 0 END) AS processing
        FROM consumer_cursor k WHERE k.partition_id = p.id) k
    CROSS JOIN LATERAL (
        SELECT count(*) AS segments, coalesce(sum(s.count), 0)::bigint AS messages,
               coalesce(sum(s.raw_bytes), 0)::bigint AS bytes
        FROM segment s WHERE s.partition_id = p.id) s";

fn text(at: Micros) -> String {
    time::format_micros(at.0)
}

/// A page of queues by name, with their counts.
pub fn queues(conn: &mut Conn, limit: i64, offset: i64) -> Result<Value, StoreError> {
    let sql = format!(
        "SELECT q.id, q.name, q.namespace, q.task, q.created_at, count(x.id), coalesce(sum(x.bytes), 0)::bigint,
                coalesce(sum(x.total), 0)::bigint, coalesce(sum(x.pending), 0)::bigint,
                coalesce(sum(x.processing), 0)::bigint, coalesce(sum(x.segments), 0)::bigint,
                coalesce(sum(x.messages), 0)::bigint
         FROM (SELECT * FROM queue ORDER BY name LIMIT $1 OFFSET $2) q
         LEFT JOIN LATERAL ({PARTITION_STATS} WHERE p.queue_id = q.id) x ON true
         GROUP BY q.id, q.name, q.namespace, q.task, q.created_at ORDER BY q.name"
    );
    let rows = conn.run(|client| client.query(&sql, &[&limit, &offset]))?;
    let queues: Vec<Value> = rows
        .iter()
        .map(|r| {
            json!({
                "id": r.get::<_, Uuid>(0), "name": r.get::<_, &str>(1), "namespace": r.get::<_, &str>(2),
                "task": r.get::<_, &str>(3), "createdAt": text(r.get(4)), "partitions": r.get::<_, i64>(5),
                "retainedBytes": r.get::<_, i64>(6),
                "messages": {"total": r.get::<_, i64>(7), "pending": r.get::<_, i64>(8), "processing": r.get::<_, i64>(9)},
                "segments": {"segments": r.get::<_, i64>(10), "messages": r.get::<_, i64>(11)},
            })
        })
        .collect();
    Ok(json!({"queues": queues}))
}

/// One queue with a page of its partitions; `None` if there is no such queue. The
/// totals are the whole queue's.
pub fn queue(conn: &mut Conn, name: &str, limit: i64, offset: i64) -> Result<Option<Value>, StoreError> {
    let Some(found) = super::queue::find(conn, name)? else { return Ok(None) };
    let sql = format!("{PARTITION_STATS} WHERE p.queue_id = $1 ORDER BY p.name");
    let rows = conn.run(|client| client.query(&sql, &[&found.id]))?;
    let sum = |column: usize| rows.iter().map(|row| row.get::<_, i64>(column)).sum::<i64>();
    let (total, pending) = (sum(4), sum(5));
    let page = rows.iter().skip(offset as usize).take(limit as usize);
    let partitions: Vec<Value> = page
        .map(|r| {
            let (total, pending): (i64, i64) = (r.get(4), r.get(5));
            let newest = (total > 0).then(|| text(r.get(3)));
            json!({
                "id": r.get::<_, Uuid>(0), "name": r.get::<_, &str>(1), "createdAt": text(r.get(2)),
                "stats": {"total": total, "pending": pending, "processing": r.get::<_, i64>(6),
                          "completed": total - pending, "failed": null, "deadLetter": r.get::<_, i64>(7)},
                "oldestMessage": r.get::<_, Option<Micros>>(8).map(text), "newestMessage": newest,
            })
        })
        .collect();
    Ok(Some(json!({
        "id": found.id, "name": name, "namespace": found.namespace, "task": found.task, "createdAt": text(found.created),
        "options": found.options_json(), "partitions": partitions,
        "totals": {"total": total, "pending": pending, "processing": sum(6), "completed": total - pending,
                   "failed": null, "deadLetter": sum(7)},
        "retainedBytes": sum(11), "segments": {"segments": sum(9), "messages": sum(10)},
    })))
}

/// What of the dead letters is asked for.
pub struct DeadLetters<'a> {
    /// Of this queue only.
    pub queue: Option<&'a str>,
    /// Of this group only.
    pub group: Option<&'a str>,
    /// Of this partition only, by name.
    pub partition: Option<&'a str>,
    /// Page size.
    pub limit: i64,
    /// Rows to pass over.
    pub offset: i64,
}

/// A page of dead letters, newest first, and how many there are.
pub fn dead_letters(conn: &mut Conn, asked: &DeadLetters<'_>) -> Result<String, StoreError> {
    let rows = conn.query(
        "SELECT d.message_id, d.transaction_id, d.partition_id, q.name, p.name, d.group_name, d.error, d.retry_count,
                d.payload, d.producer_sub, d.created_at, d.failed_at, count(*) OVER ()
         FROM dead_letter d JOIN partition p ON p.id = d.partition_id JOIN queue q ON q.id = p.queue_id
         WHERE ($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR d.group_name = $2)
           AND ($3::text IS NULL OR p.name = $3)
         ORDER BY d.failed_at DESC, d.id DESC LIMIT $4 OFFSET $5",
        &[&asked.queue, &asked.group, &asked.partition, &asked.limit, &asked.offset],
    )?;
    let total: i64 = rows.first().map_or(0, |row| row.get(12));
    let messages: Vec<String> = rows
        .iter()
        .map(|r| {
            let rest = json!({
                "id": r.get::<_, Uuid>(0), "transactionId": r.get::<_, &str>(1), "partitionId": r.get::<_, Uuid>(2),
                "queue": r.get::<_, &str>(3), "partition": r.get::<_, &str>(4), "consumerGroup": r.get::<_, &str>(5),
                "errorMessage": r.get::<_, &str>(6), "retryCount": r.get::<_, i32>(7),
                "producerSub": r.get::<_, Option<&str>>(9),
                "createdAt": text(r.get(10)), "failedAt": text(r.get(11)),
            });
            spliced(&rest, &[("data", r.get(8))])
        })
        .collect();
    let rest = json!({"pagination": {"limit": asked.limit, "offset": asked.offset}, "total": total});
    Ok(spliced(&rest, &[("messages", listed(&messages).as_bytes())]))
}

/// The text of an object with more members, whose values are JSON as it was pushed: a
/// parsed number would not come out digit for digit.
pub fn spliced(object: &Value, members: &[(&str, &[u8])]) -> String {
    let mut out = object.to_string();
    for (key, value) in members {
        let closing = out.pop();
        debug_assert_eq!(closing, Some('}'));
        out.push_str(&format!("{}\"{key}\":", if out.ends_with('{') { "" } else { "," }));
        out.push_str(&String::from_utf8_lossy(value));
        out.push('}');
    }
    out
}

/// The text of an array.
pub fn listed(elements: &[String]) -> String {
    format!("[{}]", elements.join(","))
}

/// One message with its state for every group; `None` if it is not retained. The newest
/// with this transaction id.
pub fn message(conn: &mut Conn, partition: Uuid, transaction_id: &str) -> Result<Option<String>, StoreError> {
    let hash = segment::transaction_hash(transaction_id);
    let rows = conn.query(
        "SELECT s.base_offset, s.created_at, s.codec, s.data, s.hashes
         FROM segment s WHERE s.partition_id = $1 AND position($2 IN s.hashes) > 0
         ORDER BY s.base_offset DESC LIMIT 8",
        &[&partition, &hash.to_be_bytes().as_slice()],
    )?;
    let found = rows.iter().find_map(|row| {
        let position = segment::hashes_of(row.get(4)).collect::<Vec<_>>().iter().rposition(|h| *h == hash)?;
        Some((row, position))
    });
    let Some((row, position)) = found else { return Ok(None) };
    let (offset, data): (i64, &[u8]) = (row.get::<_, i64>(0) + position as i64, row.get(3));
    let corrupt = |error: segment::CorruptSegment| StoreError::Statement {
        code: "XX001".into(),
        message: error.to_string(),
    };
    let raw = segment::unpack(row.get(2), data).map_err(corrupt)?;
    let mut frames = segment::frames(&raw);
    frames.skip_frames(position);
    let Some(frame) = frames.next().transpose().map_err(corrupt)? else { return Ok(None) };
    let of = conn.query(
        "SELECT q.name, q.namespace, q.task, p.name, q.lease_time, q.retry_limit, q.retry_delay, q.ttl, q.priority
         FROM partition p JOIN queue q ON q.id = p.queue_id WHERE p.id = $1",
        &[&partition],
    )?;
    let Some(of) = of.first() else { return Ok(None) };
    let cursors = conn.query(
        "SELECT k.group_name, k.committed >= $2, CASE WHEN k.lease_expires_at > clock_timestamp() THEN k.lease_expires_at END
         FROM consumer_cursor k WHERE k.partition_id = $1 ORDER BY k.group_name",
        &[&partition, &offset],
    )?;
    let dead = conn.query(
        "SELECT error, retry_count FROM dead_letter WHERE partition_id = $1 AND message_offset = $2
         ORDER BY failed_at DESC LIMIT 1",
        &[&partition, &offset],
    )?;
    let is_named = |row: &&postgres::Row| row.get::<_, &str>(0) != QUEUE_MODE;
    let named = cursors.iter().filter(is_named).count();
    let has_queue_mode = named < cursors.len();
    let deciding: Vec<&postgres::Row> =
        if named > 0 { cursors.iter().filter(is_named).collect() } else { cursors.iter().collect() };
    let leased = cursors.iter().find_map(|row| row.get::<_, Option<Micros>>(2));
    let status = if !dead.is_empty() {
        "dead_letter"
    } else if !deciding.is_empty() && deciding.iter().all(|row| row.get(1)) {
        "completed"
    } else if leased.is_some() {
        "processing"
    } else {
        "pending"
    };
    let (queue, name): (&str, &str) = (of.get(0), of.get(3));
    let groups: Vec<Value> = cursors
        .iter()
        .map(|row| {
            let group: &str = row.get(0);
            json!({"name": group, "group": group, "consumed": row.get::<_, bool>(1),
                   "leaseExpiresAt": row.get::<_, Option<Micros>>(2).map(text)})
        })
        .collect();
    let kind = match (has_queue_mode, named) {
        (true, 0) => "queue",
        (true, _) => "hybrid",
        (false, 0) => "none",
        (false, _) => "bus",
    };
    let rest = json!({
        "id": frame.message_id, "transactionId": transaction_id,
        "traceId": frame.trace_id, "producerSub": frame.producer_sub, "createdAt": text(row.get(1)),
        "partitionId": partition, "partition": name, "isEncrypted": false, "queue": queue,
        "queuePath": format!("{queue}/{name}"), "namespace": of.get::<_, &str>(1), "task": of.get::<_, &str>(2),
        "status": status, "errorMessage": dead.first().map(|row| row.get::<_, String>(0)),
        "retryCount": dead.first().map_or(0, |row| row.get::<_, i32>(1)),
        "leaseExpiresAt": leased.map(text),
        "queueConfig": {"leaseTime": of.get::<_, i32>(4), "retryLimit": of.get::<_, i32>(5),
                        "retryDelay": of.get::<_, i32>(6), "ttl": of.get::<_, i32>(7), "priority": of.get::<_, i32>(8)},
        "mode": {"hasQueueMode": has_queue_mode, "busGroupsCount": named, "type": kind},
        "consumerGroups": groups,
    });
    Ok(Some(spliced(&rest, &[("data", frame.payload), ("payload", frame.payload)])))
}
