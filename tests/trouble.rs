//! The embedded PostgreSQL, and a database that is killed, frozen or read-only.
#![allow(missing_docs)]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Broker, data};
use serde_json::{Value, json};

/// A folder that the user postgres may enter too.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("waspmq").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

fn postmaster(folder: &tempfile::TempDir) -> i32 {
    let text = std::fs::read_to_string(folder.path().join("d/postgres/postmaster.pid")).unwrap();
    text.lines().next().unwrap().trim().parse().unwrap()
}

/// The server and all its processes.
fn processes(postmaster: i32) -> Vec<i32> {
    let mut all = vec![postmaster];
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent =
            stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1).map(str::to_owned));
        if parent.and_then(|text| text.parse().ok()) == Some(postmaster) {
            all.push(pid);
        }
    }
    all
}

fn signal(pids: &[i32], signal: i32) {
    for pid in pids {
        // SAFETY: a signal to a process that this test started.
        unsafe { libc::kill(*pid, signal) };
    }
}

fn push(broker: &Broker, n: u64) -> (u16, Value) {
    let body =
        json!({"items": [{"queue": "q", "partition": "p", "payload": n, "transactionId": format!("t{n}")}]});
    broker.post("/api/v1/push", &body)
}

/// Pushes until it is stored; every answer on the way must be a 503 in bounded time.
fn push_until_stored(broker: &Broker, n: u64) {
    let limit = Instant::now() + Duration::from_secs(60);
    loop {
        let started = Instant::now();
        let (status, answer) = push(broker, n);
        assert!(started.elapsed() < Duration::from_secs(15), "answered after {:?}", started.elapsed());
        match status {
            201 => return,
            503 => {
                assert!(answer["code"] == "unavailable" || answer["code"] == "outcome_unknown", "{answer}")
            }
            _ => panic!("{status}: {answer}"),
        }
        assert!(Instant::now() < limit, "it does not recover");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn all_are_there(broker: &Broker, n: u64) {
    let messages = broker.pop("/queue/q?batch=1000&wait=true&timeout=20000");
    assert_eq!(data(&messages), (0..n).map(|n| json!(n)).collect::<Vec<_>>());
}

#[test]
fn a_killed_broker_leaves_everything_to_the_next_and_a_second_one_is_refused() {
    let folder = folder();
    let data = folder.path().join("d");
    let mut first = Broker::embedded(&data);
    assert_eq!(push(&first, 0).0, 201);
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_waspmq"))
        .args(["serve", "--listen", "127.0.0.1:0", "--data", data.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(!second.status.success());
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(text.contains(&format!("another broker (pid {})", first.pid())), "{text}");
    assert_eq!(push(&first, 1).0, 201, "the first one is not disturbed");
    first.kill();
    let mut next = Broker::embedded(&data);
    assert_eq!(push(&next, 1).1[0]["status"], "duplicate");
    all_are_there(&next, 2);
    next.terminate();
}

#[test]
fn a_killed_database_is_started_again() {
    let folder = folder();
    let mut broker = Broker::embedded(&folder.path().join("d"));
    (0..5).for_each(|n| push_until_stored(&broker, n));
    signal(&[postmaster(&folder)], libc::SIGKILL);
    assert_eq!(broker.get("/livez").0, 200);
    (5..10).for_each(|n| push_until_stored(&broker, n));
    all_are_there(&broker, 10);
    broker.terminate();
}

#[test]
fn a_frozen_database_is_answered_with_503_in_bounded_time() {
    let folder = folder();
    let mut broker = Broker::embedded(&folder.path().join("d"));
    push_until_stored(&broker, 0);
    let frozen = processes(postmaster(&folder));
    signal(&frozen, libc::SIGSTOP);
    let started = Instant::now();
    let (status, answer) = push(&broker, 1);
    let took = started.elapsed();
    let alive = broker.get("/livez").0;
    let (second, _) = broker.get("/api/v1/pop/queue/q");
    signal(&frozen, libc::SIGCONT);
    assert_eq!((status, alive, second), (503, 200, 503), "{answer}");
    assert!(took < Duration::from_secs(15), "{took:?}");
    push_until_stored(&broker, 1);
    all_are_there(&broker, 2);
    broker.terminate();
}

#[test]
fn a_read_only_database_is_answered_with_503_until_it_takes_writes_again() {
    let folder = folder();
    let mut broker = Broker::embedded(&folder.path().join("d"));
    push_until_stored(&broker, 0);
    let set = |value: &str| {
        let mut client = broker.client();
        client.batch_execute("SET default_transaction_read_only = off").unwrap();
        client.execute(&format!("ALTER SYSTEM SET default_transaction_read_only = {value}"), &[]).unwrap();
        client.execute("SELECT pg_reload_conf()", &[]).unwrap();
        std::thread::sleep(Duration::from_millis(500));
    };
    set("on");
    let (status, answer) = push(&broker, 1);
    assert_eq!((status, &answer["code"]), (503, &json!("unavailable")), "{answer}");
    set("off");
    push_until_stored(&broker, 1);
    all_are_there(&broker, 2);
    broker.terminate();
}

/// The network between a broker and its database.
struct Network {
    port: u16,
    state: Arc<AtomicU8>,
    open: Arc<Mutex<Vec<(TcpStream, UnixStream)>>>,
}

const WORKS: u8 = 0;
/// What is sent gets lost; nobody is told.
const SWALLOWS: u8 = 1;
/// Connections end as soon as they are made.
const REFUSES: u8 = 2;

impl Network {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = common::server();
        let folder = server.split("host=").nth(1).unwrap().split(' ').next().unwrap();
        let socket = format!("{folder}/.s.PGSQL.5432");
        let (state, open) = (Arc::new(AtomicU8::new(WORKS)), Arc::new(Mutex::new(Vec::new())));
        let (on, all) = (state.clone(), open.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                if on.load(Ordering::SeqCst) == REFUSES {
                    continue;
                }
                let far = UnixStream::connect(&socket).unwrap();
                all.lock().unwrap().push((near.try_clone().unwrap(), far.try_clone().unwrap()));
                let (a, b) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let state = on.clone();
                std::thread::spawn(move || carry(a, b, &state));
                let state = on.clone();
                std::thread::spawn(move || carry(far, near, &state));
            }
        });
        Self { port, state, open }
    }

    fn set(&self, state: u8) {
        self.state.store(state, Ordering::SeqCst);
        if state == REFUSES {
            for (near, far) in self.open.lock().unwrap().drain(..) {
                let _ = near.shutdown(std::net::Shutdown::Both);
                let _ = far.shutdown(std::net::Shutdown::Both);
            }
        }
    }
}

fn carry(mut from: impl Read, mut to: impl Write, state: &AtomicU8) {
    let mut buffer = [0; 65536];
    while let Ok(n) = from.read(&mut buffer) {
        if n == 0 {
            return;
        }
        if state.load(Ordering::SeqCst) != WORKS {
            // As with packets that are dropped: this connection never gets anything through again.
            while from.read(&mut buffer).is_ok_and(|n| n > 0) {}
            return;
        }
        if to.write_all(&buffer[..n]).is_err() {
            return;
        }
    }
}

/// A broker behind a network, and its database's own address.
fn behind(network: &Network) -> (Broker, String) {
    let database = common::new_database();
    let name = database.rsplit_once("dbname=").unwrap().1.to_owned();
    let far = format!("host=127.0.0.1 port={} user=postgres dbname={name}", network.port);
    (Broker::on(&far, &[]), database)
}

fn trouble(kind: u8) {
    let network = Network::start();
    let (broker, database) = behind(&network);
    push_until_stored(&broker, 0);
    let taken = broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all&leaseSeconds=2");
    assert_eq!(taken.len(), 1);
    // Loaded when it happens, and a pop is parked.
    let url = broker.url.clone();
    let parked = std::thread::spawn(move || {
        common::call(&format!("{url}/api/v1/pop/queue/empty?wait=true&timeout=25000"), "GET", None).0
    });
    network.set(kind);
    for _ in 0..3 {
        let started = Instant::now();
        let (status, answer) = push(&broker, 1);
        assert_eq!(status, 503, "{answer}");
        assert!(answer["code"] == "unavailable" || answer["code"] == "outcome_unknown", "{answer}");
        assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
        let ack = json!({"transactionId": taken[0]["transactionId"], "partitionId": taken[0]["partitionId"],
            "consumerGroup": "g", "leaseId": taken[0]["leaseId"]});
        assert_eq!(broker.post("/api/v1/ack", &ack).0, 503);
        assert_eq!(broker.get("/api/v1/pop/queue/q").0, 503);
        assert_eq!(broker.get("/livez").0, 200);
        assert_eq!(broker.get("/health").0, 503);
    }
    network.set(WORKS);
    push_until_stored(&broker, 1);
    push_until_stored(&broker, 2);
    all_are_there(&broker, 3);
    // The lease from before is over, and nothing of it is left.
    let again = broker.pop("/queue/q?consumerGroup=g&wait=true&timeout=20000");
    assert_eq!(data(&again), [json!(0), json!(1), json!(2)]);
    assert_eq!(broker.ack(&again[2], "completed")["success"], true);
    let status = parked.join().unwrap();
    assert!(status == 204 || status == 503, "{status}");
    drop(broker);
    let mut client = postgres::Client::connect(&common::server(), postgres::NoTls).unwrap();
    let name = database.rsplit_once("dbname=").unwrap().1;
    client.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).unwrap();
}

#[test]
fn a_black_hole_before_the_database_is_answered_with_503_and_survived() {
    trouble(SWALLOWS);
}

#[test]
fn a_database_that_is_stopped_and_started_elsewhere_is_found_again() {
    trouble(REFUSES);
}
