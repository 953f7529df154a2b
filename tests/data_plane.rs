//! Push, pop, ack, leases and long-poll, through the real binary.
#![allow(missing_docs)]

mod common;

use std::time::{Duration, Instant};

use common::{Broker, data};
use serde_json::{Value, json};

#[test]
fn what_is_pushed_is_popped_once_in_order_and_acked() {
    let broker = Broker::start();
    broker.push("q", "a", &[json!(1), json!({"x": [1.5, null]}), json!("three")]);
    let messages = broker.pop("/queue/q?batch=10");
    assert_eq!(data(&messages), [json!(1), json!({"x": [1.5, null]}), json!("three")]);
    assert!(broker.pop("/queue/q?batch=10").is_empty(), "it is leased");
    let last = broker.ack(&messages[2], "completed");
    assert_eq!((&last["success"], &last["leaseReleased"]), (&json!(true), &json!(true)));
    let again = broker.ack(&messages[0], "completed");
    assert_eq!(again["success"], false, "its lease is over: {again}");
    broker.push("q", "a", &[json!(4)]);
    assert_eq!(data(&broker.pop("/queue/q?batch=10")), [json!(4)]);
}

#[test]
fn a_repeated_transaction_id_is_stored_once() {
    let broker = Broker::start();
    let body = json!({"items": [{"queue": "q", "payload": 1, "transactionId": "same"}, {"queue": "q", "payload": 2, "transactionId": "same"},
        {"queue": "q", "partition": "other", "payload": 3, "transactionId": "same"}]});
    let (_, first) = broker.post("/api/v1/push", &body);
    let statuses =
        |answer: &Value| answer.as_array().unwrap().iter().map(|e| e["status"].clone()).collect::<Vec<_>>();
    assert_eq!(statuses(&first), ["queued", "duplicate", "queued"]);
    assert_eq!(first[0]["message_id"], first[1]["message_id"]);
    let (_, second) = broker.post("/api/v1/push", &body);
    assert_eq!(statuses(&second), ["duplicate"; 3]);
    assert_eq!(second[0]["message_id"], first[0]["message_id"]);
    assert_eq!(broker.pop("/queue/q?batch=10&partitions=0").len(), 2);
}

#[test]
fn a_failure_caps_the_cursor_and_comes_again_at_once() {
    let broker = Broker::start();
    broker.push("q", "a", &[json!(0), json!(1), json!(2)]);
    let m = broker.pop("/queue/q?batch=10");
    let item = |n: usize, status: &str| json!({"transactionId": m[n]["transactionId"], "partitionId": m[n]["partitionId"], "leaseId": m[n]["leaseId"], "status": status});
    let body = json!({"acknowledgments": [item(0, "completed"), item(1, "failed"), item(2, "completed")]});
    let (_, answer) = broker.post("/api/v1/ack/batch", &body);
    assert!(answer.as_array().unwrap().iter().all(|a| a["success"] == true), "{answer}");
    let again = broker.pop("/queue/q?batch=10");
    assert_eq!(data(&again), [json!(1), json!(2)]);
    assert_eq!(again[0]["deliveryAttempt"], 2);
}

#[test]
fn the_budget_is_three_redeliveries_and_then_the_dead_letters() {
    let broker = Broker::start();
    broker.push("q", "a", &[json!("poison"), json!("fine")]);
    for attempt in 1..=4 {
        let m = broker.pop("/queue/q?batch=1&wait=true&timeout=2000");
        assert_eq!(data(&m), [json!("poison")], "attempt {attempt}");
        let answer = broker.ack(&m[0], "failed");
        assert_eq!(answer["dlq"], attempt == 4, "attempt {attempt}: {answer}");
    }
    assert_eq!(data(&broker.pop("/queue/q?batch=10&wait=true&timeout=2000")), [json!("fine")]);
    let rows = broker.client().query("SELECT payload, error, retry_count FROM dead_letter", &[]).unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (rows[0].get::<_, Vec<u8>>(0), rows[0].get::<_, &str>(1)),
        (b"\"poison\"".to_vec(), "because")
    );
}

#[test]
fn an_expired_lease_comes_again_and_its_ack_is_refused() {
    let broker = Broker::start();
    broker.push("q", "a", &[json!(1)]);
    let m = broker.pop("/queue/q?leaseSeconds=1");
    let again = broker.pop("/queue/q?wait=true&timeout=5000");
    assert_eq!((data(&again), again[0]["deliveryAttempt"].as_i64()), (vec![json!(1)], Some(2)));
    assert_eq!(broker.ack(&m[0], "completed")["error"], "invalid or expired lease");
    assert_eq!(broker.ack(&again[0], "completed")["success"], true);
}

#[test]
fn a_lease_is_renewed() {
    let broker = Broker::start();
    broker.push("q", "a", &[json!(1)]);
    let m = broker.pop("/queue/q?leaseSeconds=2");
    let path = format!("/api/v1/lease/{}/extend", m[0]["leaseId"].as_str().unwrap());
    let (status, answer) = broker.post(&path, &json!({"seconds": 30}));
    assert_eq!((status, &answer["success"], &answer["renewed"]), (200, &json!(true), &json!(1)));
    assert!(broker.pop("/queue/q?wait=true&timeout=2500").is_empty());
    assert_eq!(broker.ack(&m[0], "completed")["success"], true);
    let (status, answer) = broker.call("POST", "/api/v1/lease/none/extend", None);
    assert_eq!((status, &answer["success"]), (200, &json!(false)));
}

