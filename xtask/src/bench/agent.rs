//! Container lifecycle, exec and Check of the agent, compared with crun and runc.
//!
//! All three run the same configuration, root file system, cgroup limits and command. A peer's figure is one
//! `crun run` and so includes the start of its process; the agent's has four ttrpc calls, pipes for the output, and
//! a runtime process that exists already, as in a guest.
//!
//! On an emulated machine only ratios within the run have goals; the goals in
//! milliseconds are for a real one: `--bundle` creates a directory to copy there,
//! `--from` evaluates the output of its program.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use firstlight_lab::{Guest, Lab};
use firstlight_vm::Vm;
use serde::Deserialize;

use super::Figure;

/// Prefix of the benchmark's lines on the guest's console.
const PREFIX: &str = "bench: ";

/// Timeout, far above the run time in an emulated guest.
const LIMIT: Duration = Duration::from_mins(15);

/// Options of `bench agent`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Repetitions of each measurement.
    #[arg(long, default_value_t = 30)]
    rounds: u32,
    /// Only create a directory for another machine (Linux, root, cgroup v2), where DIR/run measures.
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    bundle: Option<PathBuf>,
    /// Evaluate the output of DIR/run, saved in FILE.
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Results {
    spans: BTreeMap<String, Span>,
    values: BTreeMap<String, f64>,
    versions: BTreeMap<String, String>,
    machine: String,
}

#[derive(Debug, Deserialize)]
struct Span {
    min_us: f64,
    median_us: f64,
}

/// Returns the figures, and the machine if it is another one; none if only a directory was created.
pub(super) fn figures(lab: &Lab, options: &Options) -> anyhow::Result<Option<(Vec<Figure>, Option<String>)>> {
    if let Some(dir) = &options.bundle {
        bundle(lab, dir)?;
        println!("copy {0} to the machine and run, as root: {0}/run --rounds 200 > results.json", dir.display());
        return Ok(None);
    }
    let (results, real) = match &options.from {
        Some(file) => {
            let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
            (find(text.lines()).with_context(|| file.display().to_string())?, true)
        }
        None => (in_guest(lab, options.rounds)?, false),
    };
    for (name, version) in &results.versions {
        eprintln!("bench: {name} is {version}");
    }
    let figures = evaluate(&results, real)?;
    Ok(Some((figures, real.then_some(results.machine))))
}

fn find<'a>(mut lines: impl Iterator<Item = &'a str>) -> anyhow::Result<Results> {
    let line = lines.find_map(|line| line.find("{\"spans\"").and_then(|at| line.get(at..)));
    serde_json::from_str(line.context("no line with results")?.trim_end()).context("failed to parse the results")
}

fn in_guest(lab: &Lab, rounds: u32) -> anyhow::Result<Results> {
    let image = lab.agent_bench_image(&lab.agent_bench()?)?;
    let guest = Guest { cpus: 1, initrd: Some(image.initrd), ..Guest::default() }
        // The benchmark runs in the agent's place and never reports that it listens.
        .parameter("firstlight.on-failure=hold")
        .parameter(format!("bench.rounds={rounds}"));
    let prepared = lab.guest(&guest).context("prepare the guest")?;
    let dir = firstlight_lab::cache_root()?.join("bench");
    fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let log = dir.join("agent-console.log");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    let ended = runtime.block_on(async {
        let mut vm = Vm::start(&prepared.machine, &dir, &log).await?;
        let ended = tokio::time::timeout(LIMIT, vm.wait()).await.is_ok();
        vm.stop().await;
        anyhow::Ok(ended)
    })?;
    let console = fs::read(&log).with_context(|| log.display().to_string())?;
    let console = String::from_utf8_lossy(&console).into_owned();
    let lines: Vec<&str> = console.lines().filter_map(|line| Some(line.split_once(PREFIX)?.1)).collect();
    if !ended {
        bail!("the guest did not end in {LIMIT:?}; see {}", log.display());
    }
    find(lines.iter().copied())
        .with_context(|| format!("the guest printed: {}; see {}", lines.join(" / "), log.display()))
}

