//! Running cargo and other programs, loudly.

use std::process::Command;

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
    let status = command.status().with_context(|| format!("start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed with {status}");
    }
    Ok(())
}

/// Runs cargo.
pub(crate) fn cargo(arguments: &[&str]) -> anyhow::Result<()> {
    cargo_with(arguments, &[])
}

/// Runs cargo with more in its environment.
pub(crate) fn cargo_with(arguments: &[&str], environment: &[(&str, &str)]) -> anyhow::Result<()> {
    must_with(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()), arguments, environment)
}
