//! The sample plugins, each through the broker, for what it promises. `script/plugins all`
//! builds them; `WASPMQ_TEST_PLUGINS` says where they are.
#![allow(missing_docs)]

mod common;

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use common::{Broker, data};
use serde_json::{Value, json};

const SAMPLES: [&str; 9] = [
    "accept-all",
    "fair-share",
    "json-match",
    "latest-only",
    "not-before",
    "oldest-first",
    "priority",
    "schema-guard",
    "sticky",
];

/// A broker with all samples; compiled ones are kept beside them, for all tests and runs.
fn broker() -> Broker {
    let folder = std::env::var("WASPMQ_TEST_PLUGINS").expect("script/test sets it, after script/plugins all");
    Broker::with(&["--plugins", &folder, "--plugin-cache", &format!("{folder}-cache")])
}

fn bind(broker: &Broker, queue: &str, kind: &str, binding: Value) {
    let (status, answer) =
        broker.post("/api/v1/configure", &json!({"queue": queue, "options": {kind: binding}}));
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn all_samples_load_and_say_what_they_are() {
    let broker = broker();
    let (_, list) = broker.get("/api/v1/plugins");
    for name in SAMPLES {
        let plugin = list["plugins"].as_array().unwrap().iter().find(|plugin| plugin["name"] == name);
        let plugin = plugin.unwrap_or_else(|| panic!("{name} is missing in {list}"));
        assert_eq!((&plugin["status"], &plugin["error"]), (&json!("loaded"), &Value::Null), "{plugin}");
        let selector = ["fair-share", "oldest-first", "priority", "sticky"].contains(&name);
        assert_eq!(plugin["kinds"], json!([if selector { "selector" } else { "filter" }]), "{name}");
    }
}

#[test]
fn every_sample_refuses_settings_that_it_does_not_know() {
    let broker = broker();
    broker.push("q", "p", &[json!(1)]);
    for (name, kind, settings, words) in [
        ("oldest-first", "selector", json!({"a": "b"}), "no settings"),
        ("priority", "selector", json!({"aging-ms": "0"}), "aging-ms must be"),
        ("priority", "selector", json!({"prefixes": "vip"}), "PREFIX:NUMBER"),
        ("fair-share", "selector", json!({"weights": "a=0"}), "from 1 to 1000"),
        ("fair-share", "selector", json!({"separator": "::"}), "one character"),
        ("sticky", "selector", json!({"strict": "maybe"}), "strict"),
        ("json-match", "filter", json!({}), "where is required"),
        ("json-match", "filter", json!({"where": "total is 5"}), "\"is\" is not one of"),
        ("latest-only", "filter", json!({"x": "y"}), "no settings"),
        ("not-before", "filter", json!({"when": "y"}), "field"),
        ("schema-guard", "filter", json!({"schema": "{\"typ\": 1}"}), "$.typ is not understood"),
        ("schema-guard", "filter", json!({"schema": "{"}), "not JSON"),
    ] {
        let path = format!("/api/v1/consumer-groups/g/queues/q/{kind}");
        let (status, answer) = broker.call_put(&path, &json!({"plugin": name, "settings": settings}));
        assert_eq!((status, &answer["code"]), (400, &json!("plugin_refused")), "{name} {settings}: {answer}");
        assert!(answer["error"].as_str().unwrap().contains(words), "{name} {settings}: {answer}");
    }
}

/// One conformance suite for every filter: with settings that let everything through it changes nothing.
#[test]
fn a_filter_that_lets_everything_through_changes_nothing() {
    let broker = broker();
    for (name, settings) in [
        ("accept-all", json!({})),
        ("json-match", json!({"where": "n >= 0"})),
        ("not-before", json!({})),
        ("schema-guard", json!({"schema": "{\"required\": [\"n\"]}"})),
    ] {
        let queue = format!("q-{name}");
        bind(&broker, &queue, "filter", json!({"plugin": name, "settings": settings}));
        let payloads: Vec<Value> = (0..700).map(|n| json!({"n": n, "text": "ünïcödé \u{1F41D}"})).collect();
        broker.push(&queue, "p", &payloads);
        let mut seen = Vec::new();
        while seen.len() < 700 {
            let found = broker.pop(&format!("/queue/{queue}?consumerGroup=g&subscriptionMode=all&batch=300"));
            assert!(!found.is_empty(), "{name}: {}", seen.len());
            assert_eq!(broker.ack(found.last().unwrap(), "completed")["leaseReleased"], true, "{name}");
            seen.extend(data(&found));
        }
        assert_eq!(seen, payloads, "{name}");
    }
}

/// One conformance suite for every selector: whatever it prefers, everything is delivered once.
#[test]
fn whatever_a_selector_prefers_everything_is_delivered_once() {
    let broker = broker();
    for name in ["none", "oldest-first", "priority", "fair-share", "sticky"] {
        let queue = format!("q-{name}");
        for n in 0..120 {
            broker.push(&queue, &format!("t{}:{}", n % 3, n % 20), &[json!(n)]);
        }
        let mut seen = Vec::new();
        while seen.len() < 120 {
            let found = broker.pop(&format!(
                "/queue/{queue}?selector={name}&hint.worker=w1&batch=7&partitions=3&autoAck=true"
            ));
            assert!(!found.is_empty(), "{name}: {}", seen.len());
            seen.extend(found.iter().map(|message| message["data"].as_u64().unwrap()));
        }
        assert!(broker.pop(&format!("/queue/{queue}?selector={name}&hint.worker=w1")).is_empty());
        seen.sort_unstable();
        assert_eq!(seen, (0..120).collect::<Vec<u64>>(), "{name}");
    }
}

#[test]
fn oldest_first_serves_the_longest_wait() {
    let broker = broker();
    for lane in ["a", "b", "c"] {
        broker.push("q", lane, &[json!(lane)]);
        std::thread::sleep(Duration::from_millis(60));
    }
    // A lane that is served and filled again waits anew.
    let pop = || broker.pop("/queue/q?selector=oldest-first&batch=1&autoAck=true")[0]["data"].clone();
    assert_eq!(pop(), "a");
    broker.push("q", "a", &[json!("a again")]);
    assert_eq!([pop(), pop(), pop()], [json!("b"), json!("c"), json!("a again")]);
}

#[test]
fn a_pop_explains_itself() {
    let broker = broker();
    bind(&broker, "q", "filter", json!({"plugin": "json-match", "settings": {"where": "n > 1"}}));
    broker.push("q", "a", &[json!({"n": 1}), json!({"n": 2})]);
    broker.push("q", "b", &[json!({"n": 3})]);
    let (status, answer) = broker.get("/api/v1/pop/queue/q?selector=oldest-first&explain=true");
    assert_eq!(status, 200);
    let told = answer["explain"].as_array().unwrap();
    assert_eq!(
        (&told[0]["selector"], &told[0]["offered"], &told[0]["first"]),
        (&json!("oldest-first"), &json!(2), &json!(["a", "b"]))
    );
    assert_eq!(
        (&told[1]["filter"], &told[1]["delivered"], &told[1]["skipped"]),
        (&json!("json-match"), &json!(1), &json!(1))
    );
    assert_eq!(told[1]["sha256"].as_str().unwrap().len(), 64);
    broker.ack(&answer["messages"][0], "completed");
    assert_eq!(broker.get("/api/v1/pop/queue/q").1.get("explain"), None);
}

#[test]
fn priority_prefers_and_starves_nobody() {
    let broker = broker();
    bind(
        &broker,
        "q",
        "selector",
        json!({"plugin": "priority", "settings": {"prefixes": "vip-:100,slow-:-5", "aging-ms": "20"}}),
    );
    broker.push("q", "slow-1", &[json!("slow")]);
    broker.push("q", "normal", &[json!("normal")]);
    broker.push("q", "vip-1", &[json!("vip")]);
    let pop = || data(&broker.pop("/queue/q?batch=1&autoAck=true"));
    assert_eq!(pop(), [json!("vip")]);
    // There is always something more important; its lead is 105 steps of 20 ms, and no more.
    let started = Instant::now();
    let mut n = 0;
    loop {
        broker.push("q", &format!("vip-{n}"), &[json!("vip")]);
        n += 1;
        if pop() == [json!("slow")] {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(20), "it starves");
    }
    let waited = started.elapsed();
    assert!(waited > Duration::from_millis(1_500), "it came before its time: {waited:?}");
}

#[test]
fn fair_share_shares_by_weight() {
    let broker = broker();
    bind(
        &broker,
        "q",
        "selector",
        json!({"plugin": "fair-share", "settings": {"weights": "gold=3,silver=2"}}),
    );
    // Everybody has more work than is served; `bronze` by far the most.
    for (tenant, lanes) in [("gold", 5), ("silver", 5), ("bronze", 40)] {
        for lane in 0..lanes {
            let payloads: Vec<Value> = (0..2_400 / lanes).map(|_| json!(tenant)).collect();
            broker.push("q", &format!("{tenant}:{lane}"), &payloads);
        }
    }
    let mut served: HashMap<String, u32> = HashMap::new();
    for _ in 0..360 {
        for message in broker.pop("/queue/q?batch=10&autoAck=true") {
            *served.entry(message["data"].as_str().unwrap().to_owned()).or_default() += 1;
        }
    }
    let total: u32 = served.values().sum();
    assert_eq!(total, 3_600);
    for (tenant, share) in [("gold", 3.0 / 6.0), ("silver", 2.0 / 6.0), ("bronze", 1.0 / 6.0)] {
        let got = f64::from(served[tenant]) / f64::from(total);
        assert!((got / share - 1.0).abs() < 0.1, "{tenant} got {got:.3} of {share:.3}: {served:?}");
    }
}

#[test]
fn sticky_keeps_a_lane_with_its_worker_while_it_lives() {
    let broker = broker();
    bind(
        &broker,
        "q",
        "selector",
        json!({"plugin": "sticky", "settings": {"strict": "true", "lifetime-ms": "1500"}}),
    );
    let workers = ["w1", "w2", "w3"];
    let pop = |worker: &str| {
        broker.pop(&format!("/queue/q?hint.worker={worker}&batch=100&partitions=0&autoAck=true"))
    };
    // Everybody is known: a selector is only asked while there is something to choose.
    for worker in workers {
        broker.push("q", "warm-up", &[json!(0)]);
        pop(worker);
    }
    workers.iter().for_each(|worker| drop(pop(worker)));
    let mut owners: HashMap<String, &str> = HashMap::new();
    for round in 0..5 {
        for lane in 0..30 {
            broker.push("q", &format!("lane{lane}"), &[json!(round)]);
        }
        for worker in workers {
            for message in pop(worker) {
                let lane = message["partition"].as_str().unwrap().to_owned();
                let owner = owners.entry(lane.clone()).or_insert(worker);
                assert_eq!(*owner, worker, "round {round}: {lane} changed hands");
            }
        }
    }
    assert_eq!(owners.keys().filter(|lane| lane.starts_with("lane")).count(), 30);
    let used: HashSet<&str> = owners.values().copied().collect();
    assert_eq!(used.len(), 3, "{owners:?}");
    // One goes: its lanes move, nobody else's do.
    for lane in 0..30 {
        broker.push("q", &format!("lane{lane}"), &[json!("after")]);
    }
    let limit = Instant::now() + Duration::from_secs(10);
    let mut after: HashMap<String, &str> = HashMap::new();
    while after.len() < 30 {
        assert!(Instant::now() < limit, "{after:?}");
        for worker in ["w1", "w2"] {
            for message in pop(worker) {
                after.insert(message["partition"].as_str().unwrap().to_owned(), worker);
            }
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    for (lane, worker) in &after {
        assert!(
            owners[lane] == *worker || owners[lane] == "w3",
            "{lane} moved from {} to {worker}",
            owners[lane]
        );
    }
}

#[test]
fn json_match_compares_fields() {
    let broker = broker();
    let order = |total: f64, region: &str| json!({"total": total, "customer": {"region": region}, "tags": ["a", region]});
    let payloads = [
        order(50.0, "eu"),
        order(150.0, "us"),
        order(250.0, "asia"),
        order(350.5, "eu"),
        json!("text"),
        json!(null),
    ];
    broker.push("q", "p", &payloads);
    for (group, condition, expected) in [
        ("g1", "total >= 150", vec![1, 2, 3]),
        ("g2", "customer.region in eu,us; total < 200", vec![0, 1]),
        ("g3", "customer.region = \"asia\"", vec![2]),
        ("g4", "total missing", vec![4, 5]),
        ("g5", "tags contains us", vec![1]),
        ("g6", "tags.1 != eu", vec![1, 2, 4, 5]),
        ("g7", "total == 350.5", vec![3]),
        ("g8", "customer.region ~ si", vec![2]),
    ] {
        let path = format!("/api/v1/consumer-groups/{group}/queues/q/filter");
        let (status, answer) =
            broker.call_put(&path, &json!({"plugin": "json-match", "settings": {"where": condition}}));
        assert_eq!(status, 200, "{answer}");
        let found = broker.pop(&format!("/queue/q?consumerGroup={group}&subscriptionMode=all&autoAck=true"));
        let wanted: Vec<Value> = expected.iter().map(|n: &usize| payloads[*n].clone()).collect();
        assert_eq!(data(&found), wanted, "{condition}");
    }
}

#[test]
fn latest_only_starts_after_the_last_push() {
    let broker = broker();
    bind(&broker, "q", "filter", json!("latest-only"));
    // More than one call of the filter, and more than one claim.
    for block in 0..3 {
        broker.push("q", "state", &(0..400).map(|n| json!(block * 400 + n)).collect::<Vec<_>>());
    }
    broker.push("q", "other", &[json!("a"), json!("b")]);
    let mut found = Vec::new();
    let limit = Instant::now() + Duration::from_secs(10);
    while found.len() < 2 {
        assert!(Instant::now() < limit, "{found:?}");
        found.extend(data(
            &broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all&autoAck=true&batch=100"),
        ));
    }
    found.sort_by_key(Value::is_string);
    assert_eq!(found, [json!(1_199), json!("b")]);
    broker.push("q", "state", &[json!("new")]);
    assert_eq!(data(&broker.pop("/queue/q?consumerGroup=g&wait=true&timeout=5000")), [json!("new")]);
}

#[test]
fn not_before_delivers_in_time() {
    let broker = broker();
    bind(&broker, "q", "filter", json!({"plugin": "not-before", "settings": {"field": "at.time"}}));
    let now_ms =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    let due = Instant::now() + Duration::from_millis(2_000);
    broker.push("q", "numbers", &[json!({"at": {"time": now_ms + 2_000}, "n": 1})]);
    let text = "2020-01-01T00:00:00Z";
    broker.push("q", "texts", &[json!({"at": {"time": text}, "n": 2})]);
    broker.push("q", "none", &[json!({"n": 3})]);
    let mut at_once: Vec<u64> = (0..2)
        .map(|_| broker.pop("/queue/q?batch=1&autoAck=true")[0]["data"]["n"].as_u64().unwrap())
        .collect();
    at_once.sort_unstable();
    assert_eq!(at_once, [2, 3]);
    let later = broker.pop("/queue/q?wait=true&timeout=10000");
    let late = Instant::now().saturating_duration_since(due);
    assert_eq!(later[0]["data"]["n"], 1);
    assert!(Instant::now() >= due && late < Duration::from_secs(1), "{late:?} late");
}

#[test]
fn schema_guard_names_the_failing_path() {
    let broker = broker();
    let schema = json!({"type": "object", "required": ["id"], "properties": {
        "id": {"type": "integer", "minimum": 1},
        "lines": {"type": "array", "items": {"type": "object", "required": ["sku"], "properties": {"sku": {"pattern": "^[A-Z]{3}$"}}}}}});
    bind(&broker, "q", "filter", json!({"plugin": "schema-guard", "settings": {"schema": schema}}));
    let good = json!({"id": 5, "lines": [{"sku": "ABC"}]});
    broker.push(
        "q",
        "p",
        &[
            json!({"lines": []}),
            json!({"id": 0}),
            json!({"id": 1, "lines": [{"sku": "ABC"}, {"sku": "abc"}]}),
            json!([]),
            good.clone(),
        ],
    );
    let found = broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all");
    assert_eq!(data(&found), [good]);
    let (_, dead) = broker.get("/api/v1/dlq?queue=q");
    let mut reasons: Vec<&str> =
        dead["messages"].as_array().unwrap().iter().map(|m| m["errorMessage"].as_str().unwrap()).collect();
    reasons.sort_unstable();
    assert_eq!(
        reasons,
        [
            "$.id: is below 1",
            "$.id: is required",
            "$.lines[1].sku: does not match ^[A-Z]{3}$",
            "$: is not object",
        ]
    );
}
