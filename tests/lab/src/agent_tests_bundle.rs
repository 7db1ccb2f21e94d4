//! Creates the directory that runs the agent's tests with real containers on a
//! machine without cargo: `run`, and the static programs that it needs.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use firstlight_image_builder::cache;
use firstlight_progress::Progress;

use crate::binaries::{AgentTests, BuildError, static_program, workspace};
use crate::toolbox;

/// Errors of creating the bundle.
#[derive(Debug, thiserror::Error)]
pub enum AgentTestsError {
    /// A program failed to build.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A file or directory could not be created.
    #[error("failed to create the bundle of the agent's tests: {path}: {source}")]
    File {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The debug symbols could not be removed.
    #[error("failed to create the bundle of the agent's tests: strip (package binutils): {0}")]
    Strip(String),
    /// The cache directory could not be determined.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// busybox could not be fetched.
    #[error(transparent)]
    Toolbox(#[from] toolbox::Error),
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> AgentTestsError {
    let path = path.to_owned();
    move |source| AgentTestsError::File { path, source }
}

/// Scripts, by their names in the bundle.
const SCRIPTS: &[(&str, &str)] = &[
    ("run", include_str!("../agent-tests/run")),
    ("in-root", include_str!("../agent-tests/in-root")),
    ("one-by-one", include_str!("../agent-tests/one-by-one")),
];

/// Creates the bundle in `dir` and returns its programs.
///
/// # Errors
/// The first step that failed.
pub fn make(dir: &Path) -> Result<Vec<PathBuf>, AgentTestsError> {
    let agent = static_program(&workspace(), "firstlight-agent", "firstlight-agent")?;
    let tests = AgentTests::build(&workspace())?.program;
    let busybox = toolbox::busybox(&cache::root()?, Progress::stderr("lab"))?;
    std::fs::create_dir_all(dir).map_err(at(dir))?;
    let mut programs = Vec::new();
    for (from, name) in [(agent, "firstlight-agent"), (tests, "tests"), (busybox, "busybox")] {
        let to = dir.join(name);
        std::fs::copy(&from, &to).map_err(at(&to))?;
        programs.push(to);
    }
    strip(&dir.join("tests"))?;
    for (name, text) in SCRIPTS {
        let path = dir.join(name);
        std::fs::write(&path, text).map_err(at(&path))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).map_err(at(&path))?;
    }
    Ok(programs)
}

/// Removes the debug information, which is most of the program's size.
fn strip(program: &Path) -> Result<(), AgentTestsError> {
    let output =
        Command::new("strip").arg(program).output().map_err(|error| AgentTestsError::Strip(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(AgentTestsError::Strip(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Replaces the test program: prints the output of a test with this name.
    const PROGRAM: &str = r#"#!/bin/sh
if [ "$1" = --list ]; then
  shift 3
  for name in good lacks bad quiet; do
    [ $# = 0 ] && echo "$name: test"
    for filter in "$@"; do case $name in *$filter*) echo "$name: test" ;; esac; done
  done
  exit 0
fi
[ "$1 $3 $4" = "--exact --test-threads=1 --show-output" ] || exit 9
case $2 in
  good) printf 'figures: 7 of %s\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured\n' "$SHORT_PROCESSES" ;;
  lacks) printf 'panicked at x.rs:1:\nnot runnable here: no such disk\n'; exit 101 ;;
  bad) echo 'is not: not runnable here: x'; exit 101 ;;
  quiet) echo 'test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured' ;;
esac
"#;

    fn one_by_one(dir: &Path, filters: &[&str]) -> (String, Option<i32>) {
        let program = dir.join("tests");
        fs::write(&program, PROGRAM).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let script = workspace().join("tests/lab/agent-tests/one-by-one");
        let mut command = Command::new("sh");
        command.arg(script).args(filters).env("TESTS", &program).env("SHORT_PROCESSES", "9");
        let output = command.output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), output.status.code())
    }

    #[test]
    fn test_that_cannot_run_is_reported_and_never_counts_as_passed() {
        let dir = tempfile::tempdir().unwrap();
        let (text, code) = one_by_one(dir.path(), &[]);
        for part in [
            "ok       good (",
            "         7 of 9\n",
            "not run  lacks: no such disk\n",
            "FAILED   bad (",
            "FAILED   quiet (",
        ] {
            assert!(text.contains(part), "no {part:?} in:\n{text}");
        }
        assert!(text.ends_with("\n4 tests: 1 ok, 2 failed, 1 not runnable here\n"), "{text}");
        assert_eq!(code, Some(1));
        let (text, code) = one_by_one(dir.path(), &["goo", "lack"]);
        assert!(text.ends_with("\n2 tests: 1 ok, 0 failed, 1 not runnable here\n"), "{text}");
        assert_eq!(code, Some(0));
        // The script fails if no test ran.
        assert_eq!(one_by_one(dir.path(), &["lacks"]).1, Some(1));
        let (text, code) = one_by_one(dir.path(), &["nowhere"]);
        assert!(text.contains("no test name contains any of: nowhere") && code == Some(1), "{text}");
    }

    #[test]
    fn invalid_options_are_rejected() {
        let run = |arguments: &[&str]| {
            let script = workspace().join("tests/lab/agent-tests/run");
            let output = Command::new("sh").arg(script).args(arguments).output().unwrap();
            (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
        };
        for (arguments, part) in [
            (&["--short-processes", "many"][..], "--short-processes requires a number, not \"many\""),
            (&["--many-containers"], "--many-containers requires a number, not \"\""),
            (&["--fast"], "unknown option --fast"),
            (&["limits", "--list"], "options must precede the first FILTER: --list"),
        ] {
            let (text, code) = run(arguments);
            assert!(text.contains(part) && code == Some(1), "{code:?} {text}");
        }
        assert_eq!(run(&["--help"]).1, Some(0));
    }
}
