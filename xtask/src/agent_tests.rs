//! `cargo xtask agent-tests`: bundles the agent's tests with real containers, to
//! be run at full size on a real machine.

use std::path::PathBuf;
use std::process::ExitCode;

use firstlight_lab::agent_tests_bundle;

use crate::bundle;

/// Options of `agent-tests`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Create a directory that runs on a machine without cargo: copy it there and run DIR/run as root.
    #[arg(long, value_name = "DIR")]
    bundle: PathBuf,
}

/// Maximum size of the bundle, bytes.
const BUDGET: u64 = 50_000_000;

/// Creates the bundle.
pub(crate) fn agent_tests(args: &Args) -> anyhow::Result<ExitCode> {
    let dir = &args.bundle;
    let programs = agent_tests_bundle::make(dir)?;
    let bytes = bundle::check_size(dir, &programs, BUDGET)?;
    let shown = dir.display();
    eprintln!("xtask: {shown} has {} kB; on a Linux machine with cgroup v2, as root:", bytes / 1000);
    eprintln!("  {shown}/run --short-processes 10000 --many-containers 100");
    Ok(ExitCode::SUCCESS)
}
