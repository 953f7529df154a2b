//! Messages, dead letters and traces; the broker in numbers; maintenance.

use std::sync::Arc;

use serde_json::{Value, json};
use uuid::Uuid;

use super::admin::{Outcome, page, with_database};
use super::edge::Method;
use super::router::App;
use super::transaction;
use crate::broker::answer::{Reply, ReplyHandle};
use crate::broker::error::ApiError;
use crate::broker::push::check_name;
use crate::broker::query::Query;
use crate::broker::time;
use crate::store::messages::{self, Asked, DeadFilter};
use crate::store::{Conn, Micros, StoreError, hint, inspect, overview, trace};

/// Dead letters of one transaction of a bulk replay or deletion.
const BULK: i64 = 500;
/// Dead letters of one call.
const MAX_BULK: i64 = 100_000;

/// A route of this file.
pub enum Route {
    /// `GET /api/v1/messages`
    Messages,
    /// `DELETE /api/v1/messages/:partitionId/:transactionId`
    DeleteMessage(String, String),
    /// `POST /api/v1/messages/:partitionId/:transactionId/retry`
    RetryMessage(String, String),
    /// `POST /api/v1/dlq/retry`
    RetryDead,
    /// `DELETE /api/v1/dlq`
    DeleteDead,
    /// `POST /api/v1/traces`
    RecordTrace,
    /// `GET /api/v1/traces/:partitionId/:transactionId`
    Traces(String, String),
    /// `GET /api/v1/traces/by-name/:name`
    TracesByName(String),
    /// `GET /api/v1/traces/names`
    TraceNames,
    /// `GET /api/v1/resources/overview`
    Overview,
    /// `GET /api/v1/resources/namespaces` and `…/tasks`
    Grouped(bool),
    /// `GET /api/v1/resources/partitions`
    Partitions,
    /// `GET /api/v1/status`
    Status,
    /// `GET /api/v1/status/queues`
    StatusQueues,
    /// `GET /api/v1/status/queues/:queue`
    StatusQueue(String),
    /// Series that nobody measures yet: by name
    Series(&'static str),
    /// `POST /api/v1/stats/refresh`
    Refresh,
    /// `GET|POST /api/v1/system/maintenance` (of pushes) and `…/pop`: of pops, to be set
    Maintenance(bool, bool),
}

/// The route of a path, and its methods.
pub fn find(parts: &[&str], method: Method) -> Option<(Route, &'static str)> {
    const GET: &str = "GET, HEAD";
    let ["api", "v1", rest @ ..] = parts else { return None };
    let own = |text: &&str| (*text).to_owned();
    Some(match rest {
        ["messages"] => (Route::Messages, GET),
        ["messages", partition, id] if method == Method::Delete => {
            (Route::DeleteMessage(own(partition), own(id)), "GET, HEAD, DELETE")
        }
        ["messages", partition, id, "retry"] => (Route::RetryMessage(own(partition), own(id)), "POST"),
        ["dlq"] if method == Method::Delete => (Route::DeleteDead, "GET, HEAD, DELETE"),
        ["dlq", "retry"] => (Route::RetryDead, "POST"),
        ["traces"] => (Route::RecordTrace, "POST"),
        ["traces", "names"] => (Route::TraceNames, GET),
        ["traces", "by-name", name] => (Route::TracesByName(own(name)), GET),
        ["traces", partition, id] => (Route::Traces(own(partition), own(id)), GET),
        ["resources", "overview"] => (Route::Overview, GET),
        ["resources", "namespaces"] => (Route::Grouped(false), GET),
        ["resources", "tasks"] => (Route::Grouped(true), GET),
        ["resources", "partitions"] => (Route::Partitions, GET),
        ["status"] => (Route::Status, GET),
        ["status", "queues"] => (Route::StatusQueues, GET),
        ["status", "queues", queue] => (Route::StatusQueue(own(queue)), GET),
        ["status", "analytics"] => (Route::Series("analytics"), GET),
        ["analytics", "queue-lag"] => (Route::Series("queue-lag"), GET),
        ["analytics", "queue-ops"] => (Route::Series("queue-ops"), GET),
        ["analytics", "queue-parked-replicas"] => (Route::Series("queue-parked-replicas"), GET),
        ["analytics", "retention"] => (Route::Series("retention"), GET),
        ["analytics", "worker-metrics"] => (Route::Series("worker-metrics"), GET),
        ["analytics", "system-metrics"] => (Route::Series("system-metrics"), GET),
        ["stats", "refresh"] => (Route::Refresh, "POST"),
        ["system", "maintenance"] => (Route::Maintenance(false, method == Method::Post), "GET, HEAD, POST"),
        ["system", "maintenance", "pop"] => {
            (Route::Maintenance(true, method == Method::Post), "GET, HEAD, POST")
        }
        _ => return None,
    })
}

/// Handles a request of this file.
pub fn handle(app: &Arc<App>, route: Route, query: &str, body: Vec<u8>, reply: ReplyHandle) {
    let query = query.to_owned();
    with_database(app, reply, move |app, conn| {
        let query = Query::new(&query);
        let refused = |error: ApiError| -> Outcome { Ok(Err(error)) };
        let listed = |value: Value| -> Outcome { Ok(Ok(Reply::json(200, value.to_string()))) };
        match route {
            Route::Messages => messages(conn, &query),
            Route::DeleteMessage(partition, id) => {
                let deleted = match Uuid::parse_str(&partition) {
                    Ok(partition) => delete_dead(conn, &of_message(partition, &id))?,
                    Err(_) => 0,
                };
                Ok(Ok(message_answer(deleted > 0, &partition, &id, "Dead letter deleted")))
            }
            Route::RetryMessage(partition, id) => {
                let replayed = match Uuid::parse_str(&partition) {
                    Ok(parsed) => transaction::replay(app, conn, &of_message(parsed, &id))?,
                    Err(_) => Vec::new(),
                };
                match replayed.first() {
                    None => Ok(Ok(message_answer(false, &partition, &id, ""))),
                    Some(first) => {
                        let place = crate::store::group::place(
                            conn,
                            Uuid::parse_str(&partition).unwrap_or_default(),
                        )?;
                        let (queue, name) = place.unwrap_or_default();
                        listed(
                            json!({"success": true, "queue": queue, "partition": name, "replayedAs": first,
                            "replayed": replayed.len(), "dlqRowRemoved": true}),
                        )
                    }
                }
            }
            Route::RetryDead => bulk(&query, &body, |filter, limit| {
                let mut replayed = 0;
                while replayed < limit {
                    let filter = DeadFilter { limit: BULK.min(limit - replayed), ..*filter };
                    let n = transaction::replay(app, conn, &filter)?.len() as i64;
                    replayed += n;
                    if n == 0 {
                        break;
                    }
                }
                Ok(json!({"success": true, "replayed": replayed}))
            }),
            Route::DeleteDead => bulk(&query, &body, |filter, limit| {
                let mut deleted = 0;
                while deleted < limit {
                    let n = delete_dead(conn, &DeadFilter { limit: BULK.min(limit - deleted), ..*filter })?;
                    deleted += n;
                    if n == 0 {
                        break;
                    }
                }
                Ok(json!({"success": true, "deleted": deleted}))
            }),
            Route::RecordTrace => record_trace(conn, &body),
            Route::Traces(partition, id) => match Uuid::parse_str(&partition) {
                Ok(partition) => listed(trace::of_message(conn, partition, &id, 10_000)?),
                Err(_) => listed(json!({"traces": []})),
            },
            Route::TracesByName(name) => match page(&query, 100) {
                Ok((limit, offset)) => listed(trace::by_name(conn, &name, limit, offset)?),
                Err(error) => refused(error),
            },
            Route::TraceNames => match page(&query, 50) {
                Ok((limit, offset)) => listed(trace::names(conn, limit, offset)?),
                Err(error) => refused(error),
            },
            Route::Overview => {
                let mut value = overview::overview(conn)?;
                value["timestamp"] = now().into();
                listed(value)
            }
            Route::Grouped(by_task) => match page(&query, 10_000) {
                Ok((limit, offset)) => listed(overview::grouped(conn, by_task, limit, offset)?),
                Err(error) => refused(error),
            },
            Route::Partitions => match (page(&query, 610), query.text("queue")) {
                (Ok((limit, _)), Ok(queue)) => listed(overview::busiest(conn, queue.as_deref(), limit)?),
                (Err(error), _) | (_, Err(error)) => refused(error),
            },
            Route::Status => status(app, conn, &query),
            Route::StatusQueues => match page(&query, 100) {
                Ok((limit, offset)) => {
                    let mut value = inspect::queues(conn, limit, offset)?;
                    for queue in value["queues"].as_array_mut().into_iter().flatten() {
                        let counts = &mut queue["messages"];
                        let (total, pending) = (counts["total"].as_i64(), counts["pending"].as_i64());
                        counts["completed"] =
                            json!(total.zip(pending).map(|(total, pending)| total - pending));
                    }
                    value["pagination"] = json!({"limit": limit, "offset": offset});
                    listed(value)
                }
                Err(error) => refused(error),
            },
            Route::StatusQueue(name) => match page(&query, 10_000) {
                Ok((limit, offset)) => match inspect::queue(conn, &name, limit, offset)? {
                    Some(found) => listed(status_queue(&found)),
                    None => refused(ApiError::not_found("Queue not found")),
                },
                Err(error) => refused(error),
            },
            Route::Series(name) => match span(&query) {
                Ok(span) => listed(series(name, &span)),
                Err(error) => refused(error),
            },
            // Every number is counted when it is asked for.
            Route::Refresh => listed(json!({"success": true, "message": "statistics are always up to date"})),
            Route::Maintenance(pops, set) => maintenance(app, conn, pops, set.then_some(body.as_slice())),
        }
    });
}

fn now() -> String {
    time::format_micros(crate::core::filtering::now_ms() as i64 * 1_000)
}

// ---- messages and dead letters ------------------------------------------------------

/// A time among the parameters.
fn moment(query: &Query<'_>, name: &str) -> Result<Option<Micros>, ApiError> {
    match query.text(name)? {
        None => Ok(None),
        Some(text) => match time::parse_rfc3339(text.trim()) {
            Some(at) => Ok(Some(Micros(at))),
            None => Err(ApiError::bad_request(format!("{name} must be an RFC 3339 time, got \"{text}\""))),
        },
    }
}

fn messages(conn: &mut Conn, query: &Query<'_>) -> Outcome {
    let read = || -> Result<_, ApiError> {
        let limit = query.integer("limit")?.unwrap_or(200);
        let offset = query.integer("offset")?.unwrap_or(0);
        if !(1..=1_000).contains(&limit) {
            return Err(ApiError::bad_request(format!("limit must be between 1 and 1000, got {limit}")));
        }
        if !(0..=100_000).contains(&offset) {
            return Err(ApiError::bad_request(format!("offset must be between 0 and 100000, got {offset}")));
        }
        let status = query.text("status")?;
        if let Some(status) = &status
            && !["pending", "processing", "completed", "dead_letter"].contains(&&**status)
        {
            return Err(ApiError::bad_request(format!(
                "status must be pending, processing, completed or dead_letter, got \"{status}\""
            )));
        }
        let namespace = query.text("namespace")?.or(query.text("ns")?);
        let hour_ago = Micros((crate::core::filtering::now_ms() as i64 - 3_600_000) * 1_000);
        let from = moment(query, "from")?.unwrap_or(hour_ago);
        Ok((
            query.text("queue")?,
            query.text("partition")?,
            namespace,
            query.text("task")?,
            status,
            from,
            moment(query, "to")?,
            limit,
            offset,
        ))
    };
    let (queue, partition, namespace, task, status, from, to, limit, offset) = match read() {
        Ok(read) => read,
        Err(error) => return Ok(Err(error)),
    };
    let asked = Asked {
        queue: queue.as_deref(),
        partition: partition.as_deref(),
        namespace: namespace.as_deref(),
        task: task.as_deref(),
        from: Some(from),
        to,
        status: status.as_deref(),
        limit: limit as usize,
        offset: offset as usize,
    };
    Ok(Ok(Reply::json(200, messages::list(conn, &asked)?)))
}

fn of_message(partition: Uuid, id: &str) -> DeadFilter<'_> {
    DeadFilter { message: Some((partition, id)), limit: BULK, ..DeadFilter::default() }
}

