//! `cargo xtask soak`: consecutive boots, fabric cycles or runs of the scenarios.
//!
//! Boots alternate between small and large guests. Each guest boots, runs a
//! container and powers off within the default deadlines; the first that does not
//! is a failure, and its console log is preserved.

mod load;
mod suite;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use firstlight::run::{ContainerCommand, Outputs, Report};
use firstlight_boot_record::State;
use firstlight_lab::{Guest, Lab};

use crate::guest::{Boot, BootResult, boot};

/// Options of `soak`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of boots.
    #[arg(long, default_value_t = 200)]
    boots: u32,
    /// Instead of boots, activate and deactivate partitions this many times while the partition daemon and the fabric
    /// manager are killed.
    #[arg(long, value_name = "CYCLES", conflicts_with = "boots")]
    fabric: Option<u32>,
    /// Duration of each change in the fabric manager's stand-in, in ms.
    #[arg(long, value_name = "MS", default_value_t = 200, requires = "fabric")]
    latency: u64,
    /// Instead of boots, run the scenarios of `test` this many times, with two compilers as CPU load.
    #[arg(long, value_name = "TURNS", conflicts_with_all = ["boots", "fabric"])]
    suite: Option<u32>,
    /// Number of scenarios to run in parallel.
    #[arg(long, value_name = "N", default_value_t = 2, requires = "suite")]
    jobs: usize,
    /// Run only scenarios whose name contains one of these strings.
    #[arg(value_name = "SCENARIO", requires = "suite")]
    filters: Vec<String>,
}

/// Processors and GPUs of the guests, used in rotation: each changes the order of concurrent events.
const SHAPES: &[(u32, usize)] = &[(1, 0), (2, 0), (1, 1), (2, 2), (4, 0), (1, 2)];

/// Duration of the attach of one synthetic GPU.
const ATTACH: Duration = Duration::from_millis(50);

/// Boots between two progress lines.
const PROGRESS_BOOTS: u32 = 10;

/// Returns the failure of a boot, or none if it succeeded.
fn failure_of(report: &Report) -> Option<String> {
    let record = &report.boot_record;
    if !report.succeeded() {
        return Some(format!("the container: {:?}", report.container));
    }
    // The record ends during the shutdown: earlier failures are in its units.
    let bad = record.units.iter().find(|unit| !matches!(unit.outcome.as_str(), "ok" | "skipped" | "running"));
    if let Some(unit) = bad {
        return Some(format!("unit {} {}: {}", unit.name, unit.outcome.as_str(), unit.detail));
    }
    if record.state != State::PoweringOff || record.event("power-off").is_none() {
        return Some(format!("the guest did not power off: final state {:?}", record.state));
    }
    None
}

/// Runs activations and deactivations with faults; stops at the first violated invariant and prints it.
fn run_fabric_cycles(cycles: u32, latency: u64) -> anyhow::Result<ExitCode> {
    let setup = crate::bench::FabricSetup::build("cycles")?;
    let (cycles, latency) = (cycles.to_string(), latency.to_string());
    let status = setup.command().args([cycles, latency]).status().context("start examples/cycles")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the soak test; fails at the first failed boot.
pub(crate) fn soak(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(cycles) = args.fabric {
        return run_fabric_cycles(cycles, args.latency);
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
        let plan = Boot {
            guest,
            devices: Vec::new(),
            command: ContainerCommand::Arguments(vec!["/bin/true".into()]),
            image: None,
            keep: false,
        };
        let what = format!("boot {} of {} ({cpus} processors, {gpus} GPUs)", number + 1, args.boots);
        let failure = match boot(&lab, &plan, &outputs, &mut |_| {}).with_context(|| what.clone())? {
            BootResult::Interrupted(signal) => anyhow::bail!("{what}: interrupted by signal {}", signal.0),
            BootResult::Failed(error) => Some(error.to_string()),
            BootResult::Report(report) => {
                totals.push(report.host.qemu_exit_us / 1000);
                failure_of(&report)
            }
        };
        if let Some(failure) = failure {
            eprintln!("soak: {what}: {failure}; see {}", dir.display());
            return Ok(ExitCode::FAILURE);
        }
        if (number + 1) % PROGRESS_BOOTS == 0 {
            eprintln!("soak: {} boots of {} succeeded", number + 1, args.boots);
        }
    }
    totals.sort_unstable();
    let at = |share: usize| totals.get((totals.len().saturating_sub(1)) * share / 100).copied().unwrap_or_default();
    println!(
        "soak: {} consecutive boots succeeded: QEMU's run time {} ms minimum, {} median, {} maximum",
        totals.len(),
        at(0),
        at(50),
        at(100)
    );
    Ok(ExitCode::SUCCESS)
}
