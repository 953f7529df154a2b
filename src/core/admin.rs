//! Slow and rare database work, off the core threads: a few threads with pooled
//! connections. What they find out goes back to a core as a message.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use uuid::Uuid;

use super::discovery::DiscoveryKey;
use super::engine::{GroupKey, store_error};
use super::inbox::{ExtendJob, LaneHashes, Message, Opened, OpenedGroup, Page, PopJob, start_mode};
use super::owner_of_group;
use crate::broker::ack;
use crate::broker::answer::Reply;
use crate::broker::error::ApiError;
use crate::broker::plugin::{Binding, Kind};
use crate::broker::pop::StartAt;
use crate::broker::queue_options::namespace_and_task_of;
use crate::plugins::library::Library;
use crate::store::group::{self, QueueInfo};
use crate::store::plugin;
use crate::store::push::load_hashes;
use crate::store::{Conn, Database, StoreError};

/// Longest call of the admin side.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(3);
/// Partitions per page.
const PAGE: i64 = 2_000;

/// r2d2's view of our connections, whose calls end even where the server does not answer;
/// r2d2_postgres' own manager makes connections whose calls may hang for ever.
pub struct Manager(Database);

impl r2d2::ManageConnection for Manager {
    type Connection = Conn;
    type Error = StoreError;

    fn connect(&self) -> Result<Conn, StoreError> {
        self.0.connect_slow("admin", CALL_TIMEOUT)
    }

    fn is_valid(&self, conn: &mut Conn) -> Result<(), StoreError> {
        if conn.looks_alive() {
            Ok(())
        } else {
            Err(StoreError::Unavailable("the connection was closed".to_owned()))
        }
    }

    fn has_broken(&self, conn: &mut Conn) -> bool {
        !conn.looks_alive()
    }
}

enum Task {
    Database(Box<dyn FnOnce(Result<&mut Conn, StoreError>) + Send>),
    Plain(Box<dyn FnOnce() + Send>),
}

/// A handle to a pool of admin threads.
#[derive(Clone)]
pub struct Admin {
    tasks: Sender<Task>,
    pool: r2d2::Pool<Manager>,
    peers: Arc<[Sender<Message>]>,
}

impl Admin {
    /// Starts the threads. They end when the last handle is dropped.
    pub fn start(
        database: &Database,
        name: &str,
        threads: usize,
        peers: Arc<[Sender<Message>]>,
    ) -> std::io::Result<Self> {
        let pool = r2d2::Pool::builder()
            .max_size(threads as u32)
            .min_idle(Some(0))
            .connection_timeout(CONNECTION_TIMEOUT)
            .error_handler(Box::new(r2d2::NopErrorHandler))
            .build_unchecked(Manager(database.clone()));
        let (tasks, inbox) = unbounded::<Task>();
        for n in 0..threads {
            let (inbox, pool) = (inbox.clone(), pool.clone());
            std::thread::Builder::new().name(format!("{name}-{n}")).spawn(move || work(&inbox, &pool))?;
        }
        Ok(Self { tasks, pool, peers })
    }

    /// Runs something with a connection, or with the reason why there is none.
    pub fn run(&self, task: impl FnOnce(Result<&mut Conn, StoreError>) + Send + 'static) {
        let _ = self.tasks.send(Task::Database(Box::new(task)));
    }

    /// Runs something slow that needs no database.
    pub fn run_without_database(&self, task: impl FnOnce() + Send + 'static) {
        let _ = self.tasks.send(Task::Plain(Box::new(task)));
    }

    /// Connections made, idle, and tasks that wait.
    pub fn state(&self) -> (u32, u32, usize) {
        let state = self.pool.state();
        (state.connections, state.idle_connections, self.tasks.len())
    }

    fn send(&self, core: usize, message: Message) {
        let _ = self.peers[core].send(message);
    }

    /// Reads a page of partitions with work.
    pub(super) fn page(&self, core: usize, key: GroupKey, queue_id: Uuid, after: Option<String>) {
        let me = self.clone();
        self.run(move |conn| {
            let found =
                conn.and_then(|conn| group::pending_page(conn, queue_id, &key.1, after.as_deref(), PAGE));
            let (pending, next, failed) = match found {
                Ok((pending, next)) => (pending, next, false),
                Err(_) => (Vec::new(), after, true),
            };
            me.send(core, Message::Page(Page { queue: key.0, group: key.1, pending, next, failed }));
        });
    }

    /// Looks queues up again.
    pub(super) fn queue_infos(&self, core: usize, ids: Vec<Uuid>) {
        let me = self.clone();
        self.run(move |conn| {
            if let Ok(infos) = conn.and_then(|conn| group::queues_by_id(conn, &ids)) {
                me.send(core, Message::QueueInfos(ids, infos));
            }
        });
    }

    /// Reads a lane's hashes.
    pub(super) fn load_hashes(
        &self,
        core: usize,
        queue: String,
        partition: String,
        id: Uuid,
        window_seconds: i32,
    ) {
        let me = self.clone();
        self.run(move |conn| {
            let result = conn.and_then(|conn| load_hashes(conn, id, 0, window_seconds, i64::MAX));
            me.send(core, Message::Hashes(LaneHashes { lane: (queue, partition), partition: id, result }));
        });
    }

    /// A group's first contact with a queue (here): the queue is made, the group
    /// subscribed, its first candidates found.
    pub(super) fn open(&self, core: usize, key: GroupKey, start: StartAt) {
        let me = self.clone();
        self.run(move |conn| {
            let result = conn.and_then(|conn| {
                let (namespace, task) = namespace_and_task_of(&key.0);
                let info = group::ensure_queue(conn, &key.0, namespace, task)?;
                open(conn, info, &key.1, start)
            });
            me.send(core, Message::Opened(Opened { queue: key.0, group: key.1, result }));
        });
    }

