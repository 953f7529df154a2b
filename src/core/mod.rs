//! Core threads: all work of the data plane.
//!
//! Each core thread has one database connection and exclusive ownership of the
//! state that is hashed to it. A request goes to the core that owns it: a push by
//! (queue, partition), a pop by (queue, group), an ack to the core that gave out
//! its lease. No state is shared, so nothing is locked; cores talk through
//! crossbeam channels.
//!
//! A core drains and fuses: it takes everything that waits in its inbox and turns
//! each kind of request into one SQL call. Under no load that call carries one
//! request; under load everything that arrived during the previous commit shares
//! the next one.

pub mod acking;
pub mod admin;
pub mod dedup;
pub mod discovery;
pub mod engine;
pub mod filtering;
pub mod group;
pub mod hints;
pub mod inbox;
pub mod lanes;
pub mod leases;
pub mod link;
pub mod metrics;
pub mod popping;
pub mod pushing;
pub mod ring;
pub mod selecting;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Sender, unbounded};
use uuid::Uuid;
use xxhash_rust::xxh3::Xxh3;

use crate::broker::ack::AckRequest;
use crate::broker::answer::ReplyHandle;
use crate::broker::pop::{PopRequest, PopTarget};
use crate::broker::push::PushRequest;
use crate::plugins::library::Library;
use crate::store::hint::Catalog;
use crate::store::{Database, StoreError};
use admin::Admin;
use engine::{Engine, GroupKey};
use inbox::{AckJob, ExtendJob, Mark, Message, PopJob, PushJob, Settled};
use link::Link;
use metrics::Metrics;

/// Stack of a core thread: plugins run on it, and their own limit must be reached first.
const CORE_STACK_BYTES: usize = 8 * 1024 * 1024;
/// Threads for slow work of the cores.
const ADMIN_THREADS: usize = 2;
/// Threads for admin requests.
const HTTP_ADMIN_THREADS: usize = 2;

fn hash_of(a: &str, b: &str) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(a.as_bytes());
    // No name contains it.
    hasher.update(&[0]);
    hasher.update(b.as_bytes());
    hasher.digest()
}

/// The core that owns a (queue, group).
pub fn owner_of_group(queue: &str, group: &str, cores: usize) -> usize {
    (hash_of(queue, group) % cores as u64) as usize
}

/// Which (queue, group)s are open on this broker, for the keeper. Locked when a
/// group opens or closes, never per request.
#[derive(Default)]
pub struct Registry(Mutex<HashMap<GroupKey, Uuid>>);

impl Registry {
    fn opened(&self, key: &GroupKey, queue_id: Uuid) {
        self.0.lock().expect("no panic while it is held").insert(key.clone(), queue_id);
    }

    fn closed(&self, key: &GroupKey) {
        self.0.lock().expect("no panic while it is held").remove(key);
    }

    fn open_groups(&self) -> Vec<(GroupKey, Uuid)> {
        self.0.lock().expect("no panic while it is held").iter().map(|(key, id)| (key.clone(), *id)).collect()
    }
}

/// The maintenance modes, as this broker last saw them.
#[derive(Default)]
pub struct Maintenance {
    /// Pushes are refused.
    pub push: AtomicBool,
    /// Pops find nothing.
    pub pop: AtomicBool,
}

impl Maintenance {
    /// Takes over what the database says.
    pub fn follow(&self, catalog: &Catalog) {
        self.push.store(catalog.push_maintenance, Ordering::Relaxed);
        self.pop.store(catalog.pop_maintenance, Ordering::Relaxed);
    }
}

/// The running core threads: where requests go.
pub struct Cores {
    /// The maintenance modes.
    pub maintenance: Arc<Maintenance>,
    peers: Arc<[Sender<Message>]>,
    /// For admin requests.
    pub admin: Admin,
    /// Counters.
    pub metrics: Arc<Metrics>,
    hints: hints::HintSender,
    stop: Mutex<Option<(Sender<()>, Vec<JoinHandle<()>>)>>,
}

impl Cores {
    /// Connects, and starts `cores` core threads and their helpers.
    pub fn start(database: &Database, cores: usize, library: &Arc<Library>) -> Result<Self, StoreError> {
        let thread =
            |error: std::io::Error| StoreError::Unavailable(format!("cannot start a thread: {error}"));
        let (peers, inboxes): (Vec<_>, Vec<_>) = (0..cores).map(|_| unbounded()).unzip();
        let peers: Arc<[Sender<Message>]> = peers.into();
        let (registry, metrics) = (Arc::new(Registry::default()), Arc::new(Metrics::default()));
        let maintenance = Arc::new(Maintenance::default());
        let own = Admin::start(database, "admin", ADMIN_THREADS, peers.clone()).map_err(thread)?;
        let admin =
            Admin::start(database, "http-admin", HTTP_ADMIN_THREADS, peers.clone()).map_err(thread)?;
        let (hints, stop, mut threads) =
            hints::start(database, peers.clone(), registry.clone(), maintenance.clone()).map_err(thread)?;
        for (index, inbox) in inboxes.into_iter().enumerate() {
            let name = format!("core-{index}");
            let conn = database.connect(&name)?;
            let link = Link::new(database.clone(), name.clone(), conn);
            let engine = Engine::new(
                index,
                inbox,
                peers.clone(),
                own.clone(),
                hints.clone(),
                registry.clone(),
                metrics.clone(),
                link,
                library.clone(),
            );
            let builder = std::thread::Builder::new().name(name).stack_size(CORE_STACK_BYTES);
            threads.push(builder.spawn(move || engine.run()).map_err(thread)?);
        }
        Ok(Self { maintenance, peers, admin, metrics, hints, stop: Mutex::new(Some((stop, threads))) })
    }

