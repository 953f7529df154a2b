//! Plugin directories: what is in them, compiled, and kept up to date.

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};
use wasmtime::component::Component;

use super::filter_world::FilterPre;
use super::host::{Guest, Host};
use super::pool::Pool;
use super::selector_world::SelectorPre;
use super::stats::Stats;
use super::{PluginLimits, cut};
use crate::broker::error::ApiError;
use crate::broker::plugin::{Binding, Kind, is_plugin_name};

/// Largest plugin file in bytes.
pub const MAX_FILE_BYTES: u64 = 64 * 1024 * 1024;
/// Most plugins of all directories together.
const MAX_PLUGINS: usize = 1_000;
/// How often the directories are looked at.
pub const WATCH_EVERY: Duration = Duration::from_secs(2);
/// Start of a cache file: what it is, and of which version.
const CACHE_MAGIC: &[u8; 16] = b"waspmq-plugin-01";

/// The version of the interfaces that this broker has.
const WIT_VERSION: &str = "1.0.0";

/// One plugin file's content, compiled.
pub struct Version {
    /// The plugin's name.
    pub name: Arc<str>,
    /// Of the file's content, in hexadecimal.
    pub sha256: String,
    /// The file.
    pub file: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// How long it took to have it ready.
    pub ready_in: Duration,
    /// Whether it came from the cache.
    pub cached: bool,
    /// Counters of the name, through all versions.
    pub stats: Arc<Stats>,
    /// As a selector, if it is one.
    pub selector: Option<SelectorPre<Guest>>,
    /// As a filter, if it is one.
    pub filter: Option<FilterPre<Guest>>,
}

impl Version {
    /// What it can be bound as.
    pub fn kinds(&self) -> Vec<&'static str> {
        let mut kinds = Vec::new();
        kinds.extend(self.selector.as_ref().map(|_| Kind::Selector.name()));
        kinds.extend(self.filter.as_ref().map(|_| Kind::Filter.name()));
        kinds
    }

    /// Whether it can be bound as this.
    pub fn is(&self, kind: Kind) -> bool {
        match kind {
            Kind::Selector => self.selector.is_some(),
            Kind::Filter => self.filter.is_some(),
        }
    }
}

/// The plugins that can be called, by name.
pub type Loaded = HashMap<Arc<str>, Arc<Version>>;

/// What a file was when it was last looked at.
#[derive(Clone, PartialEq, Eq)]
struct Fingerprint {
    bytes: u64,
    modified: Option<SystemTime>,
    inode: u64,
}

#[derive(Default)]
struct Known {
    file: PathBuf,
    fingerprint: Option<Fingerprint>,
    version: Option<Arc<Version>>,
    /// Why the file as it is now is not what is running.
    error: Option<String>,
    /// Looks in a row that did not find the file.
    missing: u32,
    stats: Arc<Stats>,
}

/// A plugin as it is shown.
pub struct Shown {
    /// Its name.
    pub name: String,
    /// Its file.
    pub file: PathBuf,
    /// What runs, if anything does.
    pub version: Option<Arc<Version>>,
    /// Why the file as it is now does not run.
    pub error: Option<String>,
    /// Its counters.
    pub stats: Arc<Stats>,
}

/// See the module.
pub struct Library {
    /// The engine.
    pub host: Arc<Host>,
    /// Limits of every call.
    pub limits: PluginLimits,
    directories: Vec<PathBuf>,
    cache: Option<PathBuf>,
    known: Mutex<BTreeMap<String, Known>>,
    current: RwLock<Arc<Loaded>>,
}

