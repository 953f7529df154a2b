//! What must be true of every run: nothing lost, nothing twice, lanes in order.

use std::sync::Mutex;

/// A stream of messages: one producer's, in one partition, numbered from 0.
#[derive(Default)]
struct Stream {
    /// Messages answered as stored.
    stored: u64,
    /// The next one that may be delivered.
    due: u64,
    /// Someone has messages of it under a lease.
    held: bool,
}

/// See the module.
pub struct Ledger {
    streams: Vec<Mutex<Stream>>,
    faults: Mutex<Vec<String>>,
    /// A consumer was answered with an error: its lease may end by expiry, and deliver again.
    excused: std::sync::atomic::AtomicBool,
}

/// Faults that are told in full.
const MAX_FAULTS: usize = 10;

impl Ledger {
    /// For so many streams.
    pub fn new(streams: usize) -> Self {
        Self {
            streams: (0..streams).map(|_| Mutex::default()).collect(),
            faults: Mutex::default(),
            excused: false.into(),
        }
    }

    /// An answer that no client should get.
    pub fn fault_of_broker(&self, text: String) {
        self.fault(text);
    }

    fn fault(&self, text: String) {
        let mut faults = self.faults.lock().expect("no panic while it is held");
        if faults.len() < MAX_FAULTS {
            faults.push(text);
        }
    }

    /// An ack or a pop failed: what it was about may be delivered again.
    pub fn excuse(&self) {
        self.excused.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    fn is_excused(&self) -> bool {
        self.excused.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Messages below `end` of a stream were answered as stored.
    pub fn stored(&self, stream: usize, end: u64) {
        let mut entry = self.streams[stream].lock().expect("no panic while it is held");
        entry.stored = entry.stored.max(end);
    }

    /// The messages `first..end` of a stream were delivered, and are now held.
    pub fn delivered(&self, stream: usize, first: u64, end: u64) {
        let Some(entry) = self.streams.get(stream) else {
            return self.fault(format!("a message of stream {stream}, which nobody writes"));
        };
        let mut entry = entry.lock().expect("no panic while it is held");
        if entry.held && !self.is_excused() {
            self.fault(format!("stream {stream}: {first} delivered while it is held by another consumer"));
        }
        if first > entry.due || (first < entry.due && !self.is_excused()) {
            self.fault(format!("stream {stream}: {first} delivered, {} was due", entry.due));
        }
        entry.due = entry.due.max(end);
        entry.held = true;
    }

    /// A consumer is about to ack what it holds of a stream.
    pub fn let_go(&self, stream: usize) {
        if let Some(entry) = self.streams.get(stream) {
            entry.lock().expect("no panic while it is held").held = false;
        }
    }

    /// A message out of the order of its own delivery.
    pub fn out_of_order(&self, stream: usize, n: u64, expected: u64) {
        self.fault(format!("stream {stream}: {n} instead of {expected} within one delivery"));
    }

    /// Messages stored, and of them delivered.
    pub fn totals(&self) -> (u64, u64) {
        self.streams.iter().fold((0, 0), |(stored, due), stream| {
            let stream = stream.lock().expect("no panic while it is held");
            (stored + stream.stored, due + stream.due.min(stream.stored))
        })
    }

    /// What went wrong.
    pub fn faults(&self) -> Vec<String> {
        self.faults.lock().expect("no panic while it is held").clone()
    }
}