    /// Sees to it that a group's filter is the one that a pop names: registers it on
    /// first contact, else refuses the pop.
    pub(super) fn register_filter(
        &self,
        core: usize,
        key: GroupKey,
        job: Box<PopJob>,
        library: Arc<Library>,
    ) {
        let me = self.clone();
        self.run(move |conn| {
            let Some(asked) = job.request.filter.clone() else { return };
            let result = conn.and_then(|conn| {
                let (namespace, task) = namespace_and_task_of(&key.0);
                if let Some(info) = group::find_queue(conn, &key.0)?
                    && let Some(stored) = plugin::find(conn, info.id, &key.1, Kind::Filter)?
                {
                    return Ok(agree(info, &asked, Some(&stored)));
                }
                if let Err(error) = library.check(Kind::Filter, &asked) {
                    return Ok(Err(error));
                }
                let info = group::ensure_queue(conn, &key.0, namespace, task)?;
                let stored = plugin::register(conn, info.id, &key.1, &asked)?;
                // Read again: with the binding.
                let info = group::find_queue(conn, &key.0)?.unwrap_or(info);
                Ok(agree(info, &asked, stored.as_ref()))
            });
            match result {
                Ok(Ok(info)) => me.send(core, Message::FilterAgreed(job, Box::new(info))),
                Ok(Err(error)) => drop(job.reply.send(Reply::from(&error))),
                Err(error) => drop(job.reply.send(Reply::from(&store_error(&error)))),
            }
        });
    }

    /// Finds the queues of a discovery key and opens those that are new to it, each
    /// at its owner; then tells the key's home.
    pub(super) fn discover(&self, home: usize, key: Arc<DiscoveryKey>, start: StartAt, known: Vec<Uuid>) {
        let me = self.clone();
        self.run(move |conn| {
            let result = conn.and_then(|conn| me.discover_now(conn, &key, start, &known));
            me.send(home, Message::Discovered(key, result));
        });
    }

    fn discover_now(
        &self,
        conn: &mut Conn,
        key: &DiscoveryKey,
        start: StartAt,
        known: &[Uuid],
    ) -> Result<Vec<QueueInfo>, StoreError> {
        let queues = group::matching_queues(conn, key.namespace.as_deref(), key.task.as_deref())?;
        for info in &queues {
            if known.contains(&info.id) {
                continue;
            }
            let queue: Arc<str> = info.name.as_str().into();
            let opened = open(conn, info.clone(), &key.group, start)?;
            let owner = owner_of_group(&queue, &key.group, self.peers.len());
            self.send(owner, Message::Opened(Opened { queue, group: key.group.clone(), result: Ok(opened) }));
        }
        Ok(queues)
    }

    /// Renews a lease that no core remembers.
    pub(super) fn extend_unknown(&self, id: Uuid, job: ExtendJob) {
        self.run(move |conn| {
            let renewed = conn.and_then(|conn| {
                let rows = crate::store::ack::find_lease(conn, id)?;
                let (mut renewed, mut until) = (0, None);
                for (partition, group) in rows {
                    let (n, at) =
                        crate::store::ack::extend_lease(conn, id, &[partition], &group, job.seconds as i32)?;
                    renewed += n as u64;
                    until = match (until, at) {
                        (Some(a), Some(b)) => Some(std::cmp::min::<crate::store::Micros>(a, b)),
                        (a, b) => a.or(b),
                    };
                }
                Ok((renewed, until))
            });
            job.reply.send(match renewed {
                Ok((renewed, until)) => {
                    Reply::json(200, ack::extend_answer(&job.lease, renewed, until.map(|at| at.0)))
                }
                Err(error) => Reply::from(&store_error(&error)),
            });
        });
    }
}

/// The queue, if the filter that a pop names is what the group has.
fn agree(info: QueueInfo, asked: &Binding, stored: Option<&Binding>) -> Result<QueueInfo, ApiError> {
    match stored {
        Some(stored) if stored.key == asked.key => Ok(info),
        stored => {
            let has = stored
                .map_or("no filter".to_owned(), |stored| format!("filter {}", stored.to_json(Kind::Filter)));
            Err(ApiError {
                status: 409,
                code: "filter_conflict",
                message: format!(
                    "the group has {has} on this queue, the pop names {}; change it with PUT /api/v1/consumer-groups/:group/queues/:queue/filter",
                    asked.to_json(Kind::Filter)
                ),
            })
        }
    }
}

fn open(conn: &mut Conn, info: QueueInfo, group: &str, start: StartAt) -> Result<OpenedGroup, StoreError> {
    let (mode, at) = start_mode(start);
    group::subscribe(conn, info.id, group, mode, at)?;
    let (pending, next) = group::pending_page(conn, info.id, group, None, PAGE)?;
    Ok(OpenedGroup { info, pending, next })
}

fn work(inbox: &Receiver<Task>, pool: &r2d2::Pool<Manager>) {
    for task in inbox {
        let run = || match task {
            Task::Plain(task) => task(),
            Task::Database(task) => match pool.get() {
                Ok(mut conn) => task(Ok(&mut conn)),
                Err(error) => task(Err(StoreError::Unavailable(error.to_string()))),
            },
        };
        // A panic costs its task, not the thread: the reply it held answers 500.
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
            tracing::error!("a task of the admin side panicked");
        }
    }
}
