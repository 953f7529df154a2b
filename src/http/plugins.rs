//! Plugins as operators see them: what is loaded, what it does, what binds it, and
//! trying it on messages that are there.

use std::sync::Arc;

use serde_json::{Value, json};
use uuid::Uuid;

use super::admin::{Outcome, with_database};
use super::edge::Method;
use super::router::App;
use crate::broker::answer::{Reply, ReplyHandle};
use crate::broker::error::ApiError;
use crate::broker::plugin::{Binding, Kind, Verdict};
use crate::broker::pop::QUEUE_MODE;
use crate::broker::{segment, time};
use crate::core::filtering::now_ms;
use crate::core::inbox::Message;
use crate::plugins::pool::Pool;
use crate::plugins::{PluginError, candidate_selector, message_filter};
use crate::store::{Conn, Micros, StoreError, group, plugin};

/// Most messages of a dry run.
const MAX_DRY_RUN: i64 = 1_000;
/// Messages of a dry run that does not say how many.
const DRY_RUN: i64 = 100;

/// A route about plugins.
pub enum Route {
    /// `GET /api/v1/plugins`
    List,
    /// `POST /api/v1/plugins/reload`
    Reload,
    /// `POST /api/v1/plugins/:name/dry-run`
    DryRun(String),
    /// `GET /api/v1/consumer-groups/:group/queues/:queue/filter` and `…/selector`
    Bound(Kind, String, String),
    /// `PUT`
    Bind(Kind, String, String),
    /// `DELETE`
    Unbind(Kind, String, String),
}

/// The route of a path, and its methods.
pub fn find(parts: &[&str], method: Method) -> Option<(Route, &'static str)> {
    Some(match parts {
        ["api", "v1", "plugins"] => (Route::List, "GET, HEAD"),
        ["api", "v1", "plugins", "reload"] => (Route::Reload, "POST"),
        ["api", "v1", "plugins", name, "dry-run"] => (Route::DryRun((*name).to_owned()), "POST"),
        ["api", "v1", "consumer-groups", group, "queues", queue, kind @ ("filter" | "selector")] => {
            let kind = if *kind == "filter" { Kind::Filter } else { Kind::Selector };
            let (group, queue) = ((*group).to_owned(), (*queue).to_owned());
            let route = match method {
                Method::Put => Route::Bind(kind, group, queue),
                Method::Delete => Route::Unbind(kind, group, queue),
                _ => Route::Bound(kind, group, queue),
            };
            (route, "GET, HEAD, PUT, DELETE")
        }
        _ => return None,
    })
}

/// Handles a request about plugins.
pub fn handle(app: &Arc<App>, route: Route, body: Vec<u8>, reply: ReplyHandle) {
    match route {
        Route::List => with_database(app, reply, |app, conn| {
            Ok(Ok(Reply::json(200, list(app, plugin::all_bindings(conn)?).to_string())))
        }),
        Route::Reload => {
            let app2 = app.clone();
            app.cores.admin.run(move |conn| {
                app2.library.scan(true);
                let loaded = app2.library.current();
                app2.cores.tell(|| Message::Plugins(loaded.clone()));
                // What binds them is shown as well, if the database tells.
                let bindings = conn.and_then(plugin::all_bindings).unwrap_or_default();
                reply.send(Reply::json(200, list(&app2, bindings).to_string()));
            });
        }
        Route::Bound(kind, group, queue) => with_database(app, reply, move |_, conn| {
            let Some(info) = group::find_queue(conn, &queue)? else { return Ok(Err(no_queue(&queue))) };
            let own = plugin::find(conn, info.id, &group, kind)?;
            let of_queue = if kind == Kind::Filter { info.filter } else { info.selector };
            let source = match (&own, &of_queue) {
                (Some(_), _) => json!("group"),
                (None, Some(_)) => json!("queue"),
                (None, None) => Value::Null,
            };
            let effective = own.as_ref().or(of_queue.as_deref());
            let binding = effective.map_or(Value::Null, |binding| binding.to_json(kind));
            Ok(Ok(shown(kind, &group, &queue, json!({kind.name(): binding, "source": source}))))
        }),
        Route::Bind(kind, group, queue) => with_database(app, reply, move |app, conn| {
            let binding = serde_json::from_slice::<Value>(&body)
                .map_err(|error| ApiError::bad_request(format!("bad body: {error}")))
                .and_then(|value| Binding::parse(kind, &value))
                .and_then(|binding| {
                    binding.ok_or_else(|| ApiError::bad_request("a binding is required; DELETE removes one"))
                });
            let binding =
                match binding.and_then(|binding| app.library.check(kind, &binding).map(|()| binding)) {
                    Ok(binding) => binding,
                    Err(error) => return Ok(Err(error)),
                };
            let Some(info) = group::find_queue(conn, &queue)? else { return Ok(Err(no_queue(&queue))) };
            plugin::bind(conn, info.id, &group, kind, &binding)?;
            app.cores.tell(|| Message::CatalogChanged);
            Ok(Ok(shown(
                kind,
                &group,
                &queue,
                json!({kind.name(): binding.to_json(kind), "source": "group"}),
            )))
        }),
        Route::Unbind(kind, group, queue) => with_database(app, reply, move |app, conn| {
            let Some(info) = group::find_queue(conn, &queue)? else { return Ok(Err(no_queue(&queue))) };
            let deleted = plugin::unbind(conn, info.id, &group, kind)?;
            app.cores.tell(|| Message::CatalogChanged);
            Ok(Ok(shown(kind, &group, &queue, json!({"deleted": deleted}))))
        }),
        Route::DryRun(name) => with_database(app, reply, move |app, conn| dry_run(app, conn, &name, &body)),
    }
}

