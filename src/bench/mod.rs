//! `waspmq bench`: load over HTTP, with every guarantee checked while it runs.
//!
//! Closed loop by default: each connection sends its next request when the last is
//! answered. With `--rate` open loop: requests have a time at which they are due,
//! and their latency counts from then, whether or not the client was late
//! (no coordinated omission).

mod client;
mod ledger;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hdrhistogram::Histogram;
use serde::Deserialize;
use serde_json::{Value, json};

use client::Client;
use ledger::Ledger;

/// What to run.
#[derive(clap::Args, Debug, Clone)]
pub struct BenchOptions {
    /// The broker
    #[arg(long, default_value = "http://127.0.0.1:6632")]
    pub url: String,
    /// Connections that push
    #[arg(long, default_value_t = 8)]
    pub producers: usize,
    /// Connections that pop and ack
    #[arg(long, default_value_t = 8)]
    pub consumers: usize,
    /// Messages of one push, all to one partition
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub batch: u64,
    /// Spread the messages of a push over so many partitions
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub spread: u64,
    /// Most messages of one pop [default: --batch]
    #[arg(long)]
    pub pop_batch: Option<u64>,
    /// Most partitions of one pop
    #[arg(long, default_value_t = 1)]
    pub pop_partitions: u64,
    /// Bytes of one payload, a JSON object
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    pub payload: u64,
    /// Partitions
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub partitions: u64,
    /// Seconds of load
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Messages per second of all producers together; 0: as fast as they are answered
    #[arg(long, default_value_t = 0)]
    pub rate: u64,
    /// Messages pushed before the measurement begins
    #[arg(long, default_value_t = 0)]
    pub prefill: u64,
    /// Queue; it should not exist yet [default: bench- and the time]
    #[arg(long)]
    pub queue: Option<String>,
    /// Consumer group
    #[arg(long, default_value = "bench")]
    pub group: String,
    /// Commit at delivery, without leases and acks
    #[arg(long)]
    pub auto_ack: bool,
    /// Further parameters of the pops, as in a query string
    #[arg(long, default_value = "")]
    pub pop_query: String,
    /// Write the result as JSON to this file
    #[arg(long)]
    pub json: Option<std::path::PathBuf>,
    /// Leave the queue there at the end
    #[arg(long)]
    pub keep: bool,
}

#[derive(Deserialize)]
struct Popped<'a> {
    #[serde(rename = "leaseId", borrow)]
    lease: &'a str,
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(rename = "transactionId", borrow)]
    transaction_id: &'a str,
    #[serde(rename = "partitionId", borrow)]
    partition_id: &'a str,
    data: Payload,
}

/// What a payload tells; the rest of it is there to be carried.
#[derive(Deserialize)]
struct Payload {
    stream: usize,
    n: u64,
    due_us: u64,
}

/// What is shared by all connections of a run.
struct Run {
    options: BenchOptions,
    address: String,
    queue: String,
    ledger: Ledger,
    filler: String,
    /// Counted from here on.
    measured_from: Instant,
    until: Instant,
    drained: AtomicBool,
    sent: AtomicU64,
    received: AtomicU64,
    errors: AtomicU64,
}

/// What one connection measured.
struct Measured {
    calls: Histogram<u64>,
    end_to_end: Histogram<u64>,
    messages: u64,
    empty: u64,
}

impl Measured {
    fn new() -> Self {
        // Microseconds, to three digits.
        let histogram = || Histogram::new(3).expect("three digits are few enough");
        Self { calls: histogram(), end_to_end: histogram(), messages: 0, empty: 0 }
    }

    fn add(&mut self, other: &Self) {
        self.calls += &other.calls;
        self.end_to_end += &other.end_to_end;
        self.messages += other.messages;
        self.empty += other.empty;
    }
}

fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_micros() as u64)
}

impl Run {
    fn streams_of(&self, producer: usize) -> Vec<usize> {
        let streams = (self.options.partitions as usize).max(self.options.producers);
        (producer..streams).step_by(self.options.producers.max(1)).collect()
    }

