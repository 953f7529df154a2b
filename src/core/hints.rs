//! Hints to and from the other brokers of the database, and the keeper: the
//! periodic looks at the database that find what a lost hint would have told.
//!
//! A hint is only ever a reason to look; nothing depends on its arrival.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::engine::GroupKey;
use super::inbox::{Mark, Message};
use super::{Maintenance, Registry, owner_of_group};
use crate::store::group::pending_recent;
use crate::store::{Conn, Database, StoreError, hint};

/// Hints gather for this long.
const GATHER: Duration = Duration::from_millis(5);
/// How often this broker says that it lives, and looks whether others do.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// How often recently written partitions are looked at while this broker is alone ...
const LOOK_ALONE: Duration = Duration::from_secs(10);
/// ... and while there are others, whose acks free partitions that are leased here.
const LOOK_WITH_OTHERS: Duration = Duration::from_secs(2);
/// Longest call.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Partitions of one look.
const LOOK_LIMIT: i64 = 20_000;

/// One notification.
#[derive(Serialize, Deserialize)]
struct Hint {
    /// Who sent it.
    b: Uuid,
    /// Queue.
    q: String,
    /// Partition id, name, messages.
    #[serde(default)]
    p: Vec<(Uuid, String, u64)>,
    /// Instead of partitions: a group whose cursors were moved or deleted (`q` empty: in all queues).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    g: Option<String>,
    /// They were deleted.
    #[serde(default)]
    d: bool,
}

/// What cores and admin threads tell the other brokers.
enum News {
    /// Messages were committed.
    Marks(Vec<(Arc<str>, Vec<(Uuid, Arc<str>, u64)>)>),
    /// A group's cursors were moved, or deleted: queue, group.
    Group(Option<String>, String, bool),
}

/// What cores tell the other brokers through.
#[derive(Clone)]
pub struct HintSender {
    others: Arc<AtomicBool>,
    news: Sender<News>,
}

impl HintSender {
    /// Messages were committed. Costs nothing while this broker is alone.
    pub(super) fn marked(&self, marks: &HashMap<Arc<str>, Vec<(Uuid, Arc<str>, u64)>>) {
        if self.others.load(Ordering::Relaxed) {
            let marks = marks.iter().map(|(queue, partitions)| (queue.clone(), partitions.clone())).collect();
            let _ = self.news.send(News::Marks(marks));
        }
    }

    /// A group's cursors were moved, or deleted.
    pub(super) fn group_changed(&self, queue: Option<&str>, group: &str, deleted: bool) {
        if self.others.load(Ordering::Relaxed) {
            let _ = self.news.send(News::Group(queue.map(str::to_owned), group.to_owned(), deleted));
        }
    }
}

/// Starts the threads; they end when the returned sender is dropped.
pub(super) fn start(
    database: &Database,
    peers: Arc<[Sender<Message>]>,
    registry: Arc<Registry>,
    maintenance: Arc<Maintenance>,
) -> std::io::Result<(HintSender, Sender<()>, Vec<JoinHandle<()>>)> {
    let me = Uuid::now_v7();
    let others = Arc::new(AtomicBool::new(false));
    let (news, inbox) = unbounded();
    let (stop, stopped) = bounded::<()>(0);
    let sender = HintSender { others: others.clone(), news };
    let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new().name(name.to_owned()).spawn(run)
    };
    let (db, on) = (database.clone(), stopped.clone());
    let speaker = spawn("hints-out", Box::new(move || speak(&db, me, &inbox, &on)))?;
    let (db, on, cores) = (database.clone(), stopped.clone(), peers.clone());
    let listener = spawn("hints-in", Box::new(move || listen(&db, me, &cores, &on)))?;
    let db = database.clone();
    let keeper =
        spawn("keeper", Box::new(move || keep(&db, me, &others, &peers, &registry, &maintenance, &stopped)))?;
    Ok((sender, stop, vec![speaker, listener, keeper]))
}

/// Whether it is time to end.
fn over(stopped: &Receiver<()>, wait: Duration) -> bool {
    !matches!(stopped.recv_timeout(wait), Err(RecvTimeoutError::Timeout))
}

/// A connection that is made when it is needed and dropped when it breaks.
struct Lazy<'a> {
    database: &'a Database,
    name: &'static str,
    conn: Option<Conn>,
}

impl Lazy<'_> {
    fn call<T>(&mut self, call: impl FnOnce(&mut Conn) -> Result<T, StoreError>) -> Result<T, StoreError> {
        if self.conn.as_mut().is_none_or(|conn| !conn.looks_alive()) {
            self.conn = Some(self.database.connect_slow(self.name, CALL_TIMEOUT)?);
        }
        let conn = self.conn.as_mut().expect("just made");
        let result = call(conn);
        if result.as_ref().is_err_and(StoreError::is_connection) {
            self.conn = None;
        }
        result
    }
}

