//! Answers, and the right to give one.

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

impl Reply {
    /// An answer with a JSON body.
    pub fn json(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, content_type: "application/json", headers: Vec::new(), body: body.into() }
    }

    /// 204: nothing, and nothing said about it.
    pub fn no_content() -> Self {
        Self { status: 204, content_type: "", headers: Vec::new(), body: Vec::new() }
    }
}

impl From<&super::error::ApiError> for Reply {
    fn from(error: &super::error::ApiError) -> Self {
        let mut reply = Reply::json(error.status, error.to_json());
        if error.status == 503 {
            reply.headers.push(("Retry-After", "1".to_owned()));
        }
        reply
    }
}