impl Library {
    /// Of these directories; compiled code is kept in `cache`. Loads nothing yet.
    pub fn new(
        directories: Vec<PathBuf>,
        cache: Option<PathBuf>,
        limits: PluginLimits,
    ) -> Result<Self, String> {
        let cache = cache.filter(|folder| match private_folder(folder) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, folder = %folder.display(), "compiled plugins are not kept");
                false
            }
        });
        Ok(Self {
            host: Arc::new(Host::new()?),
            limits,
            directories,
            cache,
            known: Mutex::default(),
            current: RwLock::default(),
        })
    }

    /// What can be called now.
    pub fn current(&self) -> Arc<Loaded> {
        self.current.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Whether there are directories at all.
    pub fn is_watching(&self) -> bool {
        !self.directories.is_empty()
    }

    /// All plugins, also those that do not load.
    pub fn shown(&self) -> Vec<Shown> {
        let known = self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        known
            .iter()
            .map(|(name, known)| Shown {
                name: name.clone(),
                file: known.file.clone(),
                version: known.version.clone(),
                error: known.error.clone(),
                stats: known.stats.clone(),
            })
            .collect()
    }

    /// Looks at the directories, and loads what is new or changed (`force`: also what
    /// only may have). True if anything else can be called now. May take seconds.
    pub fn scan(&self, force: bool) -> bool {
        let mut known = self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut found: BTreeMap<String, PathBuf> = BTreeMap::new();
        for directory in &self.directories {
            if let Err(error) = list(directory, &mut found) {
                tracing::warn!(directory = %directory.display(), %error, "cannot read a plugin directory");
                // Not that everything in it is gone.
                for known in known.values() {
                    if known.file.parent() == Some(directory)
                        && let Some(name) = known.file.file_stem().and_then(|stem| stem.to_str())
                    {
                        found.entry(name.to_owned()).or_insert_with(|| known.file.clone());
                    }
                }
            }
        }
        let mut changed = false;
        known.retain(|name, entry| {
            let there = found.contains_key(name);
            entry.missing = if there { 0 } else { entry.missing + 1 };
            // A file that is being replaced may be away for a moment.
            let keep = there || (entry.missing < 2 && !force);
            if !keep && entry.version.is_some() {
                tracing::info!(plugin = %name, "unloaded: its file is gone");
                changed = true;
            }
            keep
        });
        for (name, file) in found.into_iter().take(MAX_PLUGINS) {
            changed |= self.look(&name, file, known.entry(name.clone()).or_default(), force);
        }
        if changed {
            let loaded: Loaded = known
                .values()
                .filter_map(|known| {
                    known.version.as_ref().map(|version| (version.name.clone(), version.clone()))
                })
                .collect();
            *self.current.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Arc::new(loaded);
        }
        changed
    }

    /// Loads one file under a name, whatever the directories hold.
    pub fn put(&self, name: &str, file: &Path) -> Result<(), String> {
        let version = self.load(name, file, &Known::default())?.ok_or("nothing was loaded")?;
        let mut loaded = (*self.current()).clone();
        loaded.insert(version.name.clone(), Arc::new(version));
        *self.current.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Arc::new(loaded);
        Ok(())
    }

    /// Looks at one file. True if another version runs now.
    fn look(&self, name: &str, file: PathBuf, known: &mut Known, force: bool) -> bool {
        let fingerprint = std::fs::metadata(&file).ok().map(|data| Fingerprint {
            bytes: data.len(),
            modified: data.modified().ok(),
            inode: data.ino(),
        });
        if !force && known.file == file && known.fingerprint.is_some() && known.fingerprint == fingerprint {
            return false;
        }
        (known.file, known.fingerprint) = (file.clone(), fingerprint);
        match self.load(name, &file, known) {
            Ok(None) => {
                known.error = None;
                false
            }
            Ok(Some(version)) => {
                tracing::info!(
                    plugin = %name, sha256 = %&version.sha256[..12], kinds = ?version.kinds(), cached = version.cached,
                    took_ms = version.ready_in.as_millis() as u64, "plugin loaded"
                );
                known.error = None;
                known.version = Some(Arc::new(version));
                true
            }
            Err(error) => {
                if known.error.as_ref() != Some(&error) {
                    let kept = known.version.is_some();
                    tracing::warn!(plugin = %name, %error, kept_the_old_version = kept, "a plugin does not load");
                }
                known.error = Some(error);
                false
            }
        }
    }

    /// Reads and compiles a file; `None`: it is what runs already.
    fn load(&self, name: &str, file: &Path, known: &Known) -> Result<Option<Version>, String> {
        let started = Instant::now();
        if !is_plugin_name(name) {
            return Err("its file's name is not a plugin's name: 1 to 63 of a-z, 0-9 and -".to_owned());
        }
        let content = read_file(file)?;
        let sha256 = hex(&Sha256::digest(&content));
        if known.version.as_ref().is_some_and(|running| running.sha256 == sha256 && running.file == file) {
            return Ok(None);
        }
        let (component, cached) = self.compile(&content, &sha256)?;
        let (selector, filter) = kinds(&self.host, &component)?;
        Ok(Some(Version {
            name: name.into(),
            sha256,
            file: file.to_owned(),
            bytes: content.len() as u64,
            ready_in: started.elapsed(),
            cached,
            stats: known.stats.clone(),
            selector,
            filter,
        }))
    }

    fn compile(&self, content: &[u8], sha256: &str) -> Result<(Component, bool), String> {
        let Some(cache) = &self.cache else {
            return compile(&self.host, content).map(|component| (component, false));
        };
        let mut hasher = xxhash_rust::xxh3::Xxh3::new();
        std::hash::Hash::hash(&self.host.engine().precompile_compatibility_hash(), &mut hasher);
        let file = cache.join(format!("{sha256}-{:016x}.bin", hasher.digest()));
        if let Some(component) = cached(&self.host, &file) {
            return Ok((component, true));
        }
        let component = compile(&self.host, content)?;
        if let Err(error) = keep(&component, &file) {
            tracing::warn!(file = %file.display(), %error, "cannot keep a compiled plugin");
        }
        Ok((component, false))
    }

    /// Whether a binding would work: the plugin is loaded, is of this kind, and
    /// takes the settings. Makes an instance.
    pub fn check(&self, kind: Kind, binding: &Binding) -> Result<(), ApiError> {
        let loaded = self.current();
        let what = kind.name();
        let Some(version) = loaded.get(binding.plugin.as_str()) else {
            let mut names: Vec<&str> = loaded.keys().map(|name| &**name).collect();
            names.sort_unstable();
            return Err(ApiError {
                status: 400,
                code: "unknown_plugin",
                message: format!(
                    "{what}: there is no plugin \"{}\"; loaded: [{}]",
                    binding.plugin,
                    names.join(", ")
                ),
            });
        };
        if !version.is(kind) {
            return Err(ApiError {
                status: 400,
                code: "wrong_plugin_kind",
                message: format!(
                    "{what}: plugin \"{}\" is a {}",
                    binding.plugin,
                    version.kinds().join(" and a ")
                ),
            });
        }
        let mut pool = Pool::new(self.host.clone(), self.limits.clone(), loaded);
        pool.try_init(kind, binding).map_err(|error| ApiError {
            status: 400,
            code: "plugin_refused",
            message: format!("{what}: plugin \"{}\" refuses this: {error}", binding.plugin),
        })
    }
}

