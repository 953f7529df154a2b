//! Guests that misbehave, each in its own way: the pop fails clearly or goes on
//! without them, nothing is lost, and other traffic is not disturbed.
#![allow(missing_docs)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::guests::{FilterGuest, selector};
use common::{Broker, data};
use serde_json::{Value, json};

/// A broker with these plugins.
fn broker_with(plugins: &[(&str, String)], options: &[&str]) -> (Broker, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in plugins {
        std::fs::write(folder.path().join(format!("{name}.wat")), text).unwrap();
    }
    let path = folder.path().to_str().unwrap();
    let cache = folder.path().join("cache");
    let broker =
        Broker::with(&[&["--plugins", path, "--plugin-cache", cache.to_str().unwrap()], options].concat());
    (broker, folder)
}

fn plugin(broker: &Broker, name: &str) -> Value {
    let (_, list) = broker.get("/api/v1/plugins");
    let found = list["plugins"].as_array().unwrap().iter().find(|plugin| plugin["name"] == name);
    found.unwrap_or_else(|| panic!("{name} is not in {list}")).clone()
}

/// Traffic on other queues while something bad goes on: longest time of a push and pop, and how many.
struct Others {
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<(u64, Duration)>>,
}

impl Others {
    fn start(broker: &Broker) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (url, stop) = (broker.url.clone(), over.clone());
        let thread = std::thread::spawn(move || {
            let (mut rounds, mut longest) = (0, Duration::ZERO);
            while !stop.load(Ordering::Relaxed) {
                // Several queues: on every core.
                let queue = format!("other{}", rounds % 8);
                let body = json!({"items": [{"queue": queue, "payload": rounds}]});
                let started = Instant::now();
                let (status, _) = common::call(&format!("{url}/api/v1/push"), "POST", Some(&body));
                assert_eq!(status, 201);
                let (status, answer) =
                    common::call(&format!("{url}/api/v1/pop/queue/{queue}?autoAck=true"), "GET", None);
                assert_eq!(status, 200);
                assert_eq!(answer["messages"][0]["data"], json!(rounds));
                longest = longest.max(started.elapsed());
                rounds += 1;
            }
            (rounds, longest)
        });
        Self { over, thread: Some(thread) }
    }

    fn end(mut self) -> (u64, Duration) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().expect("other traffic goes on")
    }
}

/// Binds a filter, and sees it fail in this way; the message is delivered when the filter is gone.
fn fails(name: &str, guest: &FilterGuest<'_>, cause: &str, text: &str) {
    let (broker, _folder) = broker_with(&[(name, guest.text())], &[]);
    broker.push("q", "p", &[json!(1), json!(2)]);
    let (status, answer) =
        broker.call_put("/api/v1/consumer-groups/g/queues/q/filter", &json!({"plugin": name}));
    assert_eq!(status, 200, "{answer}");
    let others = Others::start(&broker);
    for _ in 0..3 {
        let started = Instant::now();
        let (status, answer) =
            broker.get("/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all&wait=true&timeout=3000");
        assert_eq!((status, &answer["code"]), (503, &json!("plugin_failed")), "{name}: {answer}");
        let error = answer["error"].as_str().unwrap();
        assert!(error.contains(cause) && error.contains(text) && error.len() < 2_000, "{name}: {error}");
        assert!(started.elapsed() < Duration::from_secs(3), "{name}: {:?}", started.elapsed());
    }
    let (rounds, longest) = others.end();
    assert!(rounds > 3 && longest < Duration::from_secs(2), "{name}: {rounds} rounds, {longest:?}");
    let shown = plugin(&broker, name);
    assert!(shown["errors"][cause].as_u64().unwrap() >= 3, "{shown}");
    // Nothing was lost, and nothing counts as delivered.
    assert_eq!(broker.call("DELETE", "/api/v1/consumer-groups/g/queues/q/filter", None).0, 200);
    let found = broker.pop("/queue/q?consumerGroup=g&wait=true&timeout=10000");
    assert_eq!(data(&found), [json!(1), json!(2)], "{name}");
    assert_eq!(found[0]["deliveryAttempt"], 1, "{name}");
}

const LOOP: &str = "(loop $for-ever (br $for-ever)) (unreachable)";

#[test]
fn an_endless_loop_meets_its_deadline() {
    fails(
        "endless",
        &FilterGuest { filter: LOOP, ..FilterGuest::default() },
        "deadline",
        "longer than its deadline",
    );
}

