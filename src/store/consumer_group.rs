//! Consumer groups as operators see them: where they are, moving and deleting them.

use serde_json::{Value, json};
use uuid::Uuid;

use super::{Conn, Micros, StoreError};
use crate::broker::time;

/// Partitions of one statement of a seek or a deletion.
const PAGE: i32 = 2_000;
/// A group whose oldest unconsumed message has waited longer is lagging, in seconds.
const LAGGING_SECONDS: f64 = 300.0;

/// Per cursor with a backlog: how many messages, and since when the oldest of them waits.
const CURSORS: &str = "
    SELECT k.group_name, q.name AS queue_name, p.name AS partition_name, p.id AS partition_id, k.consumed,
           p.next_offset - 1 - greatest(k.committed, p.start_offset - 1) AS backlog,
           CASE WHEN k.lease_expires_at > clock_timestamp() THEN k.lease_id END AS lease,
           s.created_at AS oldest, k.served_at
    FROM consumer_cursor k
    JOIN partition p ON p.id = k.partition_id
    JOIN queue q ON q.id = p.queue_id
    LEFT JOIN LATERAL (
        SELECT s.created_at FROM segment s
        WHERE p.next_offset - 1 > k.committed AND s.partition_id = p.id
          AND s.base_offset >= coalesce((SELECT max(h.base_offset) FROM segment h
                                         WHERE h.partition_id = p.id AND h.base_offset <= k.committed + 1), 0)
        ORDER BY s.base_offset LIMIT 1) s ON true";

fn text(at: Option<Micros>) -> Option<String> {
    at.map(|at| time::format_micros(at.0))
}

/// A page of (group, queue)s by group and queue: a row for each.
pub fn list(conn: &mut Conn, limit: i64, offset: i64) -> Result<Value, StoreError> {
    let sql = format!(
        "SELECT x.group_name, x.queue_name, count(*), count(*) FILTER (WHERE x.backlog > 0),
                coalesce(sum(greatest(x.backlog, 0)), 0)::bigint,
                coalesce(extract(epoch FROM clock_timestamp() - min(x.oldest)), 0)::float8, sum(x.consumed)::bigint,
                max(s.mode), max(s.start_at), max(s.created_at)
         FROM ({CURSORS}) x
         LEFT JOIN queue q ON q.name = x.queue_name
         LEFT JOIN subscription s ON s.queue_id = q.id AND s.group_name = x.group_name
         GROUP BY x.group_name, x.queue_name ORDER BY x.group_name, x.queue_name LIMIT $1 OFFSET $2"
    );
    let rows = conn.run(|client| client.query(&sql, &[&limit, &offset]))?;
    let groups: Vec<Value> = rows
        .iter()
        .map(|r| {
            let (queue, cursors, lag, consumed): (&str, i64, f64, i64) = (r.get(1), r.get(2), r.get(5), r.get(6));
            let state = match (lag > LAGGING_SECONDS, consumed > 0) {
                (true, _) => "Lagging",
                (false, true) => "Stable",
                (false, false) => "Dead",
            };
            json!({
                "name": r.get::<_, &str>(0), "topics": [queue], "queueName": queue, "members": cursors,
                "partitionCursors": cursors, "partitionsWithLag": r.get::<_, i64>(3), "totalLag": r.get::<_, i64>(4),
                "maxTimeLag": lag.max(0.0) as i64, "state": state, "storage": "segments",
                "subscriptionMode": r.get::<_, Option<&str>>(7),
                "subscriptionTimestamp": text(r.get::<_, Option<Micros>>(8)),
                "subscriptionCreatedAt": text(r.get::<_, Option<Micros>>(9)),
            })
        })
        .collect();
    Ok(groups.into())
}

/// A group by queue and partition; at most `limit` partitions.
pub fn detail(conn: &mut Conn, group: &str, limit: i64, offset: i64) -> Result<Value, StoreError> {
    let sql = format!(
        "SELECT x.*, coalesce(extract(epoch FROM clock_timestamp() - x.oldest), 0)::float8
         FROM ({CURSORS} WHERE k.group_name = $1) x ORDER BY x.queue_name, x.partition_name LIMIT $2 OFFSET $3"
    );
    let rows = conn.run(|client| client.query(&sql, &[&group, &limit, &offset]))?;
    let mut queues = serde_json::Map::new();
    for r in &rows {
        let of_queue =
            queues.entry(r.get::<_, &str>(1).to_owned()).or_insert_with(|| json!({"partitions": []}));
        let lease: Option<Uuid> = r.get(6);
        let partition = json!({
            "partition": r.get::<_, &str>(2), "workerId": lease, "lastConsumedAt": text(r.get::<_, Option<Micros>>(8)),
            "totalConsumed": r.get::<_, i64>(4), "offsetLag": r.get::<_, i64>(5).max(0),
            "timeLagSeconds": r.get::<_, f64>(9).max(0.0) as i64, "leaseActive": lease.is_some(),
        });
        if let Some(list) = of_queue["partitions"].as_array_mut() {
            list.push(partition);
        }
    }
    Ok(queues.into())
}

