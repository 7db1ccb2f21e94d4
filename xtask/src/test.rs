//! `cargo xtask test`.

use std::os::unix::fs::MetadataExt as _;
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
    // The tests configure kernels from their source.
    Lab::install_kernel_packages(args.yes)?;
    check::check(&check::Args {})?;
    cargo(&["test", "--quiet", "--locked", "--workspace", "--exclude", "firstlight-e2e"])?;
    daemons()?;
    fuzz::smoke()?;
    if args.no_lab {
        return Ok(ExitCode::SUCCESS);
    }
    let sizes = size::size()?;
    if sizes != ExitCode::SUCCESS {
        return Ok(sizes);
    }
    Lab::install_libvirt_packages(args.yes)?;
    // Prepared once here, so that no test's time contains a download.
    Lab::prepare(args.yes)?.agent_tests()?;
    cargo(&["test", "--locked", "--package", "firstlight-e2e", "--", "--test-threads=1"])?;
    Ok(ExitCode::SUCCESS)
}

/// PID 1's daemons as real processes, where this user may make resource groups;
/// elsewhere only a guest's scenario shows them.
fn daemons() -> anyhow::Result<()> {
    let cgroup2 = std::fs::read_to_string("/proc/self/mounts")?.lines().any(|line| line.contains(" cgroup2 rw"));
    if std::fs::metadata("/proc/self")?.uid() != 0 || !cgroup2 {
        eprintln!("xtask: not run: firstlight-init's tests with real daemons need root and a mounted cgroup2");
        return Ok(());
    }
    cargo(&["test", "--quiet", "--locked", "--package", "firstlight-init", "--features", "real", "--test", "daemons"])
}