#[test]
fn a_memory_bomb_meets_its_limit() {
    let filter = "(loop $more (drop (memory.grow (i32.const 512))) (br $more)) (unreachable)";
    fails("bomb", &FilterGuest { filter, ..FilterGuest::default() }, "memory", "memory wanted to grow");
}

#[test]
fn a_deep_recursion_is_a_trap_and_not_the_end() {
    let module = "(func $deeper (param i64 i64 i64 i64) (result i64)
        (i64.add (call $deeper (local.get 1) (local.get 2) (local.get 3) (local.get 0)) (local.get 0)))";
    let filter = "(i32.wrap_i64 (call $deeper (i64.const 1) (i64.const 2) (i64.const 3) (i64.const 4)))";
    // The module's own declarations come before its functions.
    let guest = FilterGuest { module: "", filter, ..FilterGuest::default() };
    let text = guest.text().replace("    (func $ok (param", &format!("{module}\n    (func $ok (param"));
    fails_as("deep", text, "trap", "stack");
}

fn fails_as(name: &str, text: String, cause: &str, words: &str) {
    let (broker, _folder) = broker_with(&[(name, text)], &[]);
    broker.push("q", "p", &[json!(1)]);
    let (status, answer) =
        broker.call_put("/api/v1/consumer-groups/g/queues/q/filter", &json!({"plugin": name}));
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = broker.get("/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all");
    let error = answer["error"].as_str().unwrap_or_default();
    assert_eq!(status, 503, "{answer}");
    assert!(error.contains(cause) && error.contains(words), "{error}");
    assert_eq!(broker.get("/livez").0, 200);
}

#[test]
fn a_trap_is_told() {
    fails("trap", &FilterGuest { filter: "(unreachable)", ..FilterGuest::default() }, "trap", "unreachable");
}

#[test]
fn a_wrong_number_of_verdicts_is_refused() {
    let filter = "(memory.fill (i32.const 60000) (i32.const 0) (i32.const 36)) (call $ok (i32.const 60000) (i32.add (local.get $count) (i32.const 1)))";
    fails(
        "generous",
        &FilterGuest { filter, ..FilterGuest::default() },
        "answer",
        "3 verdicts for 2 messages",
    );
}

#[test]
fn a_long_error_text_is_cut() {
    let filter = "(drop (memory.grow (i32.const 20)))
        (memory.fill (i32.const 2048) (i32.const 97) (i32.const 1000000))
        (i32.store (i32.const 0) (i32.const 1)) (i32.store (i32.const 4) (i32.const 2048)) (i32.store (i32.const 8) (i32.const 1000000))
        (i32.const 0)";
    fails("verbose", &FilterGuest { filter, ..FilterGuest::default() }, "error", "aaaaaaaaaa");
}

#[test]
fn many_strings_that_are_the_same_megabyte_are_not_copied() {
    // As many verdicts as messages, each a dead letter with the same long reason.
    let filter = "(drop (memory.grow (i32.const 40)))
        (memory.fill (i32.const 200000) (i32.const 97) (i32.const 1000000))
        (local.set $verdicts (i32.const 100000))
        (block $end (loop $each
          (br_if $end (i32.ge_u (local.get $n) (local.get $count)))
          (local.set $at (i32.add (local.get $verdicts) (i32.mul (local.get $n) (i32.const 12))))
          (i32.store (local.get $at) (i32.const 3))
          (i32.store offset=4 (local.get $at) (i32.const 200000))
          (i32.store offset=8 (local.get $at) (i32.const 1000000))
          (local.set $n (i32.add (local.get $n) (i32.const 1)))
          (br $each)))
        (call $ok (local.get $verdicts) (local.get $count))";
    let guest = FilterGuest { filter, ..FilterGuest::default() };
    let (broker, _folder) = broker_with(&[("copies", guest.text())], &[]);
    broker.push("q", "p", &(0..256).map(|n| json!(n)).collect::<Vec<_>>());
    assert_eq!(
        broker.call_put("/api/v1/consumer-groups/g/queues/q/filter", &json!({"plugin": "copies"})).0,
        200
    );
    let (status, answer) = broker.get("/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all&batch=1000");
    assert_eq!(status, 503, "{answer}");
    let (_, metrics) = broker.get("/metrics");
    let bytes = metrics["memory"]["rss"].as_u64().unwrap();
    assert!(bytes < 300_000_000, "{bytes} bytes resident");
    assert_eq!(broker.get("/api/v1/dlq").1["total"], 0);
}

