//! Consumer groups: listings, seeks, deletion.

use std::sync::Arc;

use serde_json::{Value, json};

use super::admin::{Outcome, page, with_database};
use super::edge::Method;
use super::router::App;
use crate::broker::answer::{Reply, ReplyHandle};
use crate::broker::error::ApiError;
use crate::broker::query::Query;
use crate::broker::time;
use crate::store::{Conn, Micros, consumer_group, group};

/// A route about consumer groups.
pub enum Route {
    /// `GET /api/v1/consumer-groups`
    List,
    /// `GET /api/v1/consumer-groups/lagging`
    Lagging,
    /// `GET /api/v1/consumer-groups/:group`
    Detail(String),
    /// `DELETE /api/v1/consumer-groups/:group`, of a queue or of all
    Delete(String, Option<String>),
    /// `POST /api/v1/consumer-groups/:group/subscription`
    Subscription(String),
    /// `POST …/queues/:queue/seek` and `…/partitions/:partition/seek`: group, queue, partition
    Seek(String, String, Option<String>),
}

/// The route of a path, and its methods.
pub fn find(parts: &[&str], method: Method) -> Option<(Route, &'static str)> {
    let ["api", "v1", "consumer-groups", rest @ ..] = parts else { return None };
    let own = |text: &&str| (*text).to_owned();
    Some(match rest {
        [] => (Route::List, "GET, HEAD"),
        ["lagging"] if method != Method::Delete => (Route::Lagging, "GET, HEAD"),
        [group] if method == Method::Delete => (Route::Delete(own(group), None), "GET, HEAD, DELETE"),
        [group] => (Route::Detail(own(group)), "GET, HEAD, DELETE"),
        [group, "subscription"] => (Route::Subscription(own(group)), "POST"),
        [group, "queues", queue] => (Route::Delete(own(group), Some(own(queue))), "DELETE"),
        [group, "queues", queue, "seek"] => (Route::Seek(own(group), own(queue), None), "POST"),
        [group, "queues", queue, "partitions", partition, "seek"] => {
            (Route::Seek(own(group), own(queue), Some(own(partition))), "POST")
        }
        _ => return None,
    })
}

/// Handles a request about consumer groups.
pub fn handle(app: &Arc<App>, route: Route, query: &str, body: Vec<u8>, reply: ReplyHandle) {
    let query = query.to_owned();
    with_database(app, reply, move |app, conn| {
        let query = Query::new(&query);
        match route {
            Route::List => listing(&query, 10_000, |limit, offset| consumer_group::list(conn, limit, offset)),
            Route::Detail(group) => {
                listing(&query, 100_000, |limit, offset| consumer_group::detail(conn, &group, limit, offset))
            }
            Route::Lagging => {
                let seconds = match query.integer("minLagSeconds") {
                    Ok(seconds) => seconds.unwrap_or(3_600),
                    Err(error) => return Ok(Err(error)),
                };
                listing(&query, 1_000, |limit, offset| consumer_group::lagging(conn, seconds, limit, offset))
            }
            Route::Delete(group, queue) => delete(app, conn, &group, queue.as_deref(), &query),
            Route::Subscription(group) => subscription(conn, &group, &body),
            Route::Seek(group, queue, partition) => {
                seek(app, conn, &group, &queue, partition.as_deref(), &body)
            }
        }
    });
}

fn listing(
    query: &Query<'_>,
    default: i64,
    read: impl FnOnce(i64, i64) -> Result<Value, crate::store::StoreError>,
) -> Outcome {
    match page(query, default) {
        Ok((limit, offset)) => Ok(Ok(Reply::json(200, read(limit, offset)?.to_string()))),
        Err(error) => Ok(Err(error)),
    }
}

