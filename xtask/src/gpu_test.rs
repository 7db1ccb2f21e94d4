//! `cargo xtask gpu-test`: the agent beside a real NVIDIA driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use firstlight_lab::binaries::target;
use firstlight_lab::gpu_bundle;

use crate::elf::needs_interpreter;

/// Options of `gpu-test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only make a folder that runs on a machine without cargo: copy it there and run DIR/gpu-test as root.
    #[arg(long, value_name = "DIR")]
    bundle: Option<PathBuf>,
    /// Write the figures here.
    #[arg(long, value_name = "FILE", conflicts_with = "bundle")]
    json: Option<PathBuf>,
    /// Which GPU, by its position in PCI order.
    #[arg(long, default_value_t = 0, value_name = "N")]
    gpu: usize,
}

/// The most a bundle may weigh, bytes.
const BUDGET: u64 = 60_000_000;

/// Makes the bundle, and runs it unless it is for elsewhere.
pub(crate) fn gpu_test(args: &Args) -> anyhow::Result<ExitCode> {
    let folder = args.bundle.clone().unwrap_or_else(|| target().join("gpu-bundle"));
    for program in gpu_bundle::make(&folder)? {
        let bytes = fs::read(&program).with_context(|| program.display().to_string())?;
        if needs_interpreter(&bytes).with_context(|| program.display().to_string())? {
            bail!("{} is not static: it would not run on another machine", program.display());
        }
    }
    let bytes = weigh(&folder)?;
    if bytes > BUDGET {
        bail!("{} weighs {bytes} bytes; {BUDGET} are the limit", folder.display());
    }
    if args.bundle.is_some() {
        eprintln!("xtask: {} has {} kB; on a machine with an NVIDIA driver, as root:", folder.display(), bytes / 1000);
        eprintln!("  {}/gpu-test --json gpu.json", folder.display());
        return Ok(ExitCode::SUCCESS);
    }
    let program = folder.join("gpu-test");
    let mut command = Command::new(&program);
    command.arg("--gpu").arg(args.gpu.to_string());
    if let Some(json) = &args.json {
        command.arg("--json").arg(json);
    }
    let status = command.status().with_context(|| format!("start {}", program.display()))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn weigh(folder: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let data = entry.metadata()?;
        bytes += if data.is_dir() { weigh(&entry.path())? } else { data.len() };
    }
    Ok(bytes)
}
