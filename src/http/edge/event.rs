//! The default edge: a few I/O threads that multiplex any number of connections.
//!
//! Each I/O thread has its own poll and its own connections. It reads and parses;
//! the reply is written straight to the socket by whichever thread has it, under
//! the connection's lock, and only what the kernel does not take at once is left
//! to the I/O thread. Requests of one connection are handled one after the other.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use mio::event::Source;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};

use super::wire::{Parsed, Progress as Reading, code_of, parse_request, peer_is_gone, write_reply};
use super::{
    Delivery, Edge, EdgeLimits, Handler, IDLE_TIMEOUT_SECONDS, MAX_HEAD_BYTES, Method, READ_TIMEOUT_SECONDS,
    Reply, ReplyHandle, ReplySink, Request,
};

const WAKER: Token = Token(usize::MAX);
const LISTENER: Token = Token(usize::MAX - 1);
/// Bytes of one read.
const READ_BYTES: usize = 64 * 1024;
/// How often timeouts are looked for.
const TICK: Duration = Duration::from_millis(500);
/// Pause of accepting while the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Complaints about that are at least this far apart.
const WARN_EVERY: Duration = Duration::from_secs(5);
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

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Nobody reads this connection's answers any more.
    fn mark_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// Writes what the kernel takes of the backlog.
    fn push_out(&self, outlet: &mut Outlet) -> Progress {
        while outlet.written < outlet.backlog.len() {
            match outlet.stream.write(&outlet.backlog[outlet.written..]) {
                Ok(0) => return Progress::Broken,
                Ok(n) => outlet.written += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Progress::Blocked,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    self.mark_gone();
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
                warned_at: None,
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

impl Edge for EventEdge {
    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn counter(&self) -> Box<dyn Fn() -> usize + Send + Sync> {
        let connections = self.connections.clone();
        Box::new(move || connections.load(Ordering::Relaxed))
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
    /// How far the request under way has been read.
    reading: Reading,
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
    /// Last complaint about that.
    warned_at: Option<Instant>,
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
                    if self.warned_at.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
                        self.warned_at = Some(Instant::now());
                        tracing::warn!(%error, "cannot accept connections");
                    }
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
            unread: false,
        };
        let shared = Arc::new(Shared { outlet: Mutex::new(outlet), gone: AtomicBool::new(false) });
        self.conns.insert(
            id,
            Conn {
                shared,
                input: Vec::new(),
                reading: Reading::default(),
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
        conn.shared.mark_gone();
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
            conn.shared.mark_gone();
        }
        // A pipelining client is read on when its reply is out; what is not read stays in the kernel.
        let mut total = 0;
        let mut broken = false;
        while outlet.phase != Phase::Answering || conn.input.len() < READ_BYTES {
            match outlet.stream.read(&mut self.buffer) {
                Ok(0) => {
                    conn.end_of_input = true;
                    if outlet.phase == Phase::Answering {
                        conn.shared.mark_gone();
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
            conn.shared.mark_gone();
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
        match parse_request(&conn.input, &self.limits, &mut conn.reading) {
            Parsed::Whole { head, body, length } => {
                conn.reading = Reading::default();
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
                    conn.shared.mark_gone();
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
                    let _ = conn.shared.push_out(&mut outlet);
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
        conn.reading = Reading::default();
        conn.mid_request = false;
        conn.linger_until = Some(Instant::now() + LINGER);
        if conn.shared.push_out(&mut outlet) == Progress::Done {
            let _ = outlet.stream.shutdown(std::net::Shutdown::Write);
        }
    }

    fn flush(&mut self, id: usize) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let mut outlet = conn.shared.lock();
        if outlet.backlog.is_empty() {
            return;
        }
        match conn.shared.push_out(&mut outlet) {
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
        let close = outlet.close || conn.shared.is_gone();
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
        let gone = conn.shared.is_gone();
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
        if outlet.phase == Phase::Closed || self.shared.is_gone() || peer_is_gone(outlet.stream.as_fd()) {
            self.shared.mark_gone();
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
        let progress = self.shared.push_out(&mut outlet);
        // An idle connection needs nobody: its next request is an event of its own.
        let resume = outlet.close || outlet.unread || progress != Progress::Done;
        drop(outlet);
        if resume {
            self.threads[self.index].send(Order::Resume(self.id));
        }
        if progress == Progress::Broken { Delivery::Gone } else { Delivery::Written }
    }

    fn is_gone(&self) -> bool {
        self.shared.is_gone()
    }
}

#[derive(PartialEq, Eq)]
enum Progress {
    Done,
    Blocked,
    Broken,
}