    /// Pushes until the time is over, or so many messages.
    fn produce(&self, producer: usize, limit: u64, mut next: Vec<u64>) -> (Measured, Vec<u64>) {
        let o = &self.options;
        let streams = self.streams_of(producer);
        if next.is_empty() {
            next = vec![0; streams.len()];
        }
        let mut client = Client::new(&self.address);
        let mut measured = Measured::new();
        let mut body = Vec::new();
        let (mut turn, mut pushed) = (0, 0);
        let started = Instant::now();
        let interval = (o.rate > 0)
            .then(|| Duration::from_secs_f64(o.batch as f64 * o.producers as f64 / o.rate as f64));
        let offset = interval.map_or(Duration::ZERO, |i| i.mul_f64(producer as f64 / o.producers as f64));
        let mut k = 0u32;
        while pushed < limit && (limit < u64::MAX || Instant::now() < self.until) {
            let mut due = Instant::now();
            if let (Some(interval), u64::MAX) = (interval, limit) {
                due = started + offset + interval * k;
                k += 1;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            let late = Instant::now().saturating_duration_since(due).as_micros() as u64;
            let due_us = now_us() - late;
            body.clear();
            body.extend_from_slice(b"{\"items\":[");
            let mut touched = Vec::new();
            for m in 0..o.batch {
                let at = (turn + (m % o.spread) as usize) % streams.len();
                let (stream, n) = (streams[at], next[at]);
                next[at] += 1;
                touched.push(at);
                if m > 0 {
                    body.push(b',');
                }
                use std::io::Write;
                let _ = write!(
                    body,
                    r#"{{"queue":"{}","partition":"p{}","transactionId":"{stream}-{n}","payload":{{"stream":{stream},"n":{n},"due_us":{due_us},{}}}}}"#,
                    self.queue,
                    stream as u64 % o.partitions,
                    self.filler
                );
            }
            turn = (turn + o.spread as usize) % streams.len();
            body.extend_from_slice(b"]}");
            // The same again until it is stored: a repeat of what was stored is a duplicate.
            loop {
                match client.call("POST", "/api/v1/push", &body) {
                    Ok((201, _)) => break,
                    Ok((status, text)) if status < 500 => {
                        let text = String::from_utf8_lossy(&text).into_owned();
                        self.ledger.fault_of_broker(format!("a push was answered {status}: {text}"));
                        return (measured, next);
                    }
                    _ => {
                        self.errors.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(100));
                    }
                }
            }
            pushed += o.batch;
            self.sent.fetch_add(o.batch, Ordering::Relaxed);
            for at in touched {
                self.ledger.stored(streams[at], next[at]);
            }
            if due >= self.measured_from {
                let _ = measured.calls.record(due.elapsed().as_micros() as u64);
                measured.messages += o.batch;
            }
        }
        (measured, next)
    }

