//! Runs cargo and other programs; prints each command, and that it still runs.

use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use firstlight_lab::binaries::workspace;

/// Runs a program in the workspace's root; its failure is an error that names it.
pub(crate) fn must(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    must_with(program, arguments, &[])
}

fn must_with(program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> anyhow::Result<()> {
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

/// How often a command that still runs is named: some compile for minutes without a line.
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

/// Runs cargo with more in its environment.
pub(crate) fn cargo_with(arguments: &[&str], environment: &[(&str, &str)]) -> anyhow::Result<()> {
    must_with(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()), arguments, environment)
}
