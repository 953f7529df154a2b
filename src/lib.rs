//! WaspMQ: a message broker on PostgreSQL.
pub mod broker;
pub mod core;
pub mod http;
pub mod serve;
pub mod store;
