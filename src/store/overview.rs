//! What operators look at first: the whole broker in numbers. What is not measured is null.

use serde_json::{Value, json};
use uuid::Uuid;

use super::{Conn, StoreError};

/// Per partition, in one pass over the cursors: retained, behind the slowest group, inside live leases.
const COUNTS: &str = "
    SELECT p.id, p.queue_id, p.name, p.start_offset, p.next_offset - p.start_offset AS total,
           p.next_offset - 1 - greatest(coalesce(k.named, k.queue_mode, p.start_offset - 1), p.start_offset - 1) AS pending,
           coalesce(k.processing, 0)::bigint AS processing
    FROM partition p
    LEFT JOIN (
        SELECT k.partition_id,
               min(k.committed) FILTER (WHERE k.group_name <> '__QUEUE_MODE__') AS named,
               max(k.committed) FILTER (WHERE k.group_name = '__QUEUE_MODE__') AS queue_mode,
               sum(CASE WHEN k.lease_expires_at > clock_timestamp() THEN greatest(k.batch_end - k.committed, 0) ELSE 0 END) AS processing
        FROM consumer_cursor k GROUP BY k.partition_id) k ON k.partition_id = p.id";

/// Counts of everything.
pub fn overview(conn: &mut Conn) -> Result<Value, StoreError> {
    let sql = format!(
        "SELECT (SELECT count(*) FROM queue), count(*), (SELECT count(DISTINCT namespace) FROM queue),
                (SELECT count(DISTINCT task) FROM queue WHERE task <> ''),
                coalesce(sum(x.total), 0)::bigint, coalesce(sum(x.pending), 0)::bigint, coalesce(sum(x.processing), 0)::bigint,
                (SELECT count(*) FROM dead_letter),
                avg(x.pending) FILTER (WHERE x.pending > 0)::float8, min(x.pending) FILTER (WHERE x.pending > 0),
                max(x.pending), percentile_cont(0.5) WITHIN GROUP (ORDER BY x.pending) FILTER (WHERE x.pending > 0)
         FROM ({COUNTS}) x"
    );
    let rows = conn.run(|client| {
        // The session of the data plane shuns hash joins; over everything they are right.
        let mut transaction = client.transaction()?;
        transaction.batch_execute("SET LOCAL enable_hashjoin = on; SET LOCAL enable_seqscan = on")?;
        let rows = transaction.query(&sql, &[])?;
        transaction.commit()?;
        Ok(rows)
    })?;
    let r = &rows[0];
    let (total, pending): (i64, i64) = (r.get(4), r.get(5));
    Ok(json!({
        "queues": r.get::<_, i64>(0), "partitions": r.get::<_, i64>(1), "namespaces": r.get::<_, i64>(2),
        "tasks": r.get::<_, i64>(3),
        "messages": {"total": total, "pending": pending, "processing": r.get::<_, i64>(6), "completed": total - pending,
            "failed": null, "deadLetter": r.get::<_, i64>(7)},
        "lag": {
            "time": {"avg": null, "median": null, "min": null, "max": null},
            "offset": {"avg": r.get::<_, Option<f64>>(8), "median": r.get::<_, Option<f64>>(11),
                "min": r.get::<_, Option<i64>>(9), "max": r.get::<_, Option<i64>>(10)},
        },
        "throughput": {"ingestedPerSecond": null, "processedPerSecond": null},
        "statsAge": 0,
    }))
}

/// Queues by namespace, or by task.
pub fn grouped(conn: &mut Conn, by_task: bool, limit: i64, offset: i64) -> Result<Value, StoreError> {
    let column = if by_task { "task" } else { "namespace" };
    let sql = format!(
        "SELECT q.{column}, count(DISTINCT q.id), count(x.id), coalesce(sum(x.total), 0)::bigint, coalesce(sum(x.pending), 0)::bigint
         FROM queue q LEFT JOIN ({COUNTS}) x ON x.queue_id = q.id
         WHERE q.{column} <> '' GROUP BY q.{column} ORDER BY q.{column} LIMIT $1 OFFSET $2"
    );
    let rows = conn.run(|client| client.query(&sql, &[&limit, &offset]))?;
    let all: Vec<Value> = rows
        .iter()
        .map(|r| {
            json!({column: r.get::<_, &str>(0), "queues": r.get::<_, i64>(1), "partitions": r.get::<_, i64>(2),
                "messages": {"total": r.get::<_, i64>(3), "pending": r.get::<_, i64>(4)}})
        })
        .collect();
    Ok(if by_task { json!({"tasks": all}) } else { json!({"namespaces": all}) })
}

