//! `cargo xtask`: the one door for contributors.
#![forbid(unsafe_code)]

mod agent_tests;
mod bench;
mod bundle;
mod cargo;
mod check;
mod conformance;
mod crates;
mod elf;
mod fuzz;
mod gpu_test;
mod guest;
mod image;
mod run;
mod scenarios;
mod size;
mod soak;
mod steps;
mod test;
mod words;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Everything that is done to this repository, by name.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Set up, build, boot a guest with synthetic GPUs, run a container in it, show the boot.
    Run(run::Args),
    /// Check, then run every test, the lab's included.
    Test(test::Args),
    /// Formatting, lints, licences, documents.
    Check(check::Args),
    /// Measure; prints figures, with --json into a file.
    Bench(bench::Args),
    /// The agent beside a real NVIDIA driver: one container, one GPU, one CUDA kernel.
    GpuTest(gpu_test::Args),
    /// A directory with the agent's own tests with real containers, for another machine.
    AgentTests(agent_tests::Args),
    /// Feed inputs, guided by coverage, to everything that reads somebody else's bytes.
    Fuzz(fuzz::Args),
    /// Boots in a row, none of which may hang.
    Soak(soak::Args),
    /// The images of `manifests/`, as they ship: our programs, Debian's kernel, NVIDIA's driver.
    Image(image::Args),
    /// Sizes of the guest's programs against their budgets.
    Size,
}

fn main() -> ExitCode {
    // Causes, but no backtrace: that helps nobody who typed a command.
    do_it().unwrap_or_else(|error| {
        eprintln!("xtask: {}", firstlight::explain(error.as_ref()));
        ExitCode::FAILURE
    })
}

fn do_it() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Test(args) => test::test(&args),
        Command::Check(args) => check::check(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::GpuTest(args) => gpu_test::gpu_test(&args),
        Command::AgentTests(args) => agent_tests::agent_tests(&args),
        Command::Fuzz(args) => fuzz::fuzz(&args),
        Command::Soak(args) => soak::soak(&args),
        Command::Image(args) => image::image(&args),
        Command::Size => size::size(),
    }
}
