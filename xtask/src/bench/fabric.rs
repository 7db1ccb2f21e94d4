//! `cargo xtask bench fabric`: what the planner and the partition daemon take.
//!
//! A fabric manager's stand-in takes as long as it is told; what is left of a cycle
//! is the daemon's own: four records on the disk, two calls and two lists.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};
use firstlight_fake_fm::home::build_library;
use firstlight_lab::binaries::{target, workspace};

use super::Figure;
use crate::cargo::cargo;

/// A program beside the daemon, a fabric manager's stand-in and libnvfm's, all built.
#[derive(Debug)]
pub(crate) struct Stand {
    program: PathBuf,
    parts: [PathBuf; 3],
}

impl Stand {
    /// Builds them, as they are released, and an example of the daemon's package.
    pub(crate) fn build(example: &str) -> anyhow::Result<Self> {
        let build = ["build", "--quiet", "--locked", "--release"];
        let programs = ["--package", "firstlight-partitiond", "--package", "firstlight-fake-fm", "--bins"];
        cargo(&[&build[..], &programs[..]].concat())?;
        cargo(&[&build[..], &["--package", "firstlight-partitiond", "--example", example]].concat())?;
        let library = build_library("").context("build libnvfm's stand-in")?;
        let release = target().join("release");
        let program = release.join("examples").join(example);
        Ok(Self { program, parts: [release.join("fm-partitiond"), release.join("fake-fm"), library] })
    }

    /// The program, told where the others are.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(workspace()).args(&self.parts);
        command
    }
}

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let output = Stand::build("figures")?
        .command()
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("start examples/figures")?;
    if !output.status.success() {
        bail!("examples/figures failed with {}", output.status);
    }
    let text = String::from_utf8(output.stdout).context("read the figures")?;
    let values: BTreeMap<&str, f64> = text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, value)| Some((name, value.parse().ok()?)))
        .collect();
    let value = |name: &str| values.get(name).copied().with_context(|| format!("examples/figures printed no {name}"));
    let mut figures = Vec::new();
    for table in ["h100", "b200", "a100-16"] {
        let what = format!("a plan on the table of {table}, median of every state");
        figures.push(Figure::shown(what, "us", value(&format!("plan-median-us-{table}"))?));
        figures.push(Figure::at_most(
            "the same, 999 of 1000 at most",
            "us",
            value(&format!("plan-worst-us-{table}"))?,
            50.0,
        ));
    }
    for latency in [0, 200, 5000] {
        let what = format!("own time of an activation and a deactivation that take {latency} ms each");
        figures.push(Figure::shown(what, "ms", value(&format!("cycle-own-ms-at-{latency}"))?));
    }
    figures.push(Figure::at_most(
        "a list while an activation hangs, 99 of 100 at most",
        "ms",
        value("list-p99-ms")?,
        20.0,
    ));
    Ok(figures)
}
