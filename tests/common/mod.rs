//! The real binary on a database of its own, for one test.
#![allow(dead_code, missing_docs)]

pub mod guests;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A superuser's connection string; `script/test` sets it.
pub fn server() -> String {
    std::env::var("WASPMQ_TEST_DATABASE")
        .expect("WASPMQ_TEST_DATABASE names a PostgreSQL; script/test starts one")
}

pub struct Broker {
    child: Child,
    pub url: String,
    pub database: String,
    owns: bool,
}

/// A new, empty database: its connection string.
pub fn new_database() -> String {
    let name = format!("t_{}", uuid::Uuid::now_v7().simple());
    let mut client =
        postgres::Client::connect(&server(), postgres::NoTls).expect("the test server takes connections");
    client.batch_execute(&format!("CREATE DATABASE {name}")).expect("a superuser may make databases");
    format!("{} dbname={name}", server())
}

impl Broker {
    pub fn start() -> Self {
        Self::with(&[])
    }

    pub fn with(options: &[&str]) -> Self {
        let database = new_database();
        let mut broker = Self::on(&database, options);
        broker.owns = true;
        broker
    }

    /// On a database that somebody else drops.
    pub fn on(database: &str, options: &[&str]) -> Self {
        Self::run(&[&["--database", database], options].concat(), database)
    }

    /// With a PostgreSQL of its own.
    pub fn embedded(folder: &std::path::Path) -> Self {
        let folder = folder.to_str().expect("UTF-8");
        Self::run(&["--data", folder], &format!("host={folder} user=waspmq dbname=postgres"))
    }

    /// With at most so many file descriptors.
    pub fn with_descriptors(limit: u32, options: &[&str]) -> Self {
        let database = new_database();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {limit}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_waspmq")]);
        let mut broker = Self::run_as(command, &[&["--database", &database], options].concat(), &database);
        broker.owns = true;
        broker
    }

    fn run(options: &[&str], database: &str) -> Self {
        Self::run_as(Command::new(env!("CARGO_BIN_EXE_waspmq")), options, database)
    }

    fn run_as(mut command: Command, options: &[&str], database: &str) -> Self {
        let mut child = command
            .args(["serve", "--listen", "127.0.0.1:0", "--log-level", "warn"])
            .args(options)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("it says that it is ready");
        let url = line.split_whitespace().find(|word| word.starts_with("http://"));
        let url = url.unwrap_or_else(|| panic!("no address in: {line}")).trim_end_matches(',').to_owned();
        Self { child, url, database: database.to_owned(), owns: false }
    }

    /// Takes over the database of a broker that this one follows.
    pub fn owning(mut self, mut before: Self) -> Self {
        self.owns = std::mem::take(&mut before.owns);
        self
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Stops it as a supervisor would, and says how long that took.
    pub fn terminate(&mut self) -> Duration {
        let started = Instant::now();
        // SAFETY: a signal to our own child.
        unsafe { libc::kill(self.pid(), libc::SIGTERM) };
        let status = self.child.wait().expect("it is our child");
        assert!(status.success(), "{status}");
        started.elapsed()
    }

    /// A connection past whatever stands between the broker and its database.
    pub fn client(&self) -> postgres::Client {
        postgres::Client::connect(&self.database, postgres::NoTls).expect("the database is there")
    }

    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        call(&format!("{}{path}", self.url), method, body)
    }

    pub fn get(&self, path: &str) -> (u16, Value) {
        self.call("GET", path, None)
    }

    pub fn call_put(&self, path: &str, body: &Value) -> (u16, Value) {
        self.call("PUT", path, Some(body))
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.call("POST", path, Some(body))
    }

    /// Pushes payloads to one partition; every one must be queued.
    pub fn push(&self, queue: &str, partition: &str, payloads: &[Value]) -> Vec<Value> {
        let items: Vec<Value> =
            payloads.iter().map(|p| json!({"queue": queue, "partition": partition, "payload": p})).collect();
        let (status, answer) = self.post("/api/v1/push", &json!({"items": items}));
        assert_eq!(status, 201, "{answer}");
        let answer = answer.as_array().expect("a list").clone();
        assert!(answer.iter().all(|element| element["status"] == "queued"), "{answer:?}");
        answer
    }

    /// A pop that must find nothing, or its messages.
    pub fn pop(&self, path_and_query: &str) -> Vec<Value> {
        let (status, answer) = self.get(&format!("/api/v1/pop{path_and_query}"));
        match status {
            204 => Vec::new(),
            200 => answer["messages"].as_array().expect("a list").clone(),
            _ => panic!("{status}: {answer}"),
        }
    }

    /// Acks one message and returns its answer.
    pub fn ack(&self, message: &Value, status: &str) -> Value {
        let body = json!({"transactionId": message["transactionId"], "partitionId": message["partitionId"],
            "leaseId": message["leaseId"], "consumerGroup": message["consumerGroup"], "status": status, "error": "because"});
        let (code, answer) = self.post("/api/v1/ack", &body);
        assert_eq!(code, 200, "{answer}");
        answer[0].clone()
    }
}

pub fn call(url: &str, method: &str, body: Option<&Value>) -> (u16, Value) {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(Duration::from_secs(70)))
        .build()
        .into();
    let mut answer = match (method, body) {
        ("GET", _) => agent.get(url).call(),
        ("PUT", Some(body)) => agent.put(url).send(body.to_string()),
        ("DELETE", _) => agent.delete(url).call(),
        ("POST", Some(body)) => agent.post(url).send(body.to_string()),
        ("POST", None) => agent.post(url).send_empty(),
        _ => panic!("{method}"),
    }
    .unwrap_or_else(|error| panic!("{method} {url}: {error}"));
    let text = answer.body_mut().with_config().limit(1 << 30).read_to_string().expect("text");
    let status = answer.status().as_u16();
    assert!(status != 204 || text.is_empty(), "a 204 has no body");
    (
        status,
        if text.is_empty() {
            Value::Null
        } else {
            serde_json::from_str(&text).unwrap_or(Value::String(text))
        },
    )
}

pub fn data(messages: &[Value]) -> Vec<Value> {
    messages.iter().map(|message| message["data"].clone()).collect()
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
        if self.owns
            && let Some((_, name)) = self.database.rsplit_once("dbname=")
            && let Ok(mut client) = postgres::Client::connect(&server(), postgres::NoTls)
        {
            let _ = client.batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"));
        }
    }
}
