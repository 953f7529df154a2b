//! The domain: what a push, a pop, an ack and an option mean, without sockets,
//! threads or SQL.
pub mod ack;
pub mod answer;
pub mod error;
pub mod plugin;
pub mod pop;
pub mod push;
pub mod query;
pub mod queue_options;
pub mod segment;
pub mod time;
pub mod transaction;
