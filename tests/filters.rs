//! What filters promise: every message ends where its verdict says.
#![allow(missing_docs)]

mod common;

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use common::guests::{BY_LETTER, FilterGuest};
use common::{Broker, data};
use serde_json::{Value, json};

/// A folder with the filter that judges by the payload's first letter, as `letters`.
fn letters() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let guest = FilterGuest { filter: BY_LETTER, ..FilterGuest::default() };
    std::fs::write(folder.path().join("letters.wat"), guest.text()).unwrap();
    folder
}

fn options(folder: &tempfile::TempDir) -> [&str; 2] {
    ["--plugins", folder.path().to_str().unwrap()]
}

fn start() -> (Broker, tempfile::TempDir) {
    let folder = letters();
    let cache = folder.path().join("cache");
    let broker =
        Broker::with(&[&options(&folder)[..], &["--plugin-cache", cache.to_str().unwrap()]].concat());
    (broker, folder)
}

fn texts(messages: &[Value]) -> Vec<&str> {
    messages.iter().map(|message| message["data"].as_str().unwrap()).collect()
}

fn push(broker: &Broker, queue: &str, payloads: &[&str]) {
    broker.push(queue, "p", &payloads.iter().map(|text| json!(text)).collect::<Vec<_>>());
}

fn cursor(broker: &Broker, group: &str) -> i64 {
    let sql = "SELECT committed FROM consumer_cursor WHERE group_name = $1";
    broker.client().query_one(sql, &[&group]).unwrap().get(0)
}

#[test]
fn skipped_messages_are_passed_over_and_the_lease_covers_the_rest() {
    let (broker, _folder) = start();
    push(&broker, "q", &["s0", "s1", "d2", "s3", "d4", "s5"]);
    let first = broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all&filter=letters");
    assert_eq!(texts(&first), ["d2", "d4"]);
    assert_eq!(cursor(&broker, "g"), 1, "the leading ones are finished");
    // The ack of the later one finishes what was skipped in between; the lease is over with it.
    let answer = broker.ack(&first[1], "completed");
    assert_eq!((&answer["success"], &answer["leaseReleased"]), (&json!(true), &json!(true)), "{answer}");
    assert_eq!(cursor(&broker, "g"), 4);
    assert!(broker.pop("/queue/q?consumerGroup=g").is_empty());
    assert_eq!(cursor(&broker, "g"), 5, "the trailing one was judged again, and passed over");
    // Another group sees everything.
    assert_eq!(broker.pop("/queue/q?consumerGroup=all&subscriptionMode=all").len(), 6);
}

#[test]
fn a_nack_and_an_expiry_bring_the_same_messages_again() {
    let (broker, _folder) = start();
    push(&broker, "q", &["s0", "d1", "s2", "d3"]);
    let first = broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all&filter=letters&leaseSeconds=1");
    assert_eq!(broker.ack(&first[1], "failed")["success"], true);
    // All below the failed one is not finished by it.
    let again = broker.pop("/queue/q?consumerGroup=g&leaseSeconds=1");
    assert_eq!(texts(&again), ["d1", "d3"]);
    assert_eq!(again[0]["deliveryAttempt"], 2);
    std::thread::sleep(Duration::from_millis(1_200));
    let third = broker.pop("/queue/q?consumerGroup=g&wait=true&timeout=5000");
    assert_eq!((texts(&third), &third[0]["deliveryAttempt"]), (vec!["d1", "d3"], &json!(3)));
    assert_eq!(broker.ack(&third[0], "completed")["leaseReleased"], false);
    assert_eq!(broker.ack(&third[1], "completed")["leaseReleased"], true);
}

#[test]
fn a_dead_letter_waits_until_it_is_the_head_and_is_stored_once() {
    let (broker, _folder) = start();
    push(&broker, "q", &["x0", "d1", "x2", "d3"]);
    let first = broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all&filter=letters");
    assert_eq!(texts(&first), ["d1"]);
    let dead = || broker.get("/api/v1/dlq?queue=q").1;
    assert_eq!(dead()["total"], 1, "the one behind the delivered message is not dead yet");
    assert_eq!(broker.ack(&first[0], "retry")["success"], true);
    let again = broker.pop("/queue/q?consumerGroup=g");
    assert_eq!(texts(&again), ["d1"]);
    broker.ack(&again[0], "completed");
    let last = broker.pop("/queue/q?consumerGroup=g");
    assert_eq!(texts(&last), ["d3"]);
    let dead = dead();
    assert_eq!(dead["total"], 2);
    let stored: Vec<(&Value, &Value)> =
        dead["messages"].as_array().unwrap().iter().map(|m| (&m["data"], &m["errorMessage"])).collect();
    assert_eq!(stored, [(&json!("x2"), &json!("rule")), (&json!("x0"), &json!("rule"))]);
}

