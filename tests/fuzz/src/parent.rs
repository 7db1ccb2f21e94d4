//! The parent process: starts a worker process per target and reports how it exits.

use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::targets::Target;
use crate::{Arguments, fuzz_loop};

/// Targets of input that the host and the kernel send directly to the guest:
/// `--smoke` gives each of them [`SMOKE_DIRECT`].
const DIRECT_TARGETS: &[&str] =
    &["ttrpc-frames", "shim-oci-spec", "storage-options", "uevent", "mountinfo", "kernel-command-line"];

/// A direct target's time in `--smoke`.
const SMOKE_DIRECT: Duration = Duration::from_secs(30);

/// Any other target's time in `--smoke`.
const SMOKE_OTHER: Duration = Duration::from_secs(2);

/// A target's time by default.
const DEFAULT_TIME: Duration = Duration::from_secs(10);

/// Time that a target may take beyond its own: to run seeds and corpus, and for one slow input.
const GRACE: Duration = Duration::from_secs(60);

/// Runs targets, as many in parallel as there are processors.
pub(crate) fn run(targets: &[&'static Target], arguments: &Arguments) -> ExitCode {
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(targets.len());
    let time = |target: &Target| arguments.time.unwrap_or_else(|| default_time(target, arguments.smoke));
    let mut queue = targets.to_vec();
    // pop() takes the longest first, so that none runs alone at the end.
    queue.sort_by_key(|target| time(target));
    let queue = Mutex::new(queue);
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let worker = || {
        let mut passed = true;
        while let Some(target) = next() {
            passed &= run_target(target, time(target), arguments.grow);
        }
        passed
    };
    let passed = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        // A panic of a worker counts as a failure of its targets.
        workers.into_iter().fold(true, |passed, worker| passed & worker.join().unwrap_or(false))
    });
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn default_time(target: &Target, smoke: bool) -> Duration {
    match (smoke, DIRECT_TARGETS.contains(&target.name)) {
        (false, _) => DEFAULT_TIME,
        (true, true) => SMOKE_DIRECT,
        (true, false) => SMOKE_OTHER,
    }
}

/// Runs a target and reports a failure; returns whether it passed.
fn run_target(target: &Target, time: Duration, grow: bool) -> bool {
    let current = std::env::temp_dir().join(format!("firstlight-fuzz-{}-{}", target.name, std::process::id()));
    let exit = run_worker(target, time, grow, &current);
    let input = std::fs::read(&current).ok().as_deref().and_then(fuzz_loop::recorded_input);
    let _ = std::fs::remove_file(&current);
    let cause = match exit {
        Ok(Some(status)) if status.success() => return true,
        Ok(Some(status)) => status.to_string(),
        Ok(None) => format!("did not exit within {:?}", time + GRACE),
        Err(error) => format!("failed to start: {error}"),
    };
    let file = format!("fuzz-{}.bin", target.name);
    let written = std::fs::write(&file, input.unwrap_or_default());
    println!(
        "{:24} FAILED ({cause}): input in {file}{}",
        target.name,
        written.err().map_or(String::new(), |e| format!(", not written: {e}"))
    );
    println!("{:24} replay: cargo xtask fuzz --replay {file} {}", "", target.name);
    false
}

/// Runs a target in its own process; returns `None` if it did not exit in time and was killed.
fn run_worker(target: &Target, time: Duration, grow: bool, current: &Path) -> std::io::Result<Option<ExitStatus>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--worker").arg(current).args(["--milliseconds", &time.as_millis().to_string()]);
    command.args(grow.then_some("--grow")).arg(target.name);
    // The policy engine prints to stderr; a panic's message is printed by the replay.
    command.stderr(Stdio::null());
    let mut child = command.spawn()?;
    let end = Instant::now() + time + GRACE;
    while Instant::now() < end {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        sleep(Duration::from_millis(20));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::TARGETS;

    #[test]
    fn direct_targets_exist_and_get_their_smoke_time() {
        for name in DIRECT_TARGETS {
            let target = TARGETS.iter().find(|target| target.name == *name).unwrap();
            assert_eq!(default_time(target, true), SMOKE_DIRECT, "{name}");
        }
        let others = TARGETS.iter().filter(|target| !DIRECT_TARGETS.contains(&target.name));
        assert!(others.into_iter().all(|target| default_time(target, true) == SMOKE_OTHER));
        assert_eq!(default_time(&TARGETS[0], false), DEFAULT_TIME);
    }

    #[test]
    fn every_target_has_a_corpus_in_the_tree() {
        for target in TARGETS {
            assert!(!crate::corpus::load(target.name).is_empty(), "{0}: cargo xtask fuzz --grow {0}", target.name);
        }
    }
}
