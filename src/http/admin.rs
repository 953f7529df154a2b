//! Everything that is not the data plane: configuration, inspection, health.

use std::sync::Arc;

use serde_json::json;
use uuid::Uuid;

use super::edge::Method;
use super::groups;
use super::operations;
use super::plugins;
use super::router::App;
use super::transaction;
use crate::broker::answer::{Reply, ReplyHandle};
use crate::broker::error::ApiError;
use crate::broker::plugin::Kind;
use crate::broker::query::Query;
use crate::broker::queue_options::{QueueOptions, namespace_and_task_of, parse_configure};
use crate::core::engine::store_error;
use crate::core::inbox::Message;
use crate::store::{Conn, StoreError, inspect, queue};

/// An admin route, with what its path names.
pub enum Route {
    /// `POST /api/v1/configure`
    Configure,
    /// `DELETE /api/v1/resources/queues/:queue`
    DeleteQueue(String),
    /// `GET /api/v1/resources/queues/:queue`
    Queue(String),
    /// `GET /api/v1/resources/queues`
    Queues,
    /// `GET /api/v1/dlq`
    DeadLetters,
    /// `GET /api/v1/messages/:partitionId/:transactionId`
    Message(String, String),
    /// `POST /api/v1/transaction`
    Transaction,
    /// Messages, dead letters, traces, overviews, maintenance
    Operations(operations::Route),
    /// Consumer groups
    Groups(groups::Route),
    /// Plugins and their bindings
    Plugins(plugins::Route),
    /// `GET /health`
    Health,
    /// `GET /livez`
    Livez,
    /// `GET /metrics`
    Metrics,
    /// `GET /metrics/prometheus`
    Prometheus,
}

/// The route of a path, and its methods.
pub fn find(parts: &[&str], method: Method) -> Option<(Route, &'static str)> {
    Some(match parts {
        ["api", "v1", "configure"] => (Route::Configure, "POST"),
        ["api", "v1", "resources", "queues"] => (Route::Queues, "GET, HEAD"),
        ["api", "v1", "resources", "queues", queue] => {
            let queue = (*queue).to_owned();
            let route =
                if method == Method::Delete { Route::DeleteQueue(queue) } else { Route::Queue(queue) };
            (route, "GET, HEAD, DELETE")
        }
        ["api", "v1", "dlq"] if method != Method::Delete => (Route::DeadLetters, "GET, HEAD, DELETE"),
        ["api", "v1", "messages", partition, transaction] if method != Method::Delete => {
            (Route::Message((*partition).to_owned(), (*transaction).to_owned()), "GET, HEAD, DELETE")
        }
        ["api", "v1", "transaction"] => (Route::Transaction, "POST"),
        ["health"] => (Route::Health, "GET, HEAD"),
        ["livez"] => (Route::Livez, "GET, HEAD"),
        ["metrics"] => (Route::Metrics, "GET, HEAD"),
        ["metrics", "prometheus"] => (Route::Prometheus, "GET, HEAD"),
        parts => {
            if let Some((route, allowed)) = plugins::find(parts, method) {
                return Some((Route::Plugins(route), allowed));
            }
            if let Some((route, allowed)) = groups::find(parts, method) {
                return Some((Route::Groups(route), allowed));
            }
            let (route, allowed) = operations::find(parts, method)?;
            (Route::Operations(route), allowed)
        }
    })
}

