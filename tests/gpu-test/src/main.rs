//! `gpu-test`: tests the agent with a real NVIDIA driver.
//!
//! Runs from the bundle of `cargo xtask gpu-test --bundle DIR`, on a machine that needs only the driver, cgroup
//! v2 and root. The agent runs in a separate mount namespace with a CDI file written by PID 1's code; a container
//! gets one GPU and runs a CUDA kernel on it. Settings of GPUs and driver are not changed.
#![forbid(unsafe_code)]

mod drive;
mod figures;
mod machine;
mod namespace;
mod probe;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

/// Runs a CUDA kernel in a container with one GPU, through the agent, with the machine's driver.
#[derive(Debug, Parser)]
#[command(name = "gpu-test")]
struct Args {
    /// Index of the GPU in PCI order among the usable ones.
    #[arg(long, default_value_t = 0, value_name = "N")]
    gpu: usize,
    /// Write the figures to this file, as `cargo xtask bench` does.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Directory of the agent and the image [default: that of this program].
    #[arg(long, value_name = "DIR")]
    bundle: Option<PathBuf>,
    /// Internal: prepare a namespace and exec the agent.
    #[arg(long, value_name = "DIR", hide = true)]
    exec_agent: Option<PathBuf>,
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
        Some(dir) => std::path::absolute(dir).context("failed to find the bundle")?,
        None => std::env::current_exe()
            .context("failed to find this program")?
            .parent()
            .map(PathBuf::from)
            .unwrap_or_default(),
    };
    if let Some(dir) = &args.exec_agent {
        return Err(namespace::exec_agent(&bundle, dir));
    }
    let machine = machine::inspect(&firstlight_init::root::Root::real())?;
    let figures = drive::run(&machine, args.gpu, &bundle)?;
    print!("{}", figures.print());
    if let Some(path) = &args.json {
        figures.write(path)?;
    }
    Ok(if figures.hold() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