/// Plugin files directly in a directory, by name. A name that an earlier directory has stays there.
fn list(directory: &Path, found: &mut BTreeMap<String, PathBuf>) -> std::io::Result<()> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(directory)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    files.sort();
    for file in files {
        let extension = file.extension().and_then(|extension| extension.to_str());
        if !matches!(extension, Some("wasm" | "wat")) || !file.is_file() {
            continue;
        }
        let Some(name) = file.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned) else { continue };
        found.entry(name).or_insert(file);
    }
    Ok(())
}

/// A plugin file's bytes.
pub fn read_file(file: &Path) -> Result<Vec<u8>, String> {
    let cannot = |error: std::io::Error| format!("cannot read {}: {error}", file.display());
    let handle = std::fs::File::open(file).map_err(cannot)?;
    let bytes = handle.metadata().map_err(cannot)?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(format!("its {bytes} bytes exceed the limit of {MAX_FILE_BYTES}"));
    }
    let mut content = Vec::with_capacity(bytes as usize);
    handle.take(MAX_FILE_BYTES + 1).read_to_end(&mut content).map_err(cannot)?;
    if content.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("it exceeds the limit of {MAX_FILE_BYTES} bytes"));
    }
    Ok(content)
}

/// Compiles a component, a core module with component metadata, or a component's text.
pub fn compile(host: &Host, content: &[u8]) -> Result<Component, String> {
    let is_core_module = content.starts_with(b"\0asm\x01\0\0\0");
    let encoded;
    let bytes = if is_core_module {
        encoded = wit_component::ComponentEncoder::default()
            .module(content)
            .and_then(|encoder| encoder.validate(true).encode())
            .map_err(|error| {
                format!("is a core module that cannot be made a component: {}", cut(&format!("{error:#}")))
            })?;
        &encoded
    } else {
        content
    };
    Component::new(host.engine(), bytes)
        .map_err(|error| format!("does not compile: {}", cut(&format!("{error:#}"))))
}

