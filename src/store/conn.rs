//! Connections that cannot hang.
//!
//! The blocking client has no timeout of its own: against a server that is
//! frozen, or a network that swallows packets behind a proxy, a call would wait
//! for ever. Every connection therefore registers its socket with a watchdog
//! thread, which shuts the socket down when a call, or the making of a
//! connection, is past its deadline; the call then returns an error.

use std::collections::HashSet;
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::{Duration, Instant};

use postgres::config::Host;
use postgres::error::SqlState;
use postgres::{Client, NoTls, Statement};

/// Longest time for making a connection, handshake included.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// How much longer than `statement_timeout` a reply is waited for.
const REPLY_GRACE: Duration = Duration::from_secs(1);
/// How often the watchdog looks.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// What went wrong with a call.
#[derive(Debug, Clone)]
pub enum StoreError {
    /// The database cannot be reached, or refused before anything happened: safe to repeat.
    Unavailable(String),
    /// The connection was lost with the call under way: it may or may not have committed.
    OutcomeUnknown(String),
    /// The statement failed and was rolled back.
    Statement {
        /// The SQLSTATE.
        code: String,
        /// PostgreSQL's text.
        message: String,
    },
}

impl StoreError {
    /// Whether the connection it came from is of no more use.
    pub fn is_connection(&self) -> bool {
        !matches!(self, StoreError::Statement { .. })
    }

    fn from_call(error: &postgres::Error) -> Self {
        match error.as_db_error() {
            // Termination by an administrator, a crash or a shutdown: FATAL, and
            // the commit may just have happened.
            Some(db) if db.code().code().starts_with("57P") => {
                StoreError::OutcomeUnknown(db.message().to_owned())
            }
            Some(db) => {
                StoreError::Statement { code: db.code().code().to_owned(), message: db.message().to_owned() }
            }
            None => StoreError::OutcomeUnknown(describe(error)),
        }
    }

    fn from_connect(error: &postgres::Error) -> Self {
        StoreError::Unavailable(describe(error))
    }

    /// Whether the database refuses writes for now (standby, read-only mode).
    pub fn is_read_only(&self) -> bool {
        matches!(self, StoreError::Statement { code, .. } if code == SqlState::READ_ONLY_SQL_TRANSACTION.code())
    }
}

/// An error's text with its causes, which hold the part that helps.
fn describe(error: &postgres::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text.push_str(": ");
            text.push_str(&inner_text);
        }
        cause = inner.source();
    }
    text
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::Unavailable(message) => {
                write!(f, "the database is not available, nothing was changed: {message}")
            }
            StoreError::OutcomeUnknown(message) => write!(
                f,
                "the connection to the database was lost while the call was under way, it may or may not have taken effect: {message}"
            ),
            StoreError::Statement { code, message } => {
                write!(f, "the database refused, nothing was changed: {message} (SQLSTATE {code})")
            }
        }
    }
}

impl std::error::Error for StoreError {}

/// Where the database is, and how long its calls may take. Cheap to clone.
#[derive(Clone)]
pub struct Database {
    config: Arc<Mutex<postgres::Config>>,
    statement_timeout: Duration,
}

impl Database {
    /// `statement_timeout`: the longest a data-plane call may take.
    pub fn new(config: postgres::Config, statement_timeout: Duration) -> Self {
        Self { config: Arc::new(Mutex::new(config)), statement_timeout }
    }

    /// Points later connections elsewhere (an embedded server that moved).
    pub fn set_config(&self, config: postgres::Config) {
        *self.config.lock().expect("no panic while the lock is held") = config;
    }

    /// A connection for a core thread: short timeouts, plans that stay the same.
    pub fn connect(&self, name: &str) -> Result<Conn, StoreError> {
        self.open(name, self.statement_timeout)
    }

    /// A connection for slow and rare work, with its own longest call.
    pub fn connect_slow(&self, name: &str, statement_timeout: Duration) -> Result<Conn, StoreError> {
        self.open(name, statement_timeout)
    }

    fn open(&self, name: &str, statement_timeout: Duration) -> Result<Conn, StoreError> {
        let mut config = self.config.lock().expect("no panic while the lock is held").clone();
        config
            .application_name(&format!("waspmq {name}"))
            .connect_timeout(CONNECT_TIMEOUT)
            .keepalives(true)
            .keepalives_idle(Duration::from_secs(5))
            .keepalives_interval(Duration::from_secs(2))
            .keepalives_retries(3)
            .tcp_user_timeout(statement_timeout + REPLY_GRACE);
        let mut conn = connect_watched(&config, statement_timeout + REPLY_GRACE)?;
        conn.run(|client| client.batch_execute(&session_settings(statement_timeout)))
            .map_err(|e| StoreError::Unavailable(e.to_string()))?;
        Ok(conn)
    }
}

