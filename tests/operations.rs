//! Messages, dead letters, traces, numbers and maintenance, over HTTP.
#![allow(missing_docs)]

mod common;

use std::time::Duration;

use common::{Broker, data};
use serde_json::{Value, json};

/// What a JSON number or text must survive: more digits than a double has, a NUL, a lone key order.
const PAYLOAD: &str =
    r#"{"z":9007199254740993,"a":12345678901234567890123.4500,"nul":"a\u0000b","é":[ 1 ,2]}"#;

/// The body of an answer as it came over the wire.
fn raw(url: &str) -> String {
    ureq::get(url).call().unwrap().body_mut().read_to_string().unwrap()
}

/// Pushes a payload as it is written here, and makes dead letters of it by nacks of group `g`.
fn dead_letter(broker: &Broker, partition: &str, payload: &str, id: &str) -> Value {
    let body = format!(
        r#"{{"items":[{{"queue":"q","partition":"{partition}","transactionId":"{id}","payload":{payload}}}]}}"#
    );
    let answer = ureq::post(format!("{}/api/v1/push", broker.url)).send(body).unwrap();
    assert_eq!(answer.status(), 201);
    let popped =
        broker.pop(&format!("/queue/q/partition/{partition}?consumerGroup=g&subscriptionMode=all&batch=1"));
    assert_eq!(popped[0]["transactionId"], id);
    let answer = broker.ack(&popped[0], "dlq");
    assert_eq!((&answer["success"], &answer["dlq"]), (&json!(true), &json!(true)), "{answer}");
    popped[0].clone()
}

fn dead(broker: &Broker, filter: &str) -> Value {
    broker.get(&format!("/api/v1/dlq?queue=q{filter}")).1
}

#[test]
fn payloads_come_back_byte_for_byte_everywhere() {
    let broker = Broker::start();
    let message = dead_letter(&broker, "p", PAYLOAD, "one");
    let partition = message["partitionId"].as_str().unwrap();
    for path in
        ["/api/v1/dlq".to_owned(), "/api/v1/messages".to_owned(), format!("/api/v1/messages/{partition}/one")]
    {
        let text = raw(&format!("{}{path}", broker.url));
        assert!(text.contains(PAYLOAD), "{path}: {text}");
        serde_json::from_str::<Value>(&text).unwrap();
    }
    // A replay pushes the same bytes, under an id of its own.
    let (status, answer) = broker.call("POST", &format!("/api/v1/messages/{partition}/one/retry"), None);
    assert_eq!((status, &answer["success"], &answer["dlqRowRemoved"]), (200, &json!(true), &json!(true)));
    assert_eq!((&answer["queue"], &answer["partition"]), (&json!("q"), &json!("p")));
    assert_ne!(answer["replayedAs"]["transactionId"], "one", "{answer}");
    assert_eq!(dead(&broker, "")["total"], 0);
    let text = raw(&format!("{}/api/v1/pop/queue/q?consumerGroup=g&autoAck=true", broker.url));
    assert!(text.contains(PAYLOAD), "{text}");
    // It is gone: once is enough.
    let (status, answer) = broker.call("POST", &format!("/api/v1/messages/{partition}/one/retry"), None);
    assert_eq!((status, &answer["error"]), (404, &json!("Message not found")));
}

#[test]
fn dead_letters_are_deleted_one_by_one_and_live_messages_are_not() {
    let broker = Broker::start();
    let message = dead_letter(&broker, "p", "1", "one");
    dead_letter(&broker, "p", "2", "two");
    broker.push("q", "p", &[json!("alive")]);
    let partition = message["partitionId"].as_str().unwrap();
    let path = format!("/api/v1/messages/{partition}/one");
    let (status, answer) = broker.call("DELETE", &path, None);
    assert_eq!((status, &answer["success"]), (200, &json!(true)));
    let (status, answer) = broker.call("DELETE", &path, None);
    assert_eq!(
        (status, &answer["success"], &answer["error"]),
        (404, &json!(false), &json!("Message not found"))
    );
    assert_eq!(dead(&broker, "")["messages"][0]["transactionId"], "two");
    let alive = broker.pop("/queue/q?consumerGroup=g");
    assert_eq!(data(&alive), [json!("alive")]);
    let path = format!("/api/v1/messages/{partition}/{}", alive[0]["transactionId"].as_str().unwrap());
    assert_eq!(broker.call("DELETE", &path, None).0, 404);
    assert_eq!(broker.ack(&alive[0], "completed")["success"], true);
    assert_eq!(broker.call("DELETE", "/api/v1/messages/no-uuid/x", None).0, 404);
}

