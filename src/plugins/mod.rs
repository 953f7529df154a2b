//! The plugin host: everything that knows wasmtime.
//!
//! - [`host`]: the engine, what a guest may call, its limits.
//! - [`library`]: plugin directories: loading, compiling, the cache, replacement.
//! - [`pool`]: a core's warm instances, and the calls with their deadline.
//! - [`trial`]: the `plugin` command.
//! - [`stats`]: what the plugins do, for operators.
//!
//! A *version* is one file's content, compiled. Cores hold versions by `Arc`: a
//! replaced one lives on until the call in hand is over.

pub mod host;
pub mod library;
pub mod pool;
pub mod stats;
pub mod trial;
mod wasi;

/// Bindings of `wit/v1`, as a filter sees it.
#[allow(missing_docs)]
pub mod filter_world {
    wasmtime::component::bindgen!({
        path: "wit/v1",
        world: "filter",
        ownership: Borrowing { duplicate_if_necessary: false },
    });
}

/// Bindings of `wit/v1`, as a selector sees it.
#[allow(missing_docs)]
pub mod selector_world {
    wasmtime::component::bindgen!({
        path: "wit/v1",
        world: "selector",
        ownership: Borrowing { duplicate_if_necessary: false },
        with: {
            "waspmq:plugin/logging": super::filter_world::waspmq::plugin::logging,
            "waspmq:plugin/state": super::filter_world::waspmq::plugin::state,
        },
    });
}

pub use filter_world::exports::waspmq::plugin::message_filter;
pub use selector_world::exports::waspmq::plugin::candidate_selector;

use std::time::Duration;

/// Limits of plugins, from the command line.
#[derive(Debug, Clone)]
pub struct PluginLimits {
    /// Longest selector call (`--selector-deadline-ms`).
    pub selector_deadline: Duration,
    /// Longest filter call (`--filter-deadline-ms`).
    pub filter_deadline: Duration,
    /// Most linear memory of one instance in bytes (`--plugin-memory-mb`).
    pub memory_bytes: usize,
    /// Most candidates offered to a selector (`--selector-window`).
    pub selector_window: usize,
}

impl Default for PluginLimits {
    fn default() -> Self {
        Self {
            selector_deadline: Duration::from_millis(10),
            filter_deadline: Duration::from_millis(100),
            memory_bytes: 128 * 1024 * 1024,
            selector_window: 256,
        }
    }
}

/// Why a plugin did not do what it was asked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// It returned an error.
    Error,
    /// It trapped, or panicked.
    Trap,
    /// It took too long.
    Deadline,
    /// It wanted more memory than it may have.
    Memory,
    /// Its answer does not fit the question.
    Answer,
    /// It could not be instantiated, or `init` failed.
    Init,
    /// It failed so often in a row that it is only called now and then.
    Paused,
    /// It is not loaded.
    Missing,
}

impl Cause {
    /// All of them.
    pub const ALL: [Cause; 8] = [
        Cause::Error,
        Cause::Trap,
        Cause::Deadline,
        Cause::Memory,
        Cause::Answer,
        Cause::Init,
        Cause::Paused,
        Cause::Missing,
    ];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Error => "error",
            Cause::Trap => "trap",
            Cause::Deadline => "deadline",
            Cause::Memory => "memory",
            Cause::Answer => "answer",
            Cause::Init => "init",
            Cause::Paused => "paused",
            Cause::Missing => "missing",
        }
    }
}

/// A call that failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
pub struct PluginError {
    /// Why.
    pub cause: Cause,
    /// In words; at most [`MAX_TEXT`] bytes of them are the plugin's own.
    pub text: String,
}

/// Longest text that is kept of what a plugin says, in bytes.
pub const MAX_TEXT: usize = 1024;

/// The start of a text, whole characters.
pub fn cut(text: &str) -> &str {
    if text.len() <= MAX_TEXT {
        return text;
    }
    let mut end = MAX_TEXT;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