fn no_queue(name: &str) -> ApiError {
    ApiError::not_found(format!("Queue not found: {name}"))
}

fn shown(_: Kind, group: &str, queue: &str, mut more: Value) -> Reply {
    more["queue"] = queue.into();
    more["consumerGroup"] = group.into();
    Reply::json(200, more.to_string())
}

fn list(app: &App, bindings: Vec<(String, Kind, String, Option<String>)>) -> Value {
    let plugins: Vec<Value> = app
        .library
        .shown()
        .into_iter()
        .map(|plugin| {
            let bound: Vec<Value> = bindings
                .iter()
                .filter(|(name, ..)| *name == plugin.name)
                .map(|(_, kind, queue, group)| json!({"kind": kind.name(), "queue": queue, "consumerGroup": group}))
                .collect();
            let version = plugin.version.as_ref();
            let status = match (version, &plugin.error) {
                (Some(_), None) => "loaded",
                (Some(_), Some(_)) => "old_version",
                (None, _) => "failed",
            };
            let mut shown = json!({
                "name": plugin.name, "file": plugin.file.display().to_string(), "status": status, "error": plugin.error,
                "kinds": version.map(|version| version.kinds()).unwrap_or_default(),
                "sha256": version.map(|version| version.sha256.clone()), "bytes": version.map(|version| version.bytes),
                "readyMs": version.map(|version| version.ready_in.as_millis() as u64),
                "cached": version.map(|version| version.cached), "bindings": bound,
            });
            if let (Some(shown), Value::Object(stats)) = (shown.as_object_mut(), plugin.stats.to_json()) {
                shown.extend(stats);
            }
            shown
        })
        .collect();
    json!({"plugins": plugins})
}

/// Appends what plugins do to the metrics.
pub fn prometheus(app: &App, out: &mut String) {
    let plugins = app.library.shown();
    if plugins.is_empty() {
        return;
    }
    out.push_str("# TYPE waspmq_plugin_calls_total counter\n# TYPE waspmq_plugin_errors_total counter\n");
    out.push_str(
        "# TYPE waspmq_plugin_verdicts_total counter\n# TYPE waspmq_plugin_call_seconds histogram\n",
    );
    for plugin in plugins {
        // A name that is none (a badly named file) could break the format.
        if crate::broker::plugin::is_plugin_name(&plugin.name) {
            plugin.stats.to_prometheus(&plugin.name, out);
        }
    }
}

/// What a dry run is about.
struct DryRun {
    queue: String,
    partition: Option<String>,
    group: String,
    from: Option<i64>,
    limit: i64,
    settings: Option<Value>,
}