/// Handles an admin request: at once, or on an admin thread.
pub fn handle(app: &Arc<App>, route: Route, query: &str, body: Vec<u8>, reply: ReplyHandle) {
    match route {
        Route::Livez => drop(reply.send(Reply::json(200, r#"{"status":"alive"}"#))),
        Route::Metrics => drop(reply.send(Reply::json(200, metrics(app)))),
        Route::Prometheus => drop(reply.send(prometheus(app))),
        Route::Health => with_database(app, reply, |_, conn| {
            conn.query("SELECT 1", &[])?;
            let body =
                json!({"status": "healthy", "database": "connected", "version": env!("CARGO_PKG_VERSION")});
            Ok(Ok(Reply::json(200, body.to_string())))
        }),
        Route::Configure => with_database(app, reply, move |app, conn| configure(app, conn, &body)),
        Route::Queues => match page(&Query::new(query), 1_000) {
            Ok((limit, offset)) => with_database(app, reply, move |_, conn| {
                Ok(Ok(Reply::json(200, inspect::queues(conn, limit, offset)?.to_string())))
            }),
            Err(error) => drop(reply.send(Reply::from(&error))),
        },
        Route::Queue(name) => match page(&Query::new(query), 100_000) {
            Ok((limit, offset)) => with_database(app, reply, move |_, conn| {
                Ok(match inspect::queue(conn, &name, limit, offset)? {
                    Some(found) => Ok(Reply::json(200, found.to_string())),
                    None => Err(ApiError::not_found("Queue not found")),
                })
            }),
            Err(error) => drop(reply.send(Reply::from(&error))),
        },
        Route::DeadLetters => {
            let query = query.to_owned();
            with_database(app, reply, move |_, conn| dead_letters(conn, &Query::new(&query)));
        }
        Route::Message(partition, transaction) => with_database(app, reply, move |_, conn| {
            let Ok(partition) = Uuid::parse_str(&partition) else {
                return Ok(Err(ApiError::not_found("Message not found")));
            };
            Ok(match inspect::message(conn, partition, &transaction)? {
                Some(found) => Ok(Reply::json(200, found)),
                None => Err(ApiError::not_found("Message not found")),
            })
        }),
        Route::Operations(route) => operations::handle(app, route, query, body, reply),
        Route::Groups(route) => groups::handle(app, route, query, body, reply),
        Route::Plugins(route) => plugins::handle(app, route, body, reply),
        Route::Transaction => with_database(app, reply, move |app, conn| transaction::run(app, conn, &body)),
        Route::DeleteQueue(name) => with_database(app, reply, move |app, conn| {
            let existed = queue::delete(conn, &name)?;
            if existed {
                let queue: Arc<str> = name.as_str().into();
                app.cores.tell(|| Message::QueueDeleted(queue.clone()));
            }
            let answer = if existed {
                json!({"deleted": true, "queue": name, "existed": true})
            } else {
                json!({"deleted": false, "queue": name, "existed": false,
                       "message": "Queue not found, nothing was deleted"})
            };
            Ok(Ok(Reply::json(200, answer.to_string())))
        }),
    }
}

/// `limit` and `offset` of a listing.
pub fn page(query: &Query<'_>, default: i64) -> Result<(i64, i64), ApiError> {
    let limit = query.integer("limit")?.unwrap_or(default);
    let offset = query.integer("offset")?.unwrap_or(0);
    if !(1..=100_000).contains(&limit) {
        return Err(ApiError::bad_request(format!("limit must be between 1 and 100000, got {limit}")));
    }
    if offset < 0 {
        return Err(ApiError::bad_request(format!("offset must be 0 or more, got {offset}")));
    }
    Ok((limit, offset))
}

fn dead_letters(conn: &mut Conn, query: &Query<'_>) -> Outcome {
    let read = || -> Result<_, ApiError> {
        let limit = query.integer("limit")?.unwrap_or(100).clamp(1, 10_000);
        let offset = query.integer("offset")?.unwrap_or(0).max(0);
        Ok((query.text("queue")?, query.text("consumerGroup")?, query.text("partition")?, limit, offset))
    };
    let (queue, group, partition, limit, offset) = match read() {
        Ok(read) => read,
        Err(error) => return Ok(Err(error)),
    };
    let asked = inspect::DeadLetters {
        queue: queue.as_deref(),
        group: group.as_deref(),
        partition: partition.as_deref(),
        limit,
        offset,
    };
    Ok(Ok(Reply::json(200, inspect::dead_letters(conn, &asked)?)))
}

/// What an admin request comes to: an answer, a refusal, or a fault of the database.
pub type Outcome = Result<Result<Reply, ApiError>, StoreError>;

/// Runs an admin request on an admin thread.
pub fn with_database(
    app: &Arc<App>,
    reply: ReplyHandle,
    work: impl FnOnce(&App, &mut Conn) -> Outcome + Send + 'static,
) {
    let app2 = app.clone();
    app.cores.admin.run(move |conn| {
        let answer = match conn.and_then(|conn| work(&app2, conn)) {
            Ok(Ok(reply)) => reply,
            Ok(Err(error)) => Reply::from(&error),
            Err(error) => Reply::from(&store_error(&error)),
        };
        reply.send(answer);
    });
}

fn configure(app: &App, conn: &mut Conn, body: &[u8]) -> Outcome {
    let request = match parse_configure(body) {
        Ok(request) => request,
        Err(error) => return Ok(Err(error)),
    };
    let current = queue::find(conn, &request.queue)?;
    let options = request.apply(&current.as_ref().map_or_else(QueueOptions::default, |q| q.options.clone()));
    let (from_name, task_of_name) = namespace_and_task_of(&request.queue);
    let namespace = request.namespace.as_deref().or(current.as_ref().map(|q| q.namespace.as_str()));
    let namespace = namespace.unwrap_or(from_name).to_owned();
    let task = request.task.as_deref().or(current.as_ref().map(|q| q.task.as_str()));
    let task = task.unwrap_or(task_of_name).to_owned();
    let (selector, filter) = match current {
        Some(current) => request.bindings(current.selector, current.filter),
        None => request.bindings(None, None),
    };
    for (kind, asked) in [(Kind::Selector, &request.selector), (Kind::Filter, &request.filter)] {
        if let Some(Some(binding)) = asked
            && let Err(error) = app.library.check(kind, binding)
        {
            return Ok(Err(error));
        }
    }
    let id =
        queue::save(conn, &request.queue, &namespace, &task, &options, selector.as_ref(), filter.as_ref())?;
    app.cores.tell(|| Message::CatalogChanged);
    let answer = json!({
        "configured": true, "queueId": id, "partitionId": null, "queue": request.queue, "namespace": namespace,
        "task": task, "storage": "segments", "options": queue::options_json(&options, selector.as_ref(), filter.as_ref()),
    });
    Ok(Ok(Reply::json(200, answer.to_string())))
}

fn metrics(app: &App) -> String {
    let m = &app.cores.metrics;
    let uptime = app.started.elapsed().as_secs_f64();
    let (connections, idle, waiting) = app.cores.admin.state();
    let messages = m.pushed_messages.get() + m.popped_messages.get();
    let rate = |n: u64| if uptime > 0.0 { n as f64 / uptime } else { 0.0 };
    let (user, system) = cpu_seconds();
    json!({
        "uptime": uptime,
        "requests": {"total": m.requests.get(), "rate": rate(m.requests.get())},
        "messages": {"total": messages, "rate": rate(messages)},
        "database": {"poolSize": connections, "idleConnections": idle, "waitingRequests": waiting},
        "memory": {"rss": resident_bytes(), "heapTotal": 0, "heapUsed": 0, "external": 0, "arrayBuffers": 0},
        "cpu": {"user": user, "system": system},
    })
    .to_string()
}

fn prometheus(app: &App) -> Reply {
    let mut text = app.cores.metrics.text();
    text.push_str("# HELP waspmq_connections Connections open.\n# TYPE waspmq_connections gauge\n");
    text.push_str(&format!("waspmq_connections {}\n", (app.connections)()));
    plugins::prometheus(app, &mut text);
    Reply {
        status: 200,
        content_type: "text/plain; version=0.0.4",
        headers: Vec::new(),
        body: text.into_bytes(),
    }
}

/// Resident memory, from /proc; 0 where there is none.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()));
    pages.unwrap_or(0) * 4096
}

/// User and system time of this process in seconds.
fn cpu_seconds() -> (f64, f64) {
    // SAFETY: rusage is plain data, and getrusage fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    (seconds(usage.ru_utime), seconds(usage.ru_stime))
}
