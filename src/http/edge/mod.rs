//! The seam between sockets and the broker.
//!
//! An *edge* turns bytes on connections into [`Request`] values and writes each
//! [`Reply`] it is given, from any thread, exactly once. Above the seam nobody
//! knows which edge is running.

pub mod event;
pub mod tiny;
mod wire;

use std::sync::Arc;

pub use crate::broker::answer::{Delivery, Reply, ReplyHandle, ReplySink};

/// Limits of an edge. Every one of them has an answer of its own on the wire.
#[derive(Clone, Debug)]
pub struct EdgeLimits {
    /// Largest request body in bytes; a longer one is answered 413 and the connection closed.
    pub max_body_bytes: usize,
    /// Most connections open at once.
    pub max_connections: usize,
    /// Threads that read and parse requests (edge `event`).
    pub io_threads: usize,
}

/// Largest request line plus headers, in bytes; more is answered 431.
pub const MAX_HEAD_BYTES: usize = 64 * 1024;
/// Time in seconds for a head, and again for a body, to be complete; then 408.
pub const READ_TIMEOUT_SECONDS: u64 = 30;
/// Time in seconds after which a connection without a request is closed.
pub const IDLE_TIMEOUT_SECONDS: u64 = 600;

/// The request methods that routing distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Method {
    Get,
    Head,
    Post,
    Put,
    Delete,
    Patch,
    Options,
    /// Any other token.
    Other,
}

impl Method {
    /// From the token of a request line.
    pub fn of(token: &str) -> Self {
        match token {
            "GET" => Method::Get,
            "HEAD" => Method::Head,
            "POST" => Method::Post,
            "PUT" => Method::Put,
            "DELETE" => Method::Delete,
            "PATCH" => Method::Patch,
            "OPTIONS" => Method::Options,
            _ => Method::Other,
        }
    }
}

/// One complete request.
pub struct Request {
    /// The method.
    pub method: Method,
    /// Path and query exactly as sent (origin form; of an absolute form, its path and query).
    pub target: String,
    /// The `Authorization` header's value, if there was one.
    pub authorization: Option<String>,
    /// The whole body; empty when there was none.
    pub body: Vec<u8>,
    /// Where the answer goes.
    pub reply: ReplyHandle,
}

/// What an edge hands requests to. Called on an edge's thread: it must not block.
pub type Handler = Arc<dyn Fn(Request) + Send + Sync>;

/// A running edge.
pub trait Edge: Send {
    /// The address it listens on.
    fn local_addr(&self) -> std::net::SocketAddr;
    /// Tells how many connections are open, also after this value has moved.
    fn counter(&self) -> Box<dyn Fn() -> usize + Send + Sync>;
    /// Stops accepting and reading new requests. Outstanding replies are still written.
    fn stop_accepting(&self);
    /// Waits at most `limit` for outstanding replies to be written, then closes
    /// everything and joins its threads.
    fn shutdown(self: Box<Self>, limit: std::time::Duration);
}
