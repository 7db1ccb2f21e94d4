//! Test support: a directory with all files of a manager, and its process.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::control::{Control, Snapshot};
use crate::machine::Phase;
use crate::scenario::{Scenario, VARIABLE};

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

/// A directory with all files of a manager, kept across its restarts.
#[derive(Debug, Clone)]
pub struct Home {
    dir: PathBuf,
}

impl Home {
    /// Uses an existing directory.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// Returns the configuration file.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.dir.join("fabricmanager.cfg")
    }

    /// Returns the file for `FAKE_FM`.
    #[must_use]
    pub fn scenario(&self) -> PathBuf {
        self.dir.join("fake-fm.json")
    }

    /// Returns the command socket, unless the configuration has another one.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.join("socket")
    }

    /// Returns the control socket for tests.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.dir.join("control")
    }

    /// Returns the state file.
    #[must_use]
    pub fn state_file(&self) -> PathBuf {
        self.dir.join("fabricmanager.state")
    }

    /// Returns the manager's log.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.dir.join("fabricmanager.log")
    }

    /// Returns the log of calls across restarts, JSON lines.
    #[must_use]
    pub fn journal(&self) -> PathBuf {
        self.dir.join("journal")
    }

    /// Writes the configuration (shared mode, files in this directory, and then `keys`), and the scenario.
    ///
    /// # Errors
    /// The directory cannot be written to.
    pub fn write(&self, keys: &[(&str, &str)], scenario: &Scenario) -> Result<(), Error> {
        let own = [
            ("FABRIC_MODE", "1".to_owned()),
            ("DAEMONIZE", "0".to_owned()),
            ("STATE_FILE_NAME", self.state_file().display().to_string()),
            ("FM_CMD_UNIX_SOCKET_PATH", self.socket().display().to_string()),
            ("LOG_FILE_NAME", self.log().display().to_string()),
        ];
        let own = own.iter().filter(|(key, _)| keys.iter().all(|(given, _)| given != key));
        let mut text: String = own.map(|(key, value)| format!("{key}={value}\n")).collect();
        text.extend(keys.iter().map(|(key, value)| format!("{key}={value}\n")));
        std::fs::write(self.config(), text)?;
        let scenario = Scenario { control: Some(self.control()), log: Some(self.journal()), ..scenario.clone() };
        std::fs::write(self.scenario(), serde_json::to_vec_pretty(&scenario)?)
    }

    /// Prepares the command.
    #[must_use]
    pub fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.arg("--config").arg(self.config()).args(arguments).env(VARIABLE, self.scenario());
        command.stdin(Stdio::null());
        command
    }

    /// Starts the program and waits for the control socket; the manager may still be starting.
    ///
    /// # Errors
    /// It does not start, or exits.
    pub fn start(&self, program: &Path, arguments: &[&str]) -> Result<Running, Error> {
        // Left by a previous run.
        match std::fs::remove_file(self.control()) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut child = self.command(program, arguments).spawn()?;
        let control = poll_until(|| {
            if let Some(status) = child.try_wait()? {
                return Err(Error::other(format!("fake-fm ended: {status}")));
            }
            Ok(Control::connect(&self.control()).ok())
        })?;
        Ok(Running { child, control })
    }
}

fn poll_until<T>(mut look: impl FnMut() -> Result<Option<T>, Error>) -> Result<T, Error> {
    let start = Instant::now();
    while start.elapsed() < TIMEOUT {
        if let Some(found) = look()? {
            return Ok(found);
        }
        thread::sleep(PAUSE);
    }
    Err(ErrorKind::TimedOut.into())
}

/// A running manager; it is killed when this is dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    /// The control socket.
    pub control: Control,
}

impl Running {
    /// Returns the process id.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Waits until a snapshot meets a condition.
    ///
    /// # Errors
    /// The process exits, or the timeout passes.
    pub fn wait_until(&mut self, condition: impl Fn(&Snapshot) -> bool) -> Result<Snapshot, Error> {
        poll_until(|| self.control.snapshot().map(|snapshot| Some(snapshot).filter(&condition)))
    }

    /// Waits for a phase.
    ///
    /// # Errors
    /// The process exits, or the timeout passes.
    pub fn wait_for(&mut self, phase: Phase) -> Result<Snapshot, Error> {
        self.wait_until(|snapshot| snapshot.phase == phase)
    }

    /// Kills the process.
    ///
    /// # Errors
    /// It has exited.
    pub fn kill(&mut self) -> Result<(), Error> {
        self.child.kill()?;
        self.child.wait().map(drop)
    }

    /// Sends `SIGTERM`; returns the exit code.
    ///
    /// # Errors
    /// It has exited, or does not exit in time.
    pub fn terminate(&mut self) -> Result<Option<i32>, Error> {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), rustix::process::Signal::TERM)?;
        self.wait().map(|status| status.code())
    }

    /// Waits for its exit.
    ///
    /// # Errors
    /// It does not exit in time.
    pub fn wait(&mut self) -> Result<ExitStatus, Error> {
        poll_until(|| self.child.try_wait())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Builds the program and returns its path.
///
/// # Errors
/// cargo cannot be started or fails; its messages are on standard error.
pub fn build() -> Result<PathBuf, Error> {
    cargo(&["--package", "firstlight-fake-fm", "--bin", "fake-fm"])?;
    Ok(target().join("debug/fake-fm"))
}

/// Builds the libnvfm stand-in with these features, as `libnvfm.so.1` in a directory of its own, and returns its
/// path.
///
/// # Errors
/// cargo cannot be started or fails; its messages are on standard error.
pub fn build_library(features: &str) -> Result<PathBuf, Error> {
    let all = target().join("stand-in-nvfm");
    let dir = all.join(if features.is_empty() { "whole" } else { features });
    std::fs::create_dir_all(&dir)?;
    // cargo writes all variants to the same path.
    let lock = File::create(all.join("lock"))?;
    lock.lock()?;
    cargo(&["--package", "firstlight-stand-in-nvfm", "--lib", "--features", features])?;
    let (new, path) = (dir.join("new"), dir.join("libnvfm.so.1"));
    std::fs::copy(target().join("debug/libnvfm.so"), &new)?;
    // Another test may have the old one loaded.
    std::fs::rename(&new, &path)?;
    Ok(path)
}

fn workspace() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}

fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

fn cargo(arguments: &[&str]) -> Result<(), Error> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(workspace()).args(["build", "--quiet", "--locked"]).args(arguments).stdin(Stdio::null());
    if command.status()?.success() {
        return Ok(());
    }
    Err(Error::other(format!("`cargo build {}` failed, see above", arguments.join(" "))))
}
