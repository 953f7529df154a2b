//! The `plugin` command: a folder to begin with, and trying a plugin without a broker.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueEnum};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::library::{Library, compile, kinds, read_file};
use super::pool::Pool;
use super::{PluginLimits, candidate_selector, message_filter};
use crate::broker::plugin::{Binding, Kind, Verdict, is_plugin_name};

/// What to do with a plugin.
#[derive(Debug, Clone, Subcommand)]
pub enum PluginCommand {
    /// Make a folder with a plugin that builds
    New(NewOptions),
    /// Say whether plugin files would load, and what they are
    Check {
        /// Plugin files
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Run a plugin over messages or candidates from a file
    Run(RunOptions),
}

/// Options of `plugin new`.
#[derive(Debug, Clone, Args)]
pub struct NewOptions {
    /// What it is written in
    #[arg(long, value_enum)]
    pub lang: Language,
    /// What it is
    #[arg(long, value_enum)]
    pub kind: KindOption,
    /// Its name, and the folder's
    pub name: String,
}

/// A language that there are templates for.
#[derive(Debug, Clone, Copy, ValueEnum)]
#[allow(missing_docs)]
pub enum Language {
    Rust,
    C,
    Javascript,
    Python,
}

/// What a plugin is.
#[derive(Debug, Clone, Copy, ValueEnum)]
#[allow(missing_docs)]
pub enum KindOption {
    Selector,
    Filter,
}

/// Options of `plugin run`.
#[derive(Debug, Clone, Args)]
pub struct RunOptions {
    /// The plugin file
    pub file: PathBuf,
    /// A setting; repeatable
    #[arg(long = "settings", value_name = "KEY=VALUE")]
    pub settings: Vec<String>,
    /// A message per line: {"payload", "id"?, "transactionId"?, "createdMs"?, "partition"?}, or the payload alone
    #[arg(
        long,
        value_name = "FILE.jsonl",
        conflicts_with = "candidates",
        required_unless_present = "candidates"
    )]
    pub messages: Option<PathBuf>,
    /// A candidate per line: {"partition", "backlog"?, "oldestAgeMs"?, "sinceServedMs"?, "retries"?, "queuePriority"?}
    #[arg(long, value_name = "FILE.jsonl")]
    pub candidates: Option<PathBuf>,
    /// A hint of the pop, for selectors; repeatable
    #[arg(long, value_name = "NAME=VALUE")]
    pub hint: Vec<String>,
    /// Further messages are visible behind these
    #[arg(long)]
    pub more: bool,
    /// Longest call in milliseconds
    #[arg(long, default_value_t = 1_000)]
    pub deadline_ms: u64,
}

/// Runs the command.
pub fn run(command: &PluginCommand) -> Result<(), String> {
    match command {
        PluginCommand::New(options) => new(options),
        PluginCommand::Check { files } => check(files),
        PluginCommand::Run(options) => try_out(options),
    }
}

// ---- new -------------------------------------------------------------------------

const WIT: &str = include_str!("../../wit/v1/plugin.wit");

