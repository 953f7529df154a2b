//! The edge on `tiny_http`: small, blocking, one thread per connection. For trusted
//! networks and few connections; `docs/decisions/0001-http-edges.md` says why.
//!
//! What of tiny_http 0.12 is worked around here: a new connection may be handed to a
//! thread that is busy with another one (the doorbell); an error of `accept` ends its
//! accept loop (the server is rebuilt from a clone of the socket); a 204 is sent with
//! a length, and an unreadable `Content-Length` is taken for none (heads are checked
//! and written here).

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::wire::{origin_form, peer_is_gone, write_reply};
use super::{
    Delivery, Edge, EdgeLimits, Handler, MAX_HEAD_BYTES, Method, Reply, ReplyHandle, ReplySink, Request,
};

/// How often the doorbell rings. Measured: with it no request waited longer than 50 ms.
const DOORBELL: Duration = Duration::from_millis(10);

/// See the module.
pub struct TinyEdge {
    address: SocketAddr,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    listener: TcpListener,
    address: SocketAddr,
    limits: EdgeLimits,
    handler: Handler,
    stopping: AtomicBool,
    outstanding: Arc<AtomicUsize>,
    server: Mutex<Arc<tiny_http::Server>>,
}

fn server_on(listener: &TcpListener) -> std::io::Result<Arc<tiny_http::Server>> {
    let clone = listener.try_clone()?;
    tiny_http::Server::from_listener(clone, None)
        .map(Arc::new)
        .map_err(|error| std::io::Error::other(error.to_string()))
}

impl TinyEdge {
    /// Serves a bound listener.
    pub fn start(listener: TcpListener, limits: EdgeLimits, handler: Handler) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            server: Mutex::new(server_on(&listener)?),
            listener,
            address,
            limits,
            handler,
            stopping: AtomicBool::new(false),
            outstanding: Arc::default(),
        });
        let (taker, bell) = (shared.clone(), shared.clone());
        let threads = vec![
            std::thread::Builder::new().name("tiny-http".to_owned()).spawn(move || taker.take())?,
            std::thread::Builder::new().name("doorbell".to_owned()).spawn(move || bell.ring())?,
        ];
        Ok(Self { address, shared, threads })
    }
}

impl Edge for TinyEdge {
    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn counter(&self) -> Box<dyn Fn() -> usize + Send + Sync> {
        let shared = self.shared.clone();
        Box::new(move || shared.server.lock().map_or(0, |server| server.num_connections()))
    }

    fn stop_accepting(&self) {
        self.shared.stopping.store(true, Ordering::Release);
    }

    fn shutdown(mut self: Box<Self>, limit: Duration) {
        let until = Instant::now() + limit;
        while self.shared.outstanding.load(Ordering::Acquire) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.shared.stopping.store(true, Ordering::Release);
        if let Ok(server) = self.shared.server.lock() {
            server.unblock();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Takes requests from tiny_http; each goes on in a thread of its own if it has a large body.
    fn take(self: &Arc<Self>) {
        while !self.stopping.load(Ordering::Acquire) {
            let Ok(server) = self.server.lock().map(|server| server.clone()) else { return };
            match server.recv_timeout(Duration::from_millis(200)) {
                Ok(Some(request))
                    if request.body_length().is_none_or(|n| n <= 1024) && !is_chunked(&request) =>
                {
                    self.handle(request);
                }
                Ok(Some(request)) => {
                    let me = self.clone();
                    // The body is read by whoever asks for it: not here.
                    let spawned = std::thread::Builder::new().spawn(move || me.handle(request));
                    if let Err(error) = spawned {
                        tracing::warn!(%error, "cannot start a thread for a body");
                    }
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "tiny_http stopped accepting; starting it again");
                    std::thread::sleep(Duration::from_millis(50));
                    match (server_on(&self.listener), self.server.lock()) {
                        (Ok(fresh), Ok(mut server)) => *server = fresh,
                        _ => std::thread::sleep(Duration::from_millis(200)),
                    }
                }
            }
        }
    }

    /// Opens and closes a connection to the server itself, so that a connection that was handed
    /// to a busy thread is handed on.
    fn ring(&self) {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        while !self.stopping.load(Ordering::Acquire) {
            drop(TcpStream::connect_timeout(&address, Duration::from_millis(200)));
            std::thread::sleep(DOORBELL);
        }
    }

    fn handle(self: &Arc<Self>, mut request: tiny_http::Request) {
        let method = Method::of(request.method().as_str());
        let head = read_head(&request, self.limits.max_body_bytes);
        let target = origin_form(request.url()).to_owned();
        let (authorization, keep) = match head {
            Ok(found) => found,
            Err((status, text)) => return self.refuse(request, status, &text),
        };
        let mut body = Vec::new();
        let limit = self.limits.max_body_bytes as u64;
        let read = request.as_reader().take(limit + 1).read_to_end(&mut body);
        if read.is_err() || body.len() as u64 > limit {
            let (status, text) = match read {
                Err(error) => (400, format!("the body cannot be read: {error}")),
                Ok(_) => (413, format!("the body exceeds the limit of {limit} bytes (--max-body)")),
            };
            return self.refuse(request, status, &text);
        }
        self.outstanding.fetch_add(1, Ordering::AcqRel);
        let socket = request.remote_addr().and_then(|peer| socket_of(*peer, self.address.port()));
        let sink = Sink {
            request: Some(request),
            socket,
            head_only: method == Method::Head,
            close: !keep,
            port: self.address.port(),
            outstanding: self.outstanding.clone(),
        };
        let reply = ReplyHandle::new(Box::new(sink));
        (self.handler)(Request { method, target, authorization, body, reply });
    }
}

impl Shared {
    /// Answers a request that cannot be read, and ends the connection.
    fn refuse(&self, request: tiny_http::Request, status: u16, text: &str) {
        let body = serde_json::json!({"success": false, "error": text, "code": "bad_request"}).to_string();
        let head_only = *request.method() == tiny_http::Method::Head;
        respond(request, &Reply::json(status, body), head_only, true, self.address.port());
    }
}

fn header<'a>(request: &'a tiny_http::Request, name: &'static str) -> impl Iterator<Item = &'a str> {
    request
        .headers()
        .iter()
        .filter(move |header| header.field.equiv(name))
        .map(|header| header.value.as_str().trim())
}

fn is_chunked(request: &tiny_http::Request) -> bool {
    header(request, "Transfer-Encoding").next().is_some()
}

/// Checks a head. Returns the authorization, and whether the connection may be kept.
fn read_head(request: &tiny_http::Request, max_body: usize) -> Result<(Option<String>, bool), (u16, String)> {
    let size: usize =
        request.headers().iter().map(|h| h.field.as_str().as_str().len() + h.value.as_str().len() + 4).sum();
    if size + request.url().len() > MAX_HEAD_BYTES {
        return Err((431, format!("the request line and headers exceed {MAX_HEAD_BYTES} bytes")));
    }
    let mut length = None;
    for value in header(request, "Content-Length") {
        if value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err((400, "Content-Length is not a number".to_owned()));
        }
        let number = value.parse::<u64>().unwrap_or(u64::MAX);
        if length.is_some_and(|before| before != number) {
            return Err((400, "several Content-Length headers that differ".to_owned()));
        }
        length = Some(number);
    }
    if length.is_some_and(|n| n > max_body as u64) {
        return Err((413, format!("the body exceeds the limit of {max_body} bytes (--max-body)")));
    }
    if is_chunked(request) && length.is_some() {
        return Err((400, "Content-Length and Transfer-Encoding together".to_owned()));
    }
    let close = header(request, "Connection").any(|value| value.to_ascii_lowercase().contains("close"));
    let old = *request.http_version() < tiny_http::HTTPVersion(1, 1);
    let keep = header(request, "Connection").any(|value| value.to_ascii_lowercase().contains("keep-alive"));
    let authorization = header(request, "Authorization").next().map(str::to_owned);
    Ok((authorization, !close && (!old || keep)))
}

