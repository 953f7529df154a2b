//! Many producers and consumers against a ledger: what is answered as stored is
//! acked, in lane order, and never held by two.
//!
//! `WASPMQ_LEDGER_SECONDS` (default 15): how long producers push.
#![allow(missing_docs)]

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use common::Broker;
use serde_json::{Value, json};

const LANES: usize = 1_000;
const PRODUCERS: usize = 64;
const CONSUMERS: usize = 64;

#[derive(Default, Clone)]
struct Lane {
    /// Messages answered as stored.
    stored: u64,
    /// Messages below this are acked, as far as the answers say.
    acked: u64,
    /// Highest delivered, plus one.
    delivered: u64,
    /// The lease that holds it, as far as its consumer knows.
    held: Option<String>,
}

struct Ledger {
    url: RwLock<String>,
    lanes: Vec<Mutex<Lane>>,
    faults: Mutex<Vec<String>>,
    /// The broker is killed now and then: answers get lost, leases expire.
    unruly: bool,
    over: AtomicBool,
    acked: AtomicU64,
}

impl Ledger {
    fn fault(&self, text: String) {
        self.faults.lock().unwrap().push(text);
    }

    fn agent() -> ureq::Agent {
        ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(Duration::from_secs(20)))
            .build()
            .into()
    }

    /// A call that may get lost.
    fn post(&self, agent: &ureq::Agent, path: &str, body: &Value) -> Option<(u16, Value)> {
        let url = format!("{}{path}", self.url.read().unwrap());
        let mut answer = agent.post(&url).send(body.to_string()).ok()?;
        let text = answer.body_mut().with_config().limit(1 << 30).read_to_string().ok()?;
        Some((answer.status().as_u16(), serde_json::from_str(&text).ok()?))
    }

    fn produce(&self, producer: usize, until: Instant) {
        let agent = Self::agent();
        let mine: Vec<usize> = (0..LANES).filter(|lane| lane % PRODUCERS == producer).collect();
        let mut next: HashMap<usize, u64> = HashMap::new();
        let mut turn = producer;
        while Instant::now() < until {
            turn += 1;
            let lanes: Vec<usize> = (0..3).map(|k| mine[(turn * 7 + k) % mine.len()]).collect();
            let mut items = Vec::new();
            for lane in &lanes {
                let n = next.entry(*lane).or_default();
                for k in 0..3 {
                    items.push(json!({"queue": "q", "partition": format!("p{lane}"), "payload": {"l": lane, "n": *n + k},
                        "transactionId": format!("{lane}-{}", *n + k)}));
                }
                *n += 3;
            }
            // Repeated until it is answered: a repeat of what was stored is a duplicate.
            loop {
                match self.post(&agent, "/api/v1/push", &json!({"items": items})) {
                    Some((201, answer)) => {
                        let all = answer.as_array().unwrap();
                        let clean = |e: &Value| {
                            e["status"] == "queued" || (self.unruly && e["status"] == "duplicate")
                        };
                        if !all.iter().all(clean) {
                            self.fault(format!("a push was answered {answer}"));
                        }
                        break;
                    }
                    other if !self.unruly => return self.fault(format!("a push was answered {other:?}")),
                    _ => std::thread::sleep(Duration::from_millis(50)),
                }
            }
            for lane in lanes {
                let mut entry = self.lanes[lane].lock().unwrap();
                entry.stored = entry.stored.max(next[&lane]);
            }
        }
    }

    fn consume(&self, lease_seconds: u32) {
        let agent = Self::agent();
        while !self.over.load(Ordering::Relaxed) {
            let url = format!(
                "{}/api/v1/pop/queue/q?consumerGroup=g&batch=40&partitions=4&wait=true&timeout=1000&subscriptionMode=all&leaseSeconds={lease_seconds}",
                self.url.read().unwrap()
            );
            let Ok(mut answer) = agent.get(&url).call() else {
                if !self.unruly {
                    self.fault("a pop was not answered".to_owned());
                }
                std::thread::sleep(Duration::from_millis(50));
                continue;
            };
            match answer.status().as_u16() {
                204 => continue,
                200 => {}
                other => {
                    if !self.unruly {
                        self.fault(format!("a pop was answered {other}"));
                    }
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
            }
            let Ok(text) = answer.body_mut().with_config().limit(1 << 30).read_to_string() else { continue };
            let answer: Value = serde_json::from_str(&text).unwrap();
            self.handle(&agent, &answer);
        }
    }

    fn handle(&self, agent: &ureq::Agent, answer: &Value) {
        let lease = answer["leaseId"].as_str().unwrap().to_owned();
        let mut spans: Vec<(usize, u64, u64)> = Vec::new();
        for message in answer["messages"].as_array().unwrap() {
            let (lane, n) =
                (message["data"]["l"].as_u64().unwrap() as usize, message["data"]["n"].as_u64().unwrap());
            match spans.last_mut() {
                Some((l, _, end)) if *l == lane => {
                    if n != *end {
                        self.fault(format!("lane {lane}: {n} after {}", *end - 1));
                    }
                    *end = n + 1;
                }
                _ => spans.push((lane, n, n + 1)),
            }
        }
        for (lane, first, end) in &spans {
            let mut entry = self.lanes[*lane].lock().unwrap();
            if !self.unruly {
                if let Some(holder) = &entry.held {
                    self.fault(format!("lane {lane}: given to {lease} while {holder} holds it"));
                }
                if *first != entry.acked {
                    self.fault(format!("lane {lane}: starts at {first}, acked are {}", entry.acked));
                }
            }
            if *first < entry.acked || *first > entry.delivered {
                self.fault(format!(
                    "lane {lane}: starts at {first}, acked {}, delivered {}",
                    entry.acked, entry.delivered
                ));
            }
            entry.delivered = entry.delivered.max(*end);
            entry.held = Some(lease.clone());
        }
        // The work: time for a second consumer to be given the same, if the broker did so.
        if !self.unruly {
            std::thread::sleep(Duration::from_millis(spans[0].1 % 5));
        }
        // Let go before the ack is sent: its answer comes after the next claim may.
        for (lane, _, end) in &spans {
            let mut entry = self.lanes[*lane].lock().unwrap();
            entry.held = None;
            if !self.unruly {
                entry.acked = *end;
            }
        }
        let acks: Vec<Value> = answer["messages"].as_array().unwrap().iter()
            .map(|m| json!({"transactionId": m["transactionId"], "partitionId": m["partitionId"], "leaseId": lease, "status": "completed"}))
            .collect();
        let body = json!({"consumerGroup": "g", "acknowledgments": acks});
        match self.post(agent, "/api/v1/ack/batch", &body) {
            Some((200, answer)) => {
                let good = answer.as_array().unwrap().iter().filter(|a| a["success"] == true).count();
                if good == acks.len() {
                    self.acked.fetch_add(good as u64, Ordering::Relaxed);
                    for (lane, _, end) in &spans {
                        let mut entry = self.lanes[*lane].lock().unwrap();
                        entry.acked = entry.acked.max(*end);
                    }
                } else if !self.unruly {
                    self.fault(format!("an ack was answered {answer}"));
                }
            }
            other if !self.unruly => self.fault(format!("an ack was answered {other:?}")),
            _ => {}
        }
    }
}

