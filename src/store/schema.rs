//! Migrations.

use super::{Database, StoreError};
use std::time::Duration;

mod embedded {
    refinery::embed_migrations!("migrations");
}

/// Serialises brokers that start at the same moment on one database.
const MIGRATION_LOCK: i64 = 0x7761_7370_6d71_0001;
/// Longest time for all migrations together, waiting for another broker's included.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(600);

/// Brings the schema up to date and returns the versions that were applied.
/// Holds an advisory lock while it runs: of several brokers one applies, the
/// others wait and find nothing to do.
pub fn migrate(database: &Database) -> Result<Vec<String>, StoreError> {
    let mut conn = database.connect_slow("migrate", MIGRATION_TIMEOUT)?;
    conn.run(|client| client.execute("SELECT pg_advisory_lock($1)", &[&MIGRATION_LOCK]))?;
    let report = embedded::migrations::runner()
        .run(conn.client())
        .map_err(|error| StoreError::Statement { code: "migration".into(), message: error.to_string() });
    let unlocked = conn.run(|client| client.execute("SELECT pg_advisory_unlock($1)", &[&MIGRATION_LOCK]));
    let report = report?;
    unlocked?;
    Ok(report.applied_migrations().iter().map(|m| format!("V{} {}", m.version(), m.name())).collect())
}
