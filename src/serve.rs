//! The `serve` command: from options to a running broker, and its end.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use crate::broker::pop::{PopDefaults, StartAt};
use crate::broker::push::MAX_BODY_BYTES;
use crate::core::Cores;
use crate::core::inbox::Message;
use crate::http::edge::{Edge, EdgeLimits, Handler, event::EventEdge, tiny::TinyEdge};
use crate::http::router::{self, App};
use crate::plugins::PluginLimits;
use crate::plugins::library::{Library, WATCH_EVERY};
use crate::store::embedded::Embedded;
use crate::store::{Database, schema};

/// Longest call of the data plane.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long outstanding answers are waited for when the broker stops.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// Where a group starts that does not say.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SubscriptionMode {
    /// At the oldest retained message.
    All,
    /// At the end.
    New,
}

/// What speaks HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EdgeKind {
    /// An event loop: any number of connections.
    Event,
    /// tiny_http: a thread per connection, for trusted networks only.
    #[value(name = "tiny_http")]
    TinyHttp,
}

/// Options of `waspmq serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeOptions {
    /// Address to listen on
    #[arg(long, env = "WASPMQ_LISTEN", default_value = "127.0.0.1:6632")]
    pub listen: SocketAddr,
    /// PostgreSQL to use, as a connection string or URL; without it the broker runs its own in --data
    #[arg(long, env = "WASPMQ_DATABASE", hide_env_values = true)]
    pub database: Option<String>,
    /// Folder of the broker's own PostgreSQL
    #[arg(long, env = "WASPMQ_DATA", default_value = "./waspmq-data")]
    pub data: PathBuf,
    /// Directory of plugins (*.wasm, *.wat); repeatable
    #[arg(long, env = "WASPMQ_PLUGINS", value_name = "DIR", value_delimiter = ',')]
    pub plugins: Vec<PathBuf>,
    /// Folder for compiled plugins, writable by nobody else [default: plugin-cache in --data]
    #[arg(long, env = "WASPMQ_PLUGIN_CACHE", value_name = "DIR")]
    pub plugin_cache: Option<PathBuf>,
    /// Longest call of a selector in milliseconds
    #[arg(long, env = "WASPMQ_SELECTOR_DEADLINE_MS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub selector_deadline_ms: u64,
    /// Longest call of a filter (256 messages of one partition) in milliseconds
    #[arg(long, env = "WASPMQ_FILTER_DEADLINE_MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub filter_deadline_ms: u64,
    /// Most memory of one plugin instance in MiB
    #[arg(long, env = "WASPMQ_PLUGIN_MEMORY_MB", default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=4_095))]
    pub plugin_memory_mb: u64,
    /// Most candidates offered to a selector
    #[arg(long, env = "WASPMQ_SELECTOR_WINDOW", default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub selector_window: u64,
    /// Core threads, each with its own database connection [default: the number of CPUs]
    #[arg(long, env = "WASPMQ_CORES", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub cores: Option<u16>,
    /// Threads that read requests
    #[arg(long, env = "WASPMQ_IO_THREADS", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub io_threads: u16,
    /// What speaks HTTP
    #[arg(long, env = "WASPMQ_EDGE", value_enum, default_value = "event")]
    pub edge: EdgeKind,
    /// Let --edge tiny_http listen beyond loopback, where one request can end the process
    #[arg(long, env = "WASPMQ_I_TRUST_THIS_NETWORK")]
    pub i_trust_this_network: bool,
    /// Largest request body in bytes
    #[arg(long, env = "WASPMQ_MAX_BODY", default_value_t = 64 * 1024 * 1024, value_parser = body_limit)]
    pub max_body: usize,
    /// Longest wait of a pop in milliseconds
    #[arg(long, env = "WASPMQ_MAX_WAIT_MS", default_value_t = 60_000)]
    pub max_wait_ms: u64,
    /// Most connections open at once
    #[arg(long, env = "WASPMQ_MAX_CONNECTIONS", default_value_t = 20_000)]
    pub max_connections: usize,
    /// Where a consumer group starts that does not say
    #[arg(long, env = "WASPMQ_DEFAULT_SUBSCRIPTION_MODE", value_enum, default_value = "new")]
    pub default_subscription_mode: SubscriptionMode,
}

/// Connections that may wait to be accepted; the kernel has its own limit (`net.core.somaxconn`).
const LISTEN_BACKLOG: i32 = 4_096;

