//! The engine, what a guest may call, and the limits it runs under.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use wasmtime::component::{Component, Linker};
use wasmtime::{Config, Engine, ResourceLimiter, Store, Trap};

use super::filter_world::waspmq::plugin::{logging, state};
use super::{Cause, PluginError, PluginLimits, cut};

/// Length of an epoch: the resolution of deadlines.
pub const EPOCH: Duration = Duration::from_millis(1);
/// The ticks go on for this long after the last deadline, so that a busy broker does not start and stop them.
const TICK_ON: Duration = Duration::from_millis(200);
/// WebAssembly stack of a call; a core thread's own stack is several times as large.
const WASM_STACK_BYTES: usize = 512 * 1024;
/// Most bytes that the host copies out of a guest for one call or one result. At wasmtime's
/// default a list whose strings all are the same megabyte makes it copy 143 MB.
const HOSTCALL_BYTES: usize = 1024 * 1024;
/// Lines of one plugin in a second.
const LOG_LINES: u32 = 100;
/// Keys of one state.
const STATE_KEYS: usize = 1_024;
/// Bytes of one state, keys and values.
const STATE_BYTES: usize = 1024 * 1024;

/// The engine and its ticking clock.
pub struct Host {
    engine: Engine,
    clock: Arc<Clock>,
}

struct Clock {
    /// Until when epochs have to pass, in milliseconds since `start`.
    until: AtomicU64,
    start: Instant,
    ticking: AtomicBool,
    thread: Mutex<Option<std::thread::Thread>>,
}

