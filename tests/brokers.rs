//! Several brokers on one database.
#![allow(missing_docs)]

mod common;

use std::time::{Duration, Instant};

use common::{Broker, data};
use serde_json::json;

fn two() -> (Broker, Broker) {
    let first = Broker::start();
    let second = Broker::on(&first.database, &[]);
    // Until each has heard of the other there is nobody to send hints to.
    let limit = Instant::now() + Duration::from_secs(10);
    let mut client = first.client();
    while client.query_one("SELECT count(*) FROM broker", &[]).unwrap().get::<_, i64>(0) < 2 {
        assert!(Instant::now() < limit);
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_millis(2_500));
    (first, second)
}

/// Waits for something that every broker has to notice within 2 s (and the test machine's own slowness).
fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(5);
    while !is_so() {
        assert!(Instant::now() < limit, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_push_through_one_broker_wakes_a_pop_parked_at_another() {
    let (first, second) = two();
    for round in 0..5 {
        let url = second.url.clone();
        let parked = std::thread::spawn(move || {
            let url =
                format!("{url}/api/v1/pop/queue/q?wait=true&timeout=20000&consumerGroup=g&autoAck=true");
            let answer = common::call(&url, "GET", None);
            (Instant::now(), answer)
        });
        // Far enough into the wait that no re-check of the parked pop can be mistaken for a wake.
        std::thread::sleep(Duration::from_millis(3_300));
        first.push("q", "p", &[json!(round)]);
        let pushed = Instant::now();
        let (at, (status, answer)) = parked.join().unwrap();
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["messages"][0]["data"], json!(round));
        let took = at.saturating_duration_since(pushed);
        assert!(took < Duration::from_millis(1_500), "round {round}: {took:?}");
    }
}

#[test]
fn options_and_deletions_reach_every_broker() {
    let (first, second) = two();
    first.push("q", "p", &[json!(1)]);
    assert_eq!(second.pop("/queue/q?consumerGroup=g&subscriptionMode=all&autoAck=true").len(), 1);
    // Deduplication off, through the first: the second follows.
    let (status, answer) = first.post(
        "/api/v1/configure",
        &json!({"queue": "q", "options": {"dedupWindowSeconds": 0, "delayedProcessing": 3600}}),
    );
    assert_eq!(status, 200, "{answer}");
    let item = json!({"items": [{"queue": "q", "partition": "p", "payload": 2, "transactionId": "t"}]});
    assert_eq!(second.post("/api/v1/push", &item).1[0]["status"], "queued");
    soon("no deduplication at the other broker", || {
        second.post("/api/v1/push", &item).1[0]["status"] == "queued"
    });
    assert_eq!(second.pop("/queue/q?consumerGroup=g").len(), 0, "delayed");
    assert_eq!(first.call("DELETE", "/api/v1/resources/queues/q", None).0, 200);
    // Made again, it starts empty, everywhere.
    second.push("q", "p", &[json!("new")]);
    soon("the new queue is read", || {
        data(&second.pop("/queue/q?consumerGroup=g2&subscriptionMode=all&autoAck=true")) == [json!("new")]
    });
    assert_eq!(data(&first.pop("/queue/q?consumerGroup=g3&subscriptionMode=all")), [json!("new")]);
}

#[test]
fn a_group_is_served_by_both_without_a_double_delivery() {
    let (first, second) = two();
    let expected = 2_000;
    for n in 0..expected / 10 {
        let payloads: Vec<_> = (0..10).map(|k| json!(n * 10 + k)).collect();
        [&first, &second][n % 2].push("q", &format!("p{}", n % 50), &payloads);
    }
    let mut seen: Vec<u64> = Vec::new();
    let limit = Instant::now() + Duration::from_secs(30);
    while seen.len() < expected {
        assert!(Instant::now() < limit, "{} of {expected}", seen.len());
        for broker in [&first, &second] {
            let found = broker.pop(
                "/queue/q?consumerGroup=g&subscriptionMode=all&batch=37&partitions=5&wait=true&timeout=300",
            );
            for lane in found.chunk_by(|a, b| a["partition"] == b["partition"]) {
                // Acked through the other broker: the lease is the database's, not the broker's.
                let other = if std::ptr::eq(broker, &first) { &second } else { &first };
                assert_eq!(other.ack(lane.last().unwrap(), "completed")["success"], true);
            }
            seen.extend(found.iter().map(|m| m["data"].as_u64().unwrap()));
        }
    }
    let mut sorted = seen.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..expected as u64).collect::<Vec<_>>());
}

#[test]
fn brokers_start_at_the_same_moment_on_an_empty_database() {
    let database = common::new_database();
    let brokers: Vec<Broker> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..3).map(|_| scope.spawn(|| Broker::on(&database, &[]))).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    for (n, broker) in brokers.iter().enumerate() {
        broker.push("q", "p", &[json!(n)]);
    }
    let found = brokers[0].pop("/queue/q");
    assert_eq!(data(&found), [json!(0), json!(1), json!(2)]);
    drop(brokers);
    let mut client = postgres::Client::connect(&common::server(), postgres::NoTls).unwrap();
    let name = database.rsplit_once("dbname=").unwrap().1;
    client.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).unwrap();
}
