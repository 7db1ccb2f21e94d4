//! `cargo xtask fuzz`.

use std::path::PathBuf;
use std::process::ExitCode;

use firstlight_lab::binaries::workspace;

use crate::cargo::cargo_with;

/// Options of `fuzz`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Seconds per target; 10 if not given.
    #[arg(long)]
    seconds: Option<u64>,
    /// Run each target that parses direct input of the host or kernel for 30 seconds and the others for two, after a
    /// self-check of coverage guidance; part of `test`.
    #[arg(long, conflicts_with = "seconds")]
    smoke: bool,
    /// Write inputs with new coverage to tests/fuzz/corpus, and remove redundant ones there.
    #[arg(long)]
    grow: bool,
    /// Replay this one input; a failure's message contains the command.
    #[arg(long, requires = "target")]
    replay: Option<PathBuf>,
    /// Only targets whose name contains this.
    target: Option<String>,
}

/// The compilation target; given explicitly so that the flags do not apply to build scripts.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Compiler flags that add counters to every edge; all are available in the stable compiler.
const COVERAGE: (&str, &str) = (
    "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
    "-C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=3 \
     -C llvm-args=-sanitizer-coverage-inline-8bit-counters",
);

/// Compiles for coverage and runs the fuzz targets.
pub(crate) fn fuzz(args: &Args) -> anyhow::Result<ExitCode> {
    let build = if args.smoke { Build::Shared } else { Build::Covered };
    if args.smoke {
        run(build, &["--self-check"])?;
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
    run(build, &arguments)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `fuzz --smoke`, a step of `test`.
pub(crate) fn smoke() -> anyhow::Result<()> {
    let args = Args { seconds: None, smoke: true, grow: false, replay: None, target: None };
    fuzz(&args).map(drop)
}

/// How the targets are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Build {
    /// Counters in every crate, optimised: for long runs.
    Covered,
    /// Counters in our crates only; dependencies are shared with the other tests.
    Shared,
}

/// The wrapper that cargo runs instead of rustc for the workspace's crates.
const WRAPPER: &str = "tests/fuzz/rustc-with-counters.sh";

fn run(build: Build, arguments: &[&str]) -> anyhow::Result<()> {
    let package = ["--package", "firstlight-fuzz", "--"];
    match build {
        Build::Covered => {
            let options = ["run", "--locked", "--profile", "fuzz", "--target", TARGET];
            cargo_with(&[&options[..], &package, arguments].concat(), &[COVERAGE])
        }
        Build::Shared => {
            let wrapper = workspace().join(WRAPPER).display().to_string();
            // Optimised for speed; dependencies have their own optimisation level.
            let environment = [("RUSTC_WORKSPACE_WRAPPER", wrapper.as_str()), ("CARGO_PROFILE_DEV_OPT_LEVEL", "1")];
            cargo_with(&[&["run", "--locked"], &package[..], arguments].concat(), &environment)
        }
    }
}
