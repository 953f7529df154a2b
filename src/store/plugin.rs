//! Plugin bindings, trimming claims, and what selectors are told.

use std::collections::HashMap;

use uuid::Uuid;

use super::ack::Snapshot;
use super::{Conn, Micros, StoreError};
use crate::broker::plugin::{Binding, Kind};

/// A claim as its filter left it.
pub struct Trimmed {
    /// The partition.
    pub partition: Uuid,
    /// The group.
    pub group: String,
    /// The lease.
    pub lease: Uuid,
    /// The new cursor.
    pub committed: i64,
    /// Last offset that stays leased; `None`: no lease stays.
    pub end: Option<i64>,
    /// Last offset that had been claimed.
    pub claimed: i64,
    /// What goes to the dead letters.
    pub dead_letters: Vec<Snapshot>,
}

/// What became of a trim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrimVerdict {
    /// It is done.
    Trimmed,
    /// The lease was over: nothing was changed.
    Lost,
    /// The row is locked elsewhere: nothing was changed.
    Busy,
}

/// Trims claims in one commit: see `trim_claim` in the migrations. One verdict per
/// claim. Locks the cursor rows; never waits for one.
pub fn trim(conn: &mut Conn, claims: &[&Trimmed]) -> Result<Vec<TrimVerdict>, StoreError> {
    let partition: Vec<Uuid> = claims.iter().map(|c| c.partition).collect();
    let group: Vec<&str> = claims.iter().map(|c| c.group.as_str()).collect();
    let lease: Vec<Uuid> = claims.iter().map(|c| c.lease).collect();
    let committed: Vec<i64> = claims.iter().map(|c| c.committed).collect();
    let end: Vec<Option<i64>> = claims.iter().map(|c| c.end).collect();
    let claimed: Vec<i64> = claims.iter().map(|c| c.claimed).collect();
    let dead: Vec<(i32, &Snapshot)> = claims
        .iter()
        .enumerate()
        .flat_map(|(n, c)| c.dead_letters.iter().map(move |snapshot| (n as i32 + 1, snapshot)))
        .collect();
    let x_item: Vec<i32> = dead.iter().map(|(item, _)| *item).collect();
    let x_offset: Vec<i64> = dead.iter().map(|(_, s)| s.offset).collect();
    let x_id: Vec<Uuid> = dead.iter().map(|_| Uuid::now_v7()).collect();
    let x_message: Vec<Uuid> = dead.iter().map(|(_, s)| s.message_id).collect();
    let x_transaction: Vec<&str> = dead.iter().map(|(_, s)| s.transaction_id.as_str()).collect();
    let x_hash: Vec<&[u8]> = dead.iter().map(|(_, s)| s.hash.as_slice()).collect();
    let x_trace: Vec<Option<Uuid>> = dead.iter().map(|(_, s)| s.trace_id).collect();
    let x_sub: Vec<Option<&str>> = dead.iter().map(|(_, s)| s.producer_sub.as_deref()).collect();
    let x_payload: Vec<&[u8]> = dead.iter().map(|(_, s)| s.payload.as_slice()).collect();
    let x_error: Vec<&str> = dead.iter().map(|(_, s)| s.error.as_str()).collect();
    let x_created: Vec<Micros> = dead.iter().map(|(_, s)| s.created).collect();
    let rows = conn.query(
        "SELECT verdict FROM trim_claim($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)",
        &[
            &partition, &group, &lease, &committed, &end, &claimed, &x_item, &x_offset, &x_id, &x_message,
            &x_transaction, &x_hash, &x_trace, &x_sub, &x_payload, &x_error, &x_created,
        ],
    )?;
    Ok(rows
        .iter()
        .map(|row| match row.get::<_, &str>(0) {
            "trimmed" => TrimVerdict::Trimmed,
            "lost" => TrimVerdict::Lost,
            _ => TrimVerdict::Busy,
        })
        .collect())
}

/// A group's binding in a queue.
pub fn find(conn: &mut Conn, queue: Uuid, group: &str, kind: Kind) -> Result<Option<Binding>, StoreError> {
    let rows = conn.query(
        "SELECT binding FROM plugin_binding WHERE queue_id = $1 AND group_name = $2 AND kind = $3",
        &[&queue, &group, &kind.name()],
    )?;
    Ok(rows.first().and_then(|row| Binding::stored(kind, row.get(0))))
}

/// Sets a group's binding in a queue.
pub fn bind(
    conn: &mut Conn,
    queue: Uuid,
    group: &str,
    kind: Kind,
    binding: &Binding,
) -> Result<(), StoreError> {
    conn.query(
        "WITH c AS (UPDATE catalog SET version = version + 1)
         INSERT INTO plugin_binding (queue_id, group_name, kind, binding) VALUES ($1, $2, $3, $4)
         ON CONFLICT (queue_id, group_name, kind) DO UPDATE SET binding = excluded.binding",
        &[&queue, &group, &kind.name(), &binding.to_json(kind).to_string()],
    )
    .map(|_| ())
}

/// Removes a group's binding in a queue. True if there was one.
pub fn unbind(conn: &mut Conn, queue: Uuid, group: &str, kind: Kind) -> Result<bool, StoreError> {
    let rows = conn.query(
        "WITH c AS (UPDATE catalog SET version = version + 1)
         DELETE FROM plugin_binding WHERE queue_id = $1 AND group_name = $2 AND kind = $3 RETURNING 1",
        &[&queue, &group, &kind.name()],
    )?;
    Ok(!rows.is_empty())
}