fn delete(app: &App, conn: &mut Conn, group: &str, queue: Option<&str>, query: &Query<'_>) -> Outcome {
    let metadata = match query.text("deleteMetadata").map(|text| text.map(|text| text.to_ascii_lowercase())) {
        Ok(None) => true,
        Ok(Some(text)) => !matches!(text.as_str(), "false" | "0" | "no"),
        Err(error) => return Ok(Err(error)),
    };
    let id = match queue {
        None => None,
        Some(name) => match group::find_queue(conn, name)? {
            Some(info) => Some(info.id),
            None => return Ok(Err(ApiError::not_found(format!("Queue not found: {name}")))),
        },
    };
    let (deleted, had) = consumer_group::delete(conn, id, group, metadata)?;
    app.cores.group_changed(queue, group, true);
    let mut answer = json!({"success": true, "consumerGroup": group, "deletedPartitions": deleted, "metadataDeleted": had});
    if let Some(queue) = queue {
        answer["queueName"] = queue.into();
    }
    Ok(Ok(Reply::json(200, answer.to_string())))
}

fn subscription(conn: &mut Conn, group: &str, body: &[u8]) -> Outcome {
    let body: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
    let Some(text) = body["subscriptionTimestamp"].as_str().filter(|text| !text.is_empty()) else {
        return Ok(Err(ApiError::bad_request("subscriptionTimestamp is required")));
    };
    let Some(at) = time::parse_rfc3339(text) else {
        return Ok(Err(ApiError::bad_request(format!(
            "subscriptionTimestamp must be an RFC 3339 time, got \"{text}\""
        ))));
    };
    let rows = consumer_group::set_subscription(conn, group, Micros(at))?;
    let answer = json!({"success": true, "consumerGroup": group, "newTimestamp": text, "rowsUpdated": rows});
    Ok(Ok(Reply::json(200, answer.to_string())))
}

fn seek(
    app: &App,
    conn: &mut Conn,
    group: &str,
    queue: &str,
    partition: Option<&str>,
    body: &[u8],
) -> Outcome {
    // Python's client sends no body for an empty object: for one partition that means the end.
    let body: Value = if body.is_empty() && partition.is_some() {
        json!({"toEnd": true})
    } else {
        match serde_json::from_slice(body) {
            Ok(Value::Object(object)) => Value::Object(object),
            _ => return Ok(Err(ApiError::bad_request("bad body: it must be an object"))),
        }
    };
    let to_end = match &body["toEnd"] {
        Value::Null => false,
        Value::Bool(to_end) => *to_end,
        other => return Ok(Err(ApiError::bad_request(format!("toEnd must be true or false, got {other}")))),
    };
    let at = match &body["timestamp"] {
        _ if to_end => None,
        Value::String(text) if !text.is_empty() => match time::parse_rfc3339(text) {
            Some(at) => Some(Micros(at)),
            None => {
                let message = format!("timestamp must be an RFC 3339 time, got \"{text}\"");
                return Ok(Err(ApiError::bad_request(message)));
            }
        },
        Value::Null | Value::String(_) => {
            return Ok(Err(ApiError::bad_request("Must specify toEnd=true or a timestamp")));
        }
        other => return Ok(Err(ApiError::bad_request(format!("timestamp must be a string, got {other}")))),
    };
    let Some(info) = group::find_queue(conn, queue)? else {
        return Ok(Err(ApiError::not_found("Queue not found or has no partitions")));
    };
    let id = match partition {
        None => None,
        Some(name) => match group::find_partition(conn, info.id, name)? {
            Some(id) => Some(id),
            None => return Ok(Err(ApiError::not_found("Partition not found"))),
        },
    };
    let moved = consumer_group::seek(conn, info.id, group, id, at)?;
    if moved == 0 {
        return Ok(Err(ApiError::not_found("Queue not found or has no partitions")));
    }
    app.cores.group_changed(Some(queue), group, false);
    let mut answer = json!({"success": true, "consumerGroup": group, "queueName": queue, "seekToEnd": to_end,
        "targetTimestamp": at.map(|at| time::format_micros(at.0))});
    match partition {
        Some(name) => {
            answer["partitionName"] = name.into();
            answer["updated"] = true.into();
        }
        None => answer["partitionsUpdated"] = moved.into(),
    }
    Ok(Ok(Reply::json(200, answer.to_string())))
}