    fn consume(&self) -> Measured {
        let o = &self.options;
        let mut client = Client::new(&self.address);
        let mut measured = Measured::new();
        let more = if o.pop_query.is_empty() { String::new() } else { format!("&{}", o.pop_query) };
        let target = format!(
            "/api/v1/pop/queue/{}?consumerGroup={}&batch={}&partitions={}&subscriptionMode=all&wait=true&timeout=500&autoAck={}{more}",
            self.queue,
            o.group,
            o.pop_batch.unwrap_or(o.batch),
            o.pop_partitions,
            o.auto_ack
        );
        while !self.drained.load(Ordering::Relaxed) {
            let started = Instant::now();
            let (status, body) = match client.call("GET", &target, b"") {
                Ok(answer) => answer,
                Err(_) => {
                    self.failed();
                    continue;
                }
            };
            match status {
                200 => {}
                204 => {
                    measured.empty += 1;
                    continue;
                }
                400..=499 => {
                    self.ledger.fault_of_broker(format!(
                        "a pop was answered {status}: {}",
                        String::from_utf8_lossy(&body)
                    ));
                    return measured;
                }
                _ => {
                    self.failed();
                    continue;
                }
            }
            let arrived_us = now_us();
            let popped: Popped<'_> = match serde_json::from_slice(&body) {
                Ok(popped) => popped,
                Err(error) => {
                    self.ledger.fault_of_broker(format!("a pop's answer cannot be read: {error}"));
                    return measured;
                }
            };
            let counts = started >= self.measured_from && started < self.until;
            for message in &popped.messages {
                if counts && message.data.due_us > 0 {
                    let _ = measured.end_to_end.record(arrived_us.saturating_sub(message.data.due_us));
                }
            }
            let held = self.check(&popped.messages);
            for stream in held {
                self.ledger.let_go(stream);
            }
            if !o.auto_ack && !self.ack(&mut client, &popped) {
                self.failed();
                continue;
            }
            self.received.fetch_add(popped.messages.len() as u64, Ordering::Relaxed);
            if counts {
                let _ = measured.calls.record(started.elapsed().as_micros() as u64);
                measured.messages += popped.messages.len() as u64;
            }
        }
        measured
    }

    fn failed(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        self.ledger.excuse();
        std::thread::sleep(Duration::from_millis(100));
    }

    /// Enters a delivery into the ledger; the streams it is about.
    fn check(&self, messages: &[Message<'_>]) -> Vec<usize> {
        // A partition may carry several streams, in any interleaving.
        let mut spans: std::collections::HashMap<usize, (u64, u64)> = std::collections::HashMap::new();
        for message in messages {
            let Payload { stream, n, .. } = message.data;
            let span = spans.entry(stream).or_insert((n, n));
            if n != span.1 {
                self.ledger.out_of_order(stream, n, span.1);
            }
            span.1 = n + 1;
        }
        for (stream, (first, end)) in &spans {
            self.ledger.delivered(*stream, *first, *end);
        }
        spans.into_keys().collect()
    }

    fn ack(&self, client: &mut Client, popped: &Popped<'_>) -> bool {
        let item = |message: &Message<'_>| {
            json!({"transactionId": message.transaction_id, "partitionId": message.partition_id,
                "leaseId": popped.lease, "status": "completed", "consumerGroup": self.options.group})
        };
        let answer = match popped.messages.as_slice() {
            [one] => client.call("POST", "/api/v1/ack", item(one).to_string().as_bytes()),
            many => {
                let acks: Vec<Value> = many.iter().map(item).collect();
                let body = json!({"consumerGroup": self.options.group, "acknowledgments": acks});
                client.call("POST", "/api/v1/ack/batch", body.to_string().as_bytes())
            }
        };
        match answer {
            Ok((200, body)) => {
                let answers: Vec<Value> = serde_json::from_slice(&body).unwrap_or_default();
                answers.len() == popped.messages.len() && answers.iter().all(|a| a["success"] == true)
            }
            _ => false,
        }
    }
}

/// Runs it; the summary goes to stdout. An error if a guarantee was broken.
pub fn bench(options: &BenchOptions) -> Result<(), String> {
    let address = options
        .url
        .strip_prefix("http://")
        .map(|rest| rest.trim_end_matches('/').to_owned())
        .ok_or_else(|| format!("--url must start with http://, got {}", options.url))?;
    let queue = options.queue.clone().unwrap_or_else(|| format!("bench-{}", now_us()));
    let filler = filler(options.payload as usize);
    let streams = (options.partitions as usize).max(options.producers);
    let now = Instant::now();
    let mut run = Run {
        options: options.clone(),
        address,
        queue: queue.clone(),
        ledger: Ledger::new(streams),
        filler,
        measured_from: now,
        until: now,
        drained: AtomicBool::new(false),
        sent: AtomicU64::new(0),
        received: AtomicU64::new(0),
        errors: AtomicU64::new(0),
    };
    let mut next: Vec<Vec<u64>> = vec![Vec::new(); options.producers];
    if options.prefill > 0 && options.producers > 0 {
        next = prefill(&run);
    }
    let before = counters(&run.address)?;
    run.sent = AtomicU64::new(0);
    run.measured_from = Instant::now();
    run.until = run.measured_from + Duration::from_secs(options.seconds);
    let run = Arc::new(run);
    let producers: Vec<_> = next
        .into_iter()
        .enumerate()
        .filter(|_| options.prefill == 0 || options.rate > 0 || options.consumers == 0)
        .map(|(n, next)| {
            let run = run.clone();
            std::thread::spawn(move || run.produce(n, u64::MAX, next).0)
        })
        .collect();
    let consumers: Vec<_> = (0..options.consumers)
        .map(|_| {
            let run = run.clone();
            std::thread::spawn(move || run.consume())
        })
        .collect();
    watch(&run);
    let after = counters(&run.address)?;
    let mut pushes = Measured::new();
    for thread in producers {
        pushes.add(&thread.join().map_err(|_| "a producer panicked")?);
    }
    drain(&run);
    run.drained.store(true, Ordering::Relaxed);
    let mut pops = Measured::new();
    for thread in consumers {
        pops.add(&thread.join().map_err(|_| "a consumer panicked")?);
    }
    if !options.keep {
        let _ = Client::new(&run.address).call("DELETE", &format!("/api/v1/resources/queues/{queue}"), b"");
    }
    report(&run, &pushes, &pops, &before, &after)
}