#[test]
fn a_held_message_comes_in_its_time_and_nothing_overtakes_it() {
    let (broker, _folder) = start();
    push(&broker, "q", &["d0", "h1", "d2"]);
    let pushed = Instant::now();
    let first = broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all&filter=letters&autoAck=true");
    assert_eq!(texts(&first), ["d0"]);
    assert!(broker.pop("/queue/q?consumerGroup=g").is_empty());
    let rest = broker.pop("/queue/q?consumerGroup=g&wait=true&timeout=10000");
    assert_eq!(texts(&rest), ["h1", "d2"]);
    let waited = pushed.elapsed();
    assert!(waited > Duration::from_millis(250) && waited < Duration::from_secs(3), "{waited:?}");
}

#[test]
fn auto_ack_commits_everything_that_was_judged() {
    let (broker, _folder) = start();
    push(&broker, "q", &["s0", "d1", "x2", "d3", "s4"]);
    let found = broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all&filter=letters&autoAck=true");
    assert_eq!(texts(&found), ["d1", "d3"]);
    assert_eq!((&found[0]["leaseId"], cursor(&broker, "g")), (&json!(""), 4));
    assert_eq!(broker.get("/api/v1/dlq?queue=q").1["total"], 1);
    // A batch that is full leaves the rest alone.
    push(&broker, "q", &["s5", "d6", "s7", "d8"]);
    let found = broker.pop("/queue/q?consumerGroup=g&autoAck=true&batch=1");
    assert_eq!((texts(&found), cursor(&broker, "g")), (vec!["d6"], 6));
    assert_eq!(texts(&broker.pop("/queue/q?consumerGroup=g&autoAck=true")), ["d8"]);
}

#[test]
fn a_filter_that_matches_little_finds_it_and_the_lag_falls() {
    let (broker, _folder) = start();
    for block in 0..20 {
        let payloads: Vec<Value> =
            (0..1_000).map(|n| json!(if n == 500 && block % 10 == 9 { "d" } else { "s" })).collect();
        broker.push("q", &format!("p{}", block % 4), &payloads);
    }
    let found = broker.pop(
        "/queue/q?consumerGroup=g&subscriptionMode=all&filter=letters&wait=true&timeout=30000&autoAck=true",
    );
    assert_eq!(found.len(), 1);
    let more = broker.pop("/queue/q?consumerGroup=g&wait=true&timeout=30000&autoAck=true");
    assert_eq!(more.len(), 1);
    assert!(broker.pop("/queue/q?consumerGroup=g").is_empty());
    let sql = "SELECT sum(p.next_offset - 1 - k.committed)::bigint FROM partition p
               JOIN consumer_cursor k ON k.partition_id = p.id AND k.group_name = 'g'";
    assert_eq!(broker.client().query_one(sql, &[]).unwrap().get::<_, i64>(0), 0);
}

#[test]
fn bindings_are_stored_shown_followed_and_taken_away() {
    let (broker, folder) = start();
    let second = Broker::on(&broker.database, &options(&folder));
    push(&broker, "q", &["s0", "d1"]);
    let (status, answer) = broker.post(
        "/api/v1/configure",
        &json!({"queue": "q", "options": {"filter": {"plugin": "letters", "settings": {"a": "b"}}}}),
    );
    assert_eq!(status, 200);
    let expected = json!({"plugin": "letters", "settings": {"a": "b"}, "onError": "block"});
    assert_eq!(answer["options"]["filter"], expected);
    assert_eq!(broker.get("/api/v1/resources/queues/q").1["options"]["filter"], expected);
    let path = "/api/v1/consumer-groups/g/queues/q/filter";
    assert_eq!(broker.get(path).1["source"], "queue");
    let limit = Instant::now() + Duration::from_secs(5);
    let mut n = 0;
    loop {
        n += 1;
        // A new group each time: what was delivered once is not delivered again.
        let found = second.pop(&format!("/queue/q?consumerGroup=other{n}&subscriptionMode=all"));
        if texts(&found) == ["d1"] {
            break;
        }
        assert!(Instant::now() < limit, "the other broker does not follow");
        std::thread::sleep(Duration::from_millis(100));
    }
    // A group's own goes before the queue's.
    let (status, _) =
        broker.call_put(path, &json!({"plugin": "letters", "settings": {}, "onError": "deliver"}));
    assert_eq!(status, 200);
    let (_, shown) = second.get(path);
    assert_eq!((&shown["source"], &shown["filter"]["onError"]), (&json!("group"), &json!("deliver")));
    let (_, list) = broker.get("/api/v1/plugins");
    assert_eq!(list["plugins"][0]["bindings"].as_array().unwrap().len(), 2, "{list}");
    assert_eq!(broker.call("DELETE", path, None).1["deleted"], true);
    assert_eq!(broker.call("DELETE", path, None).1["deleted"], false);
    let (_, answer) = broker.post("/api/v1/configure", &json!({"queue": "q", "options": {"filter": null}}));
    assert_eq!(answer["options"]["filter"], Value::Null);
    assert_eq!(broker.get(path).1["filter"], Value::Null);
    for (path, body, expected) in [
        (path, json!({"plugin": "nope"}), 400),
        ("/api/v1/consumer-groups/g/queues/nope/filter", json!({"plugin": "letters"}), 404),
        ("/api/v1/consumer-groups/g/queues/q/selector", json!({"plugin": "letters"}), 400),
        (path, json!(null), 400),
        (path, json!({"plugin": "letters", "onError": "panic"}), 400),
    ] {
        let (status, answer) = broker.call_put(path, &body);
        assert_eq!(status, expected, "{path} {body}: {answer}");
    }
}

