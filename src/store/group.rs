//! Queues, subscriptions, and which partitions have work for a group.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Conn, Micros, StoreError};
use crate::broker::plugin::{Binding, Kind};
use uuid::Uuid;

/// A queue as the data plane needs to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueInfo {
    /// Its id.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its task.
    pub task: String,
    /// Milliseconds a waiting pop may wait for a fuller batch.
    pub min_pop_wait_ms: i32,
    /// Seconds of deduplication; 0 = off.
    pub dedup_window_seconds: i32,
    /// Seconds a partition is held back after its first unseen push; 0 = off.
    pub window_buffer_seconds: i32,
    /// Seconds before a message is visible.
    pub delayed_seconds: i32,
    /// For selectors.
    pub priority: i32,
    /// Its selector.
    pub selector: Option<Arc<Binding>>,
    /// Its filter.
    pub filter: Option<Arc<Binding>>,
    /// Bindings of groups: selector, filter. They go before the queue's.
    pub groups: HashMap<String, [Option<Arc<Binding>>; 2]>,
}

/// The columns of [`QueueInfo`], in order.
macro_rules! info_columns {
    () => {
        "id, name, namespace, task, min_pop_wait_time, dedup_window_seconds, window_buffer, delayed_processing, priority,
         selector, filter, (SELECT json_agg(json_build_array(b.group_name, b.kind, b.binding))::text
                            FROM plugin_binding b WHERE b.queue_id = queue.id)"
    };
}

impl QueueInfo {
    fn from_row(row: &postgres::Row) -> Self {
        Self {
            id: row.get(0),
            name: row.get(1),
            namespace: row.get(2),
            task: row.get(3),
            min_pop_wait_ms: row.get(4),
            dedup_window_seconds: row.get(5),
            window_buffer_seconds: row.get(6),
            delayed_seconds: row.get(7),
            priority: row.get(8),
            selector: row.get::<_, Option<&str>>(9).and_then(|text| bound(Kind::Selector, text)),
            filter: row.get::<_, Option<&str>>(10).and_then(|text| bound(Kind::Filter, text)),
            groups: row.get::<_, Option<&str>>(11).map(group_bindings).unwrap_or_default(),
        }
    }

    /// The filter of a group's pops.
    pub fn filter_of(&self, group: &str) -> Option<&Arc<Binding>> {
        self.groups.get(group).and_then(|[_, filter]| filter.as_ref()).or(self.filter.as_ref())
    }

    /// The selector of a group's pops.
    pub fn selector_of(&self, group: &str) -> Option<&Arc<Binding>> {
        self.groups.get(group).and_then(|[selector, _]| selector.as_ref()).or(self.selector.as_ref())
    }
}

fn bound(kind: Kind, text: &str) -> Option<Arc<Binding>> {
    Binding::stored(kind, text).map(Arc::new)
}

fn group_bindings(text: &str) -> HashMap<String, [Option<Arc<Binding>>; 2]> {
    let rows: Vec<(String, String, String)> = serde_json::from_str(text).unwrap_or_default();
    let mut groups: HashMap<String, [Option<Arc<Binding>>; 2]> = HashMap::new();
    for (group, kind, binding) in rows {
        let of_group = groups.entry(group).or_default();
        if kind == "filter" {
            of_group[1] = bound(Kind::Filter, &binding);
        } else {
            of_group[0] = bound(Kind::Selector, &binding);
        }
    }
    groups
}

/// Finds a queue.
pub fn find_queue(conn: &mut Conn, name: &str) -> Result<Option<QueueInfo>, StoreError> {
    let rows = conn.query(concat!("SELECT ", info_columns!(), " FROM queue WHERE name = $1"), &[&name])?;
    Ok(rows.first().map(QueueInfo::from_row))
}

/// Finds a queue, or makes it.
pub fn ensure_queue(
    conn: &mut Conn,
    name: &str,
    namespace: &str,
    task: &str,
) -> Result<QueueInfo, StoreError> {
    if let Some(found) = find_queue(conn, name)? {
        return Ok(found);
    }
    conn.query(
        "INSERT INTO queue (id, name, namespace, task) VALUES ($1, $2, $3, $4) ON CONFLICT (name) DO NOTHING",
        &[&Uuid::now_v7(), &name, &namespace, &task],
    )?;
    find_queue(conn, name)?.ok_or_else(|| StoreError::Statement {
        code: "40001".into(),
        message: format!("queue \"{name}\" was deleted at the same moment; repeat the call"),
    })
}

/// All queues of a namespace and/or task, by name.
pub fn matching_queues(
    conn: &mut Conn,
    namespace: Option<&str>,
    task: Option<&str>,
) -> Result<Vec<QueueInfo>, StoreError> {
    let rows = conn.query(
        concat!(
            "SELECT ",
            info_columns!(),
            " FROM queue WHERE ($1::text IS NULL OR namespace = $1) AND ($2::text IS NULL OR task = $2) ORDER BY name"
        ),
        &[&namespace, &task],
    )?;
    Ok(rows.iter().map(QueueInfo::from_row).collect())
}