impl DryRun {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::bad_request(format!("bad body: {error}")))?;
        let text = |key: &str| match &body[key] {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text.clone())),
            other => Err(ApiError::bad_request(format!("{key} must be a string, got {other}"))),
        };
        let limit = match &body["limit"] {
            Value::Null => DRY_RUN,
            value => value.as_i64().filter(|n| (1..=MAX_DRY_RUN).contains(n)).ok_or_else(|| {
                ApiError::bad_request(format!("limit must be between 1 and {MAX_DRY_RUN}, got {value}"))
            })?,
        };
        let from = match text("from")? {
            None => None,
            Some(text) => Some(time::parse_rfc3339(&text).ok_or_else(|| {
                ApiError::bad_request(format!("from must be an RFC 3339 time, got \"{text}\""))
            })?),
        };
        Ok(Self {
            queue: text("queue")?.ok_or_else(|| ApiError::bad_request("queue is required"))?,
            partition: text("partition")?,
            group: text("consumerGroup")?.unwrap_or_else(|| QUEUE_MODE.to_owned()),
            from,
            limit,
            settings: body.get("settings").filter(|value| !value.is_null()).cloned(),
        })
    }
}

fn dry_run(app: &App, conn: &mut Conn, name: &str, body: &[u8]) -> Outcome {
    let asked = match DryRun::parse(body) {
        Ok(asked) => asked,
        Err(error) => return Ok(Err(error)),
    };
    let loaded = app.library.current();
    let Some(version) = loaded.get(name) else {
        return Ok(Err(ApiError::not_found(format!("there is no plugin \"{name}\""))));
    };
    let Some(info) = group::find_queue(conn, &asked.queue)? else { return Ok(Err(no_queue(&asked.queue))) };
    let mut answer =
        json!({"plugin": name, "sha256": version.sha256, "queue": asked.queue, "consumerGroup": asked.group});
    let mut pool = Pool::new(app.library.host.clone(), app.library.limits.clone(), loaded.clone());
    for kind in [Kind::Filter, Kind::Selector] {
        if !version.is(kind) {
            continue;
        }
        let bound =
            if kind == Kind::Filter { info.filter_of(&asked.group) } else { info.selector_of(&asked.group) };
        let binding = match (&asked.settings, bound) {
            (None, Some(bound)) if bound.plugin == name => (**bound).clone(),
            (settings, _) => {
                let value = json!({"plugin": name, "settings": settings});
                match Binding::parse(kind, &value) {
                    Ok(Some(binding)) => binding,
                    Ok(None) => continue,
                    Err(error) => return Ok(Err(error)),
                }
            }
        };
        let result = match kind {
            Kind::Filter => dry_filter(conn, &mut pool, &binding, &info, &asked)?,
            Kind::Selector => dry_select(conn, &mut pool, &binding, &info, &asked)?,
        };
        match result {
            Ok(value) => answer[if kind == Kind::Filter { "messages" } else { "candidates" }] = value,
            Err(error) => {
                return Ok(Err(ApiError {
                    status: 400,
                    code: "plugin_failed",
                    message: format!("{} \"{name}\" failed ({}): {error}", kind.name(), error.cause.name()),
                }));
            }
        }
    }
    Ok(Ok(Reply::json(200, answer.to_string())))
}