#[test]
fn a_group_has_one_filter() {
    let (broker, _folder) = start();
    push(&broker, "q", &["s0", "d1"]);
    let pop = |query: &str| broker.get(&format!("/api/v1/pop/queue/q?{query}"));
    assert_eq!(pop("consumerGroup=g&subscriptionMode=all&filter=letters&filter.a=1").0, 200);
    let (status, answer) = pop("consumerGroup=g&filter=letters&filter.a=2");
    assert_eq!((status, &answer["code"]), (409, &json!("filter_conflict")), "{answer}");
    assert_eq!(pop("consumerGroup=g&filter=letters&filter.a=1").0, 204);
    // Known before, without a filter.
    assert_eq!(pop("consumerGroup=h&subscriptionMode=all").0, 200);
    assert_eq!(pop("consumerGroup=h&filter=letters").0, 409);
    // A targeted pop may be the first as well.
    let (status, answer) =
        broker.get("/api/v1/pop/queue/q/partition/p?consumerGroup=t&subscriptionMode=all&filter=letters");
    assert_eq!((status, &answer["messages"][0]["data"]), (200, &json!("d1")));
    assert_eq!(broker.get("/api/v1/pop?namespace=q&filter=letters").0, 400);
}

#[test]
fn a_bound_filter_that_is_gone_blocks_and_one_that_may_fail_does_not() {
    let (broker, folder) = start();
    push(&broker, "q", &["s0", "d1"]);
    for (group, on_error) in [("strict", "block"), ("lax", "deliver")] {
        let path = format!("/api/v1/consumer-groups/{group}/queues/q/filter");
        assert_eq!(broker.call_put(&path, &json!({"plugin": "letters", "onError": on_error})).0, 200);
    }
    std::fs::remove_file(folder.path().join("letters.wat")).unwrap();
    assert_eq!(broker.post("/api/v1/plugins/reload", &json!({})).1["plugins"], json!([]));
    let (status, answer) = broker.get("/api/v1/pop/queue/q?consumerGroup=strict&subscriptionMode=all");
    assert_eq!((status, &answer["code"]), (503, &json!("plugin_unavailable")), "{answer}");
    assert_eq!(data(&broker.pop("/queue/q?consumerGroup=lax&subscriptionMode=all")).len(), 2);
}

