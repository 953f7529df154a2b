//! The default edge: a few I/O threads that multiplex any number of connections.
//!
//! Each I/O thread has its own poll and its own connections. It reads and parses;
//! the reply is written straight to the socket by whichever thread has it, under
//! the connection's lock, and only what the kernel does not take at once is left
//! to the I/O thread. Requests of one connection are handled one after the other.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use mio::event::Source;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};

use super::{
    Delivery, Edge, EdgeLimits, Handler, IDLE_TIMEOUT_SECONDS, MAX_HEAD_BYTES, Method, READ_TIMEOUT_SECONDS,
    Reply, ReplyHandle, ReplySink, Request,
};

const WAKER: Token = Token(usize::MAX);
const LISTENER: Token = Token(usize::MAX - 1);
/// Headers of one request.
const MAX_HEADERS: usize = 100;
/// Bytes of one read.
const READ_BYTES: usize = 64 * 1024;
/// How often timeouts are looked for.
const TICK: Duration = Duration::from_millis(500);
/// Pause of accepting while the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// After an error the rest of the request is read and thrown away for this long, so
/// that the answer is not lost to a reset.
const LINGER: Duration = Duration::from_secs(2);

/// What a connection is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waiting for, or reading, a request.
    Reading,
    /// A reply is outstanding.
    Answering,
    /// The answer is out; what still comes is thrown away.
    Lingering,
    /// Finished.
    Closed,
}

/// The side of a connection that a reply needs.
struct Outlet {
    stream: TcpStream,
    phase: Phase,
    /// What the kernel has not taken yet.
    backlog: Vec<u8>,
    written: usize,
    head_only: bool,
    close: bool,
    gone: bool,
    /// Input came while the reply was outstanding: the I/O thread must look when it is out.
    unread: bool,
}

struct Shared {
    outlet: Mutex<Outlet>,
    gone: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Outlet> {
        self.outlet.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

enum Order {
    Adopt(TcpStream),
    /// A reply was written: read on. (connection)
    Resume(usize),
    Stop,
    Shutdown,
}

struct Thread {
    orders: Sender<Order>,
    waker: Arc<Waker>,
}

impl Thread {
    fn send(&self, order: Order) {
        if self.orders.send(order).is_ok() {
            let _ = self.waker.wake();
        }
    }
}

/// See the module.
pub struct EventEdge {
    address: SocketAddr,
    threads: Arc<[Thread]>,
    handles: Vec<JoinHandle<()>>,
    connections: Arc<AtomicUsize>,
    outstanding: Arc<AtomicUsize>,
}

impl EventEdge {
    /// Serves a bound listener.
    pub fn start(
        listener: std::net::TcpListener,
        limits: EdgeLimits,
        handler: Handler,
    ) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let mut listener = Some(TcpListener::from_std(listener));
        let (mut threads, mut parts) = (Vec::new(), Vec::new());
        for _ in 0..limits.io_threads.max(1) {
            let poll = Poll::new()?;
            let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
            let (orders, inbox) = unbounded();
            threads.push(Thread { orders, waker });
            parts.push((poll, inbox));
        }
        let threads: Arc<[Thread]> = threads.into();
        let (connections, outstanding) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut handles = Vec::new();
        for (index, (poll, inbox)) in parts.into_iter().enumerate() {
            let mut io = Io {
                index,
                poll,
                inbox,
                listener: listener.take(),
                accept_at: None,
                threads: threads.clone(),
                limits: limits.clone(),
                handler: handler.clone(),
                connections: connections.clone(),
                outstanding: outstanding.clone(),
                conns: HashMap::new(),
                next: 0,
                turn: 0,
                stopping: false,
                buffer: vec![0; READ_BYTES],
            };
            if let Some(listener) = &mut io.listener {
                io.poll.registry().register(listener, LISTENER, Interest::READABLE)?;
            }
            handles.push(std::thread::Builder::new().name(format!("io-{index}")).spawn(move || io.run())?);
        }
        Ok(Self { address, threads, handles, connections, outstanding })
    }
}

impl EventEdge {
    /// Counts the open connections, also after this value has moved.
    pub fn counter(&self) -> Box<dyn Fn() -> usize + Send + Sync> {
        let connections = self.connections.clone();
        Box::new(move || connections.load(Ordering::Relaxed))
    }
}

impl Edge for EventEdge {
    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    fn stop_accepting(&self) {
        self.threads.iter().for_each(|thread| thread.send(Order::Stop));
    }

