//! `gpu-test`: the agent beside a real NVIDIA driver.
//!
//! Runs from a directory that `cargo xtask gpu-test --bundle DIR` makes, on a
//! machine that needs nothing but the driver, cgroup v2 and root. The agent
//! lives in a mount namespace of its own with a CDI file written by PID 1's
//! code; a container gets one GPU and runs a CUDA kernel on it. Nothing about a
//! GPU or the driver is changed.
#![forbid(unsafe_code)]

mod drive;
mod figures;
mod machine;
mod probe;
mod stage;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

/// One container with one GPU and a CUDA kernel, through the agent, beside the machine's driver.
#[derive(Debug, Parser)]
#[command(name = "gpu-test")]
struct Args {
    /// Which GPU, by its position in PCI order among those that can be used here.
    #[arg(long, default_value_t = 0, value_name = "N")]
    gpu: usize,
    /// Write the figures here, as `cargo xtask bench` does.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where the agent and the image are [default: beside this program].
    #[arg(long, value_name = "DIR")]
    bundle: Option<PathBuf>,
    /// Prepare a namespace and become the agent; how this program starts itself.
    #[arg(long, value_name = "DIR", hide = true)]
    stage: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("gpu-test: {}", firstlight::explain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let bundle = match &args.bundle {
        Some(dir) => std::path::absolute(dir).context("find the bundle")?,
        None => std::env::current_exe().context("find this program")?.parent().map(PathBuf::from).unwrap_or_default(),
    };
    if let Some(dir) = &args.stage {
        return Err(stage::become_agent(&bundle, dir));
    }
    let machine = machine::look(&firstlight_init::root::Root::real())?;
    let figures = drive::run(&machine, args.gpu, &bundle)?;
    print!("{}", figures.print());
    if let Some(path) = &args.json {
        figures.write(path)?;
    }
    Ok(if figures.hold() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