impl Host {
    /// Makes the engine.
    pub fn new() -> Result<Self, String> {
        let mut config = Config::new();
        config.wasm_component_model(true);
        config.epoch_interruption(true);
        config.max_wasm_stack(WASM_STACK_BYTES);
        // Each memory keeps its default reservation of 4 GiB of addresses (not of memory): with less,
        // every access of a guest is checked.
        let engine = Engine::new(&config).map_err(|error| format!("cannot start wasmtime: {error}"))?;
        let clock = Arc::new(Clock {
            until: AtomicU64::new(0),
            start: Instant::now(),
            ticking: AtomicBool::new(false),
            thread: Mutex::new(None),
        });
        Ok(Self { engine, clock })
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Sees to it that epochs pass for so long (and a little longer). Costs next to nothing while they already do.
    pub fn keep_ticking(&self, time: Duration) {
        let clock = &self.clock;
        let until = (clock.start.elapsed() + time + TICK_ON).as_millis() as u64;
        clock.until.fetch_max(until, Ordering::Relaxed);
        if clock.ticking.load(Ordering::Acquire) {
            return;
        }
        let mut thread = clock.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !clock.ticking.swap(true, Ordering::AcqRel) {
            match &*thread {
                Some(thread) => thread.unpark(),
                None => {
                    let (own, engine) = (clock.clone(), self.engine.weak());
                    let started = std::thread::Builder::new().name("epochs".into()).spawn(move || {
                        tick(&own, &engine);
                    });
                    match started {
                        Ok(handle) => *thread = Some(handle.thread().clone()),
                        // Tried again by the next call.
                        Err(_) => clock.ticking.store(false, Ordering::Release),
                    }
                }
            }
        }
    }

    /// A linker with all that a component may import, or why it cannot be linked.
    pub fn linker(&self, component: &Component) -> Result<Linker<Guest>, String> {
        check_imports(&self.engine, component)?;
        let mut linker = Linker::new(&self.engine);
        let broken = |error: wasmtime::Error| format!("cannot link: {}", cut(&format!("{error:#}")));
        logging::add_to_linker::<_, wasmtime::component::HasSelf<Guest>>(&mut linker, |guest| guest)
            .map_err(broken)?;
        state::add_to_linker::<_, wasmtime::component::HasSelf<Guest>>(&mut linker, |guest| guest)
            .map_err(broken)?;
        for (name, _) in component.component_type().imports(&self.engine) {
            super::wasi::add_to_linker(&mut linker, name).map_err(broken)?;
        }
        linker.define_unknown_imports_as_traps(component).map_err(broken)?;
        Ok(linker)
    }

    /// A store with limits. A deadline must be set before anything runs in it.
    pub fn store(&self, limits: &PluginLimits, name: &Arc<str>) -> Store<Guest> {
        let guest = Guest {
            limits: Limits { most: limits.memory_bytes, memory_bytes: 0 },
            name: name.clone(),
            said: Said::default(),
            scope: Arc::default(),
            stdio: Vec::new(),
        };
        let mut store = Store::new(&self.engine, guest);
        store.limiter(|guest| &mut guest.limits);
        store.set_hostcall_fuel(HOSTCALL_BYTES);
        store
    }
}

fn tick(clock: &Clock, engine: &wasmtime::EngineWeak) {
    let now = || clock.start.elapsed().as_millis() as u64;
    let mut ticked = now();
    loop {
        std::thread::sleep(EPOCH);
        let Some(engine) = engine.upgrade() else { return };
        // A sleep is longer than it should be: as many epochs as milliseconds.
        while ticked < now() {
            engine.increment_epoch();
            ticked += 1;
        }
        if now() <= clock.until.load(Ordering::Relaxed) {
            continue;
        }
        let weak = engine.weak();
        drop(engine);
        clock.ticking.store(false, Ordering::SeqCst);
        // Somebody may have asked for more between the two.
        if now() <= clock.until.load(Ordering::SeqCst) {
            clock.ticking.store(true, Ordering::SeqCst);
        }
        while !clock.ticking.load(Ordering::Acquire) {
            std::thread::park_timeout(Duration::from_secs(10));
            if weak.upgrade().is_none() {
                return;
            }
        }
        ticked = now();
    }
}

/// Refuses what is neither ours nor WASI, by its name.
fn check_imports(engine: &Engine, component: &Component) -> Result<(), String> {
    for (name, _) in component.component_type().imports(engine) {
        let ours = name.strip_prefix("waspmq:plugin/");
        match ours {
            Some(rest) => match rest.split_once('@') {
                Some(("logging" | "state", version)) if version.starts_with("1.") => {}
                Some((interface @ ("logging" | "state"), version)) => {
                    return Err(format!(
                        "imports waspmq:plugin/{interface} of version {version}; this broker has 1.0.0"
                    ));
                }
                _ => return Err(format!("imports {}, which this broker does not have", cut(name))),
            },
            None if name.starts_with("wasi:") => {}
            None => {
                return Err(format!(
                    "imports {}; a plugin may import waspmq:plugin/logging, waspmq:plugin/state and wasi:*",
                    cut(name)
                ));
            }
        }
    }
    Ok(())
}

/// Elements of one table.
const TABLE_ELEMENTS: usize = 100_000;

/// Bounds what an instance may have, and knows what it has.
struct Limits {
    most: usize,
    memory_bytes: usize,
}

impl ResourceLimiter for Limits {
    fn memory_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let after = self.memory_bytes.saturating_add(desired.saturating_sub(current));
        if after > self.most {
            // An error and not `false`: a guest that takes a failed growth for granted dies of something else.
            return Err(wasmtime::format_err!("{MEMORY_TEXT}{after} bytes; its limit is {}", self.most));
        }
        self.memory_bytes = after;
        Ok(true)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        if desired > TABLE_ELEMENTS {
            return Err(wasmtime::format_err!(
                "a table wanted {desired} elements; the limit is {TABLE_ELEMENTS}"
            ));
        }
        Ok(true)
    }

    fn instances(&self) -> usize {
        100
    }

    fn tables(&self) -> usize {
        100
    }

    fn memories(&self) -> usize {
        10
    }
}

const MEMORY_TEXT: &str = "its memory wanted to grow to ";

/// What one instance's calls to the host work on.
pub struct Guest {
    limits: Limits,
    name: Arc<str>,
    said: Said,
    /// The state of the (queue, group) that the call in hand is about.
    pub scope: Arc<Mutex<Scope>>,
    /// The unfinished line of stdout and stderr.
    pub(super) stdio: Vec<u8>,
}