    fn shutdown(mut self: Box<Self>, limit: Duration) {
        let until = Instant::now() + limit;
        while self.outstanding.load(Ordering::Acquire) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.threads.iter().for_each(|thread| thread.send(Order::Shutdown));
        for handle in self.handles.drain(..) {
            let _ = handle.join();
        }
    }
}

/// The reading side of a connection; only its I/O thread has it.
struct Conn {
    shared: Arc<Shared>,
    input: Vec<u8>,
    /// Since when the request under way is incomplete, or the connection idle.
    since: Instant,
    mid_request: bool,
    continued: bool,
    end_of_input: bool,
    linger_until: Option<Instant>,
}

struct Io {
    index: usize,
    poll: Poll,
    inbox: Receiver<Order>,
    listener: Option<TcpListener>,
    accept_at: Option<Instant>,
    threads: Arc<[Thread]>,
    limits: EdgeLimits,
    handler: Handler,
    connections: Arc<AtomicUsize>,
    outstanding: Arc<AtomicUsize>,
    conns: HashMap<usize, Conn>,
    next: usize,
    turn: usize,
    stopping: bool,
    buffer: Vec<u8>,
}

impl Io {
    fn run(&mut self) {
        let mut events = Events::with_capacity(1024);
        let mut ticked = Instant::now();
        loop {
            let wait = if self.accept_at.is_some() { ACCEPT_PAUSE } else { TICK };
            if let Err(error) = self.poll.poll(&mut events, Some(wait))
                && error.kind() != ErrorKind::Interrupted
            {
                tracing::error!(%error, "cannot poll");
                std::thread::sleep(ACCEPT_PAUSE);
            }
            let mut accept = self.accept_at.is_some_and(|at| at <= Instant::now());
            for event in &events {
                match event.token() {
                    WAKER => {}
                    LISTENER => accept = true,
                    Token(id) => {
                        if event.is_writable() {
                            self.flush(id);
                        }
                        if event.is_readable() || event.is_read_closed() || event.is_error() {
                            self.readable(id, event.is_read_closed() || event.is_error());
                        }
                    }
                }
            }
            if accept {
                self.accept();
            }
            while let Ok(order) = self.inbox.try_recv() {
                match order {
                    Order::Adopt(stream) => self.adopt(stream),
                    Order::Resume(id) => self.resume(id),
                    Order::Stop => self.stop(),
                    Order::Shutdown => return,
                }
            }
            if ticked.elapsed() >= TICK {
                ticked = Instant::now();
                self.look_for_timeouts(ticked);
            }
        }
    }

    fn stop(&mut self) {
        self.stopping = true;
        self.listener = None;
        self.accept_at = None;
        let idle: Vec<usize> = self.conns.iter().filter(|(_, c)| !c.mid_request).map(|(id, _)| *id).collect();
        for id in idle {
            let answering =
                self.conns.get(&id).is_some_and(|conn| conn.shared.lock().phase == Phase::Answering);
            if !answering {
                self.close(id);
            }
        }
    }

