//! Runs cargo and other programs; prints each command, and every minute that it is still running.

use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use firstlight_lab::binaries::workspace;

/// Runs a program in the workspace's root; fails with an error that contains the command line.
pub(crate) fn run_program(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    run_program_with(program, arguments, &[])
}

fn run_program_with(program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> anyhow::Result<()> {
    let shown = format!("{program} {}", arguments.join(" "));
    eprintln!("xtask: {shown}");
    let mut command = Command::new(program);
    command.current_dir(workspace()).args(arguments).envs(environment.iter().copied());
    let child = command.spawn().with_context(|| format!("failed to start `{shown}`"))?;
    let status = wait(child, &shown).with_context(|| format!("failed to wait for `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed with {status}");
    }
    Ok(())
}

/// Interval of "still running" lines: some commands compile for minutes without output.
const INTERVAL: Duration = Duration::from_secs(60);

fn wait(mut child: Child, shown: &str) -> std::io::Result<ExitStatus> {
    let begin = Instant::now();
    let (ended, waiting) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while waiting.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                eprintln!("xtask: still running after {} s: {shown}", begin.elapsed().as_secs());
            }
        });
        let status = child.wait();
        drop(ended);
        status
    })
}

/// Runs cargo.
pub(crate) fn cargo(arguments: &[&str]) -> anyhow::Result<()> {
    cargo_with(arguments, &[])
}

/// Runs cargo with additional environment variables.
pub(crate) fn cargo_with(arguments: &[&str], environment: &[(&str, &str)]) -> anyhow::Result<()> {
    run_program_with(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()), arguments, environment)
}