fn new(options: &NewOptions) -> Result<(), String> {
    let (name, folder) = (options.name.as_str(), Path::new(&options.name));
    if !is_plugin_name(name) {
        return Err(format!("\"{name}\" is not a plugin's name: 1 to 63 of a-z, 0-9 and -"));
    }
    if folder.exists() {
        return Err(format!("{name} exists already"));
    }
    let kind = match options.kind {
        KindOption::Selector => "selector",
        KindOption::Filter => "filter",
    };
    let filter = kind == "filter";
    let pick = |filter_text: &'static str, selector_text: &'static str| {
        if filter { filter_text } else { selector_text }
    };
    let snake = name.replace('-', "_");
    let mut files: Vec<(String, Vec<u8>)> = vec![("wit/plugin.wit".to_owned(), WIT.into())];
    let mut add = |path: String, text: &str| files.push((path, fill(text, name, kind).into_bytes()));
    let (build, result) = match options.lang {
        Language::Rust => {
            add("Cargo.toml".into(), include_str!("templates/rust/Cargo.toml.in"));
            let text = pick(
                include_str!("templates/rust/filter.rs.in"),
                include_str!("templates/rust/selector.rs.in"),
            );
            add("src/lib.rs".into(), text);
            (
                "rustup target add wasm32-unknown-unknown\ncargo build --release --target wasm32-unknown-unknown"
                    .to_owned(),
                format!("target/wasm32-unknown-unknown/release/{snake}.wasm"),
            )
        }
        Language::Javascript => {
            add("package.json".into(), include_str!("templates/javascript/package.json.in"));
            let text = pick(
                include_str!("templates/javascript/filter.js.in"),
                include_str!("templates/javascript/selector.js.in"),
            );
            add(format!("{name}.js"), text);
            ("npm install\nnpm run build".to_owned(), format!("{name}.wasm"))
        }
        Language::Python => {
            let text = pick(
                include_str!("templates/python/filter.py.in"),
                include_str!("templates/python/selector.py.in"),
            );
            add("app.py".into(), text);
            (
                format!(
                    "python3 -m venv venv\nvenv/bin/pip install componentize-py==0.25.1\nvenv/bin/componentize-py -d wit -w {kind} componentize --stub-wasi app -o {name}.wasm"
                ),
                format!("{name}.wasm"),
            )
        }
        Language::C => {
            add("Makefile".into(), include_str!("templates/c/Makefile.in"));
            let text =
                pick(include_str!("templates/c/filter.c.in"), include_str!("templates/c/selector.c.in"));
            add(format!("{name}.c"), text);
            let (header, source, object): (&str, &str, &[u8]) = if filter {
                (
                    include_str!("templates/c/filter/filter.h"),
                    include_str!("templates/c/filter/filter.c"),
                    include_bytes!("templates/c/filter/filter_component_type.o"),
                )
            } else {
                (
                    include_str!("templates/c/selector/selector.h"),
                    include_str!("templates/c/selector/selector.c"),
                    include_bytes!("templates/c/selector/selector_component_type.o"),
                )
            };
            files.push((format!("bindings/{kind}.h"), header.into()));
            files.push((format!("bindings/{kind}.c"), source.into()));
            files.push((format!("bindings/{kind}_component_type.o"), object.to_vec()));
            ("make".to_owned(), format!("{name}.wasm"))
        }
    };
    let (sample, sample_text, bind) = if filter {
        (
            "messages.jsonl",
            "{\"payload\": {\"total\": 129.9}}\n{\"payload\": null, \"partition\": \"p\"}\n",
            format!(
                "curl -X PUT http://127.0.0.1:6632/api/v1/consumer-groups/GROUP/queues/QUEUE/filter -d '{{\"plugin\":\"{name}\"}}'"
            ),
        )
    } else {
        (
            "candidates.jsonl",
            "{\"partition\": \"a\", \"backlog\": 1}\n{\"partition\": \"b\", \"backlog\": 7}\n",
            format!("curl 'http://127.0.0.1:6632/api/v1/pop/queue/QUEUE?selector={name}'"),
        )
    };
    files.push((sample.to_owned(), sample_text.into()));
    let list = sample.trim_end_matches(".jsonl");
    let readme = include_str!("templates/README.md.in")
        .replace("BUILD", &build)
        .replace("TRY", &format!("waspmq plugin run RESULT --{list} {sample}"))
        .replace("BIND", &bind)
        .replace("RESULT", &result);
    files.push(("README.md".to_owned(), fill(&readme, name, kind).into_bytes()));
    for (path, content) in files {
        let path = folder.join(path);
        let write = || {
            std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
            std::fs::write(&path, content)
        };
        write().map_err(|error: std::io::Error| format!("cannot write {}: {error}", path.display()))?;
    }
    println!("{name}: a {kind}; build it with\n\n{build}\n\nand see {name}/README.md");
    Ok(())
}

fn fill(text: &str, name: &str, kind: &str) -> String {
    text.replace("NAME", name).replace("KIND", kind)
}

// ---- check -------------------------------------------------------------------------

