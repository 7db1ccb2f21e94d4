//! Somebody's command that says whether a GPU's guest got a fabric.

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

/// The exit code of a check that found no fabric.
const DOWN: i32 = 10;
/// Letters of its last line that are shown.
const LONGEST: usize = 400;
/// How long it has to end when it is told to: it ends its guest.
const PATIENCE: Duration = Duration::from_secs(20);

/// An operator's wish to stop. It is not lost while nobody waits for it.
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

/// What came of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The fabric came up.
    Up,
    /// It did not.
    Down,
    /// Nobody knows.
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
    /// Runs it to its end, or ends it.
    pub(super) async fn run(&self, stop: &mut Stop) -> Outcome {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(self.command).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("FIRSTLIGHT_PROBE_PCI", self.pci.to_string());
        command.env("FIRSTLIGHT_PROBE_MODULE", self.module.to_string());
        // What it starts ends with it.
        command.process_group(0).kill_on_drop(true);
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return Outcome::Stopped(format!("cannot start /bin/sh: {error}")),
        };
        let last = Arc::new(Mutex::new(String::new()));
        let readers = [
            child.stdout.take().map(|stream| tokio::spawn(read(stream, Arc::clone(&last)))),
            child.stderr.take().map(|stream| tokio::spawn(read(stream, Arc::clone(&last)))),
        ];
        let ended = tokio::select! {
            ended = child.wait() => Ok(ended),
            () = stop.wished() => Err("it was interrupted".to_owned()),
            () = tokio::time::sleep(self.limit) => Err(format!("the check has not ended within {} s", self.limit.as_secs())),
        };
        if ended.is_err() {
            end(&mut child).await;
        }
        for reader in readers.into_iter().flatten() {
            // Something that it left behind may hold them open.
            let _ = timeout(Duration::from_millis(500), reader).await;
        }
        let last = last.lock().map(|last| last.clone()).unwrap_or_default();
        match ended {
            Ok(Ok(status)) => judged(status, &last),
            Ok(Err(error)) => Outcome::Stopped(format!("the check is lost: {error}")),
            Err(why) => Outcome::Stopped(why),
        }
    }
}

fn judged(status: ExitStatus, last: &str) -> Outcome {
    match status.code() {
        Some(0) => Outcome::Up,
        Some(DOWN) => Outcome::Down,
        _ if last.is_empty() => Outcome::Stopped(format!("the check ended with {status} and said nothing")),
        _ => Outcome::Stopped(format!("the check ended with {status}: {last}")),
    }
}

/// Ends it and all that it has started.
async fn end(child: &mut Child) {
    let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    for signal in [Signal::TERM, Signal::KILL] {
        if let Some(group) = group {
            // It may be gone already.
            let _ = kill_process_group(group, signal);
        }
        if timeout(PATIENCE, child.wait()).await.is_ok() && signal == Signal::KILL {
            return;
        }
    }
}

/// Keeps the last line that is none of spaces.
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
    fn exit_codes_say_what_it_found() {
        let long = Duration::from_secs(20);
        assert_eq!(ran("test $FIRSTLIGHT_PROBE_PCI-$FIRSTLIGHT_PROBE_MODULE = 0000:0f:00.0-5", long), Outcome::Up);
        assert_eq!(ran("exit 10", long), Outcome::Down);
        let stopped = |text: &str| Outcome::Stopped(text.to_owned());
        assert_eq!(
            ran("echo a; printf 'no \\033guest\\n\\n' >&2; exit 3", long),
            stopped("the check ended with exit status: 3: no guest")
        );
        assert_eq!(ran("exit 1", long), stopped("the check ended with exit status: 1 and said nothing"));
        assert!(matches!(ran("kill -9 $$", long), Outcome::Stopped(text) if text.contains("signal: 9")));
        assert!(matches!(ran("nowhere-to-be-found", long), Outcome::Stopped(text) if text.contains("not found")));
    }

    #[test]
    fn one_that_hangs_is_ended_with_what_it_has_started() {
        let dir = std::env::temp_dir().join(format!("firstlight-check-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("pid");
        let command = format!("sleep 1000 & echo $! > {}; wait", file.display());
        let outcome = ran(&command, Duration::from_millis(300));
        assert!(matches!(outcome, Outcome::Stopped(text) if text.contains("not ended within")));
        let pid = std::fs::read_to_string(&file).unwrap();
        // It was killed; the kernel may be at it.
        let begun = std::time::Instant::now();
        loop {
            let state = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            if state.is_empty() || state.contains(") Z ") {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{state}");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::fs::remove_dir_all(&dir).unwrap();
        // Output without an end fills no memory, and what is left behind is not waited for.
        assert_eq!(
            ran("sleep 100 & head -c 1000000 /dev/zero | tr '\\0' x; exit 10", Duration::from_secs(20)),
            Outcome::Down
        );
    }
}
