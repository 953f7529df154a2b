//! A core's warm instances, and the calls: one instance per binding, made when it is
//! first needed, thrown away after a failure.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use wasmtime::Store;

use super::filter_world::Filter;
use super::host::{EPOCH, Guest, Host, Scope, failure};
use super::library::{Loaded, Version};
use super::selector_world::Selector;
use super::{Cause, PluginError, PluginLimits, candidate_selector, cut, message_filter};
use crate::broker::plugin::{Binding, Kind, Verdict};

/// An instance may take so long to be made; a language runtime starts in `init`.
const INIT_DEADLINE: Duration = Duration::from_secs(2);
/// Failures in a row after which a plugin is only called now and then ...
const PATIENCE: u32 = 10;
/// ... namely once in this time.
const PAUSE: Duration = Duration::from_secs(1);
/// Most instances of one core.
const MAX_INSTANCES: usize = 64;
/// An instance that was not used for this long is dropped when another one is needed.
const IDLE: Duration = Duration::from_secs(300);
/// Most states of one core.
const MAX_SCOPES: usize = 10_000;
/// Longest reason of a dead letter that is kept, in bytes.
const MAX_REASON: usize = 4096;

/// A plugin, a queue and a group.
type ScopeKey = (Arc<str>, Arc<str>, Arc<str>);

enum Live {
    Selector(Store<Guest>, Selector),
    Filter(Store<Guest>, Filter),
}

struct Slot {
    version: Arc<Version>,
    live: Option<Live>,
    /// Calls that failed in a row.
    failures: u32,
    /// Not before.
    paused_until: Option<Instant>,
    used_at: Instant,
}

/// See the module.
pub struct Pool {
    host: Arc<Host>,
    limits: PluginLimits,
    loaded: Arc<Loaded>,
    slots: HashMap<u64, Slot>,
    scopes: HashMap<ScopeKey, Arc<Mutex<Scope>>>,
}

impl Pool {
    /// Without instances.
    pub fn new(host: Arc<Host>, limits: PluginLimits, loaded: Arc<Loaded>) -> Self {
        Self { host, limits, loaded, slots: HashMap::new(), scopes: HashMap::new() }
    }

    /// The limits of its calls.
    pub fn limits(&self) -> &PluginLimits {
        &self.limits
    }

    /// Other versions may have been loaded: what runs is replaced by its next call.
    pub fn replace(&mut self, loaded: Arc<Loaded>) {
        self.slots.retain(|_, slot| loaded.contains_key(&slot.version.name));
        self.loaded = loaded;
    }

    /// The version of a plugin that is called now.
    pub fn version(&self, plugin: &str) -> Option<&Arc<Version>> {
        self.loaded.get(plugin)
    }

    /// Makes an instance, to see whether that works.
    pub fn try_init(&mut self, kind: Kind, binding: &Binding) -> Result<(), PluginError> {
        self.ready(kind, binding).map(|_| ())
    }