#[test]
fn dead_letters_are_replayed_and_deleted_in_bulk_by_filter() {
    let broker = Broker::start();
    for n in 0..6 {
        dead_letter(&broker, if n % 2 == 0 { "even" } else { "odd" }, &n.to_string(), &format!("t{n}"));
    }
    let (_, answer) = broker.post("/api/v1/dlq/retry", &json!({"queue": "other"}));
    assert_eq!(answer["replayed"], 0);
    let (status, answer) =
        broker.post("/api/v1/dlq/retry", &json!({"queue": "q", "partition": "even", "limit": 2}));
    assert_eq!((status, &answer["replayed"]), (200, &json!(2)), "{answer}");
    // The oldest first, into their own lane, in order.
    let back = broker.pop("/queue/q?consumerGroup=g&batch=10&partitions=0&autoAck=true");
    assert_eq!(data(&back), [json!(0), json!(2)]);
    assert!(back.iter().all(|message| message["partition"] == "even"));
    let (_, answer) = broker.call("DELETE", "/api/v1/dlq?queue=q&partition=odd", None);
    assert_eq!(answer["deleted"], 3, "{answer}");
    let left = dead(&broker, "");
    assert_eq!((&left["total"], &left["messages"][0]["transactionId"]), (&json!(1), &json!("t4")));
    for (body, what) in [
        (json!({"limit": 0}), "limit"),
        (json!({"limit": "many"}), "limit"),
        (json!({"from": "yesterday"}), "from"),
        (json!({"queue": 5}), "queue"),
    ] {
        let (status, answer) = broker.post("/api/v1/dlq/retry", &body);
        assert_eq!(status, 400, "{body}");
        assert!(answer["error"].as_str().unwrap().starts_with(what), "{answer}");
    }
    assert_eq!(dead(&broker, "")["total"], 1, "a refusal changes nothing");
    let future = broker.post("/api/v1/dlq/retry", &json!({"from": "2100-01-01T00:00:00Z"})).1;
    assert_eq!(future["replayed"], 0);
}

#[test]
fn a_replay_wakes_a_parked_pop() {
    let broker = Broker::start();
    dead_letter(&broker, "p", "7", "one");
    let url =
        format!("{}/api/v1/pop/queue/q?consumerGroup=g&wait=true&timeout=20000&autoAck=true", broker.url);
    let parked = std::thread::spawn(move || common::call(&url, "GET", None));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(broker.post("/api/v1/dlq/retry", &json!({})).1["replayed"], 1);
    let (status, answer) = parked.join().unwrap();
    assert_eq!((status, &answer["messages"][0]["data"]), (200, &json!(7)));
}