fn storm(kill_every: Option<Duration>) {
    let seconds = std::env::var("WASPMQ_LEDGER_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(15);
    let mut broker = Broker::start();
    let ledger = Arc::new(Ledger {
        url: RwLock::new(broker.url.clone()),
        lanes: (0..LANES).map(|_| Mutex::default()).collect(),
        faults: Mutex::default(),
        unruly: kill_every.is_some(),
        over: AtomicBool::new(false),
        acked: AtomicU64::new(0),
    });
    let until = Instant::now() + Duration::from_secs(seconds);
    let lease = if kill_every.is_some() { 3 } else { 60 };
    let producers: Vec<_> = (0..PRODUCERS)
        .map(|n| {
            let ledger = ledger.clone();
            std::thread::spawn(move || ledger.produce(n, until))
        })
        .collect();
    let consumers: Vec<_> = (0..CONSUMERS)
        .map(|_| {
            let ledger = ledger.clone();
            std::thread::spawn(move || ledger.consume(lease))
        })
        .collect();
    if let Some(every) = kill_every {
        while Instant::now() + every < until {
            std::thread::sleep(every);
            broker.kill();
            let again = Broker::on(&broker.database, &[]);
            *ledger.url.write().unwrap() = again.url.clone();
            broker = again.owning(broker);
        }
    }
    producers.into_iter().for_each(|thread| thread.join().unwrap());
    let limit = Instant::now() + Duration::from_secs(60);
    let left = || -> u64 {
        ledger
            .lanes
            .iter()
            .map(|lane| lane.lock().unwrap().clone())
            .map(|lane| lane.stored.saturating_sub(lane.acked))
            .sum()
    };
    let pending = |client: &mut postgres::Client| -> i64 {
        let sql = "SELECT coalesce(sum(p.next_offset - 1 - coalesce(k.committed, -1)), 0)::bigint
                   FROM partition p LEFT JOIN consumer_cursor k ON k.partition_id = p.id AND k.group_name = 'g'";
        client.query_one(sql, &[]).unwrap().get(0)
    };
    let mut client = broker.client();
    while (pending(&mut client) > 0 || (!ledger.unruly && left() > 0)) && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(200));
    }
    ledger.over.store(true, Ordering::Relaxed);
    consumers.into_iter().for_each(|thread| thread.join().unwrap());
    let faults = ledger.faults.lock().unwrap();
    assert!(faults.is_empty(), "{} faults, the first: {:#?}", faults.len(), &faults[..faults.len().min(5)]);
    assert_eq!(pending(&mut client), 0, "messages were never consumed");
    let stored: u64 = ledger.lanes.iter().map(|lane| lane.lock().unwrap().stored).sum();
    let rows = client.query_one("SELECT sum(next_offset)::bigint FROM partition", &[]).unwrap();
    let in_database = rows.get::<_, i64>(0) as u64;
    assert!(in_database >= stored, "{stored} were answered as stored, {in_database} are there");
    for (n, lane) in ledger.lanes.iter().enumerate() {
        let lane = lane.lock().unwrap();
        assert!(
            lane.delivered >= lane.stored,
            "lane {n}: {} stored, {} delivered",
            lane.stored,
            lane.delivered
        );
    }
    if !ledger.unruly {
        assert_eq!((stored, ledger.acked.load(Ordering::Relaxed)), (in_database, in_database));
    }
    assert!(stored > 1_000, "only {stored} messages in {seconds} s");
    eprintln!("{stored} messages stored and consumed in {seconds} s of pushing");
}

#[test]
fn heavy_every_stored_message_is_acked_once_and_in_order() {
    storm(None);
}

#[test]
fn heavy_nothing_is_lost_when_the_broker_is_killed_every_five_seconds() {
    storm(Some(Duration::from_secs(5)));
}