/// Cursors whose oldest unconsumed message has waited longer than so many seconds, worst first.
pub fn lagging(conn: &mut Conn, seconds: i64, limit: i64, offset: i64) -> Result<Value, StoreError> {
    let sql = format!(
        "SELECT x.*, extract(epoch FROM clock_timestamp() - x.oldest)::float8
         FROM ({CURSORS}) x WHERE x.oldest < clock_timestamp() - make_interval(secs => $1)
         ORDER BY x.oldest LIMIT $2 OFFSET $3"
    );
    let rows = conn.run(|client| client.query(&sql, &[&(seconds as f64), &limit, &offset]))?;
    let found: Vec<Value> = rows
        .iter()
        .map(|r| {
            let lag: f64 = r.get(9);
            json!({
                "consumer_group": r.get::<_, &str>(0), "queue_name": r.get::<_, &str>(1),
                "partition_name": r.get::<_, &str>(2), "partition_id": r.get::<_, Uuid>(3),
                "worker_id": r.get::<_, Option<Uuid>>(6), "offset_lag": r.get::<_, i64>(5), "time_lag_seconds": lag as i64,
                "lag_hours": (lag / 36.0).round() / 100.0, "oldest_unconsumed_at": text(r.get::<_, Option<Micros>>(7)),
                "last_consumed_at": text(r.get::<_, Option<Micros>>(8)),
            })
        })
        .collect();
    Ok(found.into())
}

/// Moves a group in a queue, or in one of its partitions: to the end, or (`at`) to a
/// time. In pages, each a commit of its own. Returns how many partitions there were.
pub fn seek(
    conn: &mut Conn,
    queue: Uuid,
    group: &str,
    partition: Option<Uuid>,
    at: Option<Micros>,
) -> Result<i64, StoreError> {
    let (mut after, mut moved): (Option<Uuid>, i64) = (None, 0);
    loop {
        let rows = conn.query(
            "SELECT last_id, seen FROM seek($1, $2, $3, $4, $5, $6)",
            &[&queue, &group, &partition, &at, &after, &PAGE],
        )?;
        let seen: i64 = rows[0].get(1);
        after = rows[0].get(0);
        moved += seen;
        if seen < i64::from(PAGE) {
            return Ok(moved);
        }
    }
}

/// Deletes a group's cursors in a queue (`None`: in all), in pages, and with `metadata` its
/// subscriptions and plugin bindings. Returns the cursors deleted, and whether there was metadata.
pub fn delete(
    conn: &mut Conn,
    queue: Option<Uuid>,
    group: &str,
    metadata: bool,
) -> Result<(i64, bool), StoreError> {
    let mut deleted = 0;
    // The subscription goes first: nobody makes cursors from it meanwhile.
    let mut had = false;
    if metadata {
        let rows = conn.query(
            "WITH s AS (DELETE FROM subscription WHERE group_name = $1 AND ($2::uuid IS NULL OR queue_id = $2) RETURNING 1),
                  b AS (DELETE FROM plugin_binding WHERE group_name = $1 AND ($2::uuid IS NULL OR queue_id = $2) RETURNING 1),
                  c AS (UPDATE catalog SET version = version + 1 WHERE EXISTS (SELECT 1 FROM b))
             SELECT (SELECT count(*) FROM s) + (SELECT count(*) FROM b)",
            &[&group, &queue],
        )?;
        had = rows.first().is_some_and(|row| row.get::<_, i64>(0) > 0);
    }
    loop {
        let rows = conn.query("SELECT delete_cursors($1, $2, $3)", &[&queue, &group, &PAGE])?;
        let n: i64 = rows[0].get(0);
        deleted += n;
        if n < i64::from(PAGE) {
            return Ok((deleted, had));
        }
    }
}

/// Sets where a group starts in partitions that it will meet from now on. Returns how many
/// subscriptions there were.
pub fn set_subscription(conn: &mut Conn, group: &str, at: Micros) -> Result<i64, StoreError> {
    let rows = conn.query(
        "WITH u AS (UPDATE subscription SET mode = 'time', start_at = $2 WHERE group_name = $1 RETURNING 1)
         SELECT count(*) FROM u",
        &[&group, &at],
    )?;
    Ok(rows[0].get(0))
}