/// Plans are made once and must not depend on the statistics of the moment: all
/// hot statements are nested loops over primary keys, from arrays of unknown
/// length, and a hash join over a table of ten million rows would be a disaster.
fn session_settings(statement_timeout: Duration) -> String {
    format!(
        "SET statement_timeout = {ms}; SET lock_timeout = {ms}; SET idle_session_timeout = 0; \
         SET idle_in_transaction_session_timeout = {ms}; SET TimeZone = 'UTC'; SET jit = off; \
         SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_hashjoin = off; \
         SET enable_mergejoin = off; SET work_mem = '64MB'; SET client_min_messages = warning; SET bytea_output = hex;",
        ms = statement_timeout.as_millis()
    )
}

/// A connection whose calls end.
pub struct Conn {
    client: Client,
    guard: Arc<Guard>,
    call_timeout: Duration,
    statements: Vec<(&'static str, Statement)>,
}

impl Conn {
    /// Runs one call. An error that is about the connection leaves it closed.
    pub fn run<T>(
        &mut self,
        call: impl FnOnce(&mut Client) -> Result<T, postgres::Error>,
    ) -> Result<T, StoreError> {
        self.guard.arm(self.call_timeout);
        let result = call(&mut self.client);
        self.guard.disarm();
        result.map_err(|error| StoreError::from_call(&error))
    }

    /// Runs a prepared query; the statement is prepared on its first use.
    pub fn query(
        &mut self,
        sql: &'static str,
        params: &[&(dyn postgres::types::ToSql + Sync)],
    ) -> Result<Vec<postgres::Row>, StoreError> {
        let statement = match self.statements.iter().find(|(text, _)| std::ptr::eq(*text, sql)) {
            Some((_, statement)) => statement.clone(),
            None => {
                let statement = self.run(|client| client.prepare(sql)).map_err(|e| match e {
                    // Nothing of the call itself has been sent.
                    StoreError::OutcomeUnknown(message) => StoreError::Unavailable(message),
                    other => other,
                })?;
                self.statements.push((sql, statement.clone()));
                statement
            }
        };
        self.run(|client| client.query(&statement, params))
    }

    /// Whether it can still be used, from what the socket shows without a round
    /// trip: a server that went away while the connection was idle left an end
    /// of file, or a last message, on it.
    pub fn looks_alive(&mut self) -> bool {
        !self.client.is_closed()
            && (!self.guard.has_input() || self.run(|client| client.simple_query("")).is_ok())
    }

    /// The client, for the few callers that need more than a query. Not watched: use [`Conn::run`] for calls.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }
}

/// One connection's socket as the watchdog sees it.
struct Guard {
    /// A duplicate: stays ours when the client closes its own, so that it is
    /// never another connection's socket that is shut down.
    socket: Option<OwnedFd>,
    /// Milliseconds since the watchdog's start at which the call under way is
    /// overdue; 0 while there is none.
    deadline: AtomicU64,
}

impl Guard {
    fn arm(&self, timeout: Duration) {
        let deadline = WATCHDOG.now() + timeout.as_millis() as u64;
        self.deadline.store(deadline, Ordering::Relaxed);
    }

    fn disarm(&self) {
        self.deadline.store(0, Ordering::Relaxed);
    }

    fn check(&self, now: u64) {
        let deadline = self.deadline.load(Ordering::Relaxed);
        if deadline != 0 && now > deadline {
            tracing::warn!("no reply from the database in time, giving up its connection");
            self.deadline.store(0, Ordering::Relaxed);
            if let Some(socket) = &self.socket {
                shut_down(socket.as_raw_fd());
            }
        }
    }

    fn has_input(&self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut byte = 0u8;
        // SAFETY: the descriptor is open (owned by `self`), the buffer is one byte long.
        let read = unsafe {
            libc::recv(socket.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT)
        };
        read >= 0 || std::io::Error::last_os_error().kind() != std::io::ErrorKind::WouldBlock
    }
}

fn shut_down(fd: RawFd) {
    // SAFETY: shutdown on any descriptor number is harmless to memory.
    unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
}

/// The connection being made now, if there is one.
#[derive(Default)]
struct Connecting {
    /// As [`Guard::deadline`]; 0: none.
    deadline: u64,
    ports: Vec<u16>,
    known: HashSet<RawFd>,
}

struct Watchdog {
    start: Instant,
    guards: Mutex<Vec<Weak<Guard>>>,
    connecting: Mutex<Connecting>,
    started: AtomicBool,
}

/// One per process.
static WATCHDOG: LazyLock<Watchdog> = LazyLock::new(|| Watchdog {
    start: Instant::now(),
    guards: Mutex::default(),
    connecting: Mutex::default(),
    started: AtomicBool::new(false),
});

/// Connections are made one at a time, so that a new socket can be told apart.
static CONNECT: Mutex<()> = Mutex::new(());

impl Watchdog {
    /// Milliseconds since its start, never 0.
    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64 + 1
    }