fn message_answer(found: bool, partition: &str, id: &str, message: &str) -> Reply {
    if found {
        let body =
            json!({"success": true, "partitionId": partition, "transactionId": id, "message": message});
        return Reply::json(200, body.to_string());
    }
    let body = json!({"success": false, "partitionId": partition, "transactionId": id, "error": "Message not found",
        "code": "not_found", "message": "there is no dead letter of this message; live messages cannot be deleted or replayed"});
    Reply::json(404, body.to_string())
}

/// Deletes dead letters, in a transaction of their own.
fn delete_dead(conn: &mut Conn, filter: &DeadFilter<'_>) -> Result<i64, StoreError> {
    conn.run(|client| client.batch_execute("BEGIN"))?;
    let work = (|| {
        let dead = messages::lock_dead(conn, filter)?;
        let ids: Vec<Uuid> = dead.iter().map(|letter| letter.id).collect();
        messages::delete_dead(conn, &ids)
    })();
    match work {
        Ok(deleted) => {
            conn.run(|client| client.batch_execute("COMMIT"))?;
            Ok(deleted)
        }
        Err(error) => {
            if !error.is_connection() {
                let _ = conn.run(|client| client.batch_execute("ROLLBACK"));
            }
            Err(error)
        }
    }
}

/// Runs something on the dead letters that the parameters (or the body) describe.
fn bulk(
    query: &Query<'_>,
    body: &[u8],
    work: impl FnOnce(&DeadFilter<'_>, i64) -> Result<Value, StoreError>,
) -> Outcome {
    let body: Value = if body.is_empty() {
        Value::Null
    } else {
        match serde_json::from_slice(body) {
            Ok(body) => body,
            Err(error) => return Ok(Err(ApiError::bad_request(format!("bad body: {error}")))),
        }
    };
    let text = |name: &str| -> Result<Option<String>, ApiError> {
        match &body[name] {
            Value::Null => Ok(query.text(name)?.map(|text| text.into_owned())),
            Value::String(text) => Ok(Some(text.clone()).filter(|text| !text.is_empty())),
            other => Err(ApiError::bad_request(format!("{name} must be a string, got {other}"))),
        }
    };
    let moment = |name: &str| -> Result<Option<Micros>, ApiError> {
        let Some(text) = text(name)? else { return Ok(None) };
        let at = time::parse_rfc3339(text.trim()).ok_or_else(|| {
            ApiError::bad_request(format!("{name} must be an RFC 3339 time, got \"{text}\""))
        })?;
        Ok(Some(Micros(at)))
    };
    let read = || -> Result<_, ApiError> {
        let limit = match &body["limit"] {
            Value::Null => query.integer("limit")?.unwrap_or(MAX_BULK),
            value => value.as_i64().unwrap_or(-1),
        };
        if !(1..=MAX_BULK).contains(&limit) {
            return Err(ApiError::bad_request(format!(
                "limit must be between 1 and {MAX_BULK}, got {limit}"
            )));
        }
        Ok((
            text("queue")?,
            text("consumerGroup")?,
            text("partition")?,
            moment("from")?,
            moment("to")?,
            limit,
        ))
    };
    let (queue, group, partition, from, to, limit) = match read() {
        Ok(read) => read,
        Err(error) => return Ok(Err(error)),
    };
    let filter = DeadFilter {
        queue: queue.as_deref(),
        group: group.as_deref(),
        partition: partition.as_deref(),
        from,
        to,
        message: None,
        limit: BULK,
    };
    Ok(Ok(Reply::json(200, work(&filter, limit)?.to_string())))
}

// ---- traces ---------------------------------------------------------------------------

/// Most names of one trace.
const MAX_NAMES: usize = 32;
/// Most bytes of one trace's data.
const MAX_DATA: usize = 1024 * 1024;

fn record_trace(conn: &mut Conn, body: &[u8]) -> Outcome {
    let read = || -> Result<_, ApiError> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::bad_request(format!("bad body: {error}")))?;
        let text = |key: &str| body[key].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let (Some(transaction), Some(partition)) = (text("transactionId"), text("partitionId")) else {
            return Err(ApiError::bad_request("transactionId and partitionId are required"));
        };
        let partition = Uuid::parse_str(&partition)
            .map_err(|_| ApiError::bad_request(format!("partitionId must be a UUID, got \"{partition}\"")))?;
        let data = match body.get("data") {
            None | Some(Value::Null) => return Err(ApiError::bad_request("data is required")),
            Some(data) => data.to_string(),
        };
        if data.len() > MAX_DATA {
            return Err(ApiError::bad_request(format!("data has {} bytes; at most {MAX_DATA}", data.len())));
        }
        let names: Vec<String> = match &body["traceNames"] {
            Value::Null => Vec::new(),
            Value::String(name) => vec![name.clone()],
            Value::Array(names) => names
                .iter()
                .map(|name| name.as_str().map(str::to_owned))
                .collect::<Option<_>>()
                .ok_or_else(|| ApiError::bad_request("traceNames must be strings"))?,
            other => {
                return Err(ApiError::bad_request(format!(
                    "traceNames must be a list of strings, got {other}"
                )));
            }
        };
        if names.len() > MAX_NAMES {
            return Err(ApiError::bad_request(format!(
                "at most {MAX_NAMES} traceNames, got {}",
                names.len()
            )));
        }
        names.iter().try_for_each(|name| check_name("traceNames", name))?;
        let event = text("eventType").unwrap_or_else(|| "info".to_owned());
        check_name("eventType", &event)?;
        Ok((transaction, partition, text("consumerGroup"), event, data, names))
    };
    let (transaction, partition, group, event, data, names) = match read() {
        Ok(read) => read,
        Err(error) => return Ok(Err(error)),
    };
    let written = trace::Trace {
        partition,
        // PostgreSQL's texts have no NUL.
        transaction_id: &transaction.replace('\0', "\u{fffd}"),
        group: group.as_deref(),
        event_type: &event,
        data: &data,
        names: &names,
    };
    let id = trace::record(conn, &written)?;
    Ok(Ok(Reply::json(201, json!({"success": true, "traceId": id}).to_string())))
}