    /// Orders candidates: indices, checked.
    pub fn select(
        &mut self,
        binding: &Binding,
        (queue, group): (&Arc<str>, &Arc<str>),
        request: candidate_selector::Request<'_>,
        candidates: &[candidate_selector::Candidate<'_>],
    ) -> Result<Vec<u32>, PluginError> {
        let scope = self.scope(&binding.plugin, queue, group);
        let deadline = self.limits.selector_deadline;
        let started = Instant::now();
        let result = match self.ready(Kind::Selector, binding) {
            Ok(slot) => {
                let Some(Live::Selector(store, selector)) = &mut slot.live else {
                    unreachable!("it was made ready as a selector")
                };
                store.data_mut().scope = scope;
                store.set_epoch_deadline(epochs(deadline));
                let guest = selector.waspmq_plugin_candidate_selector();
                match guest.call_select(&mut *store, request, candidates) {
                    Ok(Ok(order)) => checked_order(order, candidates.len()),
                    Ok(Err(text)) => Err(PluginError { cause: Cause::Error, text: cut(&text).to_owned() }),
                    Err(error) => Err(failure(&error)),
                }
            }
            Err(error) => return Err(error),
        };
        if let (Ok(order), Some(version)) = (&result, self.loaded.get(binding.plugin.as_str())) {
            use std::sync::atomic::Ordering::Relaxed;
            version.stats.offered.fetch_add(candidates.len() as u64, Relaxed);
            version.stats.chosen.fetch_add(order.len() as u64, Relaxed);
        }
        self.finish(binding, started, result)
    }

    /// Judges messages of one partition: one verdict for each.
    pub fn filter(
        &mut self,
        binding: &Binding,
        (queue, group): (&Arc<str>, &Arc<str>),
        context: message_filter::Context<'_>,
        messages: &[message_filter::Message<'_>],
    ) -> Result<Vec<Verdict>, PluginError> {
        let scope = self.scope(&binding.plugin, queue, group);
        let deadline = self.limits.filter_deadline;
        let started = Instant::now();
        let result = match self.ready(Kind::Filter, binding) {
            Ok(slot) => {
                let Some(Live::Filter(store, filter)) = &mut slot.live else {
                    unreachable!("it was made ready as a filter")
                };
                store.data_mut().scope = scope;
                store.set_epoch_deadline(epochs(deadline));
                let guest = filter.waspmq_plugin_message_filter();
                match guest.call_filter(&mut *store, context, messages) {
                    Ok(Ok(verdicts)) if verdicts.len() == messages.len() => {
                        Ok(verdicts.into_iter().map(verdict).collect())
                    }
                    Ok(Ok(verdicts)) => Err(PluginError {
                        cause: Cause::Answer,
                        text: format!("it gave {} verdicts for {} messages", verdicts.len(), messages.len()),
                    }),
                    Ok(Err(text)) => Err(PluginError { cause: Cause::Error, text: cut(&text).to_owned() }),
                    Err(error) => Err(failure(&error)),
                }
            }
            Err(error) => return Err(error),
        };
        self.finish(binding, started, result)
    }

    /// Counts a call; after a failure, or when it has grown fat, the instance is not used again.
    fn finish<T>(
        &mut self,
        binding: &Binding,
        started: Instant,
        result: Result<T, PluginError>,
    ) -> Result<T, PluginError> {
        let Some(slot) = self.slots.get_mut(&binding.key) else { return result };
        match &result {
            Ok(_) => {
                slot.failures = 0;
                slot.version.stats.called(started.elapsed());
                let half = self.limits.memory_bytes / 2;
                let grown = slot.live.as_mut().is_some_and(|live| live.memory_bytes() > half);
                if grown {
                    slot.live = None;
                }
            }
            Err(error) => slot.fail(error),
        }
        result
    }

    fn scope(&mut self, plugin: &str, queue: &Arc<str>, group: &Arc<str>) -> Arc<Mutex<Scope>> {
        let name: Arc<str> = match self.loaded.get_key_value(plugin) {
            Some((name, _)) => name.clone(),
            None => plugin.into(),
        };
        if self.scopes.len() >= MAX_SCOPES {
            self.scopes.clear();
        }
        self.scopes.entry((name, queue.clone(), group.clone())).or_default().clone()
    }

    /// The slot of a binding, with an instance of the version that is loaded now.
    fn ready(&mut self, kind: Kind, binding: &Binding) -> Result<&mut Slot, PluginError> {
        let Some(version) = self.loaded.get(binding.plugin.as_str()).filter(|version| version.is(kind))
        else {
            self.slots.remove(&binding.key);
            let text = format!("there is no {} plugin \"{}\" loaded", kind.name(), binding.plugin);
            return Err(PluginError { cause: Cause::Missing, text });
        };
        let now = Instant::now();
        if !self.slots.contains_key(&binding.key) && self.slots.len() >= MAX_INSTANCES {
            self.slots.retain(|_, slot| slot.used_at + IDLE > now);
            if self.slots.len() >= MAX_INSTANCES
                && let Some(oldest) =
                    self.slots.iter().min_by_key(|(_, slot)| slot.used_at).map(|(key, _)| *key)
            {
                self.slots.remove(&oldest);
            }
        }
        let slot = self.slots.entry(binding.key).or_insert_with(|| Slot {
            version: version.clone(),
            live: None,
            failures: 0,
            paused_until: None,
            used_at: now,
        });
        slot.used_at = now;
        if slot.version.sha256 != version.sha256 {
            // A new version starts with a clean slate.
            *slot =
                Slot { version: version.clone(), live: None, failures: 0, paused_until: None, used_at: now };
        }
        if let Some(until) = slot.paused_until {
            if now < until {
                let text = format!(
                    "it failed {} times in a row and is called once a second until it succeeds",
                    slot.failures
                );
                let error = PluginError { cause: Cause::Paused, text };
                slot.version.stats.failed(&error);
                return Err(error);
            }
            slot.paused_until = None;
        }
        let deadline = match kind {
            Kind::Selector => self.limits.selector_deadline,
            Kind::Filter => self.limits.filter_deadline,
        };
        self.host.keep_ticking(deadline + if slot.live.is_none() { INIT_DEADLINE } else { Duration::ZERO });
        if slot.live.is_none() {
            match Live::new(&self.host, &self.limits, kind, binding, &slot.version) {
                Ok(live) => slot.live = Some(live),
                Err(error) => {
                    slot.fail(&error);
                    return Err(error);
                }
            }
        }
        Ok(slot)
    }
}

impl Slot {
    fn fail(&mut self, error: &PluginError) {
        self.live = None;
        self.failures = self.failures.saturating_add(1);
        if self.failures >= PATIENCE {
            self.paused_until = Some(Instant::now() + PAUSE);
        }
        self.version.stats.failed(error);
    }
}

impl Live {
    fn new(
        host: &Host,
        limits: &PluginLimits,
        kind: Kind,
        binding: &Binding,
        version: &Version,
    ) -> Result<Self, PluginError> {
        let mut store = host.store(limits, &version.name);
        store.set_epoch_deadline(epochs(INIT_DEADLINE));
        let settings: Vec<(&str, &str)> =
            binding.settings.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        // What went wrong counts as `init`, whatever it was.
        let trapped = |error: wasmtime::Error| PluginError { cause: Cause::Init, ..failure(&error) };
        let refused = |text: String| PluginError { cause: Cause::Init, text: cut(&text).to_owned() };
        let missing = || PluginError { cause: Cause::Missing, text: format!("it is no {}", kind.name()) };
        match kind {
            Kind::Selector => {
                let pre = version.selector.as_ref().ok_or_else(missing)?;
                let selector = pre.instantiate(&mut store).map_err(trapped)?;
                selector
                    .waspmq_plugin_candidate_selector()
                    .call_init(&mut store, &settings)
                    .map_err(trapped)?
                    .map_err(refused)?;
                Ok(Live::Selector(store, selector))
            }
            Kind::Filter => {
                let pre = version.filter.as_ref().ok_or_else(missing)?;
                let filter = pre.instantiate(&mut store).map_err(trapped)?;
                filter
                    .waspmq_plugin_message_filter()
                    .call_init(&mut store, &settings)
                    .map_err(trapped)?
                    .map_err(refused)?;
                Ok(Live::Filter(store, filter))
            }
        }
    }

    /// Linear memory that it has grown to.
    fn memory_bytes(&mut self) -> usize {
        match self {
            Live::Selector(store, _) | Live::Filter(store, _) => store.data().memory_bytes(),
        }
    }
}

/// A deadline in epochs; the one that is under way has partly passed.
fn epochs(deadline: Duration) -> u64 {
    (deadline.as_millis() / EPOCH.as_millis()) as u64 + 1
}

fn checked_order(order: Vec<u32>, offered: usize) -> Result<Vec<u32>, PluginError> {
    let mut seen = vec![false; offered];
    for index in &order {
        match seen.get_mut(*index as usize) {
            Some(seen) if !*seen => *seen = true,
            Some(_) => {
                return Err(PluginError {
                    cause: Cause::Answer,
                    text: format!("index {index} occurs twice"),
                });
            }
            None => {
                let text = format!("index {index} is not one of the {offered} candidates");
                return Err(PluginError { cause: Cause::Answer, text });
            }
        }
    }
    Ok(order)
}

fn verdict(verdict: message_filter::Verdict) -> Verdict {
    match verdict {
        message_filter::Verdict::Deliver => Verdict::Deliver,
        message_filter::Verdict::Skip => Verdict::Skip,
        message_filter::Verdict::Hold(ms) => Verdict::Hold(ms),
        message_filter::Verdict::DeadLetter(mut reason) => {
            let mut end = reason.len().min(MAX_REASON);
            while !reason.is_char_boundary(end) {
                end -= 1;
            }
            reason.truncate(end);
            Verdict::DeadLetter(reason)
        }
    }
}
