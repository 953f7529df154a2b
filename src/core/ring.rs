//! The candidate ring: which partitions of a queue probably have work for a group,
//! and which of them to try next. The one place where a partition changes state.
//!
//! ```text
//!              mark, seed, promote          take
//!   (absent) ----------------------> READY ------> IN FLIGHT
//!      ^                               ^               |
//!      |  empty, gone, took the rest   |  not reached  |  took a lease, leased, later
//!      +-------------------------------+---------------+-----------> WAITING
//!                                      ^                                |
//!                                      +---- due, promoted, fuller -----+
//! ```
//!
//! The ring only holds hints: a wrong candidate costs a look into the database, a
//! missing one would leave messages lying. So whatever arrives while a partition
//! is in flight or leased is remembered (`dirty`) and sends it back to READY when
//! its claim or its lease ends, whatever the claim had seen.
//!
//! Times are milliseconds on the core's own clock.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use uuid::Uuid;

/// A lease is looked at again after this time, although it may last longer: it may
/// have been acked through another broker ...
pub const RECHECK_FIRST_MS: u64 = 1_000;
/// ... then after twice the time, up to this.
pub const RECHECK_LAST_MS: u64 = 8_000;

/// What a claim said about a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Messages were claimed.
    Took {
        /// When the lease expires; `None`: they were committed at once.
        until: Option<u64>,
        /// The last of them.
        end: i64,
        /// Messages behind the claimed ones.
        remaining: u64,
    },
    /// Nothing behind the cursor.
    Empty,
    /// Somebody else's lease, until then.
    Leased {
        /// When it expires.
        until: u64,
    },
    /// Messages that are not visible yet.
    Later {
        /// When they are.
        until: u64,
        /// With this many they are at once.
        early_at: Option<u64>,
    },
    /// The pop was full before its turn.
    NotReached,
    /// There is no such partition.
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ready { place: u64 },
    InFlight { place: u64 },
    Waiting { due: u64, early_at: Option<u64>, leased: bool },
}

#[derive(Debug)]
struct Entry {
    state: State,
    /// Messages behind the cursor, as far as is known.
    messages: u64,
    /// Something arrived since it was last taken.
    dirty: bool,
    /// Distance of the next look at a lease.
    recheck_ms: u64,
    /// Last offset of the lease that it waits for, if that is known.
    lease_end: Option<i64>,
}

/// See the module.
#[derive(Default)]
pub struct Ring {
    entries: HashMap<Uuid, Entry>,
    ready: BTreeMap<u64, Uuid>,
    waiting: BTreeSet<(u64, Uuid)>,
    places: u64,
    ready_messages: u64,
}

impl Ring {
    /// Messages were committed to a partition.
    pub fn mark(&mut self, id: Uuid, messages: u64) {
        self.note(id, |known| known.saturating_add(messages));
    }

    /// The database was seen to hold work for a partition.
    pub fn seed(&mut self, id: Uuid, pending: u64) {
        self.note(id, |known| known.max(pending));
    }

    /// A partition's lease ended and there is more behind it.
    pub fn promote(&mut self, id: Uuid) {
        self.note(id, |known| known.max(1));
        if let Some(Entry { state: State::Waiting { .. }, .. }) = self.entries.get(&id) {
            self.make_ready(id, None);
        }
    }

    /// A partition's lease ended with everything up to an offset committed, and there was
    /// nothing behind it. What was marked since its claim may be younger than that news,
    /// and so may be its claim: then it is another lease that ended.
    pub fn finished(&mut self, id: Uuid, committed: i64) {
        let Some(entry) = self.entries.get(&id) else { return };
        if let State::Waiting { leased: true, .. } = entry.state
            && entry.lease_end.is_some_and(|end| end <= committed)
        {
            if entry.dirty { self.make_ready(id, None) } else { self.remove(id) }
        }
    }