    fn send(&self, core: usize, message: Message) {
        // A core that has ended drops the message, and with it the reply, which then answers.
        let _ = self.peers[core].send(message);
    }

    /// A push, to the owner of its first partition.
    pub fn push(&self, request: PushRequest, reply: ReplyHandle) {
        let core = match request.lanes.first() {
            Some(lane) => owner_of_group(&lane.queue, &lane.partition, self.peers.len()),
            None => 0,
        };
        self.send(core, Message::Push(Box::new(PushJob { request, reply, arrived: Instant::now() })));
    }

    /// A pop, to the owner of its (queue, group) or discovery key.
    pub fn pop(&self, request: PopRequest, reply: ReplyHandle) {
        let core = match &request.target {
            PopTarget::Queue(queue) | PopTarget::Partition(queue, _) => {
                owner_of_group(queue, &request.group, self.peers.len())
            }
            PopTarget::Discovery { namespace, task } => {
                let key =
                    format!("{}\0{}", namespace.as_deref().unwrap_or(""), task.as_deref().unwrap_or(""));
                owner_of_group(&key, &request.group, self.peers.len())
            }
        };
        let group = request.group.as_str().into();
        let arrived = Instant::now();
        let job = PopJob {
            request,
            group,
            reply,
            arrived,
            fill_until: None,
            partition_was_missing: false,
            filter_agreed: false,
            explanation: Vec::new(),
        };
        self.send(core, Message::Pop(Box::new(job)));
    }

    /// Acks, to the core that gave out their lease.
    pub fn ack(&self, request: AckRequest, reply: ReplyHandle) {
        let core = match request.items.iter().find_map(|item| item.lease_id) {
            Some(lease) => leases::core_of(lease) % self.peers.len(),
            None => request
                .items
                .first()
                .map_or(0, |item| item.partition_id.as_u128() as usize % self.peers.len()),
        };
        self.send(core, Message::Ack(Box::new(AckJob { request, reply, arrived: Instant::now() })));
    }

    /// A renewal, to the core that gave out the lease.
    pub fn extend(&self, lease: String, seconds: u32, reply: ReplyHandle) {
        let core = Uuid::parse_str(&lease).map_or(0, |id| leases::core_of(id) % self.peers.len());
        self.send(core, Message::Extend(ExtendJob { lease, seconds, reply }));
    }

    /// Tells everybody that messages were committed, by something else than a core.
    pub fn announce(&self, marks: Vec<Mark>) {
        if marks.is_empty() {
            return;
        }
        let mut hinted: HashMap<Arc<str>, Vec<(Uuid, Arc<str>, u64)>> = HashMap::new();
        for mark in &marks {
            hinted.entry(mark.queue.clone()).or_default().extend(mark.partitions.iter().cloned());
        }
        self.hints.marked(&hinted);
        let messages: u64 = marks.iter().flat_map(|mark| &mark.partitions).map(|partition| partition.2).sum();
        self.metrics.pushed_messages.inc_by(messages);
        let marks: Arc<[Mark]> = marks.into();
        self.tell(|| Message::Marked(marks.clone()));
    }

    /// Tells everybody that a group's cursors (on a queue, or on all) were moved or deleted.
    pub fn group_changed(&self, queue: Option<&str>, group: &str, deleted: bool) {
        self.hints.group_changed(queue, group, deleted);
        let (queue, group): (Option<Arc<str>>, Arc<str>) = (queue.map(Into::into), group.into());
        self.tell(|| hints::group_message(queue.clone(), group.clone(), deleted));
    }

    /// Tells the owner of a (queue, group) that a partition may be claimable again.
    pub fn settle(&self, settled: Settled) {
        let owner = owner_of_group(&settled.queue, &settled.group, self.peers.len());
        self.send(owner, Message::Settled(settled));
    }

    /// Tells all cores.
    pub fn tell(&self, message: impl Fn() -> Message) {
        for core in 0..self.peers.len() {
            self.send(core, message());
        }
    }

    /// Answers what waits and ends the threads.
    pub fn stop(&self) {
        let Some((stop, threads)) = self.stop.lock().expect("no panic while it is held").take() else {
            return;
        };
        drop(stop);
        self.tell(|| Message::Stop);
        for thread in threads {
            let _ = thread.join();
        }
    }
}
