//! Running cargo and other programs, loudly.

use std::process::Command;

use anyhow::{Context, bail};
use firstlight_lab::binaries::workspace;

/// Runs a program in the workspace's root; its failure is an error that names it.
pub(crate) fn must(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let shown = format!("{program} {}", arguments.join(" "));
    eprintln!("xtask: {shown}");
    let mut command = Command::new(program);
    let status =
        command.current_dir(workspace()).args(arguments).status().with_context(|| format!("start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed with {status}");
    }
    Ok(())
}

/// Runs cargo.
pub(crate) fn cargo(arguments: &[&str]) -> anyhow::Result<()> {
    must(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()), arguments)
}
