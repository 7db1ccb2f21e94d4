//! `cargo xtask bench fabric`: run times of the planner and the partition daemon.
//!
//! The fabric manager's stand-in has a configured latency; the rest of a cycle is
//! the daemon's own time: four journal records, two calls and two lists.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};
use firstlight_fake_fm::home::build_library;
use firstlight_lab::binaries::{target, workspace};

use super::Figure;
use crate::cargo::cargo;

/// An example program and its peers, all built: the daemon, the stand-ins for fabric manager and libnvfm.
#[derive(Debug)]
pub(crate) struct FabricSetup {
    program: PathBuf,
    parts: [PathBuf; 3],
}

impl FabricSetup {
    /// Builds them with the profile `release`, and an example of the daemon's package.
    pub(crate) fn build(example: &str) -> anyhow::Result<Self> {
        let build = ["build", "--quiet", "--locked", "--release"];
        let programs = ["--package", "firstlight-partitiond", "--package", "firstlight-fake-fm", "--bins"];
        cargo(&[&build[..], &programs[..]].concat())?;
        cargo(&[&build[..], &["--package", "firstlight-partitiond", "--example", example]].concat())?;
        let library = build_library("").context("failed to build libnvfm's stand-in")?;
        let release = target().join("release");
        let program = release.join("examples").join(example);
        Ok(Self { program, parts: [release.join("fm-partitiond"), release.join("fake-fm"), library] })
    }

    /// Returns the command of the example, with the paths of its peers.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(workspace()).args(&self.parts);
        command
    }
}

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let output = FabricSetup::build("figures")?
        .command()
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("failed to start examples/figures")?;
    if !output.status.success() {
        bail!("examples/figures failed with {}", output.status);
    }
    let text = String::from_utf8(output.stdout).context("the output of examples/figures is not UTF-8")?;
    let values: BTreeMap<&str, f64> = text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, value)| Some((name, value.parse().ok()?)))
        .collect();
    let value = |name: &str| values.get(name).copied().with_context(|| format!("examples/figures printed no {name}"));
    let mut figures = Vec::new();
    for table in ["h100", "b200", "a100-16"] {
        let what = format!("plan for a partition table of {table}, median over all states");
        figures.push(Figure::shown(what, "us", value(&format!("plan-median-us-{table}"))?));
        figures.push(Figure::at_most(
            "the same, 99.9th percentile",
            "us",
            value(&format!("plan-worst-us-{table}"))?,
            50.0,
        ));
    }
    for latency in [0, 200, 5000] {
        let what = format!("daemon's own time of an activation and a deactivation with {latency} ms latency each");
        figures.push(Figure::shown(what, "ms", value(&format!("cycle-own-ms-at-{latency}"))?));
    }
    figures.push(Figure::at_most("List while an activation hangs, 99th percentile", "ms", value("list-p99-ms")?, 20.0));
    Ok(figures)
}
