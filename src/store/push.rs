//! Appending.

use super::{Conn, Micros, StoreError};
use crate::broker::segment::{Packer, Run};
use uuid::Uuid;

/// Messages that SQL compares with under the lock; as in the migration.
pub const GAP_MESSAGES: i64 = 5_000;

/// A (queue, partition) to be found or made.
pub struct Lane<'a> {
    /// Queue name.
    pub queue: &'a str,
    /// Namespace and task if the queue has to be made.
    pub namespace: &'a str,
    /// See `namespace`.
    pub task: &'a str,
    /// Partition name.
    pub partition: &'a str,
}

/// A partition as it was when it was looked up.
#[derive(Debug, Clone, Copy)]
pub struct ResolvedLane {
    /// Its queue's id.
    pub queue_id: Uuid,
    /// Its id.
    pub partition_id: Uuid,
    /// Offset of its next message.
    pub next_offset: i64,
    /// The queue's deduplication window in seconds; 0 = off.
    pub dedup_window_seconds: i32,
}

/// Finds partitions, and makes those (and the queues) that are missing. One
/// commit when something is made. Waits for callers that make the same names.
pub fn resolve_partitions(conn: &mut Conn, lanes: &[Lane<'_>]) -> Result<Vec<ResolvedLane>, StoreError> {
    let queues: Vec<_> = lanes.iter().map(|l| l.queue).collect();
    let queue_ids: Vec<_> = lanes.iter().map(|_| Uuid::now_v7()).collect();
    let namespaces: Vec<_> = lanes.iter().map(|l| l.namespace).collect();
    let tasks: Vec<_> = lanes.iter().map(|l| l.task).collect();
    let partitions: Vec<_> = lanes.iter().map(|l| l.partition).collect();
    let partition_ids: Vec<_> = lanes.iter().map(|_| Uuid::now_v7()).collect();
    let rows = conn.query(
        "SELECT queue_id, partition_id, next_offset, dedup_window_seconds
         FROM resolve_partitions($1, $2, $3, $4, $5, $6)",
        &[&queues, &queue_ids, &namespaces, &tasks, &partitions, &partition_ids],
    )?;
    if rows.len() != lanes.len() {
        // A queue was deleted between making and reading.
        return Err(StoreError::Statement {
            code: "40001".into(),
            message: "a queue of this push was deleted at the same moment; repeat the call".into(),
        });
    }
    Ok(rows
        .iter()
        .map(|row| ResolvedLane {
            queue_id: row.get(0),
            partition_id: row.get(1),
            next_offset: row.get(2),
            dedup_window_seconds: row.get(3),
        })
        .collect())
}

/// The arguments of one append; partitions distinct and ascending by id.
#[derive(Default)]
pub struct Append<'a> {
    /// Partition ids.
    pub ids: Vec<Uuid>,
    /// Offsets below which the caller vouches for uniqueness; `None`: no deduplication.
    pub known: Vec<Option<i64>>,
    /// New messages per partition.
    pub counts: Vec<i32>,
    /// Segments: index into `ids`, from 1.
    pub lane: Vec<i32>,
    /// Segments: base offset relative to the partition's next.
    pub base: Vec<i32>,
    /// Segments: messages.
    pub count: Vec<i32>,
    /// Segments: size unpacked, in bytes.
    pub raw: Vec<i32>,
    /// Segments: packing.
    pub codec: Vec<i16>,
    /// Segments: 16 bytes per message.
    pub hashes: Vec<&'a [u8]>,
    /// Segments: packed frames.
    pub data: Vec<std::borrow::Cow<'a, [u8]>>,
}

impl<'a> Append<'a> {
    /// Adds a segment of the partition with this index in `ids`.
    pub fn add(&mut self, partition: usize, run: &'a Run<'_>, packer: &mut Packer) {
        let (codec, data) = packer.pack(&run.frames);
        self.lane.push(partition as i32 + 1);
        self.base.push(run.base as i32);
        self.count.push((run.hashes.len() / 16) as i32);
        self.raw.push(run.frames.len() as i32);
        self.codec.push(codec);
        self.hashes.push(&run.hashes);
        self.data.push(data);
    }
}

/// What became of one partition's part of an append.
#[derive(Debug)]
pub enum AppendVerdict {
    /// Written and committed.
    Stored {
        /// First offset given out.
        base_offset: i64,
        /// Commit time.
        created: Micros,
        /// Hashes of the messages between `known` and `base_offset`, when there are any.
        gap: Option<Vec<u8>>,
    },
    /// No such partition.
    Gone,
    /// Its row is locked elsewhere.
    Busy,
    /// Too much was appended since `known`.
    Stale,
    /// Its `message`-th new message repeats the one at `original`.
    Duplicate {
        /// Index among the partition's new messages.
        message: usize,
        /// The original's offset.
        original: i64,
    },
    /// Not written because of another partition.
    Held,
}