/// What a component exports of ours, ready to be instantiated.
#[allow(clippy::type_complexity)]
pub fn kinds(
    host: &Host,
    component: &Component,
) -> Result<(Option<SelectorPre<Guest>>, Option<FilterPre<Guest>>), String> {
    let (mut selector, mut filter, mut others) = (false, false, Vec::new());
    for (name, _) in component.component_type().exports(host.engine()) {
        let (interface, version) = name.split_once('@').unwrap_or((name, ""));
        let ours = matches!(interface, "waspmq:plugin/candidate-selector" | "waspmq:plugin/message-filter");
        if ours && !version.starts_with("1.") {
            return Err(format!(
                "exports {} of version {version}; this broker has {WIT_VERSION}",
                cut(interface)
            ));
        }
        match interface {
            "waspmq:plugin/candidate-selector" => selector = true,
            "waspmq:plugin/message-filter" => filter = true,
            _ => others.push(cut(name).to_owned()),
        }
    }
    if !selector && !filter {
        return Err(format!(
            "exports neither waspmq:plugin/candidate-selector@{WIT_VERSION} nor waspmq:plugin/message-filter@{WIT_VERSION}, only [{}]",
            cut(&others.join(", "))
        ));
    }
    let linker = host.linker(component)?;
    let pre = linker
        .instantiate_pre(component)
        .map_err(|error| format!("cannot be linked: {}", cut(&format!("{error:#}"))))?;
    let unfit =
        |error: wasmtime::Error| format!("does not fit the interface: {}", cut(&format!("{error:#}")));
    let selector = selector.then(|| SelectorPre::new(pre.clone())).transpose().map_err(unfit)?;
    let filter = filter.then(|| FilterPre::new(pre)).transpose().map_err(unfit)?;
    Ok((selector, filter))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A folder that only this user can change: running what is in it is as safe as running this program.
fn private_folder(folder: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let data = std::fs::symlink_metadata(folder)?;
    // SAFETY: it only reads the process's own id.
    let me = unsafe { libc::geteuid() };
    if !data.is_dir() || data.uid() != me || data.mode() & 0o022 != 0 {
        return Err(std::io::Error::other("others can write to it"));
    }
    Ok(())
}

/// Compiled code from the cache, if it is whole.
fn cached(host: &Host, file: &Path) -> Option<Component> {
    let content = std::fs::read(file).ok()?;
    let (head, code) = content.split_at_checked(CACHE_MAGIC.len() + 32)?;
    let (magic, sum) = head.split_at(CACHE_MAGIC.len());
    if magic != CACHE_MAGIC || sum != Sha256::digest(code).as_slice() {
        return None;
    }
    // SAFETY: this program wrote it, into a folder that only its user can change, and it is whole.
    unsafe { Component::deserialize(host.engine(), code) }.ok()
}

fn keep(component: &Component, file: &Path) -> Result<(), String> {
    use std::io::Write;
    let code = component.serialize().map_err(|error| error.to_string())?;
    let temporary = file.with_extension(format!("{}.tmp", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut out = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        out.write_all(CACHE_MAGIC)?;
        out.write_all(&Sha256::digest(&code))?;
        out.write_all(&code)?;
        out.sync_all()?;
        std::fs::rename(&temporary, file)
    };
    write().map_err(|error| {
        let _ = std::fs::remove_file(&temporary);
        error.to_string()
    })
}
