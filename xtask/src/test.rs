//! `cargo xtask test` and `cargo xtask fuzz`.

use std::process::ExitCode;

use firstlight_lab::Lab;

use crate::cargo::cargo;
use crate::{check, size};

/// Options of `test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Install missing system packages without asking.
    #[arg(long)]
    yes: bool,
    /// Only tests that need no guest.
    #[arg(long)]
    no_lab: bool,
}

/// Options of `fuzz`.
#[derive(Debug, clap::Args)]
pub(crate) struct FuzzArgs {
    /// Seconds per target.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Only targets whose name contains this.
    target: Option<String>,
}

/// Prepares the machine, checks, and runs every test.
pub(crate) fn test(args: &Args) -> anyhow::Result<ExitCode> {
    Lab::install_packages(args.yes)?;
    check::check(&check::Args {})?;
    cargo(&["test", "--quiet", "--locked", "--workspace", "--exclude", "firstlight-e2e"])?;
    if args.no_lab {
        return Ok(ExitCode::SUCCESS);
    }
    let sizes = size::size()?;
    if sizes != ExitCode::SUCCESS {
        return Ok(sizes);
    }
    // Prepared once here, so that no test's time contains a download.
    Lab::prepare(args.yes)?.agent_tests()?;
    cargo(&["test", "--locked", "--package", "firstlight-e2e", "--", "--test-threads=1"])?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the fuzz targets.
pub(crate) fn fuzz(args: &FuzzArgs) -> anyhow::Result<ExitCode> {
    let seconds = args.seconds.to_string();
    let mut arguments = vec!["run", "--quiet", "--locked", "--release", "--package", "firstlight-fuzz", "--", &seconds];
    arguments.extend(args.target.as_deref());
    cargo(&arguments)?;
    Ok(ExitCode::SUCCESS)
}