/// The partitions with the most pending messages, of one queue or of all.
pub fn busiest(conn: &mut Conn, queue: Option<&str>, limit: i64) -> Result<Value, StoreError> {
    let sql = format!(
        "SELECT q.name, y.name, y.id, y.pending, y.processing, extract(epoch FROM clock_timestamp() - s.created_at)::float8
         FROM (SELECT x.* FROM ({COUNTS}) x JOIN queue q ON q.id = x.queue_id
               WHERE ($1::text IS NULL OR q.name = $1) AND x.pending > 0 ORDER BY x.pending DESC, x.id LIMIT $2) y
         JOIN queue q ON q.id = y.queue_id
         LEFT JOIN LATERAL (
             SELECT s.created_at FROM segment s WHERE s.partition_id = y.id
               AND s.base_offset >= coalesce((SELECT max(h.base_offset) FROM segment h
                   WHERE h.partition_id = y.id AND h.base_offset <= y.start_offset + y.total - y.pending), 0)
             ORDER BY s.base_offset LIMIT 1) s ON true
         ORDER BY y.pending DESC, y.id"
    );
    let rows = conn.run(|client| client.query(&sql, &[&queue, &limit]))?;
    let partitions: Vec<Value> = rows
        .iter()
        .map(|r| {
            json!({"queue": r.get::<_, &str>(0), "partition": r.get::<_, &str>(1), "id": r.get::<_, Uuid>(2),
                "pending": r.get::<_, i64>(3), "processing": r.get::<_, i64>(4),
                "lagSeconds": r.get::<_, Option<f64>>(5).map(|seconds| seconds.max(0.0) as i64)})
        })
        .collect();
    Ok(json!({"partitions": partitions}))
}

/// Leases, consumption and dead letters, for the status page.
pub fn activity(conn: &mut Conn) -> Result<Value, StoreError> {
    let rows = conn.query(
        "SELECT count(*) FILTER (WHERE lease_expires_at > clock_timestamp()),
                coalesce(sum(batch_end - committed) FILTER (WHERE lease_expires_at > clock_timestamp()), 0)::bigint,
                coalesce(sum(consumed), 0)::bigint
         FROM consumer_cursor",
        &[],
    )?;
    let errors = conn.query(
        "SELECT error, count(*), (SELECT count(*) FROM dead_letter), (SELECT count(DISTINCT partition_id) FROM dead_letter)
         FROM dead_letter GROUP BY error ORDER BY count(*) DESC, error LIMIT 10",
        &[],
    )?;
    let queues = conn.query(
        "SELECT q.id, q.name, q.namespace, q.task, count(DISTINCT p.id), coalesce(sum(k.consumed), 0)::bigint
         FROM (SELECT * FROM queue ORDER BY name LIMIT 100) q
         LEFT JOIN partition p ON p.queue_id = q.id LEFT JOIN consumer_cursor k ON k.partition_id = p.id
         GROUP BY q.id, q.name, q.namespace, q.task ORDER BY q.name",
        &[],
    )?;
    let queues: Vec<Value> = queues
        .iter()
        .map(|r| {
            json!({"id": r.get::<_, Uuid>(0), "name": r.get::<_, &str>(1), "namespace": r.get::<_, &str>(2),
                "task": r.get::<_, &str>(3), "partitions": r.get::<_, i64>(4), "totalConsumed": r.get::<_, i64>(5)})
        })
        .collect();
    let active: i64 = rows[0].get(0);
    let dead = errors.first().map_or(0, |row| row.get::<_, i64>(2));
    let top: Vec<Value> = errors
        .iter()
        .map(|row| json!({"error": row.get::<_, &str>(0), "count": row.get::<_, i64>(1)}))
        .collect();
    Ok(json!({
        "queues": queues,
        "leases": {"active": active, "partitionsWithLeases": active, "totalBatchSize": rows[0].get::<_, i64>(1),
            "totalAcked": rows[0].get::<_, i64>(2)},
        "deadLetterQueue": {"totalMessages": dead, "currentMessages": dead,
            "affectedPartitions": errors.first().map_or(0, |row| row.get::<_, i64>(3)), "topErrors": top},
    }))
}
