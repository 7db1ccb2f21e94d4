//! `cargo xtask gpu-test`: tests the agent with a real NVIDIA driver.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Context;
use firstlight_lab::binaries::target;
use firstlight_lab::gpu_bundle;

use crate::bundle;

/// Options of `gpu-test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only create a directory that runs on a machine without cargo: copy it there and run DIR/gpu-test as root.
    #[arg(long, value_name = "DIR")]
    bundle: Option<PathBuf>,
    /// Write the figures to this file.
    #[arg(long, value_name = "FILE", conflicts_with = "bundle")]
    json: Option<PathBuf>,
    /// The GPU to test, by its position in PCI order.
    #[arg(long, default_value_t = 0, value_name = "N")]
    gpu: usize,
}

/// Maximum size of the bundle, bytes.
const BUDGET: u64 = 60_000_000;

/// Creates the bundle, and runs it here unless `--bundle` is given.
pub(crate) fn gpu_test(args: &Args) -> anyhow::Result<ExitCode> {
    let dir = args.bundle.clone().unwrap_or_else(|| target().join("gpu-bundle"));
    let programs = gpu_bundle::make(&dir)?;
    let bytes = bundle::check_size(&dir, &programs, BUDGET)?;
    if args.bundle.is_some() {
        eprintln!("xtask: {} has {} kB; on a machine with an NVIDIA driver, as root:", dir.display(), bytes / 1000);
        eprintln!("  {}/gpu-test --json gpu.json", dir.display());
        return Ok(ExitCode::SUCCESS);
    }
    let program = dir.join("gpu-test");
    let mut command = Command::new(&program);
    command.arg("--gpu").arg(args.gpu.to_string());
    if let Some(json) = &args.json {
        command.arg("--json").arg(json);
    }
    let status = command.status().with_context(|| format!("start {}", program.display()))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
