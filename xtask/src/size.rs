//! `cargo xtask size`: compares the sizes of the guest's programs with their budgets.

use std::process::ExitCode;

use anyhow::{Context, bail};
use firstlight_lab::binaries::{Binaries, Profile, workspace};

use crate::elf::needs_interpreter;

/// Program and budget in bytes, as in SPECIFICATION.md.
const BUDGETS: &[(&str, u64)] = &[("init", 2_000_000), ("agent + runtime", 8_000_000)];

/// Runs [`size`] as a step of `test`: a program over its budget is an error.
pub(crate) fn check_budgets() -> anyhow::Result<()> {
    if size()? != ExitCode::SUCCESS {
        bail!("a guest program is over its budget or not static: see the table above");
    }
    Ok(())
}

/// Builds the programs and prints their sizes; the exit code is 1 if one is over its budget or not static.
pub(crate) fn size() -> anyhow::Result<ExitCode> {
    let binaries = Binaries::build(&workspace(), Profile::Shipped)?;
    let mut fine = true;
    println!("{:18} {:>10} {:>10}  STATIC", "PROGRAM", "BYTES", "BUDGET");
    for ((name, budget), path) in BUDGETS.iter().zip([&binaries.init, &binaries.agent]) {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        let is_static = !needs_interpreter(&bytes).with_context(|| path.display().to_string())?;
        let length = bytes.len() as u64;
        fine &= is_static && length <= *budget;
        let verdict = if length <= *budget { "" } else { "  OVER BUDGET" };
        println!("{name:18} {length:>10} {budget:>10}  {is_static}{verdict}");
    }
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
