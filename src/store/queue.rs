//! Queues as operators see them: options, making, deleting.

use uuid::Uuid;

use super::{Conn, Micros, StoreError};
use crate::broker::plugin::{Binding, Kind};
use crate::broker::queue_options::QueueOptions;

/// A queue with its options.
#[derive(Debug, Clone)]
pub struct Queue {
    /// Its id.
    pub id: Uuid,
    /// Its namespace.
    pub namespace: String,
    /// Its task.
    pub task: String,
    /// When it was made.
    pub created: Micros,
    /// Its options.
    pub options: QueueOptions,
    /// Its selector.
    pub selector: Option<Binding>,
    /// Its filter.
    pub filter: Option<Binding>,
}

impl Queue {
    /// All options by their names on the wire.
    pub fn options_json(&self) -> serde_json::Value {
        options_json(&self.options, self.selector.as_ref(), self.filter.as_ref())
    }
}

/// All options and bindings by their names on the wire.
pub fn options_json(
    options: &QueueOptions,
    selector: Option<&Binding>,
    filter: Option<&Binding>,
) -> serde_json::Value {
    let mut json = options.to_json();
    json["selector"] = selector.map_or(serde_json::Value::Null, |binding| binding.to_json(Kind::Selector));
    json["filter"] = filter.map_or(serde_json::Value::Null, |binding| binding.to_json(Kind::Filter));
    json
}

/// Finds a queue.
pub fn find(conn: &mut Conn, name: &str) -> Result<Option<Queue>, StoreError> {
    let rows = conn.query(
        "SELECT id, namespace, task, lease_time, retry_limit, dead_letter_queue, dlq_after_max_retries,
                delayed_processing, window_buffer, min_pop_wait_time, retention_enabled, retention_seconds,
                completed_retention_seconds, max_wait_time_seconds, dedup_window_seconds, encryption_enabled,
                priority, ttl, max_size, retry_delay, created_at, selector, filter
         FROM queue WHERE name = $1",
        &[&name],
    )?;
    Ok(rows.first().map(|row| Queue {
        id: row.get(0),
        namespace: row.get(1),
        task: row.get(2),
        created: row.get(20),
        selector: row.get::<_, Option<&str>>(21).and_then(|text| Binding::stored(Kind::Selector, text)),
        filter: row.get::<_, Option<&str>>(22).and_then(|text| Binding::stored(Kind::Filter, text)),
        options: QueueOptions {
            lease_time: row.get(3),
            retry_limit: row.get(4),
            dead_letter_queue: row.get(5),
            dlq_after_max_retries: row.get(6),
            delayed_processing: row.get(7),
            window_buffer: row.get(8),
            min_pop_wait_time: row.get(9),
            retention_enabled: row.get(10),
            retention_seconds: row.get(11),
            completed_retention_seconds: row.get(12),
            max_wait_time_seconds: row.get(13),
            dedup_window_seconds: row.get(14),
            encryption_enabled: row.get(15),
            priority: row.get(16),
            ttl: row.get(17),
            max_size: row.get(18),
            retry_delay: row.get(19),
        },
    }))
}

/// Writes a queue's options, namespace and task; makes it if it is missing. Of two
/// at the same moment the later one wins whole. Returns the queue's id.
pub fn save(
    conn: &mut Conn,
    name: &str,
    namespace: &str,
    task: &str,
    o: &QueueOptions,
    selector: Option<&Binding>,
    filter: Option<&Binding>,
) -> Result<Uuid, StoreError> {
    let selector = selector.map(|binding| binding.to_json(Kind::Selector).to_string());
    let filter = filter.map(|binding| binding.to_json(Kind::Filter).to_string());
    let rows = conn.query(
        "WITH c AS (UPDATE catalog SET version = version + 1)
         INSERT INTO queue AS q (id, name, namespace, task, lease_time, retry_limit, dead_letter_queue,
             dlq_after_max_retries, delayed_processing, window_buffer, min_pop_wait_time, retention_enabled,
             retention_seconds, completed_retention_seconds, max_wait_time_seconds, dedup_window_seconds,
             encryption_enabled, priority, ttl, max_size, retry_delay, selector, filter)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23)
         ON CONFLICT (name) DO UPDATE SET
             namespace = excluded.namespace, task = excluded.task, lease_time = excluded.lease_time,
             retry_limit = excluded.retry_limit, dead_letter_queue = excluded.dead_letter_queue,
             dlq_after_max_retries = excluded.dlq_after_max_retries,
             delayed_processing = excluded.delayed_processing, window_buffer = excluded.window_buffer,
             min_pop_wait_time = excluded.min_pop_wait_time, retention_enabled = excluded.retention_enabled,
             retention_seconds = excluded.retention_seconds,
             completed_retention_seconds = excluded.completed_retention_seconds,
             max_wait_time_seconds = excluded.max_wait_time_seconds,
             dedup_window_seconds = excluded.dedup_window_seconds,
             encryption_enabled = excluded.encryption_enabled, priority = excluded.priority, ttl = excluded.ttl,
             max_size = excluded.max_size, retry_delay = excluded.retry_delay,
             selector = excluded.selector, filter = excluded.filter
         RETURNING q.id",
        &[
            &Uuid::now_v7(), &name, &namespace, &task, &o.lease_time, &o.retry_limit, &o.dead_letter_queue,
            &o.dlq_after_max_retries, &o.delayed_processing, &o.window_buffer, &o.min_pop_wait_time,
            &o.retention_enabled, &o.retention_seconds, &o.completed_retention_seconds, &o.max_wait_time_seconds,
            &o.dedup_window_seconds, &o.encryption_enabled, &o.priority, &o.ttl, &o.max_size, &o.retry_delay,
            &selector, &filter,
        ],
    )?;
    Ok(rows[0].get(0))
}

/// Deletes a queue with everything in it, in one commit. Returns whether it was there.
/// Locks its partitions, then their cursors; waits for calls that hold them.
pub fn delete(conn: &mut Conn, name: &str) -> Result<bool, StoreError> {
    let rows = conn.query("SELECT delete_queue($1)", &[&name])?;
    Ok(rows.first().is_some_and(|row| row.get(0)))
}