    fn accept(&mut self) {
        self.accept_at = None;
        loop {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok((stream, _)) => {
                    if self.connections.load(Ordering::Relaxed) >= self.limits.max_connections {
                        refuse(stream);
                        continue;
                    }
                    self.connections.fetch_add(1, Ordering::Relaxed);
                    let _ = stream.set_nodelay(true);
                    self.turn = (self.turn + 1) % self.threads.len();
                    if self.turn == self.index {
                        self.adopt(stream);
                    } else {
                        self.threads[self.turn].send(Order::Adopt(stream));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if error.kind() == ErrorKind::Interrupted
                        || error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Out of descriptors: those that wait are accepted when some are free again.
                    tracing::warn!(%error, "cannot accept a connection");
                    self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn adopt(&mut self, mut stream: TcpStream) {
        let id = self.next;
        self.next += 1;
        let interest = Interest::READABLE | Interest::WRITABLE;
        if self.stopping || stream.register(self.poll.registry(), Token(id), interest).is_err() {
            self.connections.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let outlet = Outlet {
            stream,
            phase: Phase::Reading,
            backlog: Vec::new(),
            written: 0,
            head_only: false,
            close: false,
            gone: false,
            unread: false,
        };
        let shared = Arc::new(Shared { outlet: Mutex::new(outlet), gone: AtomicBool::new(false) });
        self.conns.insert(
            id,
            Conn {
                shared,
                input: Vec::new(),
                since: Instant::now(),
                mid_request: false,
                continued: false,
                end_of_input: false,
                linger_until: None,
            },
        );
    }

    fn close(&mut self, id: usize) {
        let Some(conn) = self.conns.remove(&id) else { return };
        let mut outlet = conn.shared.lock();
        outlet.phase = Phase::Closed;
        outlet.gone = true;
        conn.shared.gone.store(true, Ordering::Release);
        let _ = self.poll.registry().deregister(&mut outlet.stream);
        let _ = outlet.stream.shutdown(std::net::Shutdown::Both);
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn readable(&mut self, id: usize, closed: bool) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let max_input = self.limits.max_body_bytes + MAX_HEAD_BYTES + READ_BYTES;
        let mut outlet = conn.shared.lock();
        if outlet.phase == Phase::Answering && closed {
            // A half-close counts: it cannot be told from a close.
            outlet.gone = true;
            conn.shared.gone.store(true, Ordering::Release);
        }
        // A pipelining client is read on when its reply is out; what is not read stays in the kernel.
        let mut total = 0;
        let mut broken = false;
        while outlet.phase != Phase::Answering || conn.input.len() < READ_BYTES {
            match outlet.stream.read(&mut self.buffer) {
                Ok(0) => {
                    conn.end_of_input = true;
                    if outlet.phase == Phase::Answering {
                        outlet.gone = true;
                        conn.shared.gone.store(true, Ordering::Release);
                    }
                    break;
                }
                Ok(n) => {
                    if outlet.phase != Phase::Lingering {
                        conn.input.extend_from_slice(&self.buffer[..n]);
                    }
                    total += n;
                    if conn.input.len() > max_input
                        || total > 4 * 1024 * 1024 && outlet.phase == Phase::Reading
                    {
                        // Parsed in between, so that a body that is too long is noticed.
                        drop(outlet);
                        self.parse(id);
                        return self.readable(id, closed);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    broken = true;
                    break;
                }
            }
        }
        let phase = outlet.phase;
        outlet.unread |=
            phase == Phase::Answering && (total > 0 || conn.input.len() >= READ_BYTES || conn.end_of_input);
        if broken {
            outlet.gone = true;
            conn.shared.gone.store(true, Ordering::Release);
        }
        drop(outlet);
        if broken || (phase == Phase::Lingering && conn.end_of_input) {
            return self.close(id);
        }
        self.parse(id);
    }

    /// Takes a request out of the input, if a whole one is there and none is being answered.
    fn parse(&mut self, id: usize) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let mut outlet = conn.shared.lock();
        if outlet.phase != Phase::Reading {
            return;
        }
        if conn.input.is_empty() {
            conn.mid_request = false;
            drop(outlet);
            if conn.end_of_input {
                self.close(id);
            }
            return;
        }
        if !conn.mid_request {
            conn.mid_request = true;
            conn.since = Instant::now();
        }
        match parse_request(&conn.input, &self.limits) {
            Parsed::Whole { head, body, length } => {
                conn.input.drain(..length);
                if conn.input.is_empty() && conn.input.capacity() > READ_BYTES {
                    conn.input = Vec::new();
                }
                (conn.mid_request, conn.continued) = (false, false);
                outlet.phase = Phase::Answering;
                outlet.close = head.close || self.stopping;
                outlet.head_only = head.method == Method::Head;
                outlet.unread = !conn.input.is_empty();
                if conn.end_of_input {
                    outlet.gone = true;
                    conn.shared.gone.store(true, Ordering::Release);
                }
                self.outstanding.fetch_add(1, Ordering::AcqRel);
                let sink = Sink {
                    shared: conn.shared.clone(),
                    id,
                    index: self.index,
                    threads: self.threads.clone(),
                    outstanding: self.outstanding.clone(),
                };
                drop(outlet);
                let reply = ReplyHandle::new(Box::new(sink));
                let request = Request {
                    method: head.method,
                    target: head.target,
                    authorization: head.authorization,
                    body,
                    reply,
                };
                (self.handler)(request);
            }
            Parsed::More { expects_continue } => {
                if expects_continue && !conn.continued {
                    conn.continued = true;
                    outlet.backlog.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
                    let _ = push_out(&mut outlet);
                }
                drop(outlet);
                if conn.end_of_input {
                    self.close(id);
                }
            }
            Parsed::Bad(status, text) => {
                drop(outlet);
                self.refuse(id, status, &text);
            }
        }
    }

    /// Answers a request that cannot be read, and ends the connection.
    fn refuse(&mut self, id: usize, status: u16, text: &str) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let body = serde_json::json!({"success": false, "error": text, "code": code_of(status)}).to_string();
        let reply = Reply::json(status, body);
        let mut outlet = conn.shared.lock();
        outlet.close = true;
        write_reply(&mut outlet.backlog, &reply, false, true);
        outlet.phase = Phase::Lingering;
        conn.input = Vec::new();
        conn.mid_request = false;
        conn.linger_until = Some(Instant::now() + LINGER);
        if push_out(&mut outlet) == Progress::Done {
            let _ = outlet.stream.shutdown(std::net::Shutdown::Write);
        }
    }

    fn flush(&mut self, id: usize) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let mut outlet = conn.shared.lock();
        if outlet.backlog.is_empty() {
            return;
        }
        match push_out(&mut outlet) {
            Progress::Blocked => {}
            Progress::Broken => {
                drop(outlet);
                self.close(id);
            }
            Progress::Done => {
                if outlet.phase == Phase::Lingering {
                    let _ = outlet.stream.shutdown(std::net::Shutdown::Write);
                }
                drop(outlet);
                self.resume(id);
            }
        }
    }

    /// A reply is out: the next request, or the end.
    fn resume(&mut self, id: usize) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let outlet = conn.shared.lock();
        if outlet.phase != Phase::Reading || !outlet.backlog.is_empty() {
            return;
        }
        let close = outlet.close || outlet.gone;
        drop(outlet);
        conn.since = Instant::now();
        if close || (self.stopping && conn.input.is_empty()) {
            return self.finish(id);
        }
        // What is in the kernel since then gave no new event.
        self.readable(id, false);
    }

    /// Ends a connection whose last answer is out.
    fn finish(&mut self, id: usize) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let mut outlet = conn.shared.lock();
        let gone = outlet.gone;
        outlet.phase = Phase::Lingering;
        let _ = outlet.stream.shutdown(std::net::Shutdown::Write);
        drop(outlet);
        conn.linger_until = Some(Instant::now() + LINGER);
        if gone {
            return self.close(id);
        }
        self.readable(id, false);
    }

    fn look_for_timeouts(&mut self, now: Instant) {
        let (mut slow, mut over) = (Vec::new(), Vec::new());
        for (id, conn) in &self.conns {
            if conn.linger_until.is_some_and(|until| until <= now) {
                over.push(*id);
            } else if conn.linger_until.is_none() {
                let phase = conn.shared.lock().phase;
                let age = now.saturating_duration_since(conn.since).as_secs();
                if phase == Phase::Reading && conn.mid_request && age >= READ_TIMEOUT_SECONDS {
                    slow.push(*id);
                } else if phase == Phase::Reading && !conn.mid_request && age >= IDLE_TIMEOUT_SECONDS {
                    over.push(*id);
                }
            }
        }
        for id in slow {
            self.refuse(
                id,
                408,
                &format!("the request was not complete after {READ_TIMEOUT_SECONDS} seconds"),
            );
        }
        for id in over {
            self.close(id);
        }
    }
}

/// Answers one connection too many.
fn refuse(mut stream: TcpStream) {
    let body = br#"{"success":false,"error":"too many connections (--max-connections); try again","code":"unavailable"}"#;
    let mut reply = Reply::json(503, body.to_vec());
    reply.headers.push(("Retry-After", "1".to_owned()));
    let mut out = Vec::new();
    write_reply(&mut out, &reply, false, true);
    let _ = stream.write(&out);
}

struct Sink {
    shared: Arc<Shared>,
    id: usize,
    index: usize,
    threads: Arc<[Thread]>,
    outstanding: Arc<AtomicUsize>,
}

impl ReplySink for Sink {
    fn send(&mut self, reply: Reply) -> Delivery {
        let mut outlet = self.shared.lock();
        self.outstanding.fetch_sub(1, Ordering::AcqRel);
        if outlet.phase == Phase::Closed || outlet.gone || peer_is_gone(&outlet.stream) {
            outlet.gone = true;
            self.shared.gone.store(true, Ordering::Release);
            if outlet.phase != Phase::Closed {
                outlet.phase = Phase::Reading;
                outlet.close = true;
                drop(outlet);
                self.threads[self.index].send(Order::Resume(self.id));
            }
            return Delivery::Gone;
        }
        let (head_only, close) = (outlet.head_only, outlet.close);
        write_reply(&mut outlet.backlog, &reply, head_only, close);
        outlet.phase = Phase::Reading;
        let progress = push_out(&mut outlet);
        // An idle connection needs nobody: its next request is an event of its own.
        let resume = outlet.close || outlet.unread || progress != Progress::Done;
        drop(outlet);
        if resume {
            self.threads[self.index].send(Order::Resume(self.id));
        }
        if progress == Progress::Broken { Delivery::Gone } else { Delivery::Written }
    }