/// Pushes `--prefill` messages, in the batches that the pops are to meet. Returns where each producer stopped.
fn prefill(run: &Run) -> Vec<Vec<u64>> {
    let o = &run.options;
    let each = o.prefill.div_ceil(o.producers as u64);
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..o.producers).map(|n| scope.spawn(move || run.produce(n, each, Vec::new()).1)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
    })
}

/// Shows how it goes until the time is over.
fn watch(run: &Run) {
    let seconds = run.options.seconds;
    let bar = indicatif::ProgressBar::new(seconds * 10);
    bar.set_style(
        indicatif::ProgressStyle::with_template("{elapsed:>4} {bar:30} {msg}").expect("the template is ours"),
    );
    let (mut at, mut sent, mut received) = (Instant::now(), 0, 0);
    while Instant::now() < run.until {
        std::thread::sleep(Duration::from_millis(100));
        bar.inc(1);
        if at.elapsed() >= Duration::from_secs(1) {
            let (s, r) = (run.sent.load(Ordering::Relaxed), run.received.load(Ordering::Relaxed));
            let spent = at.elapsed().as_secs_f64();
            bar.set_message(format!(
                "{:.0} pushed/s, {:.0} acked/s",
                (s - sent) as f64 / spent,
                (r - received) as f64 / spent
            ));
            (at, sent, received) = (Instant::now(), s, r);
        }
    }
    bar.finish_and_clear();
}

/// Lets the consumers read what is left, unless nobody is there to do so or it is more than a while's work.
fn drain(run: &Run) {
    if run.options.consumers == 0 || run.options.prefill > 0 {
        return;
    }
    let mut last = (Instant::now(), run.received.load(Ordering::Relaxed));
    loop {
        let (stored, delivered) = run.ledger.totals();
        if delivered >= stored {
            return;
        }
        let received = run.received.load(Ordering::Relaxed);
        if received != last.1 {
            last = (Instant::now(), received);
        }
        // Nothing has come for longer than any lease or re-check takes.
        if last.0.elapsed() > Duration::from_secs(75) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The broker's own counters.
fn counters(address: &str) -> Result<std::collections::HashMap<String, f64>, String> {
    let (status, body) = Client::new(address)
        .call("GET", "/metrics/prometheus", b"")
        .map_err(|error| format!("no broker at {address}: {error}"))?;
    if status != 200 {
        return Err(format!("{address}/metrics/prometheus answered {status}"));
    }
    Ok(String::from_utf8_lossy(&body)
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        })
        .collect())
}

fn latencies(histogram: &Histogram<u64>) -> Value {
    let at = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1_000.0;
    json!({"count": histogram.len(), "p50_ms": at(0.5), "p90_ms": at(0.9), "p99_ms": at(0.99),
        "p999_ms": at(0.999), "max_ms": histogram.max() as f64 / 1_000.0})
}