#[test]
fn a_flood_of_log_lines_is_dammed() {
    let imports = r#"(import "waspmq:plugin/logging@1.0.0" (instance $logging
        (type $l (enum "debug" "info" "warn" "error")) (export "level" (type $level (eq $l)))
        (export "log" (func (param "level" $level) (param "text" string)))))
      (core module $libc (memory (export "memory") 40))
      (core instance $libc (instantiate $libc))
      (alias core export $libc "memory" (core memory $shared))
      (core func $log (canon lower (func $logging "log") (memory $shared)))"#;
    let filter =
        "(loop $more (call $log (i32.const 2) (i32.const 4096) (i32.const 500000)) (br $more)) (unreachable)";
    let guest = FilterGuest {
        imports,
        with: r#"(with "host" (instance (export "log" (func $log))))"#,
        module: r#"(import "host" "log" (func $log (param i32 i32 i32)))"#,
        filter,
        ..FilterGuest::default()
    };
    fails("chatty", &guest, "deadline", "longer than its deadline");
}

#[test]
fn what_is_not_there_traps_when_it_is_called_and_a_stranger_is_refused_by_name() {
    let sleep = |package: &str| {
        let imports = format!(
            r#"(import "{package}/clock@0.2.0" (instance $clock (export "sleep" (func (param "ms" u64)))))
               (core func $sleep (canon lower (func $clock "sleep")))"#
        );
        let guest = FilterGuest {
            imports: &imports,
            with: r#"(with "host" (instance (export "sleep" (func $sleep))))"#,
            module: r#"(import "host" "sleep" (func $sleep (param i64)))"#,
            filter: "(call $sleep (i64.const 3000)) (unreachable)",
            ..FilterGuest::default()
        };
        guest.text()
    };
    let (broker, _folder) =
        broker_with(&[("sleeper", sleep("wasi:strange")), ("spy", sleep("evil:net"))], &[]);
    let spy = plugin(&broker, "spy");
    assert_eq!(spy["status"], "failed");
    assert!(spy["error"].as_str().unwrap().contains("evil:net/clock@0.2.0"), "{spy}");
    broker.push("q", "p", &[json!(1)]);
    assert_eq!(
        broker.call_put("/api/v1/consumer-groups/g/queues/q/filter", &json!({"plugin": "sleeper"})).0,
        200
    );
    let started = Instant::now();
    let (status, answer) = broker.get("/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all");
    assert_eq!(status, 503, "{answer}");
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[test]
fn an_init_that_fails_hangs_or_loops_at_start_is_a_refusal() {
    let failing = "(i32.store (i32.const 0) (i32.const 1)) (i32.store (i32.const 4) (i32.const 512)) (i32.store (i32.const 8) (i32.const 4))
        (i32.store (i32.const 512) (i32.const 0x6f6e206f)) (i32.const 0)";
    let init = |init| FilterGuest { init, ..FilterGuest::default() }.text();
    let start = FilterGuest::default().text().replace(
        "    (func $ok (param",
        "(func $spin (loop $l (br $l))) (start $spin)\n    (func $ok (param",
    );
    let (broker, _folder) =
        broker_with(&[("refuses", init(failing)), ("hangs", init(LOOP)), ("spins", start)], &[]);
    broker.push("q", "p", &[json!(1)]);
    let others = Others::start(&broker);
    for (name, words) in [("refuses", "o no"), ("hangs", "longer than"), ("spins", "longer than")] {
        let (status, answer) =
            broker.call_put("/api/v1/consumer-groups/g/queues/q/filter", &json!({"plugin": name}));
        assert_eq!((status, &answer["code"]), (400, &json!("plugin_refused")), "{name}: {answer}");
        assert!(answer["error"].as_str().unwrap().contains(words), "{name}: {answer}");
        let (status, _) =
            broker.post("/api/v1/configure", &json!({"queue": "q", "options": {"filter": name}}));
        assert_eq!(status, 400, "{name}");
    }
    others.end();
    assert_eq!(broker.get("/api/v1/consumer-groups/g/queues/q/filter").1["filter"], Value::Null);
    assert_eq!(broker.pop("/queue/q?consumerGroup=g&subscriptionMode=all").len(), 1);
}

#[test]
fn a_filter_that_gets_slower_is_stopped_and_paused() {
    // Each call counts to four times as far as the one before.
    let module = "(global $work (mut i64) (i64.const 1000))";
    let filter = "(local $left i64)
        (global.set $work (i64.mul (global.get $work) (i64.const 4)))
        (local.set $left (global.get $work))
        (loop $more (local.set $left (i64.sub (local.get $left) (i64.const 1))) (br_if $more (i64.gt_s (local.get $left) (i64.const 0))))
        (call $ok (i32.const 100000) (local.get $count))";
    let text = FilterGuest { filter, ..FilterGuest::default() }
        .text()
        .replace("    (global $next", &format!("    {module}\n    (global $next"))
        .replace("(memory (export \"memory\") 1)", "(memory (export \"memory\") 10)");
    let (broker, _folder) = broker_with(&[("tired", text)], &["--filter-deadline-ms", "20"]);
    broker.push("q", "p", &(0..100).map(|n| json!(n)).collect::<Vec<_>>());
    assert_eq!(
        broker.call_put("/api/v1/consumer-groups/g/queues/q/filter", &json!({"plugin": "tired"})).0,
        200
    );
    let (mut good, mut bad) = (0, 0);
    let limit = Instant::now() + Duration::from_secs(60);
    while good < 100 {
        assert!(Instant::now() < limit, "{good} good, {bad} bad");
        let (status, answer) = broker.get("/api/v1/pop/queue/q?consumerGroup=g&subscriptionMode=all&batch=1&autoAck=true&wait=true&timeout=5000");
        match status {
            200 => {
                assert_eq!(answer["messages"][0]["data"], json!(good));
                good += 1;
            }
            503 => bad += 1,
            204 => {}
            other => panic!("{other}: {answer}"),
        }
    }
    assert!(bad > 0, "it was never stopped");
}

#[test]
fn selectors_that_misbehave_leave_the_built_in_order() {
    let write = "(i32.store (i32.const 65000) (i32.const ";
    let plugins = [
        ("endless", selector("", LOOP), "deadline"),
        ("trap", selector("", "(unreachable)"), "trap"),
        (
            "beyond",
            selector("", &format!("{write}77777)) (call $ok (i32.const 65000) (i32.const 1))")),
            "answer",
        ),
        (
            "twice",
            selector(
                "",
                &format!(
                    "{write}0)) (i32.store (i32.const 65004) (i32.const 0)) (call $ok (i32.const 65000) (i32.const 2))"
                ),
            ),
            "answer",
        ),
        ("long", selector("", "(call $ok (i32.const 0) (i32.const 300000))"), "trap"),
    ];
    let texts: Vec<(&str, String)> = plugins.iter().map(|(name, text, _)| (*name, text.clone())).collect();
    let (broker, _folder) = broker_with(&texts, &[]);
    for (n, (name, _, cause)) in plugins.iter().enumerate() {
        let queue = format!("q{n}");
        broker.push(&queue, "a", &[json!("first")]);
        broker.push(&queue, "b", &[json!("second")]);
        let others = Others::start(&broker);
        let found = broker.pop(&format!("/queue/{queue}?selector={name}"));
        assert_eq!(data(&found), [json!("first")], "{name}");
        others.end();
        assert_eq!(plugin(&broker, name)["errors"][cause], 1, "{name}: {}", plugin(&broker, name));
        // A binding may say that the pop fails with it.
        let binding = json!({"plugin": name, "onError": "fail"});
        assert_eq!(
            broker.call_put(&format!("/api/v1/consumer-groups/g/queues/{queue}/selector"), &binding).0,
            200
        );
        let (status, answer) =
            broker.get(&format!("/api/v1/pop/queue/{queue}?consumerGroup=g&subscriptionMode=all"));
        assert_eq!((status, &answer["code"]), (503, &json!("plugin_failed")), "{name}: {answer}");
        let found = broker.pop(&format!("/queue/{queue}?consumerGroup=g&subscriptionMode=all&selector=none"));
        assert_eq!(found.len(), 1, "{name}");
    }
}

#[test]
fn a_selector_that_withholds_everything_costs_a_poll_and_no_core() {
    let (broker, _folder) =
        broker_with(&[("miser", selector("", "(call $ok (i32.const 0) (i32.const 0))"))], &[]);
    broker.push("q", "p", &[json!(1)]);
    assert_eq!(broker.pop("/queue/q?selector=miser").len(), 0);
    let started = Instant::now();
    assert_eq!(broker.pop("/queue/q?selector=miser&wait=true&timeout=2000").len(), 0);
    assert!(started.elapsed() >= Duration::from_millis(1_900));
    let calls = plugin(&broker, "miser")["calls"].as_u64().unwrap();
    assert!(calls < 50, "{calls} calls in two seconds");
    assert_eq!(broker.pop("/queue/q").len(), 1);
}

#[test]
fn files_that_are_no_plugins_are_told_and_do_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let good = FilterGuest::default().text();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("good.wat", good.as_bytes());
    write("truncated.wat", &good.as_bytes()[..good.len() / 2]);
    write("truncated2.wasm", b"\0asm\x0d\0\x01\0\x07\xff");
    write("empty.wasm", b"");
    write("text.wasm", b"hello");
    write("module.wasm", b"\0asm\x01\0\0\0");
    write("Bad_Name.wat", good.as_bytes());
    write("notes.txt", b"not looked at");
    std::fs::File::create(folder.path().join("huge.wasm")).unwrap().set_len(200_000_000).unwrap();
    let path = folder.path().to_str().unwrap();
    let cache = folder.path().join("cache");
    let broker = Broker::with(&["--plugins", path, "--plugin-cache", cache.to_str().unwrap()]);
    let (_, list) = broker.get("/api/v1/plugins");
    let names: Vec<&str> =
        list["plugins"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["Bad_Name", "empty", "good", "huge", "module", "text", "truncated", "truncated2"]);
    for name in names {
        let shown = plugin(&broker, name);
        if name == "good" {
            assert_eq!((&shown["status"], &shown["error"]), (&json!("loaded"), &Value::Null));
        } else {
            assert_eq!(shown["status"], "failed", "{shown}");
            assert!(shown["error"].as_str().unwrap().len() > 10, "{shown}");
        }
    }
    assert!(plugin(&broker, "huge")["error"].as_str().unwrap().contains("200000000"));
}