/// Appends all segments in one commit, or none: see `push` in the migrations.
/// Locks the partition rows, skipping the wait: a row locked elsewhere is `Busy`.
/// Returns (index into `ids`, verdict).
pub fn append(conn: &mut Conn, a: &Append<'_>) -> Result<Vec<(usize, AppendVerdict)>, StoreError> {
    let data: Vec<&[u8]> = a.data.iter().map(|d| d.as_ref()).collect();
    let rows = conn.query(
        "SELECT lane, verdict, base_offset, created_at, message, gap FROM push($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        &[&a.ids, &a.known, &a.counts, &a.lane, &a.base, &a.count, &a.raw, &a.codec, &a.hashes, &data],
    )?;
    Ok(rows
        .iter()
        .map(|row| {
            let verdict = match row.get::<_, &str>(1) {
                "stored" => {
                    AppendVerdict::Stored { base_offset: row.get(2), created: row.get(3), gap: row.get(5) }
                }
                "gone" => AppendVerdict::Gone,
                "stale" => AppendVerdict::Stale,
                "duplicate" => {
                    AppendVerdict::Duplicate { message: row.get::<_, i32>(4) as usize, original: row.get(2) }
                }
                "held" => AppendVerdict::Held,
                _ => AppendVerdict::Busy,
            };
            (row.get::<_, i32>(0) as usize - 1, verdict)
        })
        .collect())
}

/// The hashes of one segment.
pub struct HashRun {
    /// Its first offset.
    pub base_offset: i64,
    /// When it was committed.
    pub created: Micros,
    /// 16 bytes per message.
    pub hashes: Vec<u8>,
}

/// The hashes of a partition's newest messages inside a window, oldest first, of
/// at most `limit` segments at or above `from`; and the partition's next offset
/// at that moment. `None`: the partition is gone.
pub fn load_hashes(
    conn: &mut Conn,
    partition: Uuid,
    from: i64,
    window_seconds: i32,
    limit: i64,
) -> Result<Option<(i64, Vec<HashRun>)>, StoreError> {
    let rows = conn.query(
        "SELECT p.next_offset, s.base_offset, s.created_at, s.hashes
         FROM partition p
         LEFT JOIN LATERAL (
             SELECT s.base_offset, s.created_at, s.hashes FROM segment s
             WHERE s.partition_id = p.id AND s.base_offset >= $2
               AND s.created_at > clock_timestamp() - make_interval(secs => $3)
             ORDER BY s.base_offset DESC LIMIT $4) s ON true
         WHERE p.id = $1
         ORDER BY s.base_offset",
        &[&partition, &from, &f64::from(window_seconds), &limit],
    )?;
    let Some(first) = rows.first() else { return Ok(None) };
    let next_offset = first.get(0);
    let runs = rows
        .iter()
        .filter_map(|row| {
            Some(HashRun {
                base_offset: row.get::<_, Option<i64>>(1)?,
                created: row.get(2),
                hashes: row.get(3),
            })
        })
        .collect();
    Ok(Some((next_offset, runs)))
}

/// One stored segment, whole.
pub struct StoredSegment {
    /// Its partition.
    pub partition_id: Uuid,
    /// Its first offset.
    pub base_offset: i64,
    /// When it was committed.
    pub created: Micros,
    /// Packing.
    pub codec: i16,
    /// Packed frames.
    pub data: Vec<u8>,
    /// Whether it is still inside its queue's deduplication window.
    pub in_window: bool,
}

/// The segments that hold messages; `None` for each that retention removed.
pub fn segments_at(
    conn: &mut Conn,
    partitions: &[Uuid],
    offsets: &[i64],
) -> Result<Vec<Option<StoredSegment>>, StoreError> {
    let rows = conn.query(
        "SELECT i.id, s.base_offset, s.created_at, s.codec, s.data,
                s.created_at > clock_timestamp() - make_interval(secs => q.dedup_window_seconds)
         FROM unnest($1::uuid[], $2::bigint[]) WITH ORDINALITY AS i(id, off, ord)
         LEFT JOIN LATERAL (
             SELECT * FROM segment s WHERE s.partition_id = i.id AND s.base_offset <= i.off
             ORDER BY s.base_offset DESC LIMIT 1) s ON s.base_offset + s.count > i.off
         LEFT JOIN partition p ON p.id = i.id
         LEFT JOIN queue q ON q.id = p.queue_id
         ORDER BY i.ord",
        &[&partitions, &offsets],
    )?;
    Ok(rows
        .iter()
        .map(|row| {
            Some(StoredSegment {
                partition_id: row.get(0),
                base_offset: row.get::<_, Option<i64>>(1)?,
                created: row.get(2),
                codec: row.get(3),
                data: row.get(4),
                in_window: row.get::<_, Option<bool>>(5).unwrap_or(false),
            })
        })
        .collect())
}