fn check(files: &[PathBuf]) -> Result<(), String> {
    let host = super::host::Host::new()?;
    let mut bad = 0;
    for file in files {
        let started = Instant::now();
        let found = read_file(file).and_then(|content| {
            let component = compile(&host, &content)?;
            let (selector, filter) = kinds(&host, &component)?;
            let imports: Vec<String> =
                component.component_type().imports(host.engine()).map(|(name, _)| name.to_owned()).collect();
            let mut worlds = Vec::new();
            worlds.extend(selector.map(|_| "selector"));
            worlds.extend(filter.map(|_| "filter"));
            Ok((content.len(), worlds, imports))
        });
        match found {
            Ok((bytes, worlds, imports)) => println!(
                "{}: {}, {bytes} bytes, ready in {} ms, imports [{}]",
                file.display(),
                worlds.join(" and "),
                started.elapsed().as_millis(),
                imports.join(", ")
            ),
            Err(error) => {
                bad += 1;
                println!("{}: would not load: {error}", file.display());
            }
        }
    }
    if bad == 0 { Ok(()) } else { Err(format!("{bad} of {} would not load", files.len())) }
}

// ---- run ---------------------------------------------------------------------------

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MessageLine<'a> {
    #[serde(borrow)]
    payload: &'a RawValue,
    id: Option<String>,
    transaction_id: Option<String>,
    created_ms: Option<u64>,
    partition: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct CandidateLine {
    partition: String,
    #[serde(default)]
    queue: String,
    #[serde(default = "one")]
    backlog: u64,
    #[serde(default)]
    oldest_age_ms: u64,
    since_served_ms: Option<u64>,
    #[serde(default)]
    retries: u32,
    #[serde(default)]
    queue_priority: i32,
}

fn one() -> u64 {
    1
}

fn pairs(given: &[String], what: &str) -> Result<Vec<(String, String)>, String> {
    given
        .iter()
        .map(|text| {
            let pair = text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
            pair.ok_or_else(|| format!("{what} must be KEY=VALUE, got \"{text}\""))
        })
        .collect()
}

fn try_out(options: &RunOptions) -> Result<(), String> {
    let kind = if options.messages.is_some() { Kind::Filter } else { Kind::Selector };
    let settings: serde_json::Map<String, Value> =
        pairs(&options.settings, "--settings")?.into_iter().map(|(key, value)| (key, value.into())).collect();
    let name = "under-trial";
    let binding = Binding::parse(kind, &json!({"plugin": name, "settings": settings}))
        .map_err(|error| error.message)?
        .ok_or("no binding")?;
    let deadline = Duration::from_millis(options.deadline_ms);
    let limits =
        PluginLimits { selector_deadline: deadline, filter_deadline: deadline, ..PluginLimits::default() };
    let library = Library::new(Vec::new(), None, limits)?;
    library.put(name, &options.file)?;
    let mut pool = Pool::new(library.host.clone(), library.limits.clone(), library.current());
    pool.try_init(kind, &binding).map_err(|error| format!("init: {error}"))?;
    match (&options.messages, &options.candidates) {
        (Some(file), _) => run_filter(&mut pool, &binding, file, options.more),
        (None, Some(file)) => run_selector(&mut pool, &binding, file, &pairs(&options.hint, "--hint")?),
        (None, None) => Err("--messages or --candidates is required".to_owned()),
    }
}

fn lines(file: &Path) -> Result<Vec<String>, String> {
    let text =
        std::fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    Ok(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect())
}