fn speak(database: &Database, me: Uuid, inbox: &Receiver<News>, stopped: &Receiver<()>) {
    let mut conn = Lazy { database, name: "hints-out", conn: None };
    while !over(stopped, GATHER) {
        let mut gathered: HashMap<Arc<str>, HashMap<Uuid, (Arc<str>, u64)>> = HashMap::new();
        let mut payloads = Vec::new();
        let mut add = |hint: &Hint| {
            let text = serde_json::to_string(hint).ok();
            payloads.extend(text.filter(|text| text.len() <= hint::MAX_PAYLOAD_BYTES));
        };
        for news in inbox.try_iter() {
            match news {
                News::Marks(marks) => {
                    for (queue, partitions) in marks {
                        let of_queue = gathered.entry(queue).or_default();
                        for (id, name, messages) in partitions {
                            of_queue.entry(id).or_insert((name, 0)).1 += messages;
                        }
                    }
                }
                News::Group(queue, group, d) => {
                    add(&Hint { b: me, q: queue.unwrap_or_default(), p: Vec::new(), g: Some(group), d });
                }
            }
        }
        for (queue, partitions) in gathered {
            let all: Vec<_> =
                partitions.into_iter().map(|(id, (name, n))| (id, name.to_string(), n)).collect();
            // Names are at most 255 bytes, at most six times that as JSON.
            for few in all.chunks(4) {
                add(&Hint { b: me, q: queue.to_string(), p: few.to_vec(), g: None, d: false });
            }
        }
        if payloads.is_empty() {
            continue;
        }
        if let Err(error) = conn.call(|conn| hint::notify(conn, &payloads)) {
            tracing::debug!(%error, "cannot send hints");
        }
    }
}

fn listen(database: &Database, me: Uuid, cores: &[Sender<Message>], stopped: &Receiver<()>) {
    while !over(stopped, Duration::ZERO) {
        let conn = database.connect_slow("hints-in", CALL_TIMEOUT).and_then(|mut conn| {
            hint::listen(&mut conn)?;
            Ok(conn)
        });
        let Ok(mut conn) = conn else {
            if over(stopped, Duration::from_secs(1)) {
                return;
            }
            continue;
        };
        while !over(stopped, Duration::ZERO) && conn.looks_alive() {
            match hint::heard(&mut conn, Duration::from_millis(200)) {
                Ok(payloads) => {
                    let (groups, marks): (Vec<Hint>, Vec<Hint>) = payloads
                        .iter()
                        .filter_map(|text| serde_json::from_str::<Hint>(text).ok())
                        .filter(|hint| hint.b != me)
                        .partition(|hint| hint.g.is_some());
                    for hint in groups {
                        let queue: Option<Arc<str>> = (!hint.q.is_empty()).then(|| hint.q.as_str().into());
                        let group: Arc<str> = hint.g.unwrap_or_default().into();
                        for core in cores {
                            let _ = core.send(group_message(queue.clone(), group.clone(), hint.d));
                        }
                    }
                    let marks: Vec<Mark> = marks
                        .into_iter()
                        .map(|hint| Mark {
                            queue: hint.q.into(),
                            partitions: hint
                                .p
                                .into_iter()
                                .map(|(id, name, n)| (id, name.into(), n))
                                .collect(),
                        })
                        .collect();
                    if !marks.is_empty() {
                        let marks: Arc<[Mark]> = marks.into();
                        cores.iter().for_each(|core| drop(core.send(Message::Marked(marks.clone()))));
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "lost the connection for hints");
                    break;
                }
            }
        }
    }
}

/// What a core is told of a group whose cursors were moved or deleted.
pub(super) fn group_message(queue: Option<Arc<str>>, group: Arc<str>, deleted: bool) -> Message {
    match (queue, deleted) {
        (Some(queue), false) => Message::GroupMoved(queue, group),
        (queue, _) => Message::GroupForgotten(queue, group),
    }
}

fn keep(
    database: &Database,
    me: Uuid,
    others: &AtomicBool,
    cores: &[Sender<Message>],
    registry: &Registry,
    maintenance: &Maintenance,
    stopped: &Receiver<()>,
) {
    let mut conn = Lazy { database, name: "keeper", conn: None };
    let (mut looked, mut version) = (Instant::now(), None);
    loop {
        match conn.call(|conn| Ok((hint::heartbeat(conn, me)?, hint::catalog(conn)?))) {
            Ok((n, catalog)) => {
                others.store(n > 0, Ordering::Relaxed);
                maintenance.follow(&catalog);
                let seen = catalog.version;
                if version.replace(seen).is_some_and(|before| before != seen) {
                    cores.iter().for_each(|core| drop(core.send(Message::CatalogChanged)));
                }
            }
            Err(error) => tracing::debug!(%error, "no heartbeat"),
        }
        let every = if others.load(Ordering::Relaxed) { LOOK_WITH_OTHERS } else { LOOK_ALONE };
        if looked.elapsed() + Duration::from_millis(100) >= every {
            let since = looked.elapsed() + Duration::from_secs(5);
            if look(&mut conn, cores, registry, since).is_ok() {
                looked = Instant::now();
            }
        }
        if over(stopped, HEARTBEAT) {
            let _ = conn.call(|conn| hint::leave(conn, me));
            return;
        }
    }
}

/// Finds recently written partitions with work for groups that are open here.
fn look(
    conn: &mut Lazy<'_>,
    cores: &[Sender<Message>],
    registry: &Registry,
    since: Duration,
) -> Result<(), StoreError> {
    let open: Vec<(GroupKey, Uuid)> = registry.open_groups();
    if open.is_empty() {
        return Ok(());
    }
    let queues: Vec<Uuid> = open.iter().map(|(_, id)| *id).collect();
    let groups: Vec<&str> = open.iter().map(|(key, _)| &*key.1).collect();
    let found = conn.call(|conn| pending_recent(conn, &queues, &groups, since.as_secs_f64(), LOOK_LIMIT))?;
    let mut per_core: Vec<Vec<_>> = cores.iter().map(|_| Vec::new()).collect();
    for (index, partition) in found {
        let (queue, group) = open[index].0.clone();
        per_core[owner_of_group(&queue, &group, cores.len())].push((queue, group, partition));
    }
    for (core, found) in cores.iter().zip(per_core) {
        if !found.is_empty() {
            let _ = core.send(Message::Found(found));
        }
    }
    Ok(())
}
