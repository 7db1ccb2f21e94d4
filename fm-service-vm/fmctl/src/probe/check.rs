//! Runs the operator's command that reports whether a GPU's guest got a fabric.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use firstlight_pci::Address;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

/// Exit code of a check that found no fabric.
const DOWN: i32 = 10;
/// Maximum length of the reported last line, in bytes.
const LONGEST: usize = 400;
/// Time between SIGTERM and SIGKILL: the command has to end its guest.
const TIMEOUT: Duration = Duration::from_secs(20);

/// SIGINT and SIGTERM of the operator, also those that arrive while nothing waits for them.
pub(super) struct Stop {
    interrupted: tokio::signal::unix::Signal,
    ended: tokio::signal::unix::Signal,
}

impl Stop {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { interrupted: signal(SignalKind::interrupt())?, ended: signal(SignalKind::terminate())? })
    }

    async fn wished(&mut self) {
        tokio::select! {
            _ = self.interrupted.recv() => {}
            _ = self.ended.recv() => {}
        }
    }
}

/// The outcome of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The fabric came up.
    Up,
    /// The fabric did not come up.
    Down,
    /// Unknown.
    Stopped(String),
}

/// One check.
pub(super) struct Check<'a> {
    pub(super) command: &'a str,
    pub(super) pci: Address,
    pub(super) module: u32,
    pub(super) limit: Duration,
}

impl Check<'_> {
    /// Runs the command until it exits, times out or is interrupted.
    pub(super) async fn run(&self, stop: &mut Stop) -> Outcome {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(self.command).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("FIRSTLIGHT_PROBE_PCI", self.pci.to_string());
        command.env("FIRSTLIGHT_PROBE_MODULE_ID", self.module.to_string());
        // A process group of its own, so that its children can be killed with it.
        command.process_group(0).kill_on_drop(true);
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return Outcome::Stopped(format!("failed to start /bin/sh: {error}")),
        };
        let last = Arc::new(Mutex::new(String::new()));
        let readers = [
            child.stdout.take().map(|stream| tokio::spawn(read(stream, Arc::clone(&last)))),
            child.stderr.take().map(|stream| tokio::spawn(read(stream, Arc::clone(&last)))),
        ];
        let ended = tokio::select! {
            ended = child.wait() => Ok(ended),
            () = stop.wished() => Err("interrupted".to_owned()),
            () = tokio::time::sleep(self.limit) => Err(format!("the check has not ended within {} s", self.limit.as_secs())),
        };
        if ended.is_err() {
            end(&mut child).await;
        }
        for reader in readers.into_iter().flatten() {
            // A background process of the command may keep the pipes open.
            let _ = timeout(Duration::from_millis(500), reader).await;
        }
        let last = last.lock().map(|last| last.clone()).unwrap_or_default();
        match ended {
            Ok(Ok(status)) => judged(status, &last),
            Ok(Err(error)) => Outcome::Stopped(format!("failed to wait for the check: {error}")),
            Err(reason) => Outcome::Stopped(reason),
        }
    }
}

fn judged(status: ExitStatus, last: &str) -> Outcome {
    match status.code() {
        Some(0) => Outcome::Up,
        Some(DOWN) => Outcome::Down,
        _ if last.is_empty() => Outcome::Stopped(format!("the check ended with {status} without output")),
        _ => Outcome::Stopped(format!("the check ended with {status}: {last}")),
    }
}

/// Ends the command's process group.
async fn end(child: &mut Child) {
    let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    for signal in [Signal::TERM, Signal::KILL] {
        if let Some(group) = group {
            // It may have exited.
            let _ = kill_process_group(group, signal);
        }
        if timeout(TIMEOUT, child.wait()).await.is_ok() && signal == Signal::KILL {
            return;
        }
    }
}

/// Keeps the last line that is not blank.
async fn read(mut stream: impl AsyncRead + Unpin, last: Arc<Mutex<String>>) {
    let (mut piece, mut line) = ([0; 4096], Vec::new());
    let keep = |line: &mut Vec<u8>| {
        let text: String = String::from_utf8_lossy(line).chars().filter(|letter| !letter.is_control()).collect();
        if let Ok(mut last) = last.lock()
            && !text.trim().is_empty()
        {
            text.trim().clone_into(&mut last);
        }
        line.clear();
    };
    while let Ok(count @ 1..) = stream.read(&mut piece).await {
        for byte in piece.iter().take(count) {
            match byte {
                b'\n' => keep(&mut line),
                _ if line.len() < LONGEST => line.push(*byte),
                _ => {}
            }
        }
    }
    keep(&mut line);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(command: &str, limit: Duration) -> Outcome {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let pci = "0000:0f:00.0".parse().unwrap();
            Check { command, pci, module: 5, limit }.run(&mut Stop::new().unwrap()).await
        })
    }

    #[test]
    fn check_exit_codes_map_to_outcomes() {
        let long = Duration::from_secs(20);
        assert_eq!(ran("test $FIRSTLIGHT_PROBE_PCI-$FIRSTLIGHT_PROBE_MODULE_ID = 0000:0f:00.0-5", long), Outcome::Up);
        assert_eq!(ran("exit 10", long), Outcome::Down);
        let stopped = |text: &str| Outcome::Stopped(text.to_owned());
        assert_eq!(
            ran("echo a; printf 'no \\033guest\\n\\n' >&2; exit 3", long),
            stopped("the check ended with exit status: 3: no guest")
        );
        assert_eq!(ran("exit 1", long), stopped("the check ended with exit status: 1 without output"));
        assert!(matches!(ran("kill -9 $$", long), Outcome::Stopped(text) if text.contains("signal: 9")));
        assert!(matches!(ran("nowhere-to-be-found", long), Outcome::Stopped(text) if text.contains("not found")));
    }

    #[test]
    fn hanging_check_is_killed_with_its_children() {
        let dir = std::env::temp_dir().join(format!("firstlight-check-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("pid");
        let command = format!("sleep 1000 & echo $! > {}; wait", file.display());
        let outcome = ran(&command, Duration::from_millis(300));
        assert!(matches!(outcome, Outcome::Stopped(text) if text.contains("not ended within")));
        let pid = std::fs::read_to_string(&file).unwrap();
        // The kill may still be in progress.
        let start = std::time::Instant::now();
        loop {
            let state = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            if state.is_empty() || state.contains(") Z ") {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "{state}");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::fs::remove_dir_all(&dir).unwrap();
        // Endless output uses bounded memory, and background processes are not waited for.
        assert_eq!(
            ran("sleep 100 & head -c 1000000 /dev/zero | tr '\\0' x; exit 10", Duration::from_secs(20)),
            Outcome::Down
        );
    }
}
