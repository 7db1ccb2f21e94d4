//! `cargo xtask test`.

use std::process::ExitCode;

use firstlight_lab::Lab;

use crate::cargo::cargo;
use crate::{check, fuzz, size};

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

/// Prepares the machine, checks, and runs every test.
pub(crate) fn test(args: &Args) -> anyhow::Result<ExitCode> {
    Lab::install_packages(args.yes)?;
    check::check(&check::Args {})?;
    cargo(&["test", "--quiet", "--locked", "--workspace", "--exclude", "firstlight-e2e"])?;
    fuzz::smoke()?;
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