/// Binds a filter on a group's first contact with a queue; a group that has read it
/// before keeps what it has. Returns what is bound now.
pub fn register(
    conn: &mut Conn,
    queue: Uuid,
    group: &str,
    binding: &Binding,
) -> Result<Option<Binding>, StoreError> {
    conn.query(
        "WITH b AS (
             INSERT INTO plugin_binding (queue_id, group_name, kind, binding)
             SELECT $1, $2, 'filter', $3
             WHERE NOT EXISTS (SELECT 1 FROM subscription s WHERE s.queue_id = $1 AND s.group_name = $2)
             ON CONFLICT (queue_id, group_name, kind) DO NOTHING RETURNING 1)
         UPDATE catalog SET version = version + 1 WHERE EXISTS (SELECT 1 FROM b)",
        &[&queue, &group, &binding.to_json(Kind::Filter).to_string()],
    )?;
    find(conn, queue, group, Kind::Filter)
}

/// What binds plugins: (plugin, kind, queue, group).
pub fn all_bindings(conn: &mut Conn) -> Result<Vec<(String, Kind, String, Option<String>)>, StoreError> {
    let rows = conn.query(
        "SELECT 'selector', selector, name, NULL FROM queue WHERE selector IS NOT NULL
         UNION ALL SELECT 'filter', filter, name, NULL FROM queue WHERE filter IS NOT NULL
         UNION ALL SELECT b.kind, b.binding, q.name, b.group_name FROM plugin_binding b JOIN queue q ON q.id = b.queue_id
         ORDER BY 3, 4, 1",
        &[],
    )?;
    Ok(rows
        .iter()
        .filter_map(|row| {
            let kind = if row.get::<_, &str>(0) == "filter" { Kind::Filter } else { Kind::Selector };
            let binding = Binding::stored(kind, row.get(1))?;
            Some((binding.plugin, kind, row.get(2), row.get(3)))
        })
        .collect())
}

/// What a selector is told of a partition.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Its name.
    pub name: String,
    /// Age of the oldest unconsumed message in milliseconds.
    pub oldest_age_ms: i64,
    /// Explicit failures charged to the next message.
    pub retries: i32,
    /// Since the group was last given something from it, in milliseconds.
    pub served_age_ms: Option<i64>,
}

/// Facts of partitions for a group; those that are no more are missing. Takes no lock.
pub fn facts(conn: &mut Conn, group: &str, partitions: &[Uuid]) -> Result<HashMap<Uuid, Facts>, StoreError> {
    let rows = conn.query(
        "SELECT p.id, p.name,
                coalesce((extract(epoch FROM clock_timestamp() - s.created_at) * 1000)::bigint, 0),
                CASE WHEN k.retry_offset = k.committed + 1 THEN k.retry_count ELSE 0 END,
                (extract(epoch FROM clock_timestamp() - k.served_at) * 1000)::bigint
         FROM unnest($2::uuid[]) AS i(id)
         JOIN partition p ON p.id = i.id
         LEFT JOIN consumer_cursor k ON k.partition_id = p.id AND k.group_name = $1
         LEFT JOIN LATERAL (
             SELECT s.created_at FROM segment s
             WHERE s.partition_id = p.id
               AND s.base_offset >= coalesce((SELECT max(h.base_offset) FROM segment h
                                              WHERE h.partition_id = p.id AND h.base_offset <= k.committed + 1), 0)
             ORDER BY s.base_offset LIMIT 1) s ON true",
        &[&group, &partitions],
    )?;
    Ok(rows
        .iter()
        .map(|row| {
            let facts = Facts {
                name: row.get(1),
                oldest_age_ms: row.get(2),
                retries: row.get::<_, Option<i32>>(3).unwrap_or(0),
                served_age_ms: row.get(4),
            };
            (row.get(0), facts)
        })
        .collect())
}

/// A retained segment, for a dry run.
pub struct Retained {
    /// When it was committed.
    pub created: Micros,
    /// Packing.
    pub codec: i16,
    /// Packed frames.
    pub data: Vec<u8>,
}

/// The oldest retained messages from a time on, of one partition or of the first ones
/// in name order: segments of about `limit` messages per partition. Takes no lock.
pub fn retained(
    conn: &mut Conn,
    queue: Uuid,
    partition: Option<&str>,
    from: Option<Micros>,
    limit: i64,
) -> Result<Vec<(String, Vec<Retained>)>, StoreError> {
    let rows = conn.query(
        "SELECT p.name, s.created_at, s.codec, s.data
         FROM (SELECT p.id, p.name FROM partition p
               WHERE p.queue_id = $1 AND ($2::text IS NULL OR p.name = $2) ORDER BY p.name LIMIT $4) p
         CROSS JOIN LATERAL (
             SELECT s.created_at, s.codec, s.data, s.base_offset FROM segment s
             WHERE s.partition_id = p.id AND ($3::timestamptz IS NULL OR s.created_at >= $3)
             ORDER BY s.base_offset LIMIT $4) s
         ORDER BY p.name, s.base_offset LIMIT $4",
        &[&queue, &partition, &from, &limit],
    )?;
    let mut found: Vec<(String, Vec<Retained>)> = Vec::new();
    for row in &rows {
        let name: &str = row.get(0);
        if found.last().is_none_or(|(last, _)| last != name) {
            found.push((name.to_owned(), Vec::new()));
        }
        if let Some((_, segments)) = found.last_mut() {
            segments.push(Retained { created: row.get(1), codec: row.get(2), data: row.get(3) });
        }
    }
    Ok(found)
}