fn run_filter(pool: &mut Pool, binding: &Binding, file: &Path, more: bool) -> Result<(), String> {
    let lines = lines(file)?;
    let mut messages = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        // With anything else than an object with a payload, the line is the payload.
        let parsed = serde_json::from_str::<MessageLine<'_>>(line).ok();
        serde_json::from_str::<&RawValue>(line)
            .map_err(|error| format!("{}:{}: not JSON: {error}", file.display(), n + 1))?;
        let payload = parsed.as_ref().map_or(line.as_str(), |parsed| parsed.payload.get());
        let id = parsed
            .as_ref()
            .and_then(|parsed| parsed.id.clone())
            .unwrap_or_else(|| format!("message-{}", n + 1));
        let transaction = parsed.as_ref().and_then(|parsed| parsed.transaction_id.clone());
        let created = parsed
            .as_ref()
            .and_then(|parsed| parsed.created_ms)
            .unwrap_or_else(crate::core::filtering::now_ms);
        let partition = parsed.and_then(|parsed| parsed.partition).unwrap_or_else(|| "Default".to_owned());
        messages.push((partition, id.clone(), transaction.unwrap_or(id), created, payload.to_owned()));
    }
    let (queue, group): (Arc<str>, Arc<str>) = ("queue".into(), "group".into());
    let mut times = Vec::new();
    for of_partition in messages.chunk_by(|a, b| a.0 == b.0) {
        let chunks: Vec<_> = of_partition.chunks(256).collect();
        for (n, chunk) in chunks.iter().enumerate() {
            let given: Vec<message_filter::Message<'_>> = chunk
                .iter()
                .map(|(_, id, transaction, created_ms, payload)| message_filter::Message {
                    id,
                    transaction_id: transaction,
                    created_ms: *created_ms,
                    payload: payload.as_bytes(),
                })
                .collect();
            let context = message_filter::Context {
                queue: &queue,
                partition: &chunk[0].0,
                consumer_group: &group,
                now_ms: crate::core::filtering::now_ms(),
                attempt: 1,
                more: more || n + 1 < chunks.len(),
            };
            let started = Instant::now();
            let verdicts = pool
                .filter(binding, (&queue, &group), context, &given)
                .map_err(|error| format!("filter ({}): {error}", error.cause.name()))?;
            times.push(started.elapsed() / chunk.len() as u32);
            for ((partition, id, ..), verdict) in chunk.iter().zip(verdicts) {
                let text = match verdict {
                    Verdict::Deliver => "deliver".to_owned(),
                    Verdict::Skip => "skip".to_owned(),
                    Verdict::Hold(ms) => format!("hold {ms} ms"),
                    Verdict::DeadLetter(reason) => format!("dead-letter: {reason}"),
                };
                println!("{partition}\t{id}\t{text}");
            }
        }
    }
    times.sort_unstable();
    let spent = times.get(times.len() / 2).copied().unwrap_or_default();
    eprintln!(
        "{} messages in {} calls, {:.2} µs a message (median of the calls)",
        messages.len(),
        times.len(),
        spent.as_secs_f64() * 1e6
    );
    Ok(())
}

/// Calls of a selector whose time is shown.
const TIMED_CALLS: usize = 200;

fn run_selector(
    pool: &mut Pool,
    binding: &Binding,
    file: &Path,
    hints: &[(String, String)],
) -> Result<(), String> {
    let mut given = Vec::new();
    for (n, line) in lines(file)?.iter().enumerate() {
        let candidate: CandidateLine =
            serde_json::from_str(line).map_err(|error| format!("{}:{}: {error}", file.display(), n + 1))?;
        given.push(candidate);
    }
    let candidates: Vec<candidate_selector::Candidate<'_>> = given
        .iter()
        .map(|c| candidate_selector::Candidate {
            queue: &c.queue,
            partition: &c.partition,
            backlog: c.backlog,
            oldest_age_ms: c.oldest_age_ms,
            since_served_ms: c.since_served_ms,
            retries: c.retries,
            queue_priority: c.queue_priority,
        })
        .collect();
    let hints: Vec<(&str, &str)> =
        hints.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let (queue, group): (Arc<str>, Arc<str>) = ("queue".into(), "group".into());
    let request = || candidate_selector::Request {
        queue: &queue,
        consumer_group: &group,
        batch: 200,
        partitions: 1,
        now_ms: crate::core::filtering::now_ms(),
        hints: &hints,
    };
    let order = pool
        .select(binding, (&queue, &group), request(), &candidates)
        .map_err(|error| format!("select ({}): {error}", error.cause.name()))?;
    // The first call is slower than those that a running broker makes.
    let mut times = Vec::new();
    for _ in 0..TIMED_CALLS {
        let started = Instant::now();
        if pool.select(binding, (&queue, &group), request(), &candidates).is_ok() {
            times.push(started.elapsed());
        }
    }
    times.sort_unstable();
    let spent = times.get(times.len() / 2).copied().unwrap_or_default();
    for index in &order {
        println!("{}", given[*index as usize].partition);
    }
    eprintln!(
        "{} of {} candidates, {:.1} µs a call (median of {TIMED_CALLS})",
        order.len(),
        given.len(),
        spent.as_secs_f64() * 1e6
    );
    Ok(())
}
