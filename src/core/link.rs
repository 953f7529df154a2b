//! A core's connection, and its replacement when it breaks.

use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

use super::inbox::Message;
use crate::store::{Conn, Database, StoreError};

/// Pauses between attempts to connect: doubling, between these.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(1);

/// The connection of one core.
pub struct Link {
    database: Database,
    name: String,
    conn: Option<Conn>,
    down_since: Option<Instant>,
    connecting: bool,
    error: String,
    checked: Instant,
}

impl Link {
    /// With a connection made before the core starts.
    pub fn new(database: Database, name: String, conn: Conn) -> Self {
        Self {
            database,
            name,
            conn: Some(conn),
            down_since: None,
            connecting: false,
            error: String::new(),
            checked: Instant::now(),
        }
    }

    /// Whether there is a connection.
    pub fn is_up(&self) -> bool {
        self.conn.is_some()
    }

    /// How long there has been none.
    pub fn down_for(&self, now: Instant) -> Duration {
        self.down_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// What a request is told that needs it.
    pub fn refusal(&self) -> String {
        format!("the database is not available, nothing was changed; repeat the call: {}", self.error)
    }

    /// Runs a call. After a pause the connection is first looked at, so that a
    /// server that went away while nothing was asked of it costs no request.
    pub fn call<T>(
        &mut self,
        call: impl FnOnce(&mut Conn) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let Some(conn) = &mut self.conn else {
            return Err(StoreError::Unavailable(self.error.clone()));
        };
        let now = Instant::now();
        if now - self.checked > Duration::from_millis(5) && !conn.looks_alive() {
            return Err(StoreError::Unavailable("the connection was closed by the server".to_owned()));
        }
        let result = call(conn);
        self.checked = Instant::now();
        result
    }

    /// The connection broke: a thread makes a new one and sends it to the core.
    pub fn lost(&mut self, error: &StoreError, now: Instant, core: &Sender<Message>) {
        self.conn = None;
        self.error = error.to_string();
        self.down_since.get_or_insert(now);
        tracing::warn!(core = %self.name, %error, "lost the database");
        self.ensure(core);
    }

    /// Makes sure that a connection is being made.
    pub fn ensure(&mut self, core: &Sender<Message>) {
        if self.connecting || self.conn.is_some() {
            return;
        }
        let (database, name, core) = (self.database.clone(), self.name.clone(), core.clone());
        let spawned = std::thread::Builder::new().name(format!("connect-{name}")).spawn(move || {
            let mut pause = RETRY_FIRST;
            loop {
                match database.connect(&name).and_then(writable) {
                    Ok(conn) => {
                        // The core may have ended.
                        let _ = core.send(Message::Connected(Box::new(conn)));
                        return;
                    }
                    Err(error) => tracing::debug!(core = %name, %error, "cannot connect"),
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(RETRY_LAST);
            }
        });
        self.connecting = spawned.is_ok();
    }

    /// A new connection. Returns whether there was none.
    pub fn connected(&mut self, conn: Conn) -> bool {
        self.conn = Some(conn);
        self.connecting = false;
        self.checked = Instant::now();
        let was_down = self.down_since.take();
        if let Some(since) = was_down {
            tracing::info!(core = %self.name, after_ms = since.elapsed().as_millis() as u64, "the database is back");
        }
        was_down.is_some()
    }
}

/// A server that refuses writes is of no use to a core; it is asked again until it takes them.
fn writable(mut conn: Conn) -> Result<Conn, StoreError> {
    let rows =
        conn.query("SELECT current_setting('transaction_read_only') = 'on' OR pg_is_in_recovery()", &[])?;
    if rows.first().is_some_and(|row| row.get(0)) {
        return Err(StoreError::Unavailable("the database is read-only".to_owned()));
    }
    Ok(conn)
}