fn body_limit(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(bytes) if (1..=MAX_BODY_BYTES).contains(&bytes) => Ok(bytes),
        Ok(bytes) => Err(format!("{bytes} is not in 1..={MAX_BODY_BYTES}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses a connection string.
pub fn database_config(text: &str) -> Result<postgres::Config, String> {
    text.parse::<postgres::Config>().map_err(|error| {
        let cause = std::error::Error::source(&error).map_or_else(String::new, |cause| format!(": {cause}"));
        format!("--database cannot be read: {error}{cause}")
    })
}

/// The plugin library that the options describe, with nothing loaded yet.
fn library(options: &ServeOptions) -> Result<Library, String> {
    for directory in &options.plugins {
        if !directory.is_dir() {
            return Err(format!("--plugins {}: there is no such directory", directory.display()));
        }
    }
    let limits = PluginLimits {
        selector_deadline: Duration::from_millis(options.selector_deadline_ms),
        filter_deadline: Duration::from_millis(options.filter_deadline_ms),
        memory_bytes: options.plugin_memory_mb as usize * 1024 * 1024,
        selector_window: options.selector_window as usize,
    };
    let cache = (!options.plugins.is_empty())
        .then(|| options.plugin_cache.clone().unwrap_or_else(|| options.data.join("plugin-cache")));
    Library::new(options.plugins.clone(), cache, limits)
}

/// What can be called, for the line that says that the broker is ready.
fn plugin_names(library: &Library) -> String {
    let loaded = library.current();
    let mut names: Vec<&str> = loaded.keys().map(|name| &**name).collect();
    names.sort_unstable();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Looks at the plugin directories now and then, until what is returned is dropped.
fn watch_plugins(app: &Arc<App>) -> std::io::Result<crossbeam_channel::Sender<()>> {
    let (stop, stopped) = crossbeam_channel::bounded::<()>(0);
    let app = app.clone();
    std::thread::Builder::new().name("plugins".into()).spawn(move || {
        while let Err(crossbeam_channel::RecvTimeoutError::Timeout) = stopped.recv_timeout(WATCH_EVERY) {
            if app.library.scan(false) {
                let loaded = app.library.current();
                app.cores.tell(|| Message::Plugins(loaded.clone()));
            }
        }
    })?;
    Ok(stop)
}

/// Runs the broker until it is told to stop (SIGTERM, SIGINT).
pub fn serve(options: &ServeOptions) -> Result<(), String> {
    let mut signals = signal_hook::iterator::Signals::new([libc::SIGTERM, libc::SIGINT])
        .map_err(|error| format!("cannot watch signals: {error}"))?;
    let listener = match listenfd::ListenFd::from_env().take_tcp_listener(0) {
        Ok(Some(listener)) => listener,
        _ => TcpListener::bind(options.listen)
            .map_err(|error| format!("cannot listen on {} (--listen): {error}", options.listen))?,
    };
    // The library's 128 fill up when a thousand consumers come back at once.
    // SAFETY: a listening socket of ours; listening again only changes its backlog.
    unsafe { libc::listen(std::os::fd::AsRawFd::as_raw_fd(&listener), LISTEN_BACKLOG) };
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    if options.edge == EdgeKind::TinyHttp && !address.ip().is_loopback() && !options.i_trust_this_network {
        return Err(format!(
            "--edge tiny_http does not listen on {address}: one header can end its process; use --edge event, or say --i-trust-this-network"
        ));
    }
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "anybody who can reach this address can read and write every queue: this version has no authentication");
    }
    let mut embedded = None;
    let (database, place) = match &options.database {
        Some(text) => (Database::new(database_config(text)?, STATEMENT_TIMEOUT), "external".to_owned()),
        None => {
            let own = Embedded::start(&options.data)?;
            let database = Database::new(own.config(), STATEMENT_TIMEOUT);
            embedded = Some(own);
            (database, format!("embedded in {}", options.data.display()))
        }
    };
    for applied in schema::migrate(&database).map_err(|error| error.to_string())? {
        tracing::info!(migration = %applied, "applied");
    }
    let cores = options
        .cores
        .map_or_else(|| std::thread::available_parallelism().map_or(2, std::num::NonZero::get), usize::from);
    let library = Arc::new(library(options)?);
    library.scan(false);
    let cores = Cores::start(&database, cores, &library).map_err(|error| error.to_string())?;
    // The edge starts after the routes that show its count.
    let edge: Arc<OnceLock<Box<dyn Fn() -> usize + Send + Sync>>> = Arc::default();
    let connections = edge.clone();
    let app = Arc::new(App {
        cores,
        library: library.clone(),
        pop_defaults: PopDefaults {
            start: match options.default_subscription_mode {
                SubscriptionMode::All => StartAt::Oldest,
                SubscriptionMode::New => StartAt::Now,
            },
            max_wait: Duration::from_millis(options.max_wait_ms),
        },
        started: Instant::now(),
        connections: Box::new(move || connections.get().map_or(0, |count| count())),
    });
    let limits = EdgeLimits {
        max_body_bytes: options.max_body,
        max_connections: options.max_connections,
        io_threads: usize::from(options.io_threads),
    };
    let handler: Handler = {
        let app = app.clone();
        Arc::new(move |request| router::handle(&app, request))
    };
    let cannot = |error: std::io::Error| format!("cannot serve: {error}");
    let running: Box<dyn Edge> = match options.edge {
        EdgeKind::Event => Box::new(EventEdge::start(listener, limits, handler).map_err(cannot)?),
        EdgeKind::TinyHttp => Box::new(TinyEdge::start(listener, limits, handler).map_err(cannot)?),
    };
    let _ = edge.set(running.counter());
    let watcher = library.is_watching().then(|| watch_plugins(&app)).transpose().map_err(cannot)?;
    println!(
        "waspmq {} ready at http://{address}, database {place}, plugins: {}",
        env!("CARGO_PKG_VERSION"),
        plugin_names(&library)
    );

    signals.forever().next();
    // A second signal ends it at once.
    std::thread::spawn(move || {
        signals.forever().next();
        std::process::exit(130);
    });
    tracing::info!("stopping");
    running.stop_accepting();
    drop(watcher);
    app.cores.stop();
    running.shutdown(STOP_LIMIT);
    if let Some(embedded) = embedded {
        embedded.stop();
    }
    Ok(())
}
