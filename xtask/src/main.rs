//! `cargo xtask`: the contributors' command.
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
mod modules;
mod picture;
mod run;
mod scenarios;
mod size;
mod soak;
mod steps;
mod test;
mod words;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Development tasks of this repository.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Build, boot a guest with synthetic GPUs, run a container in it, show the boot as a table.
    Run(run::Args),
    /// Run all checks, unit tests and lab scenarios.
    Test(test::Args),
    /// Check formatting, lints, licences, crate dependencies, discouraged words and generated documents.
    Check(check::Args),
    /// Run a benchmark and print its figures; --json writes them to a file.
    Bench(bench::Args),
    /// Test the agent with a real NVIDIA driver: one container, one GPU, one CUDA kernel.
    GpuTest(gpu_test::Args),
    /// Create a directory with the agent's tests with real containers, to run on another machine.
    AgentTests(agent_tests::Args),
    /// Run coverage-guided fuzzing of every parser of untrusted input.
    Fuzz(fuzz::Args),
    /// Repeat boots, fabric cycles or scenarios; stop at the first boot that fails or hangs.
    Soak(soak::Args),
    /// Build the release images of `manifests/`: our programs, Debian's kernel, NVIDIA's driver.
    Image(image::Args),
    /// Boot a guest and draw it as the README's picture.
    Picture(picture::Args),
    /// Compare the sizes of the guest's programs with their budgets.
    Size,
}

fn main() -> ExitCode {
    // The chain of causes without a backtrace, which is of no use to the user of a command.
    dispatch().unwrap_or_else(|error| {
        eprintln!("xtask: {}", firstlight::explain(error.as_ref()));
        ExitCode::FAILURE
    })
}

fn dispatch() -> anyhow::Result<ExitCode> {
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
        Command::Picture(args) => picture::picture(&args),
        Command::Size => size::size(),
    }
}