    fn is_gone(&self) -> bool {
        self.shared.gone.load(Ordering::Acquire)
    }
}

/// Whether the peer has closed, as far as the kernel knows at this moment.
fn peer_is_gone(stream: &TcpStream) -> bool {
    let mut poll = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one valid pollfd, no timeout.
    let ready = unsafe { libc::poll(&mut poll, 1, 0) };
    ready > 0 && poll.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
}

#[derive(PartialEq, Eq)]
enum Progress {
    Done,
    Blocked,
    Broken,
}

fn push_out(outlet: &mut Outlet) -> Progress {
    while outlet.written < outlet.backlog.len() {
        match outlet.stream.write(&outlet.backlog[outlet.written..]) {
            Ok(0) => return Progress::Broken,
            Ok(n) => outlet.written += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Progress::Blocked,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => {
                outlet.gone = true;
                outlet.backlog = Vec::new();
                outlet.written = 0;
                return Progress::Broken;
            }
        }
    }
    outlet.written = 0;
    if outlet.backlog.capacity() > READ_BYTES {
        outlet.backlog = Vec::new()
    } else {
        outlet.backlog.clear()
    }
    Progress::Done
}

fn code_of(status: u16) -> &'static str {
    match status {
        408 => "timeout",
        413 => "too_large",
        431 => "head_too_large",
        501 => "not_implemented",
        505 => "version",
        _ => "bad_request",
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        204 => "No Content",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        505 => "HTTP Version Not Supported",
        _ => "Status",
    }
}

/// Appends a reply's bytes.
pub(super) fn write_reply(out: &mut Vec<u8>, reply: &Reply, head_only: bool, close: bool) {
    let _ = write!(out, "HTTP/1.1 {} {}\r\n", reply.status, reason(reply.status));
    for (name, value) in &reply.headers {
        let _ = write!(out, "{name}: {value}\r\n");
    }
    if reply.status != 204 {
        let _ =
            write!(out, "Content-Type: {}\r\nContent-Length: {}\r\n", reply.content_type, reply.body.len());
    }
    out.extend_from_slice(if close { b"Connection: close\r\n\r\n" } else { b"\r\n" });
    if !head_only && reply.status != 204 {
        out.extend_from_slice(&reply.body);
    }
}

struct Head {
    method: Method,
    target: String,
    authorization: Option<String>,
    close: bool,
}

enum Parsed {
    Whole { head: Head, body: Vec<u8>, length: usize },
    More { expects_continue: bool },
    Bad(u16, String),
}

/// Reads one request from the start of `input`.
fn parse_request(input: &[u8], limits: &EdgeLimits) -> Parsed {
    let bad = |text: &str| Parsed::Bad(400, text.to_owned());
    // Empty lines before a request are allowed.
    let skipped = input.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
    let text = &input[skipped..];
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let too_large =
        || Parsed::Bad(431, format!("the request line and headers exceed {MAX_HEAD_BYTES} bytes"));
    let head_length = match request.parse(text) {
        Ok(httparse::Status::Complete(n)) if n > MAX_HEAD_BYTES => return too_large(),
        Ok(httparse::Status::Complete(n)) => n,
        Ok(httparse::Status::Partial) if text.len() > MAX_HEAD_BYTES => return too_large(),
        Ok(httparse::Status::Partial) => return Parsed::More { expects_continue: false },
        Err(httparse::Error::TooManyHeaders) => {
            return Parsed::Bad(431, format!("more than {MAX_HEADERS} headers"));
        }
        Err(httparse::Error::Version) => {
            return Parsed::Bad(505, "only HTTP/1.0 and HTTP/1.1 are spoken".to_owned());
        }
        Err(error) => return Parsed::Bad(400, format!("the request cannot be read: {error}")),
    };
    let http_1_1 = request.version == Some(1);
    let (mut length, mut chunked, mut close, mut keep, mut expects, mut hosts) =
        (None, false, false, false, false, 0);
    let mut authorization = None;
    for header in request.headers.iter() {
        let name = header.name;
        let value = || std::str::from_utf8(header.value).map(str::trim);
        if name.eq_ignore_ascii_case("content-length") {
            let number = value()
                .ok()
                .filter(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()));
            let Some(number) = number else { return bad("Content-Length is not a number") };
            // More digits than fit are more than any limit.
            let number = number.parse::<u64>().unwrap_or(u64::MAX);
            if length.is_some_and(|before| before != number) {
                return bad("several Content-Length headers that differ");
            }
            length = Some(number);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            if chunked || !value().is_ok_and(|text| text.eq_ignore_ascii_case("chunked")) {
                return Parsed::Bad(
                    501,
                    "the only Transfer-Encoding that is understood is chunked".to_owned(),
                );
            }
            chunked = true;
        } else if name.eq_ignore_ascii_case("connection") {
            for token in value().unwrap_or("").split(',') {
                close |= token.trim().eq_ignore_ascii_case("close");
                keep |= token.trim().eq_ignore_ascii_case("keep-alive");
            }
        } else if name.eq_ignore_ascii_case("expect") {
            expects = value().is_ok_and(|text| text.eq_ignore_ascii_case("100-continue"));
        } else if name.eq_ignore_ascii_case("authorization") {
            authorization = value().ok().map(str::to_owned);
        } else if name.eq_ignore_ascii_case("host") {
            hosts += 1;
        }
    }
    if http_1_1 && hosts != 1 {
        return bad("an HTTP/1.1 request has exactly one Host header");
    }
    if chunked && length.is_some() {
        return bad("Content-Length and Transfer-Encoding together");
    }
    let too_long = |bytes: String| {
        Parsed::Bad(
            413,
            format!("the body of {bytes} bytes exceeds the limit of {} (--max-body)", limits.max_body_bytes),
        )
    };
    let rest = &text[head_length..];
    let (body, taken) = if chunked {
        match read_chunks(rest, limits.max_body_bytes) {
            Chunks::Whole(body, taken) => (body, taken),
            Chunks::More => return Parsed::More { expects_continue: expects },
            Chunks::Bad => return bad("the chunked body cannot be read"),
            Chunks::TooLong => return too_long("more".to_owned()),
        }
    } else {
        let length = length.unwrap_or(0);
        if length > limits.max_body_bytes as u64 {
            return too_long(if length == u64::MAX { "very many".to_owned() } else { length.to_string() });
        }
        let length = length as usize;
        if rest.len() < length {
            return Parsed::More { expects_continue: expects && rest.is_empty() };
        }
        (rest[..length].to_vec(), length)
    };
    let target = request.path.unwrap_or("/");
    // Of an absolute form, its path and query.
    let target = match target.split_once("://") {
        Some((_, behind)) if !target.starts_with('/') => behind.find('/').map_or("/", |at| &behind[at..]),
        _ => target,
    };
    let head = Head {
        method: match request.method.unwrap_or("") {
            "GET" => Method::Get,
            "HEAD" => Method::Head,
            "POST" => Method::Post,
            "PUT" => Method::Put,
            "DELETE" => Method::Delete,
            "PATCH" => Method::Patch,
            "OPTIONS" => Method::Options,
            _ => Method::Other,
        },
        target: target.to_owned(),
        authorization,
        close: close || (!http_1_1 && !keep),
    };
    Parsed::Whole { head, body, length: skipped + head_length + taken }
}

