//! `cargo xtask soak`: boots in a row, none of which may hang.
//!
//! Guests take turns at being small and large. Each boots, runs a container and
//! powers off; one that does not, within the usual deadlines, is a failure, and
//! its console is kept.

mod load;
mod suite;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use firstlight::run::{Outputs, Report};
use firstlight_boot_record::State;
use firstlight_lab::{Guest, Lab};

use crate::guest::{Boot, Ended, boot};

/// Options of `soak`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How many boots.
    #[arg(long, default_value_t = 200)]
    boots: u32,
    /// No boots, but so many partitions activated and deactivated, while daemon and fabric manager are killed.
    #[arg(long, value_name = "CYCLES", conflicts_with = "boots")]
    fabric: Option<u32>,
    /// How long the fabric manager's stand-in takes for each change, in ms.
    #[arg(long, value_name = "MS", default_value_t = 200, requires = "fabric")]
    latency: u64,
    /// No boots, but so many turns of the scenarios of `test`, beside two compilers.
    #[arg(long, value_name = "TURNS", conflicts_with_all = ["boots", "fabric"])]
    suite: Option<u32>,
    /// How many scenarios run at a time.
    #[arg(long, value_name = "N", default_value_t = 2, requires = "suite")]
    jobs: usize,
    /// Only scenarios with one of these in their name.
    #[arg(value_name = "SCENARIO", requires = "suite")]
    filters: Vec<String>,
}

/// Processors and GPUs of the guests, in turns: the order of what happens at once differs in each.
const SHAPES: &[(u32, usize)] = &[(1, 0), (2, 0), (1, 1), (2, 2), (4, 0), (1, 2)];

/// What the attach of one synthetic GPU costs.
const ATTACH: Duration = Duration::from_millis(50);

/// Boots between two lines.
const LINE: u32 = 10;

/// Why this boot is not a good one.
fn complaint(report: &Report) -> Option<String> {
    let record = &report.boot_record;
    if !report.succeeded() {
        return Some(format!("the container: {:?}", report.container));
    }
    // The record ends on the way down: what it came from is in its units.
    let bad = record.units.iter().find(|unit| !matches!(unit.outcome.as_str(), "ok" | "skipped" | "running"));
    if let Some(unit) = bad {
        return Some(format!("unit {} {}: {}", unit.name, unit.outcome.as_str(), unit.detail));
    }
    if record.state != State::PoweringOff || record.event("power-off").is_none() {
        return Some(format!("its state at the end is {:?}", record.state));
    }
    None
}

/// Ends at the first thing that must not be, with what it is.
fn fabric(cycles: u32, latency: u64) -> anyhow::Result<ExitCode> {
    let stand = crate::bench::FabricStand::build("cycles")?;
    let (cycles, latency) = (cycles.to_string(), latency.to_string());
    let status = stand.command().args([cycles, latency]).status().context("start examples/cycles")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Boots them; fails at the first that is not good.
pub(crate) fn soak(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(cycles) = args.fabric {
        return fabric(cycles, args.latency);
    }
    if let Some(turns) = args.suite {
        return suite::run(turns, &args.filters, args.jobs);
    }
    let lab = Lab::prepare(false)?;
    let dir = firstlight_lab::cache_root()?.join("soak");
    let outputs = Outputs { dir: dir.clone(), json: None };
    let mut totals = Vec::new();
    for number in 0..args.boots {
        let (cpus, gpus) = SHAPES[number as usize % SHAPES.len()];
        let guest = Guest { cpus, ..Guest::with_gpus(gpus, ATTACH) };
        let plan = Boot { guest, devices: Vec::new(), command: vec!["/bin/true".into()], image: None, keep: false };
        let what = format!("boot {} of {} ({cpus} processors, {gpus} GPUs)", number + 1, args.boots);
        let bad = match boot(&lab, &plan, &outputs, &mut |_| {}).with_context(|| what.clone())? {
            Ended::Interrupted(signal) => anyhow::bail!("{what}: interrupted by signal {}", signal.0),
            Ended::Failed(error) => Some(error.to_string()),
            Ended::Report(report) => {
                totals.push(report.host.qemu_exit_us / 1000);
                complaint(&report)
            }
        };
        if let Some(bad) = bad {
            eprintln!("soak: {what}: {bad}; see {}", dir.display());
            return Ok(ExitCode::FAILURE);
        }
        if (number + 1) % LINE == 0 {
            eprintln!("soak: {} boots of {} are good", number + 1, args.boots);
        }
    }
    totals.sort_unstable();
    let at = |share: usize| totals.get((totals.len().saturating_sub(1)) * share / 100).copied().unwrap_or_default();
    println!(
        "soak: {} boots in a row, none hung: QEMU's start to its end {} ms at least, {} in the median, {} at most",
        totals.len(),
        at(0),
        at(50),
        at(100)
    );
    Ok(ExitCode::SUCCESS)
}