#[test]
fn messages_are_listed_newest_first_with_their_state() {
    let broker = Broker::start();
    dead_letter(&broker, "p", "\"dead\"", "dead");
    broker.push("q", "p", &[json!("done"), json!("leased"), json!("waiting")]);
    broker.push("other", "p", &[json!("x")]);
    let popped = broker.pop("/queue/q?consumerGroup=g&batch=2");
    broker.ack(&popped[0], "completed");
    let ids = |answer: &Value| -> Vec<(Value, Value)> {
        let messages = answer["messages"].as_array().unwrap();
        messages.iter().map(|m| (m["data"].clone(), m["status"].clone())).collect()
    };
    let (status, answer) = broker.get("/api/v1/messages?queue=q");
    assert_eq!(status, 200);
    assert_eq!(
        ids(&answer),
        [("waiting", "processing"), ("leased", "processing"), ("done", "completed"), ("dead", "dead_letter")]
            .map(|(data, status)| (json!(data), json!(status)))
    );
    assert_eq!(answer["mode"]["type"], "bus");
    assert_eq!(answer["messages"][0]["queuePath"], "q/p");
    let (_, page) = broker.get("/api/v1/messages?queue=q&limit=1&offset=2");
    assert_eq!(ids(&page), [(json!("done"), json!("completed"))]);
    let (_, only) = broker.get("/api/v1/messages?queue=q&status=dead_letter");
    assert_eq!(ids(&only), [(json!("dead"), json!("dead_letter"))]);
    assert_eq!(broker.get("/api/v1/messages").1["total"], 5);
    assert_eq!(
        broker.get("/api/v1/messages?to=2001-01-01T00:00:00Z&from=2000-01-01T00:00:00Z").1["total"],
        0
    );
    for bad in ["limit=0", "limit=1001", "offset=-1", "status=odd", "from=yesterday"] {
        assert_eq!(broker.get(&format!("/api/v1/messages?{bad}")).0, 400, "{bad}");
    }
}

#[test]
fn traces_are_found_by_message_and_by_name() {
    let broker = Broker::start();
    broker.push("q", "p", &[json!(1)]);
    let message = broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all&autoAck=true")[0].clone();
    let (id, partition) =
        (message["transactionId"].as_str().unwrap(), message["partitionId"].as_str().unwrap());
    let trace = |extra: Value| {
        let mut body = json!({"transactionId": id, "partitionId": partition, "consumerGroup": "g",
            "data": {"text": "paid", "n": 9_007_199_254_740_993_i64}});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        broker.post("/api/v1/traces", &body)
    };
    let (status, answer) = trace(json!({"traceNames": ["tenant-1", "order-7"], "eventType": "step"}));
    assert_eq!((status, &answer["success"]), (201, &json!(true)));
    assert_eq!(trace(json!({"traceNames": "order-7"})).0, 201);
    let (_, of_message) = broker.get(&format!("/api/v1/traces/{partition}/{id}"));
    let traces = of_message["traces"].as_array().unwrap();
    assert_eq!(
        (traces.len(), &traces[0]["event_type"], &traces[1]["event_type"]),
        (2, &json!("step"), &json!("info"))
    );
    assert_eq!(traces[0]["data"]["n"], 9_007_199_254_740_993_i64);
    let (_, by_name) = broker.get("/api/v1/traces/by-name/order-7?limit=1");
    assert_eq!((&by_name["total"], by_name["traces"].as_array().unwrap().len()), (&json!(2), 1));
    assert_eq!(by_name["traces"][0]["queue_name"], "q");
    let (_, names) = broker.get("/api/v1/traces/names");
    let of = |n: usize| {
        (names["trace_names"][n]["trace_name"].clone(), names["trace_names"][n]["trace_count"].clone())
    };
    assert_eq!((of(0), of(1)), ((json!("order-7"), json!(2)), (json!("tenant-1"), json!(1))));
    assert_eq!(broker.get("/api/v1/traces/by-name/none").1["total"], 0);
    for bad in [
        json!({"data": null}),
        json!({"partitionId": "x"}),
        json!({"traceNames": [5]}),
        json!({"traceNames": [""]}),
        json!({"transactionId": ""}),
    ] {
        assert_eq!(trace(bad.clone()).0, 400, "{bad}");
    }
}

