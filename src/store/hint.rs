//! Hints between the brokers of one database.
//!
//! They travel by `NOTIFY`, on a connection of their own and never inside a data
//! transaction: a notifying commit takes a lock that serialises it with every
//! other one of the database.

use super::{Conn, StoreError};
use uuid::Uuid;

/// The notification channel.
pub const CHANNEL: &str = "waspmq";
/// Most bytes of one notification's payload; PostgreSQL refuses 8,000 and more.
pub const MAX_PAYLOAD_BYTES: usize = 7_900;

/// Says that this broker lives, and returns how many others do. A broker that
/// has not been heard of for ten seconds does not count; after a minute it is forgotten.
pub fn heartbeat(conn: &mut Conn, broker: Uuid) -> Result<i64, StoreError> {
    let rows = conn.query(
        "WITH me AS (
             INSERT INTO broker (id) VALUES ($1) ON CONFLICT (id) DO UPDATE SET seen_at = clock_timestamp()
         ), dead AS (
             DELETE FROM broker WHERE seen_at < clock_timestamp() - interval '1 minute' AND id <> $1
         )
         SELECT count(*) FROM broker WHERE id <> $1 AND seen_at > clock_timestamp() - interval '10 seconds'",
        &[&broker],
    )?;
    Ok(rows.first().map_or(0, |row| row.get(0)))
}

/// Says that this broker is gone.
pub fn leave(conn: &mut Conn, broker: Uuid) -> Result<(), StoreError> {
    conn.query("DELETE FROM broker WHERE id = $1", &[&broker]).map(|_| ())
}

/// Sends payloads to all brokers, this one included, in one commit.
pub fn notify(conn: &mut Conn, payloads: &[String]) -> Result<(), StoreError> {
    conn.query("SELECT pg_notify('waspmq', p) FROM unnest($1::text[]) AS p", &[&payloads]).map(|_| ())
}

/// Starts to listen.
pub fn listen(conn: &mut Conn) -> Result<(), StoreError> {
    conn.run(|client| client.batch_execute("LISTEN waspmq"))
}

/// Payloads that arrive within a time; at once when there are some.
pub fn heard(conn: &mut Conn, wait: std::time::Duration) -> Result<Vec<String>, StoreError> {
    use postgres::fallible_iterator::FallibleIterator;
    conn.run(|client| {
        let mut notifications = client.notifications();
        let mut payloads = Vec::new();
        if let Some(first) = notifications.timeout_iter(wait).next()? {
            payloads.push(first.payload().to_owned());
        }
        let mut more = notifications.iter();
        while let Some(next) = more.next()? {
            payloads.push(next.payload().to_owned());
        }
        Ok(payloads)
    })
}

/// What all brokers of a database share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Catalog {
    /// Moves with every change of a queue's options and every deletion.
    pub version: i64,
    /// Pushes are refused.
    pub push_maintenance: bool,
    /// Pops find nothing.
    pub pop_maintenance: bool,
}

/// Reads what all brokers share.
pub fn catalog(conn: &mut Conn) -> Result<Catalog, StoreError> {
    let rows = conn.query("SELECT version, push_maintenance, pop_maintenance FROM catalog", &[])?;
    let row = &rows[0];
    Ok(Catalog { version: row.get(0), push_maintenance: row.get(1), pop_maintenance: row.get(2) })
}

/// Switches a maintenance mode for all brokers.
pub fn set_maintenance(conn: &mut Conn, pops: bool, enabled: bool) -> Result<(), StoreError> {
    conn.query(
        "UPDATE catalog SET push_maintenance = CASE WHEN $1 THEN push_maintenance ELSE $2 END,
                            pop_maintenance = CASE WHEN $1 THEN $2 ELSE pop_maintenance END",
        &[&pops, &enabled],
    )
    .map(|_| ())
}
