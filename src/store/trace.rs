//! Traces: a consumer's own notes on messages.

use serde_json::{Value, json};
use uuid::Uuid;

use super::{Conn, Micros, StoreError};
use crate::broker::{segment, time};

/// A trace to record.
pub struct Trace<'a> {
    /// The message's partition.
    pub partition: Uuid,
    /// The message's transaction id.
    pub transaction_id: &'a str,
    /// Who writes.
    pub group: Option<&'a str>,
    /// A word for what happened.
    pub event_type: &'a str,
    /// JSON.
    pub data: &'a str,
    /// Names by which it is found.
    pub names: &'a [String],
}

/// Records a trace; its id.
pub fn record(conn: &mut Conn, trace: &Trace<'_>) -> Result<Uuid, StoreError> {
    let id = Uuid::now_v7();
    let hash = segment::transaction_hash(trace.transaction_id).to_be_bytes();
    conn.query(
        "INSERT INTO message_trace (id, partition_id, transaction_id, transaction_hash, group_name, event_type, data, names)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        &[&id, &trace.partition, &trace.transaction_id, &hash.as_slice(), &trace.group, &trace.event_type, &trace.data, &trace.names],
    )?;
    Ok(id)
}

fn shown(row: &postgres::Row) -> Value {
    let data: &str = row.get(2);
    json!({
        "id": row.get::<_, Uuid>(0), "event_type": row.get::<_, &str>(1),
        "data": serde_json::from_str(data).unwrap_or_else(|_| Value::String(data.to_owned())),
        "consumer_group": row.get::<_, Option<&str>>(3), "worker_id": null,
        "created_at": time::format_micros(row.get::<_, Micros>(4).0), "trace_names": row.get::<_, Vec<String>>(5),
    })
}

/// The traces of a message, oldest first.
pub fn of_message(
    conn: &mut Conn,
    partition: Uuid,
    transaction_id: &str,
    limit: i64,
) -> Result<Value, StoreError> {
    let hash = segment::transaction_hash(transaction_id).to_be_bytes();
    let rows = conn.query(
        "SELECT id, event_type, data, group_name, created_at, names FROM message_trace
         WHERE partition_id = $1 AND transaction_hash = $2 ORDER BY created_at, id LIMIT $3",
        &[&partition, &hash.as_slice(), &limit],
    )?;
    Ok(json!({"traces": rows.iter().map(shown).collect::<Vec<_>>()}))
}

/// A page of the traces with a name, newest first.
pub fn by_name(conn: &mut Conn, name: &str, limit: i64, offset: i64) -> Result<Value, StoreError> {
    let rows = conn.query(
        "SELECT t.id, t.event_type, t.data, t.group_name, t.created_at, t.names, t.transaction_id, t.partition_id, q.name,
                p.name, count(*) OVER ()
         FROM message_trace t LEFT JOIN partition p ON p.id = t.partition_id LEFT JOIN queue q ON q.id = p.queue_id
         WHERE t.names @> ARRAY[$1::text] ORDER BY t.created_at DESC, t.id DESC LIMIT $2 OFFSET $3",
        &[&name, &limit, &offset],
    )?;
    let traces: Vec<Value> = rows
        .iter()
        .map(|row| {
            let mut trace = shown(row);
            trace["transaction_id"] = row.get::<_, &str>(6).into();
            trace["partition_id"] = json!(row.get::<_, Uuid>(7));
            trace["queue_name"] = row.get::<_, Option<&str>>(8).into();
            trace["partition_name"] = row.get::<_, Option<&str>>(9).into();
            trace["message_payload"] = Value::Null;
            trace
        })
        .collect();
    let total: i64 = rows.first().map_or(0, |row| row.get(10));
    Ok(json!({"traces": traces, "total": total, "pagination": {"limit": limit, "offset": offset}}))
}

/// A page of the names, the one used last first.
pub fn names(conn: &mut Conn, limit: i64, offset: i64) -> Result<Value, StoreError> {
    let rows = conn.query(
        "SELECT n.name, count(*), count(DISTINCT (t.partition_id, t.transaction_hash)), max(t.created_at), count(*) OVER ()
         FROM message_trace t CROSS JOIN LATERAL unnest(t.names) AS n(name)
         GROUP BY n.name ORDER BY max(t.created_at) DESC, n.name LIMIT $1 OFFSET $2",
        &[&limit, &offset],
    )?;
    let names: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({"trace_name": row.get::<_, &str>(0), "trace_count": row.get::<_, i64>(1),
                "message_count": row.get::<_, i64>(2), "last_seen": time::format_micros(row.get::<_, Micros>(3).0)})
        })
        .collect();
    let total: i64 = rows.first().map_or(0, |row| row.get(4));
    Ok(json!({"trace_names": names, "total": total, "pagination": {"limit": limit, "offset": offset}}))
}