fn respond(request: tiny_http::Request, reply: &Reply, head_only: bool, close: bool, port: u16) {
    let mut out = Vec::new();
    write_reply(&mut out, reply, head_only, close);
    // tiny_http goes by the request's own wish only.
    let socket = if close { request.remote_addr().and_then(|peer| socket_of(*peer, port)) } else { None };
    let mut writer = request.into_writer();
    let _ = writer.write_all(&out).and_then(|()| writer.flush());
    drop(writer);
    if let Some(socket) = socket {
        let _ = socket2::SockRef::from(&socket).shutdown(std::net::Shutdown::Both);
    }
}

struct Sink {
    request: Option<tiny_http::Request>,
    socket: Option<OwnedFd>,
    head_only: bool,
    close: bool,
    port: u16,
    outstanding: Arc<AtomicUsize>,
}

impl ReplySink for Sink {
    fn send(&mut self, reply: Reply) -> Delivery {
        self.outstanding.fetch_sub(1, Ordering::AcqRel);
        let gone = self.is_gone();
        if let Some(request) = self.request.take() {
            respond(request, &reply, self.head_only, self.close, self.port);
        }
        if gone { Delivery::Gone } else { Delivery::Written }
    }

    fn is_gone(&self) -> bool {
        self.socket.as_ref().is_some_and(|socket| peer_is_gone(socket.as_fd()))
    }
}

/// The connection of this process whose peer this is. tiny_http does not give its
/// sockets away, so they are looked for among the open descriptors.
fn socket_of(peer: SocketAddr, port: u16) -> Option<OwnedFd> {
    static KNOWN: Mutex<Option<HashMap<SocketAddr, i32>>> = Mutex::new(None);
    let matches = |fd: i32| {
        // SAFETY: the descriptor is only asked for its addresses; a foreign or closed one is an error.
        let socket = unsafe { socket2::SockRef::from(&std::os::fd::BorrowedFd::borrow_raw(fd)).peer_addr() };
        // SAFETY: as above.
        let local = unsafe { socket2::SockRef::from(&std::os::fd::BorrowedFd::borrow_raw(fd)).local_addr() };
        socket.is_ok_and(|a| a.as_socket() == Some(peer))
            && local.is_ok_and(|a| a.as_socket().is_some_and(|a| a.port() == port))
    };
    let mut known = KNOWN.lock().ok()?;
    let known = known.get_or_insert_default();
    let cached = known.get(&peer).copied().filter(|fd| matches(*fd));
    let fd = cached.or_else(|| {
        let entries = std::fs::read_dir("/proc/self/fd").ok()?;
        entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).find(|fd| matches(*fd))
    })?;
    if known.len() > 10_000 {
        known.clear();
    }
    known.insert(peer, fd);
    // SAFETY: a duplicate of a socket that was just seen to be the peer's; ours to close.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    // SAFETY: the new descriptor is owned by nobody else.
    (copy >= 0).then(|| unsafe { OwnedFd::from_raw_fd(copy) })
}
