//! The seam between sockets and the broker.
//!
//! An *edge* turns bytes on connections into [`Request`] values and writes each
//! [`Reply`] it is given, from any thread, exactly once. Above the seam nobody
//! knows which edge is running.

use std::sync::Arc;

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

/// One answer. The edge adds `Content-Length`, `Date` and `Connection`; a 204 is
/// written with neither length nor type, and a HEAD without its body.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// Status code.
    pub status: u16,
    /// Value of `Content-Type`; ignored for a 204.
    pub content_type: &'static str,
    /// Further headers, such as `Allow` or `Retry-After`.
    pub headers: Vec<(&'static str, String)>,
    /// The body; must be empty for a 204.
    pub body: Vec<u8>,
}

/// What became of a reply, as far as the kernel tells at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// Handed to the kernel, or queued on a connection that is still there.
    Written,
    /// The connection was gone: nobody will read this reply.
    Gone,
}

/// What an edge implements for one outstanding request.
pub trait ReplySink: Send {
    /// Writes the reply; called at most once.
    fn send(&mut self, reply: Reply) -> Delivery;
    /// True once the client closed or reset its connection (a half-close counts:
    /// it cannot be told from a close). Cheap: called for every parked pop on
    /// every wake.
    fn is_gone(&self) -> bool;
}

/// The right, and the duty, to answer one request. Dropped unanswered it answers
/// 500, so that a bug never leaves a connection hanging.
pub struct ReplyHandle(Option<Box<dyn ReplySink>>);

impl ReplyHandle {
    /// Wraps an edge's sink.
    pub fn new(sink: Box<dyn ReplySink>) -> Self {
        Self(Some(sink))
    }

    /// Sends the answer.
    pub fn send(mut self, reply: Reply) -> Delivery {
        match self.0.take() {
            Some(mut sink) => sink.send(reply),
            None => Delivery::Gone,
        }
    }

    /// Whether the client has gone while its reply is outstanding.
    pub fn is_gone(&self) -> bool {
        self.0.as_ref().is_none_or(|sink| sink.is_gone())
    }
}

impl Drop for ReplyHandle {
    fn drop(&mut self) {
        if let Some(mut sink) = self.0.take() {
            sink.send(Reply {
                status: 500,
                content_type: "application/json",
                headers: Vec::new(),
                body: br#"{"success":false,"error":"the request was dropped without an answer; whether it took effect is not known","code":"internal"}"#.to_vec(),
            });
        }
    }
}

/// What an edge hands requests to. Called on an edge's thread: it must not block.
pub type Handler = Arc<dyn Fn(Request) + Send + Sync>;

/// A running edge.
pub trait Edge: Send {
    /// The address it listens on.
    fn local_addr(&self) -> std::net::SocketAddr;
    /// Connections open now.
    fn connections(&self) -> usize;
    /// Stops accepting and reading new requests. Outstanding replies are still written.
    fn stop_accepting(&self);
    /// Waits at most `limit` for outstanding replies to be written, then closes
    /// everything and joins its threads.
    fn shutdown(self: Box<Self>, limit: std::time::Duration);
}
