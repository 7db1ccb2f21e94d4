//! `cargo xtask bench`: benchmarks whose figures are compared with a peer or a goal.

mod agent;
mod boot;
mod boot_cpu;
mod fabric;
mod formats;
mod images;

pub(crate) use fabric::FabricSetup;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Subcommand;
use firstlight::run::{Outputs, Report};
use firstlight_lab::Lab;
use serde::Serialize;

use crate::guest::{Boot, BootResult, boot};

/// Options of `bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    bench: Bench,
    /// Write the figures to this file.
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Boots per case; figures are medians.
    #[arg(long, global = true, default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=50))]
    boots: u8,
}

#[derive(Debug, Clone, Subcommand)]
enum Bench {
    /// Boots with 0, 1, 2, 4 and 8 GPUs, attached in parallel and in series; also whether they delay the agent.
    Boot,
    /// Containers of the agent, compared with crun and runc.
    Agent(agent::Options),
    /// PID 1's start to the agent's first answer, in time and in instructions.
    BootCpu {
        /// The kernel to boot.
        #[arg(long, value_enum, default_value = "own")]
        kernel: boot_cpu::KernelChoice,
    },
    /// One image in every format: boot until the driver is loaded.
    Formats,
    /// The planner and the partition daemon, with a stand-in for the fabric manager.
    Fabric,
    /// Image builds, compared with mmdebstrap and mkfs.erofs.
    Images,
}

/// JSON document of a benchmark.
#[derive(Debug, Serialize)]
struct Figures {
    bench: &'static str,
    machine: String,
    figures: Vec<Figure>,
}

/// One figure: a measured value with its peer and goal.
#[derive(Debug, Serialize)]
struct Figure {
    what: String,
    unit: &'static str,
    ours: f64,
    peer: Option<f64>,
    peer_name: Option<&'static str>,
    goal: String,
    holds: bool,
}

impl Figure {
    fn at_most(what: impl Into<String>, unit: &'static str, ours: f64, limit: f64) -> Self {
        let goal = format!("<= {limit}");
        Self { what: what.into(), unit, ours, peer: None, peer_name: None, goal, holds: ours <= limit }
    }

    fn between(what: impl Into<String>, unit: &'static str, ours: f64, low: f64, high: f64) -> Self {
        let goal = format!("{low} to {high}");
        Self { what: what.into(), unit, ours, peer: None, peer_name: None, goal, holds: (low..=high).contains(&ours) }
    }

    /// Creates a figure without a goal.
    fn shown(what: impl Into<String>, unit: &'static str, ours: f64) -> Self {
        Self { what: what.into(), unit, ours, peer: None, peer_name: None, goal: "-".into(), holds: ours.is_finite() }
    }

    /// Creates a figure whose goal is to be at least `factor` times as fast as the peer in the same run.
    fn faster(
        what: impl Into<String>,
        unit: &'static str,
        ours: f64,
        peer_name: &'static str,
        peer: f64,
        factor: f64,
    ) -> Self {
        let (goal, holds) = (format!("<= peer / {factor}"), ours * factor <= peer);
        Self { what: what.into(), unit, ours, peer: Some(peer), peer_name: Some(peer_name), goal, holds }
    }

    fn beside(mut self, peer_name: &'static str, peer: f64) -> Self {
        self.peer = Some(peer);
        self.peer_name = Some(peer_name);
        self
    }
}

/// Runs a benchmark; the exit code is 1 if a goal is not met.
pub(crate) fn bench(args: &Args) -> anyhow::Result<ExitCode> {
    let lab = Lab::prepare(false)?;
    let mut measured_on = None;
    let (bench, figures) = match &args.bench {
        Bench::Agent(options) => match agent::figures(&lab, options)? {
            Some((figures, machine)) => {
                measured_on = machine;
                ("agent", figures)
            }
            None => return Ok(ExitCode::SUCCESS),
        },
        Bench::Fabric => ("fabric", fabric::figures()?),
        Bench::Images => ("images", images::figures(&lab, args.boots.min(5))?),
        Bench::Formats => ("formats", formats::figures(&lab, args.boots)?),
        Bench::Boot => ("boot", boot::figures(&lab, args.boots)?),
        Bench::BootCpu { kernel } => ("boot-cpu", boot_cpu::figures(&lab, *kernel, args.boots)?),
    };
    let figures = Figures { bench, machine: measured_on.unwrap_or_else(machine), figures };
    println!("bench {bench} on {}", figures.machine);
    println!("{:76} {:>12} {:>12} {:14} {:>14}  HOLDS", "WHAT", "OURS", "PEER", "", "GOAL");
    for figure in &figures.figures {
        println!(
            "{:76} {:>12} {:>12} {:14} {:>14}  {}",
            figure.what,
            format!("{:.2} {}", figure.ours, figure.unit),
            figure.peer.map_or_else(|| "-".into(), |peer| format!("{peer:.2}")),
            figure.peer_name.unwrap_or(""),
            figure.goal,
            if figure.holds { "yes" } else { "NO" }
        );
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&figures)?;
        std::fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    let all = figures.figures.iter().all(|figure| figure.holds);
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the processors' count and model, and the accelerator of guests.
fn machine() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches([' ', '\t', ':']));
    let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    format!("{} x {}, {:?}", count, model.unwrap_or("unknown processor"), firstlight_lab::accelerator())
}

/// Boots a guest once and returns its report; a failed boot or container is an error.
fn report(lab: &Lab, plan: &Boot) -> anyhow::Result<Report> {
    let dir = firstlight_lab::cache_root()?.join("bench");
    let outputs = Outputs { dir, json: None };
    match boot(lab, plan, &outputs, &mut |_| {})? {
        BootResult::Report(report) => match &report.container.error {
            Some(error) => bail!("the container did not run: {error}"),
            None => Ok(*report),
        },
        BootResult::Failed(error) => Err(error.into()),
        BootResult::Interrupted(signal) => bail!("interrupted by signal {}", signal.0),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

#[expect(clippy::cast_precision_loss, reason = "microseconds of minutes fit")]
fn millis(from_us: u64, to_us: u64) -> f64 {
    to_us.saturating_sub(from_us) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_empty_inputs() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(vec![]).is_nan());
    }

    #[test]
    fn goals_are_evaluated_and_nan_meets_none() {
        assert!(Figure::at_most("x", "ms", 1.0, 1.0).holds);
        assert!(!Figure::at_most("x", "ms", f64::NAN, 1.0).holds);
        assert!(!Figure::between("x", "ms", 2.0, 0.9, 1.1).holds);
        assert!(Figure::faster("x", "ms", 1.0, "crun", 1.3, 1.3).holds);
        assert!(!Figure::faster("x", "ms", 1.0, "crun", 1.2, 1.3).holds);
        assert!(!Figure::shown("x", "ms", f64::NAN).holds);
    }
}
