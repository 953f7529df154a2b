//! The HTTP contract, by raw sockets, over both edges.
#![allow(missing_docs)]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::Broker;
use serde_json::json;

fn edges() -> [(&'static str, Broker); 2] {
    ["event", "tiny_http"].map(|edge| (edge, Broker::with(&["--edge", edge, "--max-body", "100000"])))
}

fn connect(broker: &Broker) -> TcpStream {
    let stream = TcpStream::connect(broker.url.trim_start_matches("http://")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
    stream
}

fn send(broker: &Broker, bytes: &[u8]) -> TcpStream {
    let mut stream = connect(broker);
    stream.write_all(bytes).unwrap();
    stream
}

/// One response: status, head, body.
fn response(stream: &mut TcpStream) -> (u16, String, Vec<u8>) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            Ok(1) => head.push(byte[0]),
            other => panic!("{other:?} after {:?}", String::from_utf8_lossy(&head)),
        }
    }
    let head = String::from_utf8(head).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let lower = head.to_ascii_lowercase();
    let length = lower
        .split("content-length: ")
        .nth(1)
        .map_or(0, |rest| rest.split("\r\n").next().unwrap().parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    (status, head, body)
}

fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0]) {
        Ok(n) => n == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

const GET: &[u8] = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n";
const POP: &[u8] = b"GET /api/v1/pop/queue/nothing HTTP/1.1\r\nHost: x\r\n\r\n";

#[test]
fn a_204_is_bare_and_the_connection_goes_on() {
    for (edge, broker) in edges() {
        let mut stream = send(&broker, POP);
        let (status, head, _) = response(&mut stream);
        assert_eq!(status, 204, "{edge}");
        let lower = head.to_ascii_lowercase();
        assert!(
            !lower.contains("content-length")
                && !lower.contains("content-type")
                && !lower.contains("transfer"),
            "{edge}: {head}"
        );
        stream.write_all(GET).unwrap();
        assert_eq!(response(&mut stream).0, 200, "{edge}");
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    for (edge, broker) in edges() {
        let mut stream = send(&broker, &[GET, POP, b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n", GET].concat());
        let statuses: Vec<u16> = (0..4).map(|_| response(&mut stream).0).collect();
        assert_eq!(statuses, [200, 204, 404, 200], "{edge}");
    }
}

#[test]
fn many_connections_at_once_are_all_answered() {
    for (edge, broker) in edges() {
        let mut streams: Vec<TcpStream> = (0..60).map(|_| connect(&broker)).collect();
        for _ in 0..2 {
            streams.iter_mut().for_each(|stream| stream.write_all(GET).unwrap());
            for stream in &mut streams {
                assert_eq!(response(stream).0, 200, "{edge}");
            }
        }
    }
}

#[test]
fn bodies_come_chunked_and_announced() {
    for (edge, broker) in edges() {
        let body = br#"{"items":[{"queue":"q","payload":1}]}"#;
        let mut chunked =
            b"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        for part in body.chunks(10) {
            chunked.extend_from_slice(format!("{:x}\r\n", part.len()).as_bytes());
            chunked.extend_from_slice(part);
            chunked.extend_from_slice(b"\r\n");
        }
        chunked.extend_from_slice(b"0\r\n\r\n");
        let mut stream = send(&broker, &chunked);
        assert_eq!(response(&mut stream).0, 201, "{edge}");
        stream
            .write_all(format!("POST /api/v1/push HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes())
            .unwrap();
        assert_eq!(response(&mut stream).0, 100, "{edge}");
        stream.write_all(body).unwrap();
        assert_eq!(response(&mut stream).0, 201, "{edge}");
    }
}

#[test]
fn bad_lengths_are_refused_and_the_connection_ends() {
    for (edge, broker) in edges() {
        for (headers, expected) in [
            ("Content-Length: abc", 400),
            ("Content-Length: -1", 400),
            ("Content-Length: 3\r\nContent-Length: 4", 400),
            ("Content-Length: 3\r\nTransfer-Encoding: chunked", 400),
            ("Content-Length: 100001", 413),
        ] {
            let request = format!("POST /api/v1/push HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n");
            let mut stream = send(&broker, request.as_bytes());
            // tiny_http reads what is announced before anybody can look at the head.
            if edge == "tiny_http" && !headers.ends_with("abc") && !headers.ends_with("-1") {
                let body = match expected {
                    413 => vec![b'x'; 100_001],
                    _ if headers.ends_with('4') => b"abc".to_vec(),
                    _ => b"0\r\n\r\n".to_vec(),
                };
                let _ = stream.write_all(&body);
            }
            assert_eq!(response(&mut stream).0, expected, "{edge}: {headers}");
            // What tiny_http took for a next request may be answered before the end.
            let rest = stream.read_to_end(&mut Vec::new());
            assert!(rest.is_ok_and(|n| n == 0 || edge == "tiny_http"), "{edge}: {headers}");
        }
    }
}

#[test]
fn event_refuses_absurd_lengths_and_endless_heads() {
    let broker = Broker::start();
    for length in ["100000000000", "99999999999999999999999999"] {
        let mut stream = send(
            &broker,
            format!("POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\nx").as_bytes(),
        );
        assert_eq!(response(&mut stream).0, 413);
    }
    let mut stream = send(&broker, b"GET /livez HTTP/1.1\r\nHost: x\r\n");
    for n in 0..2_000 {
        if stream.write_all(format!("X-{n}: {}\r\n", "y".repeat(100)).as_bytes()).is_err() {
            break;
        }
    }
    assert_eq!(response(&mut stream).0, 431);
    assert_eq!(response(&mut send(&broker, GET)).0, 200);
}

#[test]
fn a_body_over_the_limit_is_refused_and_one_at_the_limit_is_not() {
    for (edge, broker) in edges() {
        let item =
            |filler: usize| format!(r#"{{"items":[{{"queue":"q","payload":"{}"}}]}}"#, "x".repeat(filler));
        let request = |body: &str| {
            format!("POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        };
        let frame = item(0).len();
        let mut stream = send(&broker, request(&item(100_000 - frame)).as_bytes());
        assert_eq!(response(&mut stream).0, 201, "{edge}");
        let mut stream = connect(&broker);
        let _ = stream.write_all(request(&item(100_001 - frame)).as_bytes());
        assert_eq!(response(&mut stream).0, 413, "{edge}");
    }
}

#[test]
fn old_clients_heads_and_closes() {
    for (edge, broker) in edges() {
        let mut stream = send(&broker, b"GET /livez HTTP/1.0\r\n\r\n");
        assert_eq!(response(&mut stream).0, 200, "{edge}");
        assert!(is_closed(&mut stream), "{edge}");
        let mut stream = send(&broker, b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        assert_eq!(response(&mut stream).0, 200, "{edge}");
        assert!(is_closed(&mut stream), "{edge}");
        let mut stream = send(&broker, b"HEAD /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        let text = String::from_utf8(all).unwrap();
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("\r\n\r\n"), "{edge}: {text}");
    }
}

#[test]
fn names_are_percent_decoded() {
    for (edge, broker) in edges() {
        broker.push("a/b c%", "ü:1", &[json!(1)]);
        let m = broker.pop("/queue/a%2Fb%20c%25/partition/%C3%BC%3A1");
        assert_eq!(
            (m.len(), &m[0]["queue"], &m[0]["partition"]),
            (1, &json!("a/b c%"), &json!("ü:1")),
            "{edge}"
        );
        assert_eq!(broker.get("/api/v1/pop/queue/%FF").0, 400, "{edge}");
    }
}

#[test]
fn nothing_is_claimed_for_a_client_that_has_gone() {
    for (edge, broker) in edges() {
        let mut gone: Vec<TcpStream> = (0..5)
            .map(|_| {
                send(&broker, b"GET /api/v1/pop/queue/q?wait=true&timeout=30000 HTTP/1.1\r\nHost: x\r\n\r\n")
            })
            .collect();
        std::thread::sleep(Duration::from_millis(500));
        gone.clear();
        std::thread::sleep(Duration::from_millis(200));
        broker.push("q", "p", &[json!(1)]);
        let m = broker.pop("/queue/q?wait=true&timeout=5000");
        assert_eq!(m.len(), 1, "{edge}: swallowed");
        assert_eq!(m[0]["deliveryAttempt"], 1, "{edge}");
    }
}

/// User and system time of a process so far, in clock ticks of 10 ms.
fn cpu_ticks(pid: i32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

fn transactions(broker: &Broker) -> i64 {
    let mut client = broker.client();
    // A session reports its last transactions when it has been idle for 10 s.
    std::thread::sleep(Duration::from_secs(12));
    let sql = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()";
    client.query_one(sql, &[]).unwrap().get(0)
}

#[test]
fn heavy_event_parks_ten_thousand_pops_without_sql_and_wakes_the_right_one() {
    const PARKED: usize = 10_000;
    let broker = Broker::with(&["--max-connections", "15000"]);
    let mut parked: Vec<TcpStream> = (0..PARKED)
        .map(|n| {
            let queue = n % 1_000;
            send(
                &broker,
                format!("GET /api/v1/pop/queue/q{queue}?wait=true&timeout=60000 HTTP/1.1\r\nHost: x\r\n\r\n")
                    .as_bytes(),
            )
        })
        .collect();
    // Every group's first contact makes its queue and its subscription; then nothing is left to do.
    let mut client = broker.client();
    let limit = Instant::now() + Duration::from_secs(60);
    while client.query_one("SELECT count(*) FROM subscription", &[]).unwrap().get::<_, i64>(0) < 1_000 {
        assert!(Instant::now() < limit);
        std::thread::sleep(Duration::from_millis(200));
    }
    drop(client);
    let (before, cpu) = (transactions(&broker), cpu_ticks(broker.pid()));
    let (after, cpu) = (transactions(&broker), cpu_ticks(broker.pid()) - cpu);
    assert!(after - before < 200, "{} transactions while nothing happened", after - before);
    eprintln!("{PARKED} parked pops: {} transactions, {cpu} ticks of 10 ms in 12 s", after - before);
    broker.push("q234", "p", &[json!("hello")]);
    // The oldest of its ten.
    let (status, _, body) = response(&mut parked[234]);
    assert_eq!(status, 200);
    assert!(String::from_utf8_lossy(&body).contains("hello"));
    parked[1_234].set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(parked[1_234].read(&mut [0]).is_err(), "one message wakes one");
    assert_eq!(response(&mut send(&broker, GET)).0, 200);
}

#[test]
fn slow_requests_by_the_hundred_delay_nobody_and_end_with_408() {
    let broker = Broker::start();
    let mut slow: Vec<TcpStream> = (0..300)
        .map(|n| match n % 3 {
            0 => send(&broker, b"GET /livez HT"),
            1 => send(&broker, b"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"),
            _ => send(
                &broker,
                b"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
            ),
        })
        .collect();
    let until = Instant::now() + Duration::from_secs(25);
    let mut answered = 0;
    while Instant::now() < until {
        let started = Instant::now();
        assert_eq!(response(&mut send(&broker, GET)).0, 200);
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
        answered += 1;
        // A byte now and then does not make a request less slow.
        let _ = slow[1].write_all(b" ");
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(answered > 10);
    for stream in &mut slow {
        assert_eq!(response(stream).0, 408);
        assert!(is_closed(stream));
    }
}

// Not of tiny_http: its accepting thread panics when a descriptor cannot be duplicated.
#[test]
fn event_survives_a_low_limit_of_descriptors() {
    let broker = Broker::with_descriptors(100, &[]);
    let mut streams: Vec<TcpStream> = (0..200).map(|_| send(&broker, GET)).collect();
    assert_eq!(response(&mut streams[0]).0, 200);
    std::thread::sleep(Duration::from_secs(1));
    // The first ones give theirs back, and the last in line is answered.
    let mut last = streams.pop().unwrap();
    drop(streams);
    assert_eq!(response(&mut last).0, 200);
    drop(last);
    let limit = Instant::now() + Duration::from_secs(10);
    while broker.get("/health").0 != 200 {
        assert!(Instant::now() < limit, "it does not recover");
        std::thread::sleep(Duration::from_millis(100));
    }
    broker.push("q", "p", &[json!(1)]);
    assert_eq!(broker.pop("/queue/q").len(), 1);
}

#[test]
fn tiny_http_does_not_listen_beyond_loopback_by_itself() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_waspmq"))
        .args(["serve", "--edge", "tiny_http", "--listen", "0.0.0.0:0", "--database", &common::server()])
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("--i-trust-this-network"));
}
