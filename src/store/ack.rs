//! Committing offsets, settling failures, renewing leases.

use super::push::StoredSegment;
use super::{Conn, Micros, StoreError};
use crate::broker::segment;
use std::collections::HashMap;
use uuid::Uuid;

/// The arguments of one ack call.
#[derive(Default)]
pub struct Ack<'a> {
    /// Groups: the partition. A (partition, group) at most once.
    pub partition: Vec<Uuid>,
    /// Groups: the consumer group.
    pub group: Vec<&'a str>,
    /// Groups: the lease named, if one is.
    pub lease: Vec<Option<Uuid>>,
    /// Items: index into the groups, from 1.
    pub item: Vec<i32>,
    /// Items: the offset.
    pub offset: Vec<i64>,
    /// Items: 0 completed, 1 retry, 2 failed, 3 dead-letter.
    pub status: Vec<i16>,
    /// Messages that may have to be dead-lettered.
    pub snapshots: Vec<Snapshot>,
}

/// A message as it goes to the dead letters.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Index into the groups, from 1.
    pub item: i32,
    /// The message's offset.
    pub offset: i64,
    /// Its id.
    pub message_id: Uuid,
    /// Its transaction id.
    pub transaction_id: String,
    /// The hash of that, 16 bytes.
    pub hash: Vec<u8>,
    /// Its trace id.
    pub trace_id: Option<Uuid>,
    /// Who produced it.
    pub producer_sub: Option<String>,
    /// Its payload, byte for byte.
    pub payload: Vec<u8>,
    /// Why it failed.
    pub error: String,
    /// When it was committed.
    pub created: Micros,
}

impl Snapshot {
    /// Of a message in its segment, for the first group; `None` if the segment cannot be read.
    pub fn of(stored: &StoredSegment, offset: i64, error: &str) -> Option<Self> {
        let raw = segment::unpack(stored.codec, &stored.data).ok()?;
        let mut frames = segment::frames(&raw);
        frames.skip_frames((offset - stored.base_offset) as usize);
        let frame = frames.next()?.ok()?;
        Some(Self::of_frame(&frame, offset, stored.created, error))
    }

    /// Of a message that is at hand, for the first group.
    pub fn of_frame(frame: &segment::Frame<'_>, offset: i64, created: Micros, error: &str) -> Self {
        Self {
            item: 1,
            offset,
            message_id: frame.message_id,
            transaction_id: frame.transaction_id(&mut [0; 36]).to_owned(),
            hash: frame.hash().to_be_bytes().to_vec(),
            trace_id: frame.trace_id,
            producer_sub: frame.producer_sub.map(str::to_owned),
            payload: frame.payload.to_vec(),
            error: error.to_owned(),
            created,
        }
    }
}

/// What a signal (anything but `completed`) led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckAction {
    /// There was none.
    None,
    /// The lease was released, at no cost.
    Released,
    /// The lease was released and one unit of the budget used.
    Charged,
    /// The message was dead-lettered.
    DeadLettered,
    /// The message was passed over.
    Dropped,
}

/// The answer for one (partition, group).
#[derive(Debug, Clone)]
pub enum AckVerdict {
    /// Done.
    Applied {
        /// The queue.
        queue: String,
        /// The cursor before.
        before: i64,
        /// The cursor after.
        after: i64,
        /// Last offset that could be acked.
        span_end: i64,
        /// Whether the lease ended.
        released: bool,
        /// Lowest offset with a signal, and what it led to.
        signal: Option<i64>,
        /// See `signal`.
        action: AckAction,
        /// Whether messages are left behind the cursor.
        pending: bool,
    },
    /// The message at this offset has to be dead-lettered: repeat the call with its snapshot.
    Snapshot(i64),
    /// The group has no cursor there.
    Missing,
    /// The lease named is not the live one.
    Lease,
    /// The row is locked elsewhere.
    Busy,
}

/// Applies acks in one commit: see `ack` in the migrations. Only `Applied`
/// changed anything. Locks the cursor rows; never waits for one.
pub fn ack(conn: &mut Conn, a: &Ack<'_>) -> Result<Vec<AckVerdict>, StoreError> {
    let x = &a.snapshots;
    let x_item: Vec<i32> = x.iter().map(|s| s.item).collect();
    let x_offset: Vec<i64> = x.iter().map(|s| s.offset).collect();
    let x_id: Vec<Uuid> = x.iter().map(|_| Uuid::now_v7()).collect();
    let x_message: Vec<Uuid> = x.iter().map(|s| s.message_id).collect();
    let x_transaction: Vec<&str> = x.iter().map(|s| s.transaction_id.as_str()).collect();
    let x_hash: Vec<&[u8]> = x.iter().map(|s| s.hash.as_slice()).collect();
    let x_trace: Vec<Option<Uuid>> = x.iter().map(|s| s.trace_id).collect();
    let x_sub: Vec<Option<&str>> = x.iter().map(|s| s.producer_sub.as_deref()).collect();
    let x_payload: Vec<&[u8]> = x.iter().map(|s| s.payload.as_slice()).collect();
    let x_error: Vec<&str> = x.iter().map(|s| s.error.as_str()).collect();
    let x_created: Vec<Micros> = x.iter().map(|s| s.created).collect();
    let rows = conn.query(
        "SELECT verdict, queue_name, before, after, span_end, released, signal_offset, action, pending
         FROM ack($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)",
        &[
            &a.partition,
            &a.group,
            &a.lease,
            &a.item,
            &a.offset,
            &a.status,
            &x_item,
            &x_offset,
            &x_id,
            &x_message,
            &x_transaction,
            &x_hash,
            &x_trace,
            &x_sub,
            &x_payload,
            &x_error,
            &x_created,
        ],
    )?;
    Ok(rows
        .iter()
        .map(|row| match row.get::<_, &str>(0) {
            "applied" => AckVerdict::Applied {
                queue: row.get(1),
                before: row.get(2),
                after: row.get(3),
                span_end: row.get(4),
                released: row.get(5),
                signal: row.get(6),
                action: match row.get::<_, i16>(7) {
                    1 => AckAction::Released,
                    2 => AckAction::Charged,
                    3 => AckAction::DeadLettered,
                    4 => AckAction::Dropped,
                    _ => AckAction::None,
                },
                pending: row.get(8),
            },
            "snapshot" => AckVerdict::Snapshot(row.get(6)),
            "missing" => AckVerdict::Missing,
            "lease" => AckVerdict::Lease,
            _ => AckVerdict::Busy,
        })
        .collect())
}

