//! Daemons beside QEMU: started, awaited and stopped with the machine.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};
use tokio::time::sleep;

use crate::VmError;

/// Timeout for a daemon to create its socket.
const LISTEN: Duration = Duration::from_secs(20);

/// Poll interval for a daemon's socket.
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(crate) struct Helper {
    name: String,
    child: Child,
    log: PathBuf,
    started: Instant,
}

impl Helper {
    /// Starts `command` with its output in `NAME.log` in `dir`.
    pub(crate) fn start(name: &str, mut command: std::process::Command, dir: &Path) -> Result<Self, VmError> {
        let log = dir.join(format!("{name}.log"));
        let file = |path: &Path| File::create(path).map_err(|source| VmError::File { path: path.to_owned(), source });
        let out = file(&log)?;
        let err = out.try_clone().map_err(|source| VmError::File { path: log.clone(), source })?;
        let program = PathBuf::from(command.get_program());
        firstlight_sys::child::die_with_parent(&mut command);
        let mut command = Command::from(command);
        command.stdin(Stdio::null()).stdout(out).stderr(err).kill_on_drop(true);
        let child = command.spawn().map_err(|source| VmError::Spawn { name: name.to_owned(), program, source })?;
        Ok(Self { name: name.to_owned(), child, log, started: Instant::now() })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    /// Waits until the daemon has created its socket.
    pub(crate) async fn wait_for_socket(&mut self, socket: &Path) -> Result<(), VmError> {
        while !socket.exists() {
            if let Ok(Some(_)) = self.child.try_wait() {
                return Err(self.error("exited"));
            }
            if self.started.elapsed() > LISTEN {
                return Err(self.error("did not listen"));
            }
            sleep(PAUSE).await;
        }
        Ok(())
    }

    fn error(&self, problem: &'static str) -> VmError {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().rev().take(5).collect();
        let log_tail = lines.into_iter().rev().collect::<Vec<_>>().join(" | ");
        VmError::Helper { name: self.name.clone(), problem, elapsed: self.started.elapsed(), log_tail }
    }

    /// Kills the daemon and waits for it.
    pub(crate) async fn stop(mut self) {
        let _ = self.child.kill().await;
    }
}
