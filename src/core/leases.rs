//! What a core remembers of the leases it gave out, so that an ack names an
//! offset without a look into the database.
//!
//! Only a memory: a lease that is not here (another broker's, from before a
//! restart, forgotten for space) is resolved from the database.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

/// Most message hashes remembered by one core (16 bytes each).
const MAX_HASHES: usize = 4 * 1024 * 1024;
/// How long a lease is remembered beyond its expiry: late acks are answered from here too.
const GRACE: Duration = Duration::from_secs(30);

/// The claimed span of one partition.
pub struct Span {
    /// The partition.
    pub partition: Uuid,
    /// Its queue.
    pub queue: Arc<str>,
    /// First claimed offset.
    pub first: i64,
    /// The cursor, as last seen.
    pub committed: i64,
    /// Hashes of the messages from `first` on.
    pub hashes: Vec<u128>,
    /// Where the last look-up ended: acks mostly come in order.
    next: usize,
    /// Whether no id occurs twice; found out when it is first asked.
    distinct: Option<bool>,
}

impl Span {
    /// A span just claimed.
    pub fn new(partition: Uuid, queue: Arc<str>, first: i64, hashes: Vec<u128>) -> Self {
        Self { partition, queue, first, committed: first - 1, hashes, next: 0, distinct: None }
    }

    /// Offsets of the messages with this hash, ascending.
    pub fn offsets(&mut self, hash: u128) -> Vec<i64> {
        let hashes = &self.hashes;
        let distinct = *self.distinct.get_or_insert_with(|| {
            let mut sorted = hashes.clone();
            sorted.sort_unstable();
            sorted.windows(2).all(|pair| pair[0] != pair[1])
        });
        if distinct && self.hashes.get(self.next) == Some(&hash) {
            self.next += 1;
            return vec![self.first + self.next as i64 - 1];
        }
        (self.first..).zip(&self.hashes).filter(|(_, h)| **h == hash).map(|(offset, _)| offset).collect()
    }
}

/// One remembered lease.
pub struct Lease {
    /// The group.
    pub group: Arc<str>,
    /// When it is forgotten.
    forget_at: Instant,
    /// Per partition.
    pub spans: Vec<Span>,
}

/// All leases of one core.
#[derive(Default)]
pub struct Leases {
    by_id: HashMap<Uuid, Lease>,
    by_time: BTreeSet<(Instant, Uuid)>,
    hashes: usize,
}

/// A lease id that tells which core gave it out: a UUID v7 whose 12 `rand_a` bits
/// are the core's index. 62 random bits remain.
pub fn new_lease_id(core: usize) -> Uuid {
    let mut bytes = *Uuid::now_v7().as_bytes();
    bytes[6] = 0x70 | ((core >> 8) as u8 & 0x0f);
    bytes[7] = core as u8;
    Uuid::from_bytes(bytes)
}

/// The core index in a lease id.
pub fn core_of(lease: Uuid) -> usize {
    let bytes = lease.as_bytes();
    (usize::from(bytes[6] & 0x0f) << 8) | usize::from(bytes[7])
}

impl Leases {
    /// Remembers a lease.
    pub fn insert(&mut self, id: Uuid, group: Arc<str>, lasts: Duration, spans: Vec<Span>) {
        let forget_at = Instant::now() + lasts + GRACE;
        self.hashes += spans.iter().map(|s| s.hashes.len()).sum::<usize>();
        self.by_time.insert((forget_at, id));
        self.by_id.insert(id, Lease { group, forget_at, spans });
        while self.hashes > MAX_HASHES {
            let Some((_, oldest)) = self.by_time.first().copied() else { break };
            self.remove(oldest);
        }
    }

    /// A remembered lease.
    pub fn get_mut(&mut self, id: &Uuid) -> Option<&mut Lease> {
        self.by_id.get_mut(id)
    }

    /// A renewed lease is remembered longer.
    pub fn extend(&mut self, id: Uuid, lasts: Duration) {
        if let Some(lease) = self.by_id.get_mut(&id) {
            self.by_time.remove(&(lease.forget_at, id));
            lease.forget_at = lease.forget_at.max(Instant::now() + lasts + GRACE);
            self.by_time.insert((lease.forget_at, id));
        }
    }

    /// Forgets one partition of a lease; the lease with its last one.
    pub fn release(&mut self, id: Uuid, partition: Uuid) {
        let Some(lease) = self.by_id.get_mut(&id) else { return };
        if let Some(at) = lease.spans.iter().position(|span| span.partition == partition) {
            self.hashes -= lease.spans.swap_remove(at).hashes.len();
        }
        if lease.spans.is_empty() {
            self.remove(id);
        }
    }

    /// Forgets what is past its time.
    pub fn expire(&mut self, now: Instant) {
        while let Some((at, id)) = self.by_time.first().copied()
            && at <= now
        {
            self.remove(id);
        }
    }

    /// Leases remembered.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    fn remove(&mut self, id: Uuid) {
        if let Some(lease) = self.by_id.remove(&id) {
            self.by_time.remove(&(lease.forget_at, id));
            self.hashes -= lease.spans.iter().map(|s| s.hashes.len()).sum::<usize>();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_id_tells_its_core_and_is_a_v7_uuid() {
        for core in [0, 1, 255, 256, 4095] {
            let id = new_lease_id(core);
            assert_eq!(core_of(id), core);
            assert_eq!(id.get_version_num(), 7);
        }
        assert_ne!(new_lease_id(3), new_lease_id(3));
    }

    #[test]
    fn offsets_are_found_in_and_out_of_order_and_for_repeated_ids() {
        let mut span = Span::new(Uuid::nil(), "q".into(), 10, vec![7, 8, 9, 8]);
        assert_eq!(span.offsets(7), [10]);
        assert_eq!(span.offsets(8), [11, 13]);
        assert_eq!(span.offsets(9), [12]);
        assert_eq!(span.offsets(7), [10]);
        assert!(span.offsets(1).is_empty());
    }

    #[test]
    fn a_lease_is_forgotten_with_its_last_partition() {
        let mut leases = Leases::default();
        let (id, a, b) = (new_lease_id(0), Uuid::from_u128(1), Uuid::from_u128(2));
        let spans = vec![Span::new(a, "q".into(), 0, vec![1]), Span::new(b, "q".into(), 0, vec![2, 3])];
        leases.insert(id, "g".into(), Duration::from_secs(1), spans);
        leases.release(id, a);
        assert_eq!((leases.len(), leases.hashes), (1, 2));
        leases.release(id, b);
        assert_eq!((leases.len(), leases.hashes, leases.by_time.len()), (0, 0, 0));
    }
}
