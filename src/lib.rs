//! WaspMQ: a message broker on PostgreSQL. The map:
//!
//! - [`broker`]: the domain, without sockets, threads or SQL: what a push, a pop, an ack and an option mean.
//! - [`store`]: PostgreSQL: connections that cannot hang, migrations, one typed function per SQL call, the
//!   embedded server. The only module with SQL in it.
//! - [`core`]: the core threads: ownership by hash, draining and fusing, the candidate ring, waking, leases.
//! - [`plugins`]: the WebAssembly host: loading, limits, calls. The only module that knows wasmtime.
//! - [`http`]: two edges behind one seam, the routes, the admin requests, transactions.
//! - [`bench`]: the load generator and its ledger; it knows the broker only by HTTP.
//! - [`serve`]: from the command line to a running broker, and its end.
pub mod bench;
pub mod broker;
pub mod core;
pub mod http;
pub mod plugins;
pub mod serve;
pub mod store;