// ---- numbers ------------------------------------------------------------------------------

/// A time range, and the width of its buckets.
struct Span {
    from: String,
    to: String,
    bucket_minutes: i64,
}

fn span(query: &Query<'_>) -> Result<Span, ApiError> {
    let now = Micros(crate::core::filtering::now_ms() as i64 * 1_000);
    let to = moment(query, "to")?.unwrap_or(now);
    let from = moment(query, "from")?.unwrap_or(Micros(to.0 - 3_600_000_000));
    let minutes = (to.0 - from.0) / 60_000_000;
    let widths = [(60, 1), (360, 5), (1_440, 15), (10_080, 60)];
    let bucket_minutes = widths.iter().find(|(upto, _)| minutes <= *upto).map_or(360, |(_, width)| *width);
    Ok(Span { from: time::format_micros(from.0), to: time::format_micros(to.0), bucket_minutes })
}

/// Series over time are not recorded: the shapes that clients expect, with nothing in them.
fn series(name: &str, span: &Span) -> Value {
    let range = json!({"from": span.from, "to": span.to});
    let minutes = span.bucket_minutes;
    match name {
        "analytics" => {
            json!({"dataPoints": [], "interval": format!("{minutes} minutes"), "from": span.from, "to": span.to})
        }
        "queue-lag" => json!([]),
        "queue-ops" => json!({"timeRange": range, "bucketMinutes": minutes, "series": [], "queues": []}),
        "queue-parked-replicas" => {
            json!({"timeRange": range, "bucketMinutes": minutes, "series": [], "replicas": []})
        }
        "retention" => json!({"timeRange": range, "bucketMinutes": minutes, "series": [],
            "totals": {"retentionMsgs": null, "completedRetentionMsgs": null, "evictionMsgs": null, "totalMsgs": null}}),
        "worker-metrics" => {
            json!({"timeRange": range, "bucketMinutes": minutes, "pointCount": 0, "timeSeries": [],
            "workers": [], "queues": [], "summary": {}})
        }
        _ => {
            json!({"timeRange": range, "replicas": [], "replicaCount": 0, "bucketMinutes": minutes, "pointCount": 0})
        }
    }
}

