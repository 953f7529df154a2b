//! The broker's own PostgreSQL: made, started, watched and stopped by the broker.
//!
//! It listens on a Unix socket in its folder only. One broker per folder: a lock
//! on `lock` is held while the broker runs, and goes with its process, however
//! that ends. A server left over by a broker that was killed is stopped first.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest wait for the server to take connections: it may have to recover first.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Longest wait for it to end.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Pause before a server that ended by itself is started again.
const RESTART_PAUSE: Duration = Duration::from_millis(200);
/// Longest path of a Unix socket.
const MAX_SOCKET_PATH: usize = 100;

/// A running PostgreSQL.
pub struct Embedded {
    shared: Arc<Shared>,
    _lock: File,
}

struct Shared {
    programs: PathBuf,
    data: PathBuf,
    socket: PathBuf,
    user: Option<(u32, u32)>,
    child: Mutex<Option<Child>>,
    stopping: AtomicBool,
}

impl Embedded {
    /// Starts it in `folder`, which is made on first use. Fails, with the reason and
    /// what to do, when there is no PostgreSQL or another broker has the folder.
    pub fn start(folder: &Path) -> Result<Self, String> {
        let say =
            |what: &str, error: std::io::Error| format!("{what} {}: {error} (--data)", folder.display());
        fs::create_dir_all(folder).map_err(|error| say("cannot make", error))?;
        let folder = folder.canonicalize().map_err(|error| say("cannot open", error))?;
        let lock = lock(&folder)?;
        let programs = find_programs()?;
        // PostgreSQL refuses to run as root.
        // SAFETY: geteuid cannot fail and touches no memory.
        let user = if unsafe { libc::geteuid() } == 0 { Some(service_user()?) } else { None };
        let data = folder.join("postgres");
        let socket = if folder.as_os_str().len() + "/.s.PGSQL.5432".len() <= MAX_SOCKET_PATH {
            folder.clone()
        } else {
            let name = xxhash_rust::xxh3::xxh3_64(folder.as_os_str().as_encoded_bytes());
            let short = std::env::temp_dir().join(format!("waspmq-{name:016x}"));
            fs::create_dir_all(&short)
                .map_err(|error| format!("cannot make {}: {error}", short.display()))?;
            short
        };
        let shared = Arc::new(Shared {
            programs,
            data,
            socket,
            user,
            child: Mutex::new(None),
            stopping: AtomicBool::new(false),
        });
        shared.prepare(&folder)?;
        shared.launch()?;
        let watched = shared.clone();
        std::thread::Builder::new()
            .name("postgres-watch".to_owned())
            .spawn(move || watched.watch())
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Self { shared, _lock: lock })
    }

    /// How to connect to it.
    pub fn config(&self) -> postgres::Config {
        self.shared.config()
    }

    /// Stops it: open transactions are rolled back, everything committed is on disk.
    pub fn stop(self) {
        self.shared.stopping.store(true, Ordering::Release);
        let child = self.shared.child.lock().expect("no panic while it is held").take();
        let Some(mut child) = child else { return };
        // SAFETY: a signal to a child that has not been waited for.
        unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
        let until = Instant::now() + STOP_LIMIT;
        while Instant::now() < until {
            if matches!(child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // SAFETY: as above.
        unsafe { libc::kill(child.id() as i32, libc::SIGQUIT) };
        let _ = child.wait();
    }
}

impl Shared {
    fn config(&self) -> postgres::Config {
        let mut config = postgres::Config::new();
        config.host_path(&self.socket).user("waspmq").dbname("postgres");
        config
    }

    /// Runs a program as the user that owns the database.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        command.current_dir("/").env("LC_ALL", "C.UTF-8").stdin(Stdio::null());
        command
    }

    fn prepare(&self, folder: &Path) -> Result<(), String> {
        if let Some((uid, gid)) = self.user {
            self.check_reachable(folder)?;
            for path in [folder, &self.socket] {
                std::os::unix::fs::chown(path, Some(uid), Some(gid))
                    .map_err(|error| format!("cannot give {} to its user: {error}", path.display()))?;
            }
        }
        if self.data.join("PG_VERSION").exists() {
            return self.stop_leftover();
        }
        // A half-made folder of a first start that was interrupted.
        let making = folder.join("postgres.new");
        let _ = fs::remove_dir_all(&making);
        tracing::info!(folder = %self.data.display(), "making a new database");
        let made = self
            .command("initdb")
            .arg("-D")
            .arg(&making)
            .args(["-U", "waspmq", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--data-checksums"])
            .output()
            .map_err(|error| format!("cannot run initdb: {error}"))?;
        if !made.status.success() {
            return Err(format!("initdb failed: {}", String::from_utf8_lossy(&made.stderr).trim()));
        }
        fs::rename(&making, &self.data)
            .map_err(|error| format!("cannot rename {}: {error}", making.display()))
    }

    /// A service user must be able to walk to the folder.
    fn check_reachable(&self, folder: &Path) -> Result<(), String> {
        for parent in folder.ancestors().skip(1) {
            let mode = fs::metadata(parent).map(|meta| meta.permissions().mode()).unwrap_or(0o777);
            if mode & 0o001 == 0 {
                return Err(format!(
                    "run as root, PostgreSQL runs as the user postgres, who may not enter {}; choose another folder (--data), or allow it: chmod o+x {}",
                    parent.display(),
                    parent.display()
                ));
            }
        }
        Ok(())
    }

    /// The folder is locked by us, so a server that runs in it is an orphan.
    fn stop_leftover(&self) -> Result<(), String> {
        let Some(pid) = fs::read_to_string(self.data.join("postmaster.pid"))
            .ok()
            .and_then(|text| text.lines().next().and_then(|line| line.trim().parse::<i32>().ok()))
        else {
            return Ok(());
        };
        let is_ours = || {
            fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == self.data)
                && fs::read_to_string(format!("/proc/{pid}/comm"))
                    .is_ok_and(|name| name.starts_with("postgres"))
        };
        if !is_ours() {
            return Ok(());
        }
        tracing::warn!(pid, "stopping the PostgreSQL of a broker that was killed");
        for (signal, limit) in [(libc::SIGINT, 5), (libc::SIGQUIT, 10), (libc::SIGKILL, 5)] {
            // SAFETY: a signal to a process that was just seen to be ours.
            unsafe { libc::kill(pid, signal) };
            let until = Instant::now() + Duration::from_secs(limit);
            while Instant::now() < until {
                if !is_ours() {
                    return Ok(());
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Err(format!("a PostgreSQL with pid {pid} still runs in {} and does not end", self.data.display()))
    }

    /// Starts the server and waits until it takes connections.
    fn launch(&self) -> Result<(), String> {
        let log = OpenOptions::new().create(true).append(true).open(self.data.with_extension("log"));
        let log = log.map_err(|error| format!("cannot write PostgreSQL's log: {error}"))?;
        let mut command = self.command("postgres");
        command.arg("-D").arg(&self.data).arg("-k").arg(&self.socket);
        for setting in [
            "listen_addresses=",
            "port=5432",
            "max_connections=200",
            "shared_buffers=256MB",
            "max_wal_size=4GB",
            "wal_compression=on",
            "checkpoint_timeout=15min",
            "logging_collector=off",
            "unix_socket_permissions=0700",
        ] {
            command.args(["-c", setting]);
        }
        let parent = std::process::id();
        // SAFETY: only async-signal-safe calls between fork and exec.
        unsafe {
            command.pre_exec(move || {
                // Its own group: the terminal's ^C is for the broker. If the broker dies, it stops.
                libc::setpgid(0, 0);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGINT);
                if libc::getppid() as u32 != parent {
                    libc::_exit(1);
                }
                Ok(())
            });
        }
        let err = log.try_clone().map_err(|error| error.to_string())?;
        let mut child = command
            .stdout(log)
            .stderr(err)
            .spawn()
            .map_err(|error| format!("cannot run postgres: {error}"))?;
        let until = Instant::now() + START_LIMIT;
        loop {
            if let Ok(Some(status)) = child.try_wait() {
                return Err(format!(
                    "PostgreSQL ended at once ({status}); see {}",
                    self.data.with_extension("log").display()
                ));
            }
            // As root we may use a socket that only its owner may: root may everything.
            if self.config().connect(postgres::NoTls).is_ok() {
                break;
            }
            if Instant::now() > until {
                let _ = child.kill();
                return Err(format!(
                    "PostgreSQL takes no connections; see {}",
                    self.data.with_extension("log").display()
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        *self.child.lock().expect("no panic while it is held") = Some(child);
        Ok(())
    }

    /// Starts it again when it ends by itself.
    fn watch(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            std::thread::sleep(RESTART_PAUSE);
            let ended = {
                let mut child = self.child.lock().expect("no panic while it is held");
                match child.as_mut().map(Child::try_wait) {
                    Some(Ok(Some(status))) => {
                        *child = None;
                        Some(status.to_string())
                    }
                    Some(_) => None,
                    None => Some("it could not be started".to_owned()),
                }
            };
            if let Some(why) = ended
                && !self.stopping.load(Ordering::Acquire)
            {
                tracing::error!(%why, "PostgreSQL has ended; starting it again");
                if let Err(error) = self.stop_leftover().and_then(|()| self.launch()) {
                    tracing::error!(%error, "cannot start PostgreSQL");
                    std::thread::sleep(Duration::from_secs(1));
                }
            }
        }
    }
}

fn lock(folder: &Path) -> Result<File, String> {
    let path = folder.join("lock");
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|error| format!("cannot open {}: {error} (--data)", path.display()))?;
    // SAFETY: a valid descriptor.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
        let pid = fs::read_to_string(&path).unwrap_or_default();
        return Err(format!(
            "another broker (pid {}) uses the folder {}; stop it, or choose another folder with --data",
            pid.trim(),
            folder.display()
        ));
    }
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}

/// The newest PostgreSQL of this machine.
fn find_programs() -> Result<PathBuf, String> {
    if let Some(given) = std::env::var_os("WASPMQ_POSTGRES_BIN") {
        return Ok(given.into());
    }
    let version = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let mut found: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((version(&entry.path())?, entry.path().join("bin"))))
        .filter(|(_, bin)| bin.join("postgres").exists() && bin.join("initdb").exists())
        .collect();
    found.sort();
    if let Some((_, bin)) = found.pop() {
        return Ok(bin);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).find(|dir| dir.join("initdb").exists() && dir.join("postgres").exists()).ok_or_else(|| {
        "there is no PostgreSQL on this machine; install it (Debian: apt-get install postgresql), name its programs' folder in WASPMQ_POSTGRES_BIN, or use another server with --database".to_owned()
    })
}

/// The user that PostgreSQL runs as when the broker is root.
fn service_user() -> Result<(u32, u32), String> {
    let users =
        fs::read_to_string("/etc/passwd").map_err(|error| format!("cannot read /etc/passwd: {error}"))?;
    let of = |name: &str| {
        users.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            (fields.first() == Some(&name))
                .then(|| Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?)))?
        })
    };
    of("postgres")
        .or_else(|| of("nobody"))
        .ok_or_else(|| "there is no user postgres to run PostgreSQL as".to_owned())
}
