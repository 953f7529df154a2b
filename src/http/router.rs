//! Routes: a request's path becomes work for a core, or for the admin side.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use percent_encoding::percent_decode_str;

use super::admin;
use super::edge::{Method, Request};
use crate::broker::answer::{Reply, ReplyHandle};
use crate::broker::error::ApiError;
use crate::broker::plugin::Kind;
use crate::broker::pop::{PopDefaults, PopRequest, PopTarget, SelectorChoice};
use crate::broker::query::Query;
use crate::broker::{ack, push};
use crate::core::Cores;
use crate::plugins::library::Library;

/// Bodies above this are parsed off the I/O thread, in bytes.
const LARGE_BODY: usize = 256 * 1024;

/// What the routes need.
pub struct App {
    /// Where the work goes.
    pub cores: Cores,
    /// The plugins.
    pub library: Arc<Library>,
    /// From the command line.
    pub pop_defaults: PopDefaults,
    /// When the broker started.
    pub started: Instant,
    /// Connections open at this moment, for the metrics.
    pub connections: Box<dyn Fn() -> usize + Send + Sync>,
}

/// A route, with what its path names.
enum Route {
    Push,
    Pop(PopTarget),
    Ack,
    AckBatch,
    Extend(String),
    Admin(admin::Route),
}

/// Handles one request. Never blocks.
pub fn handle(app: &Arc<App>, request: Request) {
    app.cores.metrics.requests.inc();
    let Request { method, target, body, reply, .. } = request;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let (route, allowed) = match find(path, method) {
        Ok(found) => found,
        Err(error) => {
            reply.send(Reply::from(&error));
            return;
        }
    };
    if !allowed.split(", ").any(|name| name == name_of(method)) {
        let error = ApiError {
            status: 405,
            code: "method_not_allowed",
            message: format!("{} is not allowed here; allowed: {allowed}", name_of(method)),
        };
        let mut answer = Reply::from(&error);
        answer.headers.push(("Allow", allowed.to_owned()));
        reply.send(answer);
        return;
    }
    let maintenance = &app.cores.maintenance;
    match route {
        Route::Push if maintenance.push.load(Ordering::Relaxed) => {
            let error = ApiError {
                status: 503,
                code: "maintenance",
                message: "pushes are in maintenance, nothing was stored; repeat the call later".to_owned(),
            };
            reply.send(Reply::from(&error));
        }
        Route::Pop(_) if maintenance.pop.load(Ordering::Relaxed) => drop(reply.send(Reply::no_content())),
        Route::Pop(pop) => match PopRequest::parse(pop, &Query::new(query), &app.pop_defaults) {
            Ok(request) => match own_selector_missing(app, &request) {
                None => app.cores.pop(request, reply),
                Some(error) => drop(reply.send(Reply::from(&error))),
            },
            Err(error) => drop(reply.send(Reply::from(&error))),
        },
        Route::Push if body.len() > LARGE_BODY => {
            let app2 = app.clone();
            app.cores.admin.run_without_database(move || submit_push(&app2, &body, reply));
        }
        Route::Push => submit_push(app, &body, reply),
        Route::Ack => submit_ack(app, ack::parse_single(&body), reply),
        Route::AckBatch => submit_ack(app, ack::parse_batch(&body), reply),
        Route::Extend(lease) => match ack::parse_extend(&body) {
            Ok(seconds) => app.cores.extend(lease, seconds, reply),
            Err(error) => drop(reply.send(Reply::from(&error))),
        },
        Route::Admin(route) => admin::handle(app, route, query, body, reply),
    }
}

/// A pop that names a selector which is not loaded is mistaken, not unlucky.
fn own_selector_missing(app: &App, request: &PopRequest) -> Option<ApiError> {
    let SelectorChoice::Own(own) = &request.selector else { return None };
    match app.library.current().get(own.plugin.as_str()) {
        Some(version) if version.is(Kind::Selector) => None,
        Some(_) => {
            Some(ApiError::bad_request(format!("selector: plugin \"{}\" is not a selector", own.plugin)))
        }
        None => Some(ApiError {
            status: 400,
            code: "unknown_plugin",
            message: format!("selector: there is no plugin \"{}\"", own.plugin),
        }),
    }
}

fn submit_push(app: &App, body: &[u8], reply: ReplyHandle) {
    match push::parse(body, None) {
        Ok(request) if request.items == 0 => drop(reply.send(Reply::json(201, "[]"))),
        Ok(request) => app.cores.push(request, reply),
        Err(error) => drop(reply.send(Reply::from(&error))),
    }
}

fn submit_ack(app: &App, request: Result<ack::AckRequest, ApiError>, reply: ReplyHandle) {
    match request {
        Ok(request) if request.items.is_empty() => drop(reply.send(Reply::json(200, "[]"))),
        Ok(request) => app.cores.ack(request, reply),
        Err(error) => drop(reply.send(Reply::from(&error))),
    }
}

fn name_of(method: Method) -> &'static str {
    match method {
        Method::Get => "GET",
        Method::Head => "HEAD",
        Method::Post => "POST",
        Method::Put => "PUT",
        Method::Delete => "DELETE",
        Method::Patch => "PATCH",
        Method::Options => "OPTIONS",
        Method::Other => "this method",
    }
}

/// The route of a path, and its methods. Segments are decoded one by one, so that a
/// name may contain an encoded slash.
fn find(path: &str, method: Method) -> Result<(Route, &'static str), ApiError> {
    let mut segments = Vec::new();
    for segment in path.trim_start_matches('/').split('/') {
        let decoded = percent_decode_str(segment).decode_utf8();
        segments.push(decoded.map_err(|_| ApiError::bad_request("the path is not valid UTF-8"))?);
    }
    let parts: Vec<&str> = segments.iter().map(|segment| &**segment).collect();
    let (route, allowed) = match parts.as_slice() {
        ["api", "v1", "push"] => (Route::Push, "POST"),
        ["api", "v1", "pop"] => (Route::Pop(PopTarget::Discovery { namespace: None, task: None }), "GET"),
        ["api", "v1", "pop", "queue", queue] => (Route::Pop(PopTarget::Queue((*queue).to_owned())), "GET"),
        ["api", "v1", "pop", "queue", queue, "partition", partition] => {
            (Route::Pop(PopTarget::Partition((*queue).to_owned(), (*partition).to_owned())), "GET")
        }
        ["api", "v1", "ack"] => (Route::Ack, "POST"),
        ["api", "v1", "ack", "batch"] => (Route::AckBatch, "POST"),
        ["api", "v1", "lease", lease, "extend"] => (Route::Extend((*lease).to_owned()), "POST"),
        parts => match admin::find(parts, method) {
            Some((route, allowed)) => (Route::Admin(route), allowed),
            None => return Err(ApiError::not_found(format!("no such route: {path}"))),
        },
    };
    Ok((route, allowed))
}
