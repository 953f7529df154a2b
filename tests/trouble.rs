//! The embedded PostgreSQL, and a database that is killed, frozen or read-only.
#![allow(missing_docs)]

mod common;

use std::os::unix::fs::PermissionsExt;
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
