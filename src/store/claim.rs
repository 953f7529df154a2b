//! Claiming, and giving back.

use super::{Conn, Micros, StoreError};
use uuid::Uuid;

/// The arguments of one claim: pops, and their candidates.
#[derive(Default)]
pub struct Claim<'a> {
    /// Pops: the group.
    pub group: Vec<&'a str>,
    /// Pops: the lease to write.
    pub lease: Vec<Uuid>,
    /// Pops: most messages.
    pub batch: Vec<i32>,
    /// Pops: most partitions that yield messages.
    pub partitions: Vec<i32>,
    /// Pops: lease in seconds; `None`: the queue's.
    pub lease_seconds: Vec<Option<i32>>,
    /// Pops: commit at once, without a lease.
    pub auto: Vec<bool>,
    /// Candidates: index into the pops, from 1.
    pub pop: Vec<i32>,
    /// Candidates: the partition. A (partition, group) at most once.
    pub partition: Vec<Uuid>,
}

/// A segment of a claimed span.
#[derive(Debug)]
pub struct ClaimedSegment {
    /// Its first offset.
    pub base_offset: i64,
    /// Its messages.
    pub count: i32,
    /// When it was committed.
    pub created: Micros,
    /// Packing.
    pub codec: i16,
    /// 16 bytes per message.
    pub hashes: Vec<u8>,
    /// Packed frames.
    pub data: Vec<u8>,
}

/// The answer for one candidate.
#[derive(Debug)]
pub enum ClaimVerdict {
    /// The span `first..=end` is claimed (or, with auto-ack, committed).
    Took {
        /// Partition name.
        partition: String,
        /// First claimed offset.
        first: i64,
        /// Last claimed offset.
        end: i64,
        /// How often this batch has been delivered, this time included.
        attempt: i32,
        /// Milliseconds until the lease ends; `None` with auto-ack.
        lease_ms: Option<i64>,
        /// Messages behind the span.
        remaining: i64,
        /// The segments that cover the span, in offset order.
        segments: Vec<ClaimedSegment>,
    },
    /// Nothing behind the cursor.
    Empty,
    /// Held by another lease for so many more milliseconds.
    Leased(i64),
    /// Messages are there, none is visible for so many milliseconds.
    Later(i64),
    /// The pop was full before its turn.
    Unreached,
    /// No such partition.
    Gone,
    /// The cursor's row is locked elsewhere.
    Busy,
    /// The group has no cursor there.
    New,
}

/// Claims for all pops in one commit: see `claim` in the migrations. Returns one
/// verdict per candidate, in order. Locks the cursor rows that it claims; never waits.
pub fn claim(conn: &mut Conn, c: &Claim<'_>) -> Result<Vec<ClaimVerdict>, StoreError> {
    let rows = conn.query(
        "SELECT candidate, verdict, partition_name, first_offset, end_offset, attempt, wait_ms, remaining,
                base_offset, count, created_at, codec, hashes, data
         FROM claim($1, $2, $3, $4, $5, $6, $7, $8)",
        &[&c.group, &c.lease, &c.batch, &c.partitions, &c.lease_seconds, &c.auto, &c.pop, &c.partition],
    )?;
    let mut verdicts: Vec<ClaimVerdict> = Vec::with_capacity(c.partition.len());
    for row in &rows {
        let candidate = row.get::<_, i32>(0) as usize;
        let wait_ms = row.get::<_, Option<i64>>(6);
        let verdict = match row.get::<_, &str>(1) {
            "took" => {
                let segment = ClaimedSegment {
                    base_offset: row.get(8),
                    count: row.get(9),
                    created: row.get(10),
                    codec: row.get(11),
                    hashes: row.get(12),
                    data: row.get(13),
                };
                // Rows come ordered: a second segment of the candidate before it.
                if verdicts.len() == candidate
                    && let Some(ClaimVerdict::Took { segments, .. }) = verdicts.last_mut()
                {
                    segments.push(segment);
                    continue;
                }
                ClaimVerdict::Took {
                    partition: row.get(2),
                    first: row.get(3),
                    end: row.get(4),
                    attempt: row.get(5),
                    lease_ms: wait_ms,
                    remaining: row.get(7),
                    segments: vec![segment],
                }
            }
            "empty" => ClaimVerdict::Empty,
            "leased" => ClaimVerdict::Leased(wait_ms.unwrap_or(0)),
            "later" => ClaimVerdict::Later(wait_ms.unwrap_or(0)),
            "unreached" => ClaimVerdict::Unreached,
            "gone" => ClaimVerdict::Gone,
            "new" => ClaimVerdict::New,
            _ => ClaimVerdict::Busy,
        };
        verdicts.push(verdict);
    }
    if verdicts.len() != c.partition.len() {
        return Err(StoreError::Statement {
            code: "XX000".into(),
            message: format!("claim answered {} of {} candidates", verdicts.len(), c.partition.len()),
        });
    }
    Ok(verdicts)
}

/// Gives back claims that nobody received. Waits for the rows' locks.
pub fn unclaim(
    conn: &mut Conn,
    partitions: &[Uuid],
    groups: &[&str],
    leases: &[Uuid],
) -> Result<i32, StoreError> {
    let rows = conn.query("SELECT unclaim($1, $2, $3)", &[&partitions, &groups, &leases])?;
    Ok(rows.first().map_or(0, |row| row.get(0)))
}

/// Makes the missing cursors of groups in partitions: by the group's
/// subscription, or, where it has none, from `starts` (mode, time).
pub fn seed_cursors(
    conn: &mut Conn,
    partitions: &[Uuid],
    groups: &[&str],
    modes: &[&str],
    times: &[Option<Micros>],
) -> Result<(), StoreError> {
    conn.query("SELECT seed_cursors($1, $2, $3, $4)", &[&partitions, &groups, &modes, &times]).map(|_| ())
}