#[test]
fn heavy_replacements_under_load_lose_nothing_and_fail_no_pop() {
    let seconds: u64 = std::env::var("WASPMQ_LEDGER_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(15);
    // Two versions that deliver the same; and now and then something that does not load.
    let version = |n: usize| format!(";; version {n}\n{}", FilterGuest::default().text());
    let (broker, folder) = broker_with(&[("f", version(0))], &[]);
    broker.push("q", "p0", &[json!(0)]);
    assert_eq!(broker.post("/api/v1/configure", &json!({"queue": "q", "options": {"filter": "f"}})).0, 200);
    let over = Arc::new(AtomicBool::new(false));
    let popped = Arc::new(AtomicU64::new(0));
    let consumers: Vec<_> = (0..4)
        .map(|_| {
            let (url, over, popped) = (broker.url.clone(), over.clone(), popped.clone());
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let url = format!("{url}/api/v1/pop/queue/q?autoAck=true&wait=true&timeout=500&batch=10");
                    let (status, answer) = common::call(&url, "GET", None);
                    assert!(status == 200 || status == 204, "{status}: {answer}");
                    popped.fetch_add(
                        answer["messages"].as_array().map_or(0, Vec::len) as u64,
                        Ordering::Relaxed,
                    );
                }
            })
        })
        .collect();
    let until = Instant::now() + Duration::from_secs(seconds);
    let (mut replaced, mut pushed) = (0, 1u64);
    while Instant::now() < until {
        replaced += 1;
        let file = folder.path().join("f.wat");
        let text = version(replaced);
        if replaced % 5 == 0 {
            // Half of it is there for a moment.
            std::fs::write(&file, &text[..text.len() / 2]).unwrap();
            broker.post("/api/v1/plugins/reload", &json!({}));
            assert_eq!(plugin(&broker, "f")["status"], "old_version");
        }
        std::fs::write(folder.path().join("f.new"), &text).unwrap();
        std::fs::rename(folder.path().join("f.new"), &file).unwrap();
        assert_eq!(broker.post("/api/v1/plugins/reload", &json!({})).0, 200);
        assert_eq!(plugin(&broker, "f")["status"], "loaded");
        for n in 0..20 {
            broker.push("q", &format!("p{}", n % 4), &[json!(pushed)]);
            pushed += 1;
        }
    }
    let limit = Instant::now() + Duration::from_secs(20);
    while popped.load(Ordering::Relaxed) < pushed && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(50));
    }
    over.store(true, Ordering::Relaxed);
    consumers.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(popped.load(Ordering::Relaxed), pushed);
    eprintln!("{replaced} replacements in {seconds} s, {pushed} messages");
    assert!(replaced > 10, "{replaced}");
}