#[test]
fn groups_have_cursors_of_their_own_and_start_where_they_say() {
    let broker = Broker::start();
    broker.push("q", "a", &[json!(1)]);
    assert!(broker.pop("/queue/q?consumerGroup=late").is_empty(), "new is the default");
    assert_eq!(data(&broker.pop("/queue/q?consumerGroup=all&subscriptionMode=all")), [json!(1)]);
    broker.push("q", "b", &[json!(2)]);
    assert_eq!(
        data(&broker.pop("/queue/q?consumerGroup=late&subscriptionMode=all&wait=true&timeout=2000")),
        [json!(2)]
    );
    assert_eq!(data(&broker.pop("/queue/q?partitions=0")), [json!(1), json!(2)], "queue mode is always all");
}

#[test]
fn a_parked_pop_is_woken_by_a_push() {
    let broker = Broker::start();
    for path in ["/queue/q?", "/queue/q/partition/p?", "?namespace=q&"] {
        let waiting = std::thread::scope(|scope| {
            let pop = scope.spawn(|| {
                let m = broker.pop(&format!(
                    "{path}consumerGroup=g{}&wait=true&timeout=20000&autoAck=true",
                    path.len()
                ));
                (m, Instant::now())
            });
            std::thread::sleep(Duration::from_millis(700));
            let pushed = Instant::now();
            broker.push("q", "p", &[json!(path)]);
            let (m, at) = pop.join().unwrap();
            assert_eq!(data(&m), [json!(path)], "{path}");
            at.saturating_duration_since(pushed)
        });
        assert!(waiting < Duration::from_secs(3), "{path}: {waiting:?}");
    }
}

#[test]
fn a_discovery_pop_sees_every_queue_of_its_namespace() {
    let broker = Broker::start();
    for queue in ["ns.a", "ns.b", "other.a"] {
        broker.push(queue, "p", &[json!(queue)]);
    }
    let (_, answer) =
        broker.get("/api/v1/pop?namespace=ns&consumerGroup=g&subscriptionMode=all&partitions=0&batch=10");
    assert_eq!(answer["queue"], "");
    let mut found: Vec<String> =
        data(answer["messages"].as_array().unwrap()).iter().map(|v| v.as_str().unwrap().to_owned()).collect();
    found.sort();
    assert_eq!(found, ["ns.a", "ns.b"]);
    for message in answer["messages"].as_array().unwrap() {
        assert_eq!(broker.ack(message, "completed")["success"], true);
    }
    assert_eq!(broker.get("/api/v1/pop").0, 400);
}

#[test]
fn visibility_options_hold_messages_back() {
    let broker = Broker::start();
    broker.post("/api/v1/configure", &json!({"queue": "d", "options": {"delayedProcessing": 2}}));
    let pushed = Instant::now();
    broker.push("d", "p", &[json!(1)]);
    assert!(broker.pop("/queue/d").is_empty());
    assert_eq!(data(&broker.pop("/queue/d?wait=true&timeout=10000")), [json!(1)]);
    assert!(pushed.elapsed() >= Duration::from_millis(1990));

    broker.post("/api/v1/configure", &json!({"queue": "w", "options": {"windowBuffer": 2}}));
    let pushed = Instant::now();
    (0..5).for_each(|n| drop(broker.push("w", "p", &[json!(n)])));
    assert_eq!(broker.pop("/queue/w?wait=true&timeout=10000").len(), 5);
    assert!(pushed.elapsed() >= Duration::from_millis(1990));
}

#[test]
fn bad_requests_are_named_and_change_nothing() {
    let broker = Broker::start();
    for (path, body, part) in [
        ("/api/v1/push", json!({"items": [{"queue": "q"}, {"queue": ""}]}), "item 1"),
        ("/api/v1/push", json!([]), "bad body"),
        ("/api/v1/ack", json!({"transactionId": "t"}), "partitionId"),
        ("/api/v1/configure", json!({"queue": "q", "options": {"leaseTime": "x"}}), "leaseTime"),
    ] {
        let (status, answer) = broker.post(path, &body);
        assert_eq!(status, 400, "{answer}");
        assert!(answer["error"].as_str().unwrap().contains(part), "{answer}");
    }
    assert_eq!(
        broker.get("/api/v1/pop/queue/q?batch=0").1["error"],
        "batch must be between 1 and 10000, got 0"
    );
    assert_eq!(broker.client().query("SELECT 1 FROM queue", &[]).unwrap().len(), 0);
}

#[test]
fn a_deleted_queue_starts_anew() {
    let broker = Broker::start();
    let body = json!({"items": [{"queue": "q", "payload": 1, "transactionId": "t"}]});
    broker.post("/api/v1/push", &body);
    assert_eq!(
        broker.call("DELETE", "/api/v1/resources/queues/q", None).1,
        json!({"deleted": true, "queue": "q", "existed": true})
    );
    assert_eq!(broker.call("DELETE", "/api/v1/resources/queues/q", None).1["existed"], false);
    assert!(broker.pop("/queue/q").is_empty());
    assert_eq!(broker.post("/api/v1/push", &body).1[0]["status"], "queued");
    assert_eq!(broker.pop("/queue/q?wait=true&timeout=3000").len(), 1);
}

#[test]
fn stopping_answers_what_waits_and_loses_nothing() {
    let mut broker = Broker::start();
    let url = broker.url.clone();
    broker.push("q", "a", &[json!(1)]);
    let parked = std::thread::spawn(move || {
        common::call(&format!("{url}/api/v1/pop/queue/empty?wait=true&timeout=60000"), "GET", None).0
    });
    std::thread::sleep(Duration::from_millis(300));
    assert!(broker.terminate() < Duration::from_secs(10));
    assert_eq!(parked.join().unwrap(), 204);
    let again = Broker::on(&broker.database, &[]);
    assert_eq!(data(&again.pop("/queue/q")), [json!(1)]);
}
