//! Selectors in a pop: a window of ready candidates is offered, with what is known
//! of them, and tried in the order that comes back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::engine::{Engine, GroupKey, group_mut};
use super::filtering::now_ms;
use super::group::GroupState;
use super::inbox::PopJob;
use super::link::Link;
use crate::broker::answer::Reply;
use crate::broker::error::ApiError;
use crate::broker::plugin::{Binding, OnError};
use crate::broker::pop::{Delivery, PopTarget, SelectorChoice};
use crate::plugins::candidate_selector::{Candidate, Request};
use crate::plugins::pool::Pool;
use crate::plugins::{Cause, PluginError};
use crate::store::plugin::facts;

/// Partitions of one group that facts are kept of.
const MAX_FACTS: usize = 50_000;

/// Partitions that an explanation names.
const EXPLAINED: usize = 20;

/// What selectors are told of a partition.
struct Fact {
    name: Arc<str>,
    /// When its oldest unconsumed message was stored, about.
    waiting_since: Instant,
    served_at: Option<Instant>,
    retries: u32,
}

/// Facts of a group's partitions. Empty as long as no selector asks.
#[derive(Default)]
pub struct FactTable {
    facts: HashMap<Uuid, Fact>,
    /// Complaints about a failing selector are a second apart.
    warned_at: Option<Instant>,
}

impl FactTable {
    /// A partition that had no work has some.
    pub fn filled(&mut self, partition: Uuid) {
        if let Some(fact) = self.facts.get_mut(&partition) {
            fact.waiting_since = Instant::now();
        }
    }

    /// Messages of a partition were claimed; the next one was stored about then.
    fn served(&mut self, partition: Uuid, newest_us: i64, remaining: i64) {
        let Some(fact) = self.facts.get_mut(&partition) else { return };
        let now = Instant::now();
        fact.served_at = Some(now);
        fact.retries = 0;
        if remaining > 0 {
            let age_ms = now_ms().saturating_sub(newest_us.max(0) as u64 / 1000);
            fact.waiting_since = now.checked_sub(Duration::from_millis(age_ms)).unwrap_or(now);
        }
    }

    /// A message of a partition failed.
    pub fn charged(&mut self, partition: Uuid) {
        if let Some(fact) = self.facts.get_mut(&partition) {
            fact.retries += 1;
        }
    }

    /// Looks up what is not known yet of these.
    fn complete(&mut self, link: &mut Link, group: &str, window: &[(Uuid, u64)]) {
        let unknown: Vec<Uuid> =
            window.iter().map(|(id, _)| *id).filter(|id| !self.facts.contains_key(id)).collect();
        if unknown.is_empty() {
            return;
        }
        if self.facts.len() + unknown.len() > MAX_FACTS {
            self.facts.clear();
        }
        // Without them the candidates are offered all the same.
        let found = link.call(|conn| facts(conn, group, &unknown)).unwrap_or_default();
        let now = Instant::now();
        let ago = |ms: i64| now.checked_sub(Duration::from_millis(ms.max(0) as u64)).unwrap_or(now);
        for (id, fact) in found {
            let fact = Fact {
                name: fact.name.as_str().into(),
                waiting_since: ago(fact.oldest_age_ms),
                served_at: fact.served_age_ms.map(ago),
                retries: fact.retries.max(0) as u32,
            };
            self.facts.insert(id, fact);
        }
    }
}

impl Engine {
    /// Remembers that messages of a partition were claimed.
    pub(super) fn served(&mut self, key: &GroupKey, delivery: &Delivery, remaining: i64) {
        if let Some(group) = group_mut(&mut self.groups, key) {
            let newest = delivery.segments.last().map_or(0, |slice| slice.created_us);
            group.facts.served(delivery.partition_id, newest, remaining);
        }
    }
}

/// Lets a pop's selector order the ready candidates. `None`: the built-in order. An
/// error is the answer of a pop whose binding says that it fails with its selector.
pub(super) fn select(
    pool: &mut Pool,
    link: &mut Link,
    group: &mut GroupState,
    key: &GroupKey,
    job: &mut PopJob,
    now: Instant,
) -> Result<Option<Vec<Uuid>>, Reply> {
    let info = group.info.as_ref();
    let binding: &Binding = match &job.request.selector {
        SelectorChoice::BuiltIn => return Ok(None),
        SelectorChoice::Own(own) => own,
        SelectorChoice::Bound => match info.and_then(|info| info.selector_of(&key.1)) {
            Some(bound) => bound,
            None => return Ok(None),
        },
    };
    if !group.ring.has_ready() {
        return Ok(None);
    }
    let (queue_name, priority) = info.map_or(("", 0), |info| (info.name.as_str(), info.priority));
    let window = group.ring.peek(pool.limits().selector_window);
    group.facts.complete(link, &key.1, &window);
    let age = |at: Instant| now.saturating_duration_since(at).as_millis() as u64;
    let candidates: Vec<Candidate<'_>> = window
        .iter()
        .map(|(id, backlog)| {
            let fact = group.facts.facts.get(id);
            Candidate {
                queue: queue_name,
                partition: fact.map_or("", |fact| &fact.name),
                backlog: *backlog,
                oldest_age_ms: fact.map_or(0, |fact| age(fact.waiting_since)),
                since_served_ms: fact.and_then(|fact| fact.served_at).map(age),
                retries: fact.map_or(0, |fact| fact.retries),
                queue_priority: priority,
            }
        })
        .collect();
    let hints: Vec<(&str, &str)> =
        job.request.hints.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let queue = if matches!(job.request.target, PopTarget::Discovery { .. }) { "" } else { queue_name };
    let request = Request {
        queue,
        consumer_group: &key.1,
        batch: job.request.batch,
        partitions: job.request.partitions,
        now_ms: now_ms(),
        hints: &hints,
    };
    let selected = pool.select(binding, (&key.0, &key.1), request, &candidates);
    if job.request.explain {
        let names = |order: &[u32]| -> Vec<&str> {
            order.iter().take(EXPLAINED).map(|index| candidates[*index as usize].partition).collect()
        };
        let mut told = serde_json::json!({"selector": binding.plugin, "queue": &*key.0, "offered": candidates.len(),
            "sha256": pool.version(&binding.plugin).map(|version| version.sha256.as_str())});
        match &selected {
            Ok(order) => {
                told["chosen"] = order.len().into();
                told["first"] = names(order).into();
            }
            Err(error) => told["error"] = error.text.as_str().into(),
        }
        job.explanation.push(told);
    }
    match selected {
        Ok(order) => Ok(Some(order.into_iter().map(|index| window[index as usize].0).collect())),
        Err(error) if binding.on_error == OnError::Fail => Err(Reply::from(&refusal(binding, &error))),
        Err(error) => {
            if group.facts.warned_at.is_none_or(|at| at.elapsed() >= Duration::from_secs(1)) {
                group.facts.warned_at = Some(now);
                tracing::warn!(plugin = %binding.plugin, queue = %key.0, group = %key.1, cause = error.cause.name(),
                    error = %error.text, "a selector failed; the built-in order is used");
            }
            Ok(None)
        }
    }
}

fn refusal(binding: &Binding, error: &PluginError) -> ApiError {
    ApiError {
        status: 503,
        code: if error.cause == Cause::Missing { "plugin_unavailable" } else { "plugin_failed" },
        message: format!(
            "selector \"{}\" failed ({}): {}; nothing was claimed, the call may be repeated",
            binding.plugin,
            error.cause.name(),
            error.text
        ),
    }
}
