//! The process that starts one for each target and sees how it ends.

use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::targets::Target;
use crate::{Arguments, hunt};

/// What the host and the kernel say to the agent first hand: `--smoke` gives
/// each of them [`LONG`].
const FIRST_HAND: &[&str] =
    &["ttrpc-frames", "shim-oci-spec", "storage-options", "uevent", "mountinfo", "kernel-command-line"];

/// A target's time in `--smoke`, beyond what is known already.
const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_secs(2);

/// A target's time without further wishes.
const USUAL: Duration = Duration::from_secs(10);

/// What a target may take beyond its time: to replay what is known, and for one slow input.
const GRACE: Duration = Duration::from_secs(60);

/// Runs targets, as many at a time as there are processors.
pub(crate) fn run(targets: &[&'static Target], arguments: &Arguments) -> ExitCode {
    let lanes = std::thread::available_parallelism().map_or(1, usize::from).min(targets.len());
    let time = |target: &Target| arguments.time.unwrap_or_else(|| usual(target, arguments.smoke));
    let mut line = targets.to_vec();
    // The longest first, so that none is alone at the end.
    line.sort_by_key(|target| time(target));
    let line = Mutex::new(line);
    let next = || line.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let lane = || {
        let mut fine = true;
        while let Some(target) = next() {
            fine &= one(target, time(target), arguments.grow);
        }
        fine
    };
    let fine = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        // A lane that panicked did not see its targets survive.
        lanes.into_iter().fold(true, |fine, lane| fine & lane.join().unwrap_or(false))
    });
    if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usual(target: &Target, smoke: bool) -> Duration {
    match (smoke, FIRST_HAND.contains(&target.name)) {
        (false, _) => USUAL,
        (true, true) => LONG,
        (true, false) => SHORT,
    }
}

/// Whether a target survived.
fn one(target: &Target, time: Duration, grow: bool) -> bool {
    let current = std::env::temp_dir().join(format!("firstlight-fuzz-{}-{}", target.name, std::process::id()));
    let ended = worker(target, time, grow, &current);
    let input = std::fs::read(&current).ok().as_deref().and_then(hunt::noted);
    let _ = std::fs::remove_file(&current);
    let why = match ended {
        Ok(Some(status)) if status.success() => return true,
        Ok(Some(status)) => status.to_string(),
        Ok(None) => format!("did not end in {:?}", time + GRACE),
        Err(error) => format!("cannot be run: {error}"),
    };
    let file = format!("fuzz-{}.bin", target.name);
    let written = std::fs::write(&file, input.unwrap_or_default());
    println!(
        "{:24} FAILED ({why}): input in {file}{}",
        target.name,
        written.err().map_or(String::new(), |e| format!(", not written: {e}"))
    );
    println!("{:24} replay: cargo xtask fuzz --replay {file} {}", "", target.name);
    false
}

/// Runs a target in a process of its own; none if it does not end.
fn worker(target: &Target, time: Duration, grow: bool, current: &Path) -> std::io::Result<Option<ExitStatus>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--worker").arg(current).args(["--milliseconds", &time.as_millis().to_string()]);
    command.args(grow.then_some("--grow")).arg(target.name);
    // Engines chatter; what a panic says is seen when its input is replayed.
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
    fn what_comes_first_hand_is_there_and_gets_its_time() {
        for name in FIRST_HAND {
            let target = TARGETS.iter().find(|target| target.name == *name).unwrap();
            assert_eq!(usual(target, true), LONG, "{name}");
        }
        let others = TARGETS.iter().filter(|target| !FIRST_HAND.contains(&target.name));
        assert!(others.into_iter().all(|target| usual(target, true) == SHORT));
        assert_eq!(usual(&TARGETS[0], false), USUAL);
    }

    #[test]
    fn every_target_has_a_corpus_in_the_tree() {
        for target in TARGETS {
            assert!(!crate::corpus::load(target.name).is_empty(), "{0}: cargo xtask fuzz --grow {0}", target.name);
        }
    }
}
