//! `cargo xtask fuzz`.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::cargo::cargo_with;

/// Options of `fuzz`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Seconds per target; 10 if not given.
    #[arg(long)]
    seconds: Option<u64>,
    /// Half a minute for each reader of what host and kernel say first hand, two seconds for the others, after a look
    /// at whether guidance works; part of `test`.
    #[arg(long, conflicts_with = "seconds")]
    smoke: bool,
    /// Write what reached something new into tests/fuzz/corpus, and take out what is superfluous there.
    #[arg(long)]
    grow: bool,
    /// Run this one input, as a failure's message says.
    #[arg(long, requires = "target")]
    replay: Option<PathBuf>,
    /// Only targets whose name contains this.
    target: Option<String>,
}

/// The machine that everything is compiled for; named so that the flags are not used for build scripts.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Counters on every edge. All of this is in the stable compiler.
const COVERAGE: (&str, &str) = (
    "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
    "-C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=3 \
     -C llvm-args=-sanitizer-coverage-inline-8bit-counters",
);

/// Compiles for coverage and runs the fuzz targets.
pub(crate) fn fuzz(args: &Args) -> anyhow::Result<ExitCode> {
    if args.smoke {
        run(&["--self-check"])?;
    }
    let mut arguments = Vec::new();
    let seconds = args.seconds.map(|seconds| seconds.to_string());
    if let Some(seconds) = &seconds {
        arguments.extend(["--seconds", seconds]);
    }
    arguments.extend(args.smoke.then_some("--smoke"));
    arguments.extend(args.grow.then_some("--grow"));
    let replay = args.replay.as_ref().map(|file| file.display().to_string());
    if let Some(file) = &replay {
        arguments.extend(["--replay", file]);
    }
    arguments.extend(args.target.as_deref());
    run(&arguments)?;
    Ok(ExitCode::SUCCESS)
}

/// What CI runs.
pub(crate) fn smoke() -> anyhow::Result<()> {
    let args = Args { seconds: None, smoke: true, grow: false, replay: None, target: None };
    fuzz(&args).map(drop)
}

fn run(arguments: &[&str]) -> anyhow::Result<()> {
    let run =
        ["run", "--quiet", "--locked", "--profile", "fuzz", "--target", TARGET, "--package", "firstlight-fuzz", "--"];
    cargo_with(&[&run[..], arguments].concat(), &[COVERAGE])
}