#[test]
fn the_numbers_are_counted() {
    let broker = Broker::start();
    let config = json!({"queue": "q", "namespace": "ns", "task": "work", "options": {"leaseTime": 7}});
    assert!(broker.post("/api/v1/configure", &config).0 < 300);
    dead_letter(&broker, "p", "0", "dead");
    broker.push("q", "p", &[json!(1), json!(2), json!(3)]);
    let popped = broker.pop("/queue/q?consumerGroup=g&batch=2");
    broker.ack(&popped[0], "completed");
    let (_, overview) = broker.get("/api/v1/resources/overview");
    assert_eq!(
        (&overview["queues"], &overview["partitions"], &overview["namespaces"], &overview["tasks"]),
        (&json!(1), &json!(1), &json!(1), &json!(1))
    );
    assert_eq!(
        overview["messages"],
        json!({"total": 4, "pending": 2, "processing": 1, "completed": 2, "failed": null, "deadLetter": 1})
    );
    assert_eq!(
        broker.get("/api/v1/resources/namespaces").1["namespaces"][0]["messages"],
        json!({"total": 4, "pending": 2})
    );
    assert_eq!(broker.get("/api/v1/resources/tasks").1["tasks"][0]["task"], "work");
    let (_, busiest) = broker.get("/api/v1/resources/partitions");
    assert_eq!(
        (&busiest["partitions"][0]["partition"], &busiest["partitions"][0]["pending"]),
        (&json!("p"), &json!(2))
    );
    let (_, status) = broker.get("/api/v1/status");
    assert_eq!(
        (&status["leases"]["active"], &status["deadLetterQueue"]["totalMessages"]),
        (&json!(1), &json!(1))
    );
    assert_eq!(status["messages"]["requests"]["push"], 2);
    let (_, one) = broker.get("/api/v1/status/queues/q");
    assert_eq!(
        (&one["queue"]["config"]["leaseTime"], &one["totals"]["messages"]["pending"]),
        (&json!(7), &json!(2))
    );
    assert_eq!(broker.get("/api/v1/status/queues/none").0, 404);
    let (_, all) = broker.get("/api/v1/status/queues");
    assert_eq!(
        (&all["queues"][0]["name"], &all["queues"][0]["messages"]["completed"]),
        (&json!("q"), &json!(2))
    );
    // Not measured: empty, not invented.
    let (_, series) = broker.get("/api/v1/status/analytics");
    assert_eq!(series["dataPoints"], json!([]));
}

#[test]
fn maintenance_holds_for_every_broker_of_the_database() {
    let broker = Broker::start();
    let other = Broker::on(&broker.database, &[]);
    broker.push("q", "p", &[json!(1)]);
    let (status, answer) = broker.post("/api/v1/system/maintenance", &json!({"enabled": true}));
    assert_eq!(
        (status, &answer["maintenanceMode"], &answer["popMaintenanceMode"]),
        (200, &json!(true), &json!(false))
    );
    std::thread::sleep(Duration::from_millis(2_500));
    for broker in [&broker, &other] {
        let (status, answer) = broker.post("/api/v1/push", &json!({"items": [{"queue": "q", "payload": 2}]}));
        assert_eq!((status, &answer["code"]), (503, &json!("maintenance")), "{answer}");
        assert_eq!(broker.get("/api/v1/system/maintenance").1["maintenanceMode"], true);
    }
    // Pops and acks go on.
    let popped = other.pop("/queue/q?consumerGroup=g&subscriptionMode=all");
    assert_eq!(data(&popped), [json!(1)]);
    assert_eq!(other.ack(&popped[0], "failed")["success"], true);
    assert_eq!(
        other.post("/api/v1/system/maintenance/pop", &json!({"enabled": true})).1["popMaintenanceMode"],
        true
    );
    std::thread::sleep(Duration::from_millis(2_500));
    assert!(broker.pop("/queue/q?consumerGroup=g").is_empty());
    assert!(other.pop("/queue/q?consumerGroup=g").is_empty());
    assert_eq!(broker.post("/api/v1/system/maintenance", &json!({"enabled": false})).0, 200);
    assert_eq!(broker.post("/api/v1/system/maintenance/pop", &json!({"enabled": false})).0, 200);
    broker.push("q", "p", &[json!(2)]);
    assert_eq!(data(&broker.pop("/queue/q?consumerGroup=g&batch=9")), [json!(1), json!(2)]);
    assert_eq!(broker.post("/api/v1/system/maintenance", &json!({})).0, 400);
    assert_eq!(broker.post("/api/v1/system/maintenance", &json!({"enabled": "yes"})).0, 400);
}