fn status(app: &App, conn: &mut Conn, query: &Query<'_>) -> Outcome {
    let span = match span(query) {
        Ok(span) => span,
        Err(error) => return Ok(Err(error)),
    };
    let counts = overview::overview(conn)?;
    let mut value = overview::activity(conn)?;
    let m = &app.cores.metrics;
    value["timeRange"] = json!({"from": span.from, "to": span.to});
    value["bucketMinutes"] = span.bucket_minutes.into();
    value["pointCount"] = 0.into();
    value["throughput"] = json!([]);
    value["workers"] = json!([]);
    value["statsAge"] = 0.into();
    value["messages"] = counts["messages"].clone();
    let ratio = |messages: u64, calls: u64| (calls > 0).then(|| messages as f64 / calls as f64);
    value["messages"]["requests"] = json!({"push": m.pushes.get(), "pop": m.pops.get(), "ack": m.acks.get()});
    value["messages"]["batchEfficiency"] = json!({"push": ratio(m.pushed_messages.get(), m.pushes.get()),
        "pop": ratio(m.popped_messages.get(), m.pops.get()), "ack": ratio(m.acked_messages.get(), m.acks.get())});
    value["errors"] = json!({"dbErrors": m.database_errors.get(), "ackFailed": m.ack_failures.get(),
        "dlqMessages": m.dead_letters.get()});
    Ok(Ok(Reply::json(200, value.to_string())))
}

