//! Consumer groups: listing, seeking, deleting.
#![allow(missing_docs)]

mod common;

use std::time::Duration;

use common::{Broker, data};
use serde_json::{Value, json};

fn seek(broker: &Broker, path: &str, body: &Value) -> (u16, Value) {
    broker.post(&format!("/api/v1/consumer-groups/g/queues/q{path}/seek"), body)
}

fn drain(broker: &Broker, group: &str) -> Vec<Value> {
    data(&broker.pop(&format!(
        "/queue/q?consumerGroup={group}&subscriptionMode=all&batch=1000&partitions=0&autoAck=true"
    )))
}

#[test]
fn a_seek_is_seen_by_the_next_pop_and_ends_leases() {
    let broker = Broker::start();
    broker.push("q", "a", &[json!(1), json!(2)]);
    broker.push("q", "b", &[json!(3)]);
    assert_eq!(drain(&broker, "g").len(), 3);
    let (status, answer) = seek(&broker, "", &json!({"timestamp": "1970-01-01T00:00:00Z"}));
    assert_eq!(
        (status, &answer["partitionsUpdated"], &answer["seekToEnd"]),
        (200, &json!(2), &json!(false)),
        "{answer}"
    );
    let again = broker.pop("/queue/q?consumerGroup=g&batch=1000&partitions=0");
    assert_eq!(again.len(), 3);
    assert_eq!(again[0]["deliveryAttempt"], 1);
    // On leased partitions too: the old lease is dead, and its ack is refused.
    assert_eq!(seek(&broker, "", &json!({"toEnd": true})).1["seekToEnd"], true);
    let answer = broker.ack(&again[0], "completed");
    assert_eq!((&answer["success"], &answer["error"]), (&json!(false), &json!("invalid or expired lease")));
    assert!(broker.pop("/queue/q?consumerGroup=g&partitions=0").is_empty());
    // One partition only.
    assert_eq!(
        seek(&broker, "/partitions/a", &json!({"timestamp": "1970-01-01T00:00:00Z"})).1["updated"],
        true
    );
    assert_eq!(drain(&broker, "g"), [json!(1), json!(2)]);
}

#[test]
fn a_seek_by_time_lands_on_the_first_segment_at_or_after_it() {
    let broker = Broker::start();
    broker.push("q", "p", &[json!("before")]);
    std::thread::sleep(Duration::from_millis(20));
    broker.push("q", "p", &[json!("x"), json!("y")]);
    let all = broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all&autoAck=true");
    let at = all[1]["createdAt"].clone();
    assert_eq!(seek(&broker, "", &json!({"timestamp": at})).0, 200);
    assert_eq!(drain(&broker, "g"), [json!("x"), json!("y")]);
    assert_eq!(seek(&broker, "", &json!({"timestamp": "2100-01-01T00:00:00Z"})).0, 200);
    assert!(drain(&broker, "g").is_empty());
    // A group that has never been seen gets its cursors by the seek.
    broker.post("/api/v1/consumer-groups/new/queues/q/seek", &json!({"timestamp": at}));
    assert_eq!(data(&broker.pop("/queue/q?consumerGroup=new")), [json!("x"), json!("y")]);
}

#[test]
fn a_seek_wakes_parked_pops_also_at_another_broker() {
    let broker = Broker::start();
    let other = Broker::on(&broker.database, &[]);
    std::thread::sleep(Duration::from_millis(2_500));
    broker.push("q", "p", &[json!(1)]);
    assert_eq!(drain(&broker, "g").len(), 1);
    let url =
        format!("{}/api/v1/pop/queue/q?consumerGroup=g&wait=true&timeout=20000&autoAck=true", other.url);
    let parked = std::thread::spawn(move || common::call(&url, "GET", None));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(seek(&broker, "", &json!({"timestamp": "1970-01-01T00:00:00Z"})).0, 200);
    let (status, answer) = parked.join().unwrap();
    assert_eq!((status, &answer["messages"][0]["data"]), (200, &json!(1)));
}

