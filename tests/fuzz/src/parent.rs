//! The process that starts one for each target and sees how it ends.

use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::targets::Target;
use crate::{Arguments, SMOKE, hunt};

/// What a target may take beyond its time: to replay what is known, and for one slow input.
const GRACE: Duration = Duration::from_secs(60);

/// Runs targets one after the other.
pub(crate) fn run(targets: &[&'static Target], arguments: &Arguments) -> ExitCode {
    let count = u32::try_from(targets.len()).unwrap_or(u32::MAX).max(1);
    let usual = if arguments.smoke { SMOKE / count } else { Duration::from_secs(10) };
    let time = arguments.time.unwrap_or(usual);
    let mut fine = true;
    for target in targets {
        fine &= one(target, time, arguments.grow);
    }
    if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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