    fn ensure_started(&'static self) {
        if !self.started.swap(true, Ordering::AcqRel) {
            let spawned = std::thread::Builder::new().name("db-watchdog".into()).spawn(move || {
                loop {
                    std::thread::sleep(WATCH_INTERVAL);
                    self.look();
                }
            });
            if let Err(error) = spawned {
                tracing::error!(%error, "cannot start the thread that bounds database calls");
                self.started.store(false, Ordering::Release);
            }
        }
    }

    fn look(&self) {
        let now = self.now();
        self.guards.lock().expect("no panic while the lock is held").retain(|guard| match guard.upgrade() {
            Some(guard) => {
                guard.check(now);
                true
            }
            None => false,
        });
        let mut connecting = self.connecting.lock().expect("no panic while the lock is held");
        if connecting.deadline != 0 && now > connecting.deadline {
            connecting.deadline = 0;
            for fd in database_sockets(&connecting.ports).difference(&connecting.known) {
                shut_down(*fd);
            }
        }
    }
}

/// Makes a connection and finds its socket: the one descriptor whose peer is a
/// database and that was not there before. (The client does not show it.)
fn connect_watched(config: &postgres::Config, call_timeout: Duration) -> Result<Conn, StoreError> {
    WATCHDOG.ensure_started();
    let _one_at_a_time = CONNECT.lock().expect("no panic while the lock is held");
    let ports = ports_of(config);
    let known = database_sockets(&ports);
    *WATCHDOG.connecting.lock().expect("no panic while the lock is held") = Connecting {
        deadline: WATCHDOG.now() + CONNECT_TIMEOUT.as_millis() as u64,
        ports: ports.clone(),
        known: known.clone(),
    };
    let connected = config.connect(NoTls);
    WATCHDOG.connecting.lock().expect("no panic while the lock is held").deadline = 0;
    let client = connected.map_err(|error| StoreError::from_connect(&error))?;
    let socket = database_sockets(&ports).difference(&known).next().and_then(|fd| duplicate(*fd));
    if socket.is_none() {
        tracing::warn!(
            "cannot find the socket of a database connection: its calls have no time limit on this side"
        );
    }
    let guard = Arc::new(Guard { socket, deadline: AtomicU64::new(0) });
    WATCHDOG.guards.lock().expect("no panic while the lock is held").push(Arc::downgrade(&guard));
    Ok(Conn { client, guard, call_timeout, statements: Vec::new() })
}

fn ports_of(config: &postgres::Config) -> Vec<u16> {
    let ports = config.get_ports();
    let has_hosts = config.get_hosts().iter().any(|host| matches!(host, Host::Tcp(_) | Host::Unix(_)));
    if ports.is_empty() || !has_hosts { vec![5432] } else { ports.to_vec() }
}

fn duplicate(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: fcntl on any descriptor number is harmless; a returned descriptor is new and ours.
    unsafe {
        let copy = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3);
        (copy >= 0).then(|| OwnedFd::from_raw_fd(copy))
    }
}

/// Descriptors of this process whose peer is a PostgreSQL on one of these ports.
fn database_sockets(ports: &[u16]) -> HashSet<RawFd> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd").or_else(|_| std::fs::read_dir("/dev/fd")) else {
        return HashSet::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok())
        .filter(|fd| peer_is_database(*fd, ports))
        .collect()
}

fn peer_is_database(fd: RawFd, ports: &[u16]) -> bool {
    // SAFETY: the descriptor is only asked for its peer; it may be closed meanwhile, which is an error.
    let peer = unsafe {
        socket2::SockAddr::try_init(|storage, len| {
            if libc::getpeername(fd, storage.cast(), len) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        })
    };
    let Ok(((), peer)) = peer else { return false };
    match peer.as_socket() {
        Some(address) => ports.contains(&address.port()),
        None => peer.as_pathname().is_some_and(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| ports.iter().any(|port| name == format!(".s.PGSQL.{port}")))
        }),
    }
}
