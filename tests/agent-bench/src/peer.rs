//! crun and runc, through their command line.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::bundle::Bundle;

pub(crate) struct Peer {
    pub(crate) name: &'static str,
    program: PathBuf,
    state: PathBuf,
    short: PathBuf,
    long: PathBuf,
}

impl Peer {
    /// Writes the runtime's bundles: the same configuration with another cgroup.
    pub(crate) fn new(name: &'static str, program: &Path, dir: &Path, bundle: &Bundle, config: &Value) -> Result<Self> {
        let write = |kind: &str, command: &[&str]| -> Result<PathBuf> {
            let dir = dir.join(format!("{name}-{kind}"));
            fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
            let mut config = config.clone();
            config["process"]["args"] = command.into();
            config["root"]["path"] = bundle.root.display().to_string().into();
            config["linux"]["cgroupsPath"] = format!("/agent-bench/{name}-{kind}").into();
            fs::write(dir.join("config.json"), serde_json::to_vec(&config)?)?;
            Ok(dir)
        };
        Ok(Self {
            name,
            program: program.to_owned(),
            state: dir.join(format!("{name}-state")),
            short: write("short", &["/bin/true"])?,
            long: write("long", &["/bin/sleep", "100000"])?,
        })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--root").arg(&self.state).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    fn run(&self, mut command: Command) -> Result<Duration> {
        let begin = Instant::now();
        let output = command.output().with_context(|| format!("start {}", self.program.display()))?;
        let span = begin.elapsed();
        if !output.status.success() {
            bail!("{}: {}: {}", self.name, output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(span)
    }

    pub(crate) fn version(&self) -> Result<String> {
        let output = Command::new(&self.program).arg("--version").output().context(self.name)?;
        Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
    }

    /// Measures create, start, wait and delete as one command, which is the fastest variant.
    pub(crate) fn run_lifecycle(&self) -> Result<Duration> {
        let mut command = self.command();
        command.args(["run", "--bundle"]).arg(&self.short).arg("bench-short");
        self.run(command)
    }

    pub(crate) fn start_long(&self) -> Result<()> {
        let mut command = self.command();
        // The container would inherit the pipe and keep it open.
        command.stderr(Stdio::null()).args(["run", "--detach", "--bundle"]).arg(&self.long).arg("bench-long");
        let status = command.status().context(self.name)?;
        if status.success() { Ok(()) } else { bail!("{}: run --detach: {status}", self.name) }
    }

    pub(crate) fn exec(&self) -> Result<Duration> {
        let mut command = self.command();
        command.args(["exec", "bench-long", "/bin/true"]);
        self.run(command)
    }

    pub(crate) fn remove_long(&self) -> Result<()> {
        let mut command = self.command();
        command.args(["delete", "--force", "bench-long"]);
        self.run(command).map(drop)
    }
}