#[derive(Default)]
struct Said {
    since: Option<Instant>,
    lines: u32,
    dropped: u64,
}

impl Guest {
    /// Linear memory that the instance has grown to.
    pub fn memory_bytes(&self) -> usize {
        self.limits.memory_bytes
    }

    /// Writes a line to the broker's log, if there is room for it.
    pub(super) fn say(&mut self, level: logging::Level, text: &str) {
        let now = Instant::now();
        if self.said.since.is_none_or(|since| now - since >= Duration::from_secs(1)) {
            if self.said.dropped > 0 {
                tracing::warn!(plugin = %self.name, lines = self.said.dropped, "a plugin's log lines were dropped");
            }
            self.said = Said { since: Some(now), lines: 0, dropped: 0 };
        }
        if self.said.lines >= LOG_LINES {
            self.said.dropped += 1;
            return;
        }
        self.said.lines += 1;
        let (plugin, text) = (&self.name, cut(text));
        match level {
            logging::Level::Debug => tracing::debug!(target: "waspmq::plugin", %plugin, "{text}"),
            logging::Level::Info => tracing::info!(target: "waspmq::plugin", %plugin, "{text}"),
            logging::Level::Warn => tracing::warn!(target: "waspmq::plugin", %plugin, "{text}"),
            logging::Level::Error => tracing::error!(target: "waspmq::plugin", %plugin, "{text}"),
        }
    }
}

impl logging::Host for Guest {
    fn log(&mut self, level: logging::Level, text: String) {
        self.say(level, &text);
    }
}

/// The state of one plugin for one (queue, group).
#[derive(Default)]
pub struct Scope {
    values: HashMap<String, Vec<u8>>,
    bytes: usize,
}

impl Scope {
    fn set(&mut self, key: String, value: Vec<u8>) -> Result<(), String> {
        let before = self.values.get(&key).map_or(0, |old| key.len() + old.len());
        let after = self.bytes - before + key.len() + value.len();
        if before == 0 && !self.values.contains_key(&key) && self.values.len() >= STATE_KEYS {
            return Err(format!("the state holds its limit of {STATE_KEYS} keys"));
        }
        if after > STATE_BYTES {
            return Err(format!("the state would hold {after} bytes; its limit is {STATE_BYTES}"));
        }
        self.bytes = after;
        self.values.insert(key, value);
        Ok(())
    }
}

impl state::Host for Guest {
    fn get(&mut self, key: String) -> Option<Vec<u8>> {
        self.scope.lock().unwrap_or_else(std::sync::PoisonError::into_inner).values.get(&key).cloned()
    }

    fn set(&mut self, key: String, value: Vec<u8>) -> Result<(), String> {
        self.scope.lock().unwrap_or_else(std::sync::PoisonError::into_inner).set(key, value)
    }

    fn increment(&mut self, key: String, by: i64) -> Result<i64, String> {
        let mut scope = self.scope.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let before = match scope.values.get(&key) {
            None => 0,
            Some(bytes) => match <[u8; 8]>::try_from(bytes.as_slice()) {
                Ok(bytes) => i64::from_le_bytes(bytes),
                Err(_) => return Err(format!("{} does not hold a number of 8 bytes", cut(&key))),
            },
        };
        let after = before.checked_add(by).ok_or_else(|| format!("{} would overflow", cut(&key)))?;
        scope.set(key, after.to_le_bytes().to_vec())?;
        Ok(after)
    }
}

/// Why a call failed, from what wasmtime says.
pub fn failure(error: &wasmtime::Error) -> PluginError {
    let text = format!("{error:#}");
    let cause = match error.downcast_ref::<Trap>() {
        Some(Trap::Interrupt) => Cause::Deadline,
        Some(_) => Cause::Trap,
        None if text.contains(MEMORY_TEXT) => Cause::Memory,
        None => Cause::Trap,
    };
    let said = match cause {
        Cause::Deadline => "it took longer than its deadline".to_owned(),
        // Without the frames of the guest's stack, which come before it.
        _ => cut(&error.root_cause().to_string()).to_owned(),
    };
    PluginError { cause, text: said }
}