enum Chunks {
    Whole(Vec<u8>, usize),
    More,
    Bad,
    TooLong,
}

fn read_chunks(input: &[u8], limit: usize) -> Chunks {
    let (mut body, mut at) = (Vec::new(), 0);
    loop {
        let (consumed, size) = match httparse::parse_chunk_size(&input[at..]) {
            Ok(httparse::Status::Complete(found)) => found,
            Ok(httparse::Status::Partial) if input.len() - at > 1024 => return Chunks::Bad,
            Ok(httparse::Status::Partial) => return Chunks::More,
            Err(_) => return Chunks::Bad,
        };
        at += consumed;
        if size == 0 {
            // Trailers are read over.
            let mut trailers = [httparse::EMPTY_HEADER; MAX_HEADERS];
            return match httparse::parse_headers(&input[at..], &mut trailers) {
                Ok(httparse::Status::Complete((n, _))) => Chunks::Whole(body, at + n),
                Ok(httparse::Status::Partial) if input.len() - at > MAX_HEAD_BYTES => Chunks::Bad,
                Ok(httparse::Status::Partial) => Chunks::More,
                Err(_) => Chunks::Bad,
            };
        }
        if size > (limit - body.len()) as u64 {
            return Chunks::TooLong;
        }
        let size = size as usize;
        if input.len() - at < size + 2 {
            return Chunks::More;
        }
        body.extend_from_slice(&input[at..at + size]);
        if &input[at + size..at + size + 2] != b"\r\n" {
            return Chunks::Bad;
        }
        at += size + 2;
    }
}
