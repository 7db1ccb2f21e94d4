//! Benchmarks the agent against crun and runc: the same bundle and interleaved rounds, so that other load affects
//! all three equally.
//!
//! Prints one line of JSON. `cargo xtask bench agent` runs it in a guest of the lab; root can run it by hand on
//! any Linux machine with cgroup v2.
#![forbid(unsafe_code)]

mod agent;
mod bundle;
mod peer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use serde::Serialize;

use crate::agent::Agent;
use crate::bundle::Bundle;
use crate::peer::Peer;

/// The agent is idle after this long without a call.
const IDLE_TIME: Duration = Duration::from_secs(12);

/// Benchmarks the agent against crun and runc.
#[derive(Debug, Parser)]
struct Arguments {
    /// The agent's program.
    #[arg(long, value_name = "FILE")]
    agent: PathBuf,
    /// A static busybox, the containers' root.
    #[arg(long, value_name = "FILE")]
    busybox: PathBuf,
    /// crun's program.
    #[arg(long, value_name = "FILE")]
    crun: Option<PathBuf>,
    /// runc's program.
    #[arg(long, value_name = "FILE")]
    runc: Option<PathBuf>,
    /// An empty directory for bundles, on a file system that may run programs.
    #[arg(long, value_name = "DIR", default_value = "/tmp/agent-bench")]
    dir: PathBuf,
    /// Rounds of each measurement.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Number of Check calls.
    #[arg(long, default_value_t = 2000)]
    checks: u32,
}

/// The results of the benchmark.
#[derive(Debug, Default, Serialize)]
struct Results {
    #[serde(skip)]
    samples: BTreeMap<String, Vec<f64>>,
    /// Summaries of the samples by name.
    spans: BTreeMap<String, Span>,
    /// Single values by name.
    values: BTreeMap<String, f64>,
    /// Output of `--version` of crun and runc.
    versions: BTreeMap<String, String>,
    /// Processors and kernel of the machine.
    machine: String,
}

/// The summary of a measurement's samples, µs.
#[derive(Debug, Serialize)]
struct Span {
    count: usize,
    min_us: f64,
    median_us: f64,
    p99_us: f64,
}

impl Span {
    fn of(mut samples: Vec<f64>) -> Option<Self> {
        samples.sort_by(f64::total_cmp);
        let at = |percent: usize| samples.get((samples.len() - 1) * percent / 100).copied();
        let min_us = samples.first().copied()?;
        Some(Self { count: samples.len(), min_us, median_us: at(50)?, p99_us: at(99)? })
    }
}

impl Results {
    fn summarize(mut self) -> Self {
        let samples = std::mem::take(&mut self.samples);
        self.spans = samples.into_iter().filter_map(|(name, samples)| Some((name, Span::of(samples)?))).collect();
        self
    }

    fn sample(&mut self, name: &str, span: Duration) {
        self.samples.entry(name.to_owned()).or_default().push(span.as_secs_f64() * 1e6);
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let run = || -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
        let results = runtime.block_on(measure(&arguments))?;
        println!("{}", serde_json::to_string(&results)?);
        Ok(())
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("agent-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Describes this machine: number and model of its processors, and its kernel.
fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let (cpuinfo, kernel) = (read("/proc/cpuinfo"), read("/proc/sys/kernel/osrelease"));
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    format!("{count} x {}, Linux {}", model.map_or("unknown processor", |(_, model)| model), kernel.trim())
}

async fn measure(arguments: &Arguments) -> Result<Results> {
    let mut results = Results { machine: machine(), ..Results::default() };
    let bundle = Bundle::make(&arguments.dir, &arguments.busybox)?;
    let mut agent = Agent::start(&arguments.agent, &arguments.dir).await?;
    results.values.insert("agent start cpu us".into(), agent.cpu_us()?);
    tokio::time::sleep(Duration::from_millis(200)).await;
    resident(&mut results, &agent, "after start")?;
    agent.sandbox().await?;
    let config = agent.configuration(&bundle).await?;
    let mut peers = Vec::new();
    for (name, program) in [("crun", &arguments.crun), ("runc", &arguments.runc)] {
        if let Some(program) = program {
            let peer = Peer::new(name, program, &arguments.dir, &bundle, &config)?;
            results.versions.insert(name.into(), peer.version()?);
            peers.push(peer);
        }
    }

    // The first round warms the caches and is discarded.
    for round in 0..=arguments.rounds {
        let steps = agent.run_lifecycle(&bundle).await?;
        if round > 0 {
            results.sample("lifecycle agent", steps.iter().map(|(_, span)| *span).sum());
            for (step, span) in steps {
                results.sample(&format!("{step} agent"), span);
            }
        }
        for peer in &peers {
            let span = peer.run_lifecycle()?;
            if round > 0 {
                results.sample(&format!("lifecycle {}", peer.name), span);
            }
        }
    }
    agent.start_long(&bundle).await?;
    for peer in &peers {
        peer.start_long()?;
    }
    let logged = agent.logged()?;
    for round in 0..=arguments.rounds {
        let span = agent.exec(round).await?;
        if round > 0 {
            results.sample("exec agent", span);
        }
        for peer in &peers {
            let span = peer.exec()?;
            if round > 0 {
                results.sample(&format!("exec {}", peer.name), span);
            }
        }
    }
    for peer in &peers {
        peer.remove_long()?;
    }
    agent.remove_long().await?;
    for round in 0..arguments.checks {
        let begin = Instant::now();
        agent.check().await?;
        if round >= 20 {
            results.sample("check agent", begin.elapsed());
        }
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    resident(&mut results, &agent, "after calls")?;
    tokio::time::sleep(IDLE_TIME).await;
    resident(&mut results, &agent, "idle")?;
    results.values.insert("agent log bytes".into(), agent.logged()?.max(logged));
    results.values.insert("containers".into(), f64::from(arguments.rounds) + 3.0);
    results.values.insert("agent size bytes".into(), size(&arguments.agent)?);
    agent.kill();
    Ok(results.summarize())
}

fn resident(results: &mut Results, agent: &Agent, when: &str) -> Result<()> {
    for (who, kib) in agent.resident_kib()? {
        results.values.insert(format!("{who} resident {when} KiB"), kib);
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a program's size fits")]
fn size(file: &Path) -> Result<f64> {
    Ok(std::fs::metadata(file).with_context(|| file.display().to_string())?.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_is_computed_from_sorted_samples() {
        let span = Span::of(vec![5.0, 1.0, 3.0]).unwrap();
        assert_eq!((span.count, span.min_us, span.median_us, span.p99_us), (3, 1.0, 3.0, 3.0));
        assert!(Span::of(vec![]).is_none());
    }
}