    fn note(&mut self, id: Uuid, messages: impl FnOnce(u64) -> u64) {
        let Some(entry) = self.entries.get_mut(&id) else {
            // Any state will do: it is replaced at once.
            let state = State::InFlight { place: 0 };
            let entry = Entry {
                state,
                messages: messages(0),
                dirty: true,
                recheck_ms: RECHECK_FIRST_MS,
                lease_end: None,
            };
            self.entries.insert(id, entry);
            self.make_ready(id, None);
            return;
        };
        let before = entry.messages;
        entry.messages = messages(before);
        entry.dirty = true;
        match entry.state {
            State::Ready { .. } => self.ready_messages += entry.messages - before,
            State::Waiting { early_at: Some(enough), .. } if entry.messages >= enough => {
                self.make_ready(id, None)
            }
            _ => {}
        }
    }

    /// Takes the next candidates, oldest first: at most so many partitions, and no
    /// more than probably hold so many messages. They are in flight until [`Ring::verdict`].
    pub fn take(&mut self, partitions: usize, messages: u64) -> Vec<Uuid> {
        let (mut taken, mut expected) = (Vec::new(), 0u64);
        while taken.len() < partitions && expected < messages {
            let Some((place, id)) = self.ready.pop_first() else { break };
            let entry = self.entries.get_mut(&id).expect("what is ready is an entry");
            entry.state = State::InFlight { place };
            entry.dirty = false;
            self.ready_messages -= entry.messages;
            expected = expected.saturating_add(entry.messages.max(1));
            taken.push(id);
        }
        taken
    }

    /// The next candidates in their order, and the messages they probably hold. They stay where they are.
    pub fn peek(&self, most: usize) -> Vec<(Uuid, u64)> {
        self.ready.values().take(most).map(|id| (*id, self.entries[id].messages.max(1))).collect()
    }

    /// As [`Ring::take`], in an order of somebody else's; what is not ready is passed over.
    pub fn take_in_order(
        &mut self,
        order: impl IntoIterator<Item = Uuid>,
        partitions: usize,
        messages: u64,
    ) -> Vec<Uuid> {
        let (mut taken, mut expected) = (Vec::new(), 0u64);
        for id in order {
            if taken.len() >= partitions || expected >= messages {
                break;
            }
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            let State::Ready { place } = entry.state else { continue };
            self.ready.remove(&place);
            entry.state = State::InFlight { place };
            entry.dirty = false;
            self.ready_messages -= entry.messages;
            expected = expected.saturating_add(entry.messages.max(1));
            taken.push(id);
        }
        taken
    }

    /// Takes one partition, whatever its state. False: it is in flight already.
    pub fn take_one(&mut self, id: Uuid) -> bool {
        if let Some(Entry { state: State::InFlight { .. }, .. }) = self.entries.get(&id) {
            return false;
        }
        self.detach(id);
        let place = self.next_place();
        let entry = self.entries.entry(id).or_insert(Entry {
            state: State::InFlight { place },
            messages: 0,
            dirty: false,
            recheck_ms: RECHECK_FIRST_MS,
            lease_end: None,
        });
        entry.state = State::InFlight { place };
        entry.dirty = false;
        true
    }