fn evaluate(results: &Results, real: bool) -> anyhow::Result<Vec<Figure>> {
    let span = |name: &str| results.spans.get(name).with_context(|| format!("the results have no {name:?}"));
    let value = |name: &str| results.values.get(name).copied().with_context(|| format!("the results have no {name:?}"));
    let ms = |us: f64| us / 1000.0;
    let mut figures = Vec::new();
    for (peer, factor) in [("crun", 1.2), ("runc", 3.0)] {
        let (ours, theirs) = (span("lifecycle agent")?, span(&format!("lifecycle {peer}"))?);
        for (which, ours, theirs) in
            [("median", ours.median_us, theirs.median_us), ("minimum", ours.min_us, theirs.min_us)]
        {
            let what = format!("container lifecycle: create, start, wait, remove; {which}");
            figures.push(Figure::faster(what, "ms", ms(ours), peer, ms(theirs), factor));
        }
    }
    for step in ["create", "start", "wait", "remove"] {
        let step_span = span(&format!("{step} agent"))?;
        figures.push(Figure::shown(format!("{step}, median"), "ms", ms(step_span.median_us)));
    }
    let (exec, check) = (span("exec agent")?, span("check agent")?);
    for peer in ["crun", "runc"] {
        let theirs = span(&format!("exec {peer}"))?;
        figures.push(
            Figure::shown("exec of /bin/true, median", "ms", ms(exec.median_us)).beside(peer, ms(theirs.median_us)),
        );
    }
    let absolute = |what: &str, unit, ours, goal| match real {
        true => Figure::at_most(what, unit, ours, goal),
        false => Figure::shown(format!("{what} (emulated: no goal)"), unit, ours),
    };
    figures.push(absolute("exec of /bin/true, minimum", "ms", ms(exec.min_us), 3.0).beside("kata-agent", 5.7));
    figures.push(absolute("Check round trip, median", "us", check.median_us, 30.0).beside("kata-agent", 33.0));
    figures.push(
        absolute("processor time of both processes, exec to Check", "ms", ms(value("agent start cpu us")?), 2.0)
            .beside("kata-agent", 3.3),
    );
    let (server, runtime) = (value("agent resident idle KiB")?, value("runtime resident idle KiB")?);
    let mib = |kib: f64| kib / 1024.0;
    figures.push(Figure::at_most("resident idle, server", "MiB", mib(server), 4.0).beside("kata-agent", 11.7));
    figures.push(Figure::at_most("resident idle, server and runtime", "MiB", mib(server + runtime), 7.0));
    for when in ["after start", "after calls"] {
        let both = value(&format!("agent resident {when} KiB"))? + value(&format!("runtime resident {when} KiB"))?;
        figures.push(Figure::shown(format!("resident {when}, server and runtime"), "MiB", mib(both)));
    }
    if let Ok(worker) = value("preforked worker resident after calls KiB") {
        figures.push(Figure::shown("resident after calls, preforked worker", "MiB", mib(worker)));
    }
    let size = value("agent size bytes")? / 1e6;
    figures.push(Figure::at_most("program, stripped", "MB", size, 8.0).beside("kata-agent", 26.0));
    let log = value("agent log bytes")? / value("containers")?;
    figures.push(Figure::shown("log per container, default level", "B", log).beside("kata-agent", 15_000.0));
    Ok(figures)
}

/// The bundle's `run` script, which measures in a private root below the directory.
const RUN: &str = r#"#!/bin/sh
# Measures in a private mount namespace and root; leaves nothing on the machine.
set -e
here=$(cd "$(dirname "$0")" && pwd)
[ "$(id -u)" = 0 ] || { echo "run: needs root" >&2; exit 1; }
exec unshare --mount sh -e -c '
here=$1; shift
mount --make-rprivate /
mount --bind "$here/root" "$here/root"
cd "$here/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
grep -qw memory sys/fs/cgroup/cgroup.controllers || { echo "run: cgroup v2 has no memory controller here" >&2; exit 1; }
exec chroot . /usr/bin/agent-bench --agent /usr/bin/firstlight-agent --busybox /usr/bin/busybox \
  --crun /usr/bin/crun --runc /usr/bin/runc "$@"
' run "$here" "$@"
"#;

fn bundle(lab: &Lab, dir: &Path) -> anyhow::Result<()> {
    let bench = lab.agent_bench()?;
    let root = dir.join("root");
    for name in ["proc", "sys", "dev", "run", "tmp", "var", "etc", "root", "usr/bin"] {
        let path = root.join(name);
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
    }
    copy_tree(&bench.runtimes.join("usr"), &root.join("usr"))?;
    for (from, to) in [
        (&bench.program, "usr/bin/agent-bench"),
        (&lab.binaries.agent, "usr/bin/firstlight-agent"),
        (&lab.toolbox.busybox, "usr/bin/busybox"),
    ] {
        fs::copy(from, root.join(to)).with_context(|| from.display().to_string())?;
    }
    if !root.join("usr/bin/runc").exists() {
        symlink("../sbin/runc", root.join("usr/bin/runc"))?;
    }
    for (link, target) in [("lib64", "usr/lib64"), ("lib", "usr/lib"), ("bin", "usr/bin"), ("var/run", "/run")] {
        let link = root.join(link);
        let _ = fs::remove_file(&link);
        symlink(target, &link).with_context(|| link.display().to_string())?;
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
    let run = dir.join("run");
    fs::write(&run, RUN).with_context(|| run.display().to_string())?;
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

fn copy_tree(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy_tree(&from, &to)?;
        } else if kind.is_symlink() {
            let _ = fs::remove_file(&to);
            symlink(fs::read_link(&from)?, &to).with_context(|| to.display().to_string())?;
        } else {
            fs::copy(&from, &to).with_context(|| from.display().to_string())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"[1.2] bench: {"spans":{"lifecycle agent":{"count":1,"min_us":1000.0,"median_us":2000.0,"p99_us":1.0},"lifecycle crun":{"count":1,"min_us":2000.0,"median_us":2100.0,"p99_us":1.0}},"values":{},"versions":{},"machine":"1 x P"}"#;

    #[test]
    fn results_line_is_found_among_other_lines() {
        let results = find(["noise", LINE].into_iter()).unwrap();
        assert!((results.spans["lifecycle crun"].min_us - 2000.0).abs() < 1e-9);
        assert!(find(["noise"].into_iter()).unwrap_err().to_string().contains("no line"));
    }

    #[test]
    fn incomplete_results_are_rejected() {
        let results = find([LINE].into_iter()).unwrap();
        assert!(evaluate(&results, true).unwrap_err().to_string().contains("lifecycle runc"));
    }
}
