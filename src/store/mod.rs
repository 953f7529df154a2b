//! PostgreSQL: connections, migrations, and one typed function per SQL call.
//! The only module with SQL in it.

pub mod ack;
pub mod claim;
pub mod conn;
pub mod consumer_group;
pub mod embedded;
pub mod group;
pub mod hint;
pub mod inspect;
pub mod messages;
pub mod overview;
pub mod plugin;
pub mod push;
pub mod queue;
pub mod schema;
pub mod trace;

pub use conn::{Conn, Database, StoreError};

use postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

/// Microseconds between the Unix epoch and PostgreSQL's (2000-01-01).
const PG_EPOCH_US: i64 = 946_684_800_000_000;

/// A `timestamptz` as microseconds since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Micros(pub i64);

impl<'a> FromSql<'a> for Micros {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        let since_2000 = i64::from_be_bytes(raw.try_into()?);
        Ok(Micros(since_2000.saturating_add(PG_EPOCH_US)))
    }
    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TIMESTAMPTZ)
    }
}

impl ToSql for Micros {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut postgres::types::private::BytesMut,
    ) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.extend_from_slice(&self.0.saturating_sub(PG_EPOCH_US).to_be_bytes());
        Ok(IsNull::No)
    }
    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TIMESTAMPTZ)
    }
    to_sql_checked!();
}