fn dry_filter(
    conn: &mut Conn,
    pool: &mut Pool,
    binding: &Binding,
    info: &group::QueueInfo,
    asked: &DryRun,
) -> Result<Result<Value, PluginError>, StoreError> {
    let (queue, group): (Arc<str>, Arc<str>) = (asked.queue.as_str().into(), asked.group.as_str().into());
    let segments =
        plugin::retained(conn, info.id, asked.partition.as_deref(), asked.from.map(Micros), asked.limit)?;
    let mut judged = Vec::new();
    for (partition, segments) in segments {
        let mut unpacked = Vec::new();
        for stored in &segments {
            if let Ok(raw) = segment::unpack(stored.codec, &stored.data) {
                unpacked.push((stored.created.0, raw.into_owned()));
            }
        }
        let left = asked.limit as usize - judged.len().min(asked.limit as usize);
        let all: Vec<_> = unpacked
            .iter()
            .flat_map(|(created, raw)| segment::frames(raw).flatten().map(move |frame| (*created, frame)))
            .take(left)
            .collect();
        for (n, chunk) in all.chunks(256).enumerate() {
            let ids: Vec<String> = chunk.iter().map(|(_, frame)| frame.message_id.to_string()).collect();
            let messages: Vec<message_filter::Message<'_>> = chunk
                .iter()
                .zip(&ids)
                .map(|((created, frame), id)| message_filter::Message {
                    id,
                    transaction_id: frame.own_transaction_id.unwrap_or(id),
                    created_ms: (*created).max(0) as u64 / 1000,
                    payload: frame.payload,
                })
                .collect();
            let context = message_filter::Context {
                queue: &queue,
                partition: &partition,
                consumer_group: &group,
                now_ms: now_ms(),
                attempt: 1,
                more: (n + 1) * 256 < all.len(),
            };
            let verdicts = match pool.filter(binding, (&queue, &group), context, &messages) {
                Ok(verdicts) => verdicts,
                Err(error) => return Ok(Err(error)),
            };
            for (message, verdict) in messages.iter().zip(verdicts) {
                let mut entry = json!({"partition": partition, "id": message.id, "transactionId": message.transaction_id,
                    "createdAt": time::format_micros(message.created_ms as i64 * 1000)});
                let (name, more) = describe(&verdict);
                entry["verdict"] = name.into();
                if let Some((key, value)) = more {
                    entry[key] = value;
                }
                judged.push(entry);
            }
        }
        if judged.len() >= asked.limit as usize {
            break;
        }
    }
    Ok(Ok(judged.into()))
}

/// A verdict by name, and what else it says.
pub fn describe(verdict: &Verdict) -> (&'static str, Option<(&'static str, Value)>) {
    match verdict {
        Verdict::Deliver => ("deliver", None),
        Verdict::Skip => ("skip", None),
        Verdict::Hold(ms) => ("hold", Some(("holdMs", (*ms).into()))),
        Verdict::DeadLetter(reason) => ("dead-letter", Some(("reason", reason.as_str().into()))),
    }
}

fn dry_select(
    conn: &mut Conn,
    pool: &mut Pool,
    binding: &Binding,
    info: &group::QueueInfo,
    asked: &DryRun,
) -> Result<Result<Value, PluginError>, StoreError> {
    let window = pool.limits().selector_window.min(asked.limit as usize);
    let (mut pending, mut after) = (Vec::new(), None);
    while pending.len() < window {
        let (found, next) = group::pending_page(conn, info.id, &asked.group, after.as_deref(), 1_000)?;
        pending.extend(found);
        match next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    pending.truncate(window);
    let ids: Vec<Uuid> = pending.iter().map(|partition| partition.id).collect();
    let facts = plugin::facts(conn, &asked.group, &ids)?;
    let candidates: Vec<candidate_selector::Candidate<'_>> = pending
        .iter()
        .map(|partition| {
            let fact = facts.get(&partition.id);
            candidate_selector::Candidate {
                queue: &info.name,
                partition: &partition.name,
                backlog: partition.pending.max(1) as u64,
                oldest_age_ms: fact.map_or(0, |fact| fact.oldest_age_ms.max(0) as u64),
                since_served_ms: fact.and_then(|fact| fact.served_age_ms).map(|ms| ms.max(0) as u64),
                retries: fact.map_or(0, |fact| fact.retries.max(0) as u32),
                queue_priority: info.priority,
            }
        })
        .collect();
    let request = candidate_selector::Request {
        queue: &info.name,
        consumer_group: &asked.group,
        batch: 200,
        partitions: 1,
        now_ms: now_ms(),
        hints: &[],
    };
    let (queue, group): (Arc<str>, Arc<str>) = (asked.queue.as_str().into(), asked.group.as_str().into());
    Ok(pool.select(binding, (&queue, &group), request, &candidates).map(|order| {
        order
            .into_iter()
            .map(|index| {
                let candidate = &candidates[index as usize];
                json!({"partition": candidate.partition, "backlog": candidate.backlog,
                    "oldestAgeMs": candidate.oldest_age_ms, "sinceServedMs": candidate.since_served_ms,
                    "retries": candidate.retries})
            })
            .collect()
    }))
}