#[test]
fn bad_seeks_are_refused() {
    let broker = Broker::start();
    broker.push("q", "p", &[json!(1)]);
    for (path, body, status) in [
        ("", json!({}), 400),
        ("", json!({"position": 5}), 400),
        ("", json!({"timestamp": "yesterday"}), 400),
        ("", json!({"timestamp": 5}), 400),
        ("", json!({"toEnd": "yes"}), 400),
        ("", json!([]), 400),
        ("/partitions/nope", json!({"toEnd": true}), 404),
    ] {
        let (found, answer) = seek(&broker, path, &body);
        assert_eq!(found, status, "{path} {body}: {answer}");
    }
    assert_eq!(broker.post("/api/v1/consumer-groups/g/queues/nope/seek", &json!({"toEnd": true})).0, 404);
    // Clients send no body for an empty object.
    assert_eq!(broker.call("POST", "/api/v1/consumer-groups/g/queues/q/seek", None).0, 400);
    assert_eq!(broker.call("POST", "/api/v1/consumer-groups/g/queues/q/partitions/p/seek", None).0, 200);
}

#[test]
fn a_deleted_group_starts_anew() {
    let broker = Broker::start();
    broker.push("q", "a", &[json!(1)]);
    broker.push("r", "a", &[json!(2)]);
    assert_eq!(drain(&broker, "g").len(), 1);
    broker.pop("/queue/r?consumerGroup=g&subscriptionMode=all&autoAck=true");
    let (status, answer) =
        broker.call("DELETE", "/api/v1/consumer-groups/g/queues/q?deleteMetadata=true", None);
    assert_eq!(
        (status, &answer["deletedPartitions"], &answer["metadataDeleted"]),
        (200, &json!(1), &json!(true)),
        "{answer}"
    );
    assert_eq!(drain(&broker, "g"), [json!(1)], "a first contact again");
    assert!(broker.pop("/queue/r?consumerGroup=g").is_empty(), "the other queue is not touched");
    // Without its metadata the stored start counts.
    let (_, answer) = broker.call("DELETE", "/api/v1/consumer-groups/g?deleteMetadata=false", None);
    assert_eq!((&answer["deletedPartitions"], &answer["metadataDeleted"]), (&json!(2), &json!(false)));
    assert_eq!(drain(&broker, "g"), [json!(1)]);
    assert_eq!(broker.call("DELETE", "/api/v1/consumer-groups/g/queues/nope", None).0, 404);
    assert_eq!(broker.call("DELETE", "/api/v1/consumer-groups/unknown", None).1["deletedPartitions"], 0);
}

#[test]
fn groups_are_listed_with_their_lag() {
    let broker = Broker::start();
    broker.push("q", "a", &[json!(1), json!(2), json!(3)]);
    broker.push("q", "b", &[json!(4)]);
    let first = broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all&batch=2");
    broker.ack(&first[0], "completed");
    let (_, list) = broker.get("/api/v1/consumer-groups");
    let row = &list.as_array().unwrap()[0];
    assert_eq!(
        (&row["name"], &row["queueName"], &row["totalLag"]),
        (&json!("g"), &json!("q"), &json!(3)),
        "{row}"
    );
    assert_eq!((&row["partitionCursors"], &row["partitionsWithLag"]), (&json!(2), &json!(2)));
    let (_, detail) = broker.get("/api/v1/consumer-groups/g");
    let partitions = detail["q"]["partitions"].as_array().unwrap();
    assert_eq!(partitions.len(), 2);
    assert_eq!(
        (&partitions[0]["offsetLag"], &partitions[0]["totalConsumed"], &partitions[0]["leaseActive"]),
        (&json!(2), &json!(1), &json!(true))
    );
    assert_eq!(broker.get("/api/v1/consumer-groups/unknown").1, json!({}));
    assert_eq!(broker.get("/api/v1/consumer-groups/lagging").1, json!([]));
    std::thread::sleep(Duration::from_millis(1_200));
    let (_, lagging) = broker.get("/api/v1/consumer-groups/lagging?minLagSeconds=1");
    assert_eq!(lagging.as_array().unwrap().len(), 2, "{lagging}");
    let body = json!({"subscriptionTimestamp": "2026-01-01T00:00:00Z"});
    let (status, answer) = broker.post("/api/v1/consumer-groups/g/subscription", &body);
    assert_eq!(
        (status, &answer["rowsUpdated"], &answer["newTimestamp"]),
        (200, &json!(1), &json!("2026-01-01T00:00:00Z"))
    );
    assert_eq!(broker.post("/api/v1/consumer-groups/g/subscription", &json!({})).0, 400);
}