/// Most segments looked through, on each side of the cursor, for an acked id
/// that the broker does not remember.
pub const RESOLVE_SEGMENTS: i64 = 10_000;

/// Where messages with these hashes are: per argument, the cursor and the
/// ascending offsets. Looked for in the leased span (or, without one, up to
/// [`RESOLVE_SEGMENTS`] segments ahead of the cursor), and as far behind the
/// cursor. Takes no lock: a message never moves.
pub fn resolve_offsets(
    conn: &mut Conn,
    partitions: &[Uuid],
    groups: &[&str],
    hashes: &[u128],
) -> Result<Vec<(i64, Vec<i64>)>, StoreError> {
    let mut wanted: HashMap<(Uuid, &str), HashMap<u128, Vec<usize>>> = HashMap::new();
    for (index, ((partition, group), hash)) in partitions.iter().zip(groups).zip(hashes).enumerate() {
        wanted.entry((*partition, *group)).or_default().entry(*hash).or_default().push(index);
    }
    let keys: Vec<(Uuid, &str)> = wanted.keys().copied().collect();
    let ids: Vec<Uuid> = keys.iter().map(|key| key.0).collect();
    let names: Vec<&str> = keys.iter().map(|key| key.1).collect();
    let rows = conn.query(
        "SELECT k.ord::int, k.committed, s.base_offset, s.hashes
         FROM (SELECT i.ord, i.id, k.committed, k.batch_end
               FROM unnest($1::uuid[], $2::text[]) WITH ORDINALITY AS i(id, grp, ord)
               JOIN consumer_cursor k ON k.partition_id = i.id AND k.group_name = i.grp) k
         CROSS JOIN LATERAL (
             (SELECT s.base_offset, s.hashes FROM segment s
              WHERE s.partition_id = k.id AND s.base_offset <= k.committed
              ORDER BY s.base_offset DESC LIMIT $3)
             UNION ALL
             (SELECT s.base_offset, s.hashes FROM segment s
              WHERE s.partition_id = k.id AND s.base_offset > k.committed
                AND (k.batch_end IS NULL OR s.base_offset <= k.batch_end)
              ORDER BY s.base_offset LIMIT $3)) s",
        &[&ids, &names, &RESOLVE_SEGMENTS],
    )?;
    let mut found = vec![(i64::MIN, Vec::new()); hashes.len()];
    for row in &rows {
        let (committed, base): (i64, i64) = (row.get(1), row.get(2));
        let of_key = &wanted[&keys[row.get::<_, i32>(0) as usize - 1]];
        for (position, hash) in row.get::<_, &[u8]>(3).chunks_exact(16).enumerate() {
            let hash = u128::from_be_bytes(hash.try_into().expect("chunks of 16"));
            for index in of_key.get(&hash).into_iter().flatten() {
                found[*index].0 = committed;
                found[*index].1.push(base + position as i64);
            }
        }
    }
    for (_, offsets) in &mut found {
        offsets.sort_unstable();
    }
    Ok(found)
}

/// Renews a lease on the partitions where it is known to be. Returns the
/// earliest new expiry and how many were renewed. Locks the cursor rows.
pub fn extend_lease(
    conn: &mut Conn,
    lease: Uuid,
    partitions: &[Uuid],
    group: &str,
    seconds: i32,
) -> Result<(usize, Option<Micros>), StoreError> {
    let rows = conn.query(
        "SELECT lease_expires_at FROM extend_lease($1, $2, $3, $4)",
        &[&lease, &partitions, &group, &seconds],
    )?;
    Ok((rows.len(), rows.iter().map(|row| row.get::<_, Micros>(0)).min()))
}

/// Where a lease is held, for one that this broker did not give out. Reads the
/// whole cursor table: leases have no index, because it would make every pop and
/// ack write it.
pub fn find_lease(conn: &mut Conn, lease: Uuid) -> Result<Vec<(Uuid, String)>, StoreError> {
    let rows = conn.query(
        "SELECT partition_id, group_name FROM consumer_cursor WHERE lease_id = $1 AND lease_expires_at > clock_timestamp()",
        &[&lease],
    )?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}