/// The options of queues by id, to follow changes made elsewhere; deleted ones are missing.
pub fn queues_by_id(conn: &mut Conn, ids: &[Uuid]) -> Result<Vec<QueueInfo>, StoreError> {
    let rows = conn.query(concat!("SELECT ", info_columns!(), " FROM queue WHERE id = ANY ($1)"), &[&ids])?;
    Ok(rows.iter().map(QueueInfo::from_row).collect())
}

/// First contact: stores the subscription and seeds all cursors, once. Returns
/// whether this call did it. Waits for a racing first contact to finish.
pub fn subscribe(
    conn: &mut Conn,
    queue: Uuid,
    group: &str,
    mode: &str,
    at: Option<Micros>,
) -> Result<bool, StoreError> {
    let rows = conn.query(
        "SELECT subscribe($1, $2, $3, coalesce($4, '-infinity'::timestamptz))",
        &[&queue, &group, &mode, &at],
    )?;
    Ok(rows.first().is_some_and(|row| row.get(0)))
}

/// The id of a partition.
pub fn find_partition(conn: &mut Conn, queue: Uuid, partition: &str) -> Result<Option<Uuid>, StoreError> {
    let rows =
        conn.query("SELECT id FROM partition WHERE queue_id = $1 AND name = $2", &[&queue, &partition])?;
    Ok(rows.first().map(|row| row.get(0)))
}

/// Queue and name of a partition.
pub fn place(conn: &mut Conn, partition: Uuid) -> Result<Option<(String, String)>, StoreError> {
    let rows = conn.query(
        "SELECT q.name, p.name FROM partition p JOIN queue q ON q.id = p.queue_id WHERE p.id = $1",
        &[&partition],
    )?;
    Ok(rows.first().map(|row| (row.get(0), row.get(1))))
}

/// A partition with messages behind a group's cursor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingPartition {
    /// Its id.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// Messages behind the cursor.
    pub pending: i64,
}

/// One page of a queue's partitions in name order, starting behind `after`: those with
/// work for the group, and the page's last name (`None`: that was the last page).
pub fn pending_page(
    conn: &mut Conn,
    queue: Uuid,
    group: &str,
    after: Option<&str>,
    limit: i64,
) -> Result<(Vec<PendingPartition>, Option<String>), StoreError> {
    let rows = conn.query(
        "SELECT p.id, p.name, p.next_offset - greatest(coalesce(k.committed, p.start_offset - 1) + 1, p.start_offset)
         FROM (SELECT p.id, p.name, p.next_offset, p.start_offset FROM partition p
               WHERE p.queue_id = $1 AND ($3::text IS NULL OR p.name > $3)
               ORDER BY p.name LIMIT $4) p
         LEFT JOIN consumer_cursor k ON k.partition_id = p.id AND k.group_name = $2
         ORDER BY p.name",
        &[&queue, &group, &after, &limit],
    )?;
    let last = (rows.len() as i64 == limit).then(|| rows.last().map(|row| row.get(1))).flatten();
    let pending = rows
        .iter()
        .map(|row| PendingPartition { id: row.get(0), name: row.get(1), pending: row.get(2) })
        .filter(|p| p.pending > 0)
        .collect();
    Ok((pending, last))
}

/// Partitions written in the last `seconds` (to a minute) that have work for one
/// of these (queue, group)s: (index into the arguments, partition). At most `limit`.
pub fn pending_recent(
    conn: &mut Conn,
    queues: &[Uuid],
    groups: &[&str],
    seconds: f64,
    limit: i64,
) -> Result<Vec<(usize, PendingPartition)>, StoreError> {
    let rows = conn.query(
        "SELECT i.ord::int, p.id, p.name,
                p.next_offset - greatest(coalesce(k.committed, p.start_offset - 1) + 1, p.start_offset) AS pending
         FROM (SELECT p.id, p.queue_id, p.name, p.next_offset, p.start_offset FROM partition p
               WHERE p.written_at > clock_timestamp() - interval '1 minute' - make_interval(secs => $3)) p
         JOIN unnest($1::uuid[], $2::text[]) WITH ORDINALITY AS i(queue, grp, ord) ON i.queue = p.queue_id
         LEFT JOIN consumer_cursor k ON k.partition_id = p.id AND k.group_name = i.grp
         WHERE p.next_offset > greatest(coalesce(k.committed, p.start_offset - 1) + 1, p.start_offset)
         LIMIT $4",
        &[&queues, &groups, &seconds, &limit],
    )?;
    Ok(rows
        .iter()
        .map(|row| {
            let partition = PendingPartition { id: row.get(1), name: row.get(2), pending: row.get(3) };
            (row.get::<_, i32>(0) as usize - 1, partition)
        })
        .collect())
}