/// A queue's detail in the shape of the status page.
fn status_queue(found: &Value) -> Value {
    let options = &found["options"];
    let partitions: Vec<Value> = found["partitions"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|partition| {
            let mut partition = partition.clone();
            partition["messages"] = partition["stats"].clone();
            partition["lastActivity"] = partition["newestMessage"].clone();
            partition
        })
        .collect();
    json!({
        "queue": {"id": found["id"], "name": found["name"], "namespace": found["namespace"], "task": found["task"],
            "priority": options["priority"], "createdAt": found["createdAt"],
            "config": {"leaseTime": options["leaseTime"], "retryLimit": options["retryLimit"],
                "retryDelay": options["retryDelay"], "ttl": options["ttl"], "maxQueueSize": options["maxSize"],
                "deadLetterQueue": options["deadLetterQueue"]}},
        "partitions": partitions,
        "totals": {"messages": found["totals"]},
    })
}

// ---- maintenance --------------------------------------------------------------------------

fn maintenance(app: &App, conn: &mut Conn, pops: bool, body: Option<&[u8]>) -> Outcome {
    if let Some(body) = body {
        let body: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
        let Some(enabled) = body["enabled"].as_bool() else {
            return Ok(Err(ApiError::bad_request("enabled (boolean) is required")));
        };
        hint::set_maintenance(conn, pops, enabled)?;
    }
    let catalog = hint::catalog(conn)?;
    app.cores.maintenance.follow(&catalog);
    let said = |on: bool, what: &str| format!("{what} maintenance is {}", if on { "on" } else { "off" });
    let answer = if pops {
        json!({"popMaintenanceMode": catalog.pop_maintenance, "message": said(catalog.pop_maintenance, "pop")})
    } else {
        json!({"maintenanceMode": catalog.push_maintenance, "popMaintenanceMode": catalog.pop_maintenance,
            "bufferedMessages": 0, "bufferHealthy": true, "message": said(catalog.push_maintenance, "push")})
    };
    Ok(Ok(Reply::json(200, answer.to_string())))
}