/// A small generator: the same storms every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Random verdicts, batches, acks, nacks, expiries and restarts, against what the verdicts say.
#[test]
fn whatever_happens_every_message_ends_where_its_verdict_says() {
    let (mut broker, folder) = start();
    const LANES: usize = 3;
    const MESSAGES: usize = 60;
    for seed in 1..=6u64 {
        let mut dice = Dice(seed * 7_919);
        let queue = format!("q{seed}");
        let mut lanes: Vec<Vec<String>> = Vec::new();
        for lane in 0..LANES {
            let payloads: Vec<String> = (0..MESSAGES)
                .map(|n| format!("{}{n}", ["d", "d", "d", "s", "s", "x", "h"][dice.below(7) as usize]))
                .collect();
            for chunk in payloads.chunks(1 + dice.below(20) as usize) {
                let values: Vec<Value> = chunk.iter().map(|text| json!(text)).collect();
                broker.push(&queue, &format!("p{lane}"), &values);
            }
            lanes.push(payloads);
        }
        // Per lane: what was acked, in order.
        let mut acked: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        let mut budget: HashMap<String, u32> = HashMap::new();
        let limit = Instant::now() + Duration::from_secs(60);
        let expected = |kind: &[char]| -> BTreeMap<usize, Vec<String>> {
            lanes
                .iter()
                .enumerate()
                .map(|(n, lane)| {
                    (n, lane.iter().filter(|t| kind.contains(&t.chars().next().unwrap())).cloned().collect())
                })
                .collect()
        };
        let delivered = expected(&['d', 'h']);
        while (0..LANES).any(|lane| acked.get(&lane).map_or(0, Vec::len) < delivered[&lane].len()) {
            assert!(Instant::now() < limit, "seed {seed}: {acked:?}");
            if dice.below(60) == 0 {
                broker.kill();
                broker = Broker::on(&broker.database, &options(&folder)).owning(broker);
            }
            let (batch, partitions, auto) = (1 + dice.below(25), 1 + dice.below(3), dice.below(5) == 0);
            let found = broker.pop(&format!(
                "/queue/{queue}?consumerGroup=g&subscriptionMode=all&filter=letters&batch={batch}&partitions={partitions}&autoAck={auto}&leaseSeconds=1&wait=true&timeout=300"
            ));
            assert!(found.len() <= batch as usize);
            for span in found.chunk_by(|a, b| a["partition"] == b["partition"]) {
                let lane: usize = span[0]["partition"].as_str().unwrap()[1..].parse().unwrap();
                let done = acked.entry(lane).or_default();
                let due: Vec<&str> =
                    delivered[&lane].iter().skip(done.len()).take(span.len()).map(String::as_str).collect();
                assert_eq!(texts(span), due, "seed {seed}, lane {lane}: not what comes next");
                if auto {
                    done.extend(texts(span).into_iter().map(str::to_owned));
                    continue;
                }
                match dice.below(5) {
                    // It crashed: the lease runs out.
                    0 => {}
                    1 => {
                        // A message fails, but not so often that it goes to the dead letters.
                        let at = dice.below(span.len() as u64) as usize;
                        let charged = budget.entry(format!("{lane}{}", span[at]["data"])).or_default();
                        let status = if *charged < 2 { "failed" } else { "retry" };
                        *charged += 1;
                        if at > 0 {
                            assert_eq!(broker.ack(&span[at - 1], "completed")["success"], true);
                        }
                        assert_eq!(broker.ack(&span[at], status)["success"], true);
                        done.extend(texts(&span[..at]).into_iter().map(str::to_owned));
                    }
                    2 => {
                        let at = dice.below(span.len() as u64) as usize;
                        assert_eq!(broker.ack(&span[at], "completed")["success"], true);
                        done.extend(texts(&span[..=at]).into_iter().map(str::to_owned));
                    }
                    _ => {
                        assert_eq!(broker.ack(span.last().unwrap(), "completed")["success"], true);
                        done.extend(texts(span).into_iter().map(str::to_owned));
                    }
                }
            }
        }
        // What is left at the ends of the lanes is passed over or dead-lettered.
        assert!(
            broker
                .pop(&format!("/queue/{queue}?consumerGroup=g&wait=true&timeout=1500&partitions=3"))
                .is_empty()
        );
        assert_eq!(acked, delivered, "seed {seed}");
        let (_, dead) = broker.get(&format!("/api/v1/dlq?queue={queue}&limit=1000"));
        let mut by_lane: BTreeMap<usize, Vec<String>> = (0..LANES).map(|n| (n, Vec::new())).collect();
        for letter in dead["messages"].as_array().unwrap() {
            let lane: usize = letter["partition"].as_str().unwrap()[1..].parse().unwrap();
            by_lane.get_mut(&lane).unwrap().push(letter["data"].as_str().unwrap().to_owned());
        }
        for lane in by_lane.values_mut() {
            lane.sort_by_key(|text| text[1..].parse::<u32>().unwrap());
        }
        assert_eq!(by_lane, expected(&['x']), "seed {seed}");
        let sql = "SELECT sum(p.next_offset - 1 - k.committed)::bigint FROM partition p JOIN queue q ON q.id = p.queue_id
                   JOIN consumer_cursor k ON k.partition_id = p.id AND k.group_name = 'g' WHERE q.name = $1";
        let lag: i64 = broker.client().query_one(sql, &[&queue]).unwrap().get(0);
        assert_eq!(lag, 0, "seed {seed}");
    }
}