    /// Ends a candidate's flight.
    pub fn verdict(&mut self, id: Uuid, verdict: Verdict, now_ms: u64) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let State::InFlight { place } = entry.state else { return };
        let dirty = entry.dirty;
        match verdict {
            Verdict::Took { until: None, remaining, .. } => {
                entry.messages = remaining;
                entry.recheck_ms = RECHECK_FIRST_MS;
                if remaining > 0 || dirty { self.make_ready(id, None) } else { self.remove(id) }
            }
            Verdict::Took { until: Some(until), remaining, end } => {
                entry.messages = remaining;
                entry.lease_end = Some(end);
                entry.recheck_ms = RECHECK_FIRST_MS;
                self.wait_for_lease(id, until, now_ms);
            }
            Verdict::Leased { until } => {
                // Whose it is, and what it covers, is not known here.
                entry.lease_end = None;
                self.wait_for_lease(id, until, now_ms);
            }
            Verdict::Later { until, early_at } => {
                if early_at.is_some_and(|enough| dirty && entry.messages >= enough) {
                    self.make_ready(id, None);
                } else {
                    self.make_waiting(id, until.max(now_ms + 1), early_at, false);
                }
            }
            Verdict::NotReached => self.make_ready(id, Some(place)),
            Verdict::Empty if dirty => self.make_ready(id, None),
            Verdict::Empty | Verdict::Gone => self.remove(id),
        }
    }

    fn wait_for_lease(&mut self, id: Uuid, until: u64, now_ms: u64) {
        let entry = self.entries.get_mut(&id).expect("checked by the caller");
        let due = until.min(now_ms + entry.recheck_ms).max(now_ms + 1);
        entry.recheck_ms = (entry.recheck_ms * 2).min(RECHECK_LAST_MS);
        self.make_waiting(id, due, None, true);
    }

    /// Makes everything ready that is due.
    pub fn advance(&mut self, now_ms: u64) {
        while let Some((due, id)) = self.waiting.first().copied()
            && due <= now_ms
        {
            self.make_ready(id, None);
        }
    }

    /// When the next one is due.
    pub fn next_due(&self) -> Option<u64> {
        self.waiting.first().map(|(due, _)| *due)
    }

    /// Whether there is a candidate.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// How many there are.
    pub fn ready_len(&self) -> usize {
        self.ready.len()
    }

    /// Messages that the candidates probably hold.
    pub fn pending_estimate(&self) -> u64 {
        self.ready_messages
    }

    /// Partitions known, whatever their state.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a partition is a candidate.
    pub fn is_ready(&self, id: Uuid) -> bool {
        matches!(self.entries.get(&id), Some(Entry { state: State::Ready { .. }, .. }))
    }

    /// Whether a partition is known.
    pub fn contains(&self, id: Uuid) -> bool {
        self.entries.contains_key(&id)
    }

    fn next_place(&mut self) -> u64 {
        self.places += 1;
        self.places
    }

    fn make_ready(&mut self, id: Uuid, place: Option<u64>) {
        self.detach(id);
        let place = place.unwrap_or_else(|| self.next_place());
        let entry = self.entries.get_mut(&id).expect("checked by the caller");
        entry.state = State::Ready { place };
        self.ready_messages += entry.messages;
        self.ready.insert(place, id);
    }

    fn make_waiting(&mut self, id: Uuid, due: u64, early_at: Option<u64>, leased: bool) {
        self.detach(id);
        let entry = self.entries.get_mut(&id).expect("checked by the caller");
        entry.state = State::Waiting { due, early_at, leased };
        self.waiting.insert((due, id));
    }

    fn remove(&mut self, id: Uuid) {
        self.detach(id);
        self.entries.remove(&id);
    }

    /// Takes an entry out of the lists of its state.
    fn detach(&mut self, id: Uuid) {
        let Some(entry) = self.entries.get(&id) else { return };
        match entry.state {
            State::Ready { place } => {
                self.ready.remove(&place);
                self.ready_messages -= entry.messages;
            }
            State::InFlight { .. } => {}
            State::Waiting { due, .. } => {
                self.waiting.remove(&(due, id));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(n: usize) -> Uuid {
        Uuid::from_u128(n as u128 + 1)
    }

    #[test]
    fn candidates_are_oldest_first_and_keep_their_place_when_not_reached() {
        let mut ring = Ring::default();
        (0..4).for_each(|n| ring.mark(id(n), 2));
        assert_eq!(ring.pending_estimate(), 8);
        assert_eq!(ring.take(10, 3), [id(0), id(1)], "two of two messages hold three");
        ring.verdict(id(0), Verdict::Took { until: Some(50), end: 9, remaining: 5 }, 0);
        ring.verdict(id(1), Verdict::NotReached, 0);
        assert_eq!(ring.take(1, 100), [id(1)]);
        assert_eq!(ring.take(10, 100), [id(2), id(3)]);
        assert_eq!((ring.pending_estimate(), ring.next_due()), (0, Some(50)));
    }

    #[test]
    fn a_mark_in_flight_or_under_a_lease_is_not_forgotten() {
        let mut ring = Ring::default();
        ring.mark(id(0), 1);
        ring.take(1, 1);
        ring.mark(id(0), 1);
        ring.verdict(id(0), Verdict::Empty, 0);
        assert!(ring.is_ready(id(0)), "the claim may not have seen what was marked meanwhile");
        ring.take(1, 1);
        ring.verdict(id(0), Verdict::Took { until: Some(900), end: 9, remaining: 0 }, 0);
        ring.mark(id(0), 1);
        assert!(!ring.is_ready(id(0)), "it is leased");
        ring.finished(id(0), 9);
        assert!(ring.is_ready(id(0)));
        ring.take(1, 1);
        ring.verdict(id(0), Verdict::Took { until: Some(900), end: 9, remaining: 0 }, 0);
        ring.finished(id(0), 9);
        assert!(ring.is_empty());
    }

    #[test]
    fn a_lease_is_looked_at_before_it_ends_and_ever_more_rarely() {
        let mut ring = Ring::default();
        ring.mark(id(0), 1);
        let mut now = 0;
        for distance in [1_000, 2_000, 4_000, 8_000, 8_000] {
            ring.take(1, 1);
            ring.verdict(id(0), Verdict::Leased { until: 1_000_000 }, now);
            assert_eq!(ring.next_due(), Some(now + distance));
            now += distance;
            ring.advance(now);
        }
        ring.promote(id(0));
        assert!(ring.is_ready(id(0)));
    }

    #[test]
    fn late_news_of_one_lease_do_not_end_the_next() {
        let mut ring = Ring::default();
        ring.mark(id(0), 1);
        ring.take(1, 1);
        ring.verdict(id(0), Verdict::Took { until: Some(100), end: 4, remaining: 0 }, 0);
        ring.advance(100);
        ring.take(1, 1);
        ring.verdict(id(0), Verdict::Took { until: Some(500), end: 5, remaining: 0 }, 100);
        ring.finished(id(0), 4);
        assert!(ring.contains(id(0)), "the second lease may expire without an ack");
        ring.finished(id(0), 5);
        assert!(!ring.contains(id(0)));
    }

    #[test]
    fn a_window_ends_early_when_enough_has_gathered() {
        let mut ring = Ring::default();
        ring.mark(id(0), 60);
        ring.take(1, 1);
        ring.verdict(id(0), Verdict::Later { until: 2_000, early_at: Some(100) }, 0);
        ring.mark(id(0), 39);
        assert!(!ring.is_ready(id(0)));
        ring.mark(id(0), 1);
        assert!(ring.is_ready(id(0)));
    }

    /// The world as the database has it, and the news of it that is under way.
    #[derive(Default, Clone)]
    struct Lane {
        pushed: u64,
        committed: u64,
        lease: Option<(u64, u64)>, // end of the span, expiry
    }

    #[derive(Debug, Clone)]
    enum Step {
        Push(usize, u64),
        Deliver(usize),
        Claim(usize, u64, bool, u64),
        Ack(usize, bool),
        Seed(usize),
        Pass(u64),
    }

    enum News {
        Mark(usize, u64),
        Settled(usize, bool, i64),
        Seed(usize, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..4usize, 1..4u64).prop_map(|(lane, n)| Step::Push(lane, n)),
            5 => any::<usize>().prop_map(Step::Deliver),
            4 => (1..4usize, 1..6u64, any::<bool>(), 1..3_000u64).prop_map(|(p, n, auto, ms)| Step::Claim(p, n, auto, ms)),
            3 => (0..4usize, any::<bool>()).prop_map(|(lane, all)| Step::Ack(lane, all)),
            1 => (0..4usize).prop_map(Step::Seed),
            2 => (1..2_000u64).prop_map(Step::Pass),
        ]
    }

    struct World {
        ring: Ring,
        lanes: Vec<Lane>,
        news: Vec<News>,
        now: u64,
    }

    impl World {
        /// A claim as the database does it. `news_first`: what is delivered between take and verdict.
        fn claim(&mut self, partitions: usize, batch: u64, auto: bool, lease_ms: u64) {
            let taken = self.ring.take(partitions, batch);
            let mut left = batch;
            for candidate in taken {
                let n = (candidate.as_u128() - 1) as usize;
                let lane = &mut self.lanes[n];
                let verdict = match lane.lease {
                    Some((_, until)) if until > self.now => Verdict::Leased { until },
                    _ if lane.pushed == lane.committed => Verdict::Empty,
                    _ if left == 0 => Verdict::NotReached,
                    _ => {
                        let end = (lane.committed + left).min(lane.pushed);
                        left -= end - lane.committed;
                        if auto {
                            lane.committed = end;
                            lane.lease = None;
                            Verdict::Took { until: None, end: end as i64, remaining: lane.pushed - end }
                        } else {
                            let until = self.now + lease_ms;
                            lane.lease = Some((end, until));
                            Verdict::Took {
                                until: Some(until),
                                end: end as i64,
                                remaining: lane.pushed - end,
                            }
                        }
                    }
                };
                // News may arrive between the claim and its verdict.
                if !self.news.is_empty() && n.is_multiple_of(2) {
                    self.deliver(0);
                }
                self.ring.verdict(candidate, verdict, self.now);
            }
        }

        fn deliver(&mut self, which: usize) {
            if self.news.is_empty() {
                return;
            }
            // Of one sender news come in order; of several in any.
            let which = which % self.news.len();
            match self.news.remove(which) {
                News::Mark(lane, n) => self.ring.mark(id(lane), n),
                News::Settled(lane, true, _) => self.ring.promote(id(lane)),
                News::Settled(lane, false, committed) => self.ring.finished(id(lane), committed),
                News::Seed(lane, n) => self.ring.seed(id(lane), n),
            }
        }

        fn check(&self) {
            let ready: Vec<_> = self.ring.ready.values().collect();
            let sum: u64 = ready.iter().map(|id| self.ring.entries[id].messages).sum();
            assert_eq!(self.ring.ready_messages, sum);
            let in_lists = self.ring.ready.len() + self.ring.waiting.len();
            let flying =
                self.ring.entries.values().filter(|e| matches!(e.state, State::InFlight { .. })).count();
            assert_eq!(in_lists + flying, self.ring.entries.len());
            if self.news.is_empty() {
                for (n, lane) in self.lanes.iter().enumerate() {
                    assert!(
                        lane.pushed == lane.committed || self.ring.contains(id(n)),
                        "lane {n} has work and is unseen"
                    );
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        /// Whatever the order of marks, claims, acks, expiries and looks at the database:
        /// no partition with work stays unseen, and all of it is delivered in the end.
        #[test]
        fn no_partition_with_work_stays_unseen(steps in prop::collection::vec(step(), 1..80)) {
            let mut world = World { ring: Ring::default(), lanes: vec![Lane::default(); 4], news: Vec::new(), now: 0 };
            for step in steps {
                match step {
                    Step::Push(lane, n) => {
                        world.lanes[lane].pushed += n;
                        world.news.push(News::Mark(lane, n));
                    }
                    Step::Deliver(which) => world.deliver(which),
                    Step::Claim(partitions, batch, auto, ms) => world.claim(partitions, batch, auto, ms),
                    Step::Ack(n, all) => {
                        let lane = &mut world.lanes[n];
                        if let Some((end, until)) = lane.lease && until > world.now {
                            lane.committed = if all { end } else { lane.committed };
                            lane.lease = None;
                            let pending = lane.pushed > lane.committed;
                            world.news.push(News::Settled(n, pending, lane.committed as i64));
                        }
                    }
                    Step::Seed(n) => {
                        let lane = &world.lanes[n];
                        if lane.pushed > lane.committed {
                            world.news.push(News::Seed(n, lane.pushed - lane.committed));
                        }
                    }
                    Step::Pass(ms) => {
                        world.now += ms;
                        world.ring.advance(world.now);
                    }
                }
                world.check();
            }
            while !world.news.is_empty() {
                world.deliver(0);
            }
            world.check();
            for _ in 0..200 {
                world.now += 1_000;
                world.ring.advance(world.now);
                world.claim(4, 100, true, 1);
                world.check();
            }
            prop_assert!(world.lanes.iter().all(|lane| lane.pushed == lane.committed));
            prop_assert!(world.ring.is_empty());
        }
    }
}
