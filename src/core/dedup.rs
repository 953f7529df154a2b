//! What a core remembers of a partition's transaction ids.
//!
//! SQL compares a new message only with what was appended since `known`; below
//! that, this memory vouches that nothing inside the window repeats. An id found
//! here is a suspicion, confirmed against the stored message (the window is
//! judged by the database's clock); an id not found is certainly new.
//!
//! Cost: about 25 bytes per message inside the window.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Generations per window: memory outlives the window by at most one of them.
const GENERATIONS: i64 = 8;

/// xxh3 values are their own hash.
#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("only u64 keys are used")
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

type Offsets = HashMap<u64, i64, BuildHasherDefault<Identity>>;

struct Generation {
    started_us: i64,
    newest_us: i64,
    offsets: Offsets,
}

/// The memory of one partition.
pub struct Dedup {
    window_us: i64,
    known: i64,
    generations: VecDeque<Generation>,
}

impl Dedup {
    /// A memory that has seen everything below `known` (nothing, for a new partition).
    pub fn new(window_seconds: i32, known: i64) -> Self {
        Self { window_us: i64::from(window_seconds) * 1_000_000, known, generations: VecDeque::new() }
    }

    /// The offset below which every message inside the window is remembered here.
    pub fn known(&self) -> i64 {
        self.known
    }

    /// Where an id may have been stored before.
    pub fn find(&self, hash: u128) -> Option<i64> {
        self.generations.iter().rev().find_map(|g| g.offsets.get(&(hash as u64)).copied())
    }

    /// Remembers messages at `base` and on, committed at `created_us`. Moves
    /// `known` only if nothing is missing before `base`.
    pub fn insert(&mut self, base: i64, hashes: impl Iterator<Item = u128>, created_us: i64) {
        let span_us = (self.window_us / GENERATIONS).max(1);
        if self.generations.back().is_none_or(|g| created_us - g.started_us >= span_us) {
            self.generations.push_back(Generation {
                started_us: created_us,
                newest_us: created_us,
                offsets: Offsets::default(),
            });
        }
        let generation = self.generations.back_mut().expect("pushed above if there was none");
        generation.newest_us = generation.newest_us.max(created_us);
        let mut end = base;
        for hash in hashes {
            generation.offsets.insert(hash as u64, end);
            end += 1;
        }
        if base <= self.known {
            self.known = self.known.max(end);
        }
        while self.generations.front().is_some_and(|g| g.newest_us < created_us - self.window_us) {
            self.generations.pop_front();
        }
    }

    /// Says that everything below this offset has been inserted, or is outside the window.
    pub fn vouch(&mut self, known: i64) {
        self.known = self.known.max(known);
    }

    /// Ids remembered.
    pub fn len(&self) -> usize {
        self.generations.iter().map(|g| g.offsets.len()).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_not_vouched_for_until_it_is_filled() {
        let mut memory = Dedup::new(3600, 0);
        memory.insert(0, [1, 2].into_iter(), 1_000);
        assert_eq!(memory.known(), 2);
        memory.insert(5, [9].into_iter(), 2_000);
        assert_eq!((memory.known(), memory.find(9)), (2, Some(5)));
        memory.insert(2, [3, 4, 5].into_iter(), 2_500);
        memory.insert(5, [9].into_iter(), 2_500);
        assert_eq!(memory.known(), 6);
    }

    #[test]
    fn ids_are_forgotten_after_the_window_and_never_before() {
        let mut memory = Dedup::new(8, 0);
        for second in 0..30i64 {
            memory.insert(second, [second as u128].into_iter(), second * 1_000_000);
            for old in 0..=second {
                let inside = second - old <= 8;
                assert!(!inside || memory.find(old as u128) == Some(old), "second {second} lost {old}");
            }
            assert!(memory.len() <= 10, "{} ids kept", memory.len());
        }
    }
}