fn report(
    run: &Run,
    pushes: &Measured,
    pops: &Measured,
    before: &std::collections::HashMap<String, f64>,
    after: &std::collections::HashMap<String, f64>,
) -> Result<(), String> {
    let o = &run.options;
    let seconds = o.seconds as f64;
    let (stored, delivered) = run.ledger.totals();
    let mut faults = run.ledger.faults();
    let complete = o.consumers == 0 || o.prefill > 0;
    if !complete && delivered < stored {
        faults.push(format!("{} of {stored} stored messages were never delivered", stored - delivered));
    }
    let grew =
        |name: &str| after.get(name).copied().unwrap_or(0.0) - before.get(name).copied().unwrap_or(0.0);
    let commits = json!({
        "per_push": grew("waspmq_push_commits_total") / grew("waspmq_pushes_total").max(1.0),
        "per_ack": grew("waspmq_ack_commits_total") / grew("waspmq_acks_total").max(1.0),
        "per_pop": grew("waspmq_claim_commits_total") / (pops.calls.len() as f64).max(1.0),
    });
    let result = json!({
        "queue": run.queue, "seconds": o.seconds, "producers": o.producers, "consumers": o.consumers, "batch": o.batch,
        "pop_batch": o.pop_batch.unwrap_or(o.batch), "payload_bytes": o.payload, "partitions": o.partitions, "rate": o.rate,
        "pushes_per_s": pushes.calls.len() as f64 / seconds, "pushed_messages_per_s": pushes.messages as f64 / seconds,
        "cycles_per_s": pops.calls.len() as f64 / seconds, "consumed_messages_per_s": pops.messages as f64 / seconds,
        "empty_pops": pops.empty, "errors": run.errors.load(Ordering::Relaxed),
        "push": latencies(&pushes.calls), "cycle": latencies(&pops.calls), "end_to_end": latencies(&pops.end_to_end),
        "commits": commits, "stored": stored, "delivered": delivered, "faults": faults,
    });
    if !pushes.calls.is_empty() {
        println!(
            "pushes      {:>10.0}/s  {:>10.0} messages/s   p50 {} ms, p99 {} ms",
            result["pushes_per_s"].as_f64().unwrap_or(0.0),
            result["pushed_messages_per_s"].as_f64().unwrap_or(0.0),
            result["push"]["p50_ms"],
            result["push"]["p99_ms"]
        );
    }
    if !pops.calls.is_empty() {
        println!(
            "pop + ack   {:>10.0}/s  {:>10.0} messages/s   p50 {} ms, p99 {} ms",
            result["cycles_per_s"].as_f64().unwrap_or(0.0),
            result["consumed_messages_per_s"].as_f64().unwrap_or(0.0),
            result["cycle"]["p50_ms"],
            result["cycle"]["p99_ms"]
        );
        println!(
            "end to end  {:>10} messages   p50 {} ms, p99 {} ms, most {} ms",
            pops.end_to_end.len(),
            result["end_to_end"]["p50_ms"],
            result["end_to_end"]["p99_ms"],
            result["end_to_end"]["max_ms"]
        );
    }
    println!(
        "commits per push {:.3}, per pop {:.3}, per ack {:.3}; {} errors",
        result["commits"]["per_push"].as_f64().unwrap_or(0.0),
        result["commits"]["per_pop"].as_f64().unwrap_or(0.0),
        result["commits"]["per_ack"].as_f64().unwrap_or(0.0),
        result["errors"]
    );
    if let Some(file) = &o.json {
        let text = serde_json::to_string_pretty(&result).expect("it is JSON");
        std::fs::write(file, text + "\n")
            .map_err(|error| format!("cannot write {} (--json): {error}", file.display()))?;
    }
    if faults.is_empty() {
        println!("ledger      {stored} stored, {delivered} delivered: no loss, no double, lanes in order");
        Ok(())
    } else {
        Err(format!("the ledger found {} faults:\n  {}", faults.len(), faults.join("\n  ")))
    }
}

/// Members of a payload that looks like an order, to make it so many bytes.
fn filler(bytes: usize) -> String {
    const WORDS: [&str; 16] = [
        "amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "knoll",
        "larch", "maple", "north", "ocean", "prism",
    ];
    let mut text =
        String::from(r#""customer":{"id":48213,"region":"eu","vip":false},"total":129.90,"note":""#);
    // A small generator (Knuth's MMIX constants): the same text in every run.
    let mut state = 0x9e37_79b9_u64;
    // What stream, n and due_us take.
    let fixed = 62;
    while text.len() + fixed + 2 < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(WORDS[(state >> 60) as usize]);
        text.push_str(&format!(" {} ", (state >> 33) % 10_000));
    }
    text.truncate(bytes.saturating_sub(fixed + 1).max(80));
    text.push('"');
    text
}
