//! Builds the test programs of `tests/e2e` and lists their tests.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use firstlight_lab::binaries::workspace;

use super::Scenario;

/// A test program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) executable: PathBuf,
}

const BUILD: &[&str] =
    &["test", "--locked", "--package", "firstlight-e2e", "--no-run", "--message-format=json-render-diagnostics"];

/// A JSON message of cargo about an artifact.
#[derive(serde::Deserialize)]
struct Message {
    target: Target,
    profile: Profile,
    executable: PathBuf,
}

#[derive(serde::Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

#[derive(serde::Deserialize)]
struct Profile {
    test: bool,
}

/// Builds the test programs and returns them.
pub(crate) fn build() -> anyhow::Result<Vec<Program>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    eprintln!("xtask: {cargo} {}", BUILD.join(" "));
    let mut command = Command::new(cargo);
    command.current_dir(workspace()).args(BUILD).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().context("failed to start cargo")?;
    if !output.status.success() {
        bail!("failed to build the scenarios: `cargo {}` ended with {}", BUILD.join(" "), output.status);
    }
    let programs = executables(&output.stdout);
    if programs.is_empty() {
        bail!("failed to find the scenarios: cargo reported no test program of firstlight-e2e");
    }
    Ok(programs)
}

fn executables(messages: &[u8]) -> Vec<Program> {
    let messages = messages.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    messages
        .filter(|message: &Message| message.profile.test && message.target.kind.iter().any(|kind| kind == "test"))
        .map(|message| Program { name: message.target.name, executable: message.executable })
        .collect()
}

impl Program {
    /// Lists its tests. An ignored test is an error: a skipped test must not count as passed.
    pub(crate) fn scenarios(&self) -> anyhow::Result<Vec<Scenario>> {
        let list = |arguments: &[&str]| {
            let output = Command::new(&self.executable)
                .current_dir(workspace().join("tests/e2e"))
                .args(["--list", "--format", "terse"])
                .args(arguments)
                .output()
                .with_context(|| format!("failed to list the tests of {}", self.executable.display()))?;
            if !output.status.success() {
                bail!("failed to list the tests of {}: {}", self.executable.display(), output.status);
            }
            anyhow::Ok(names(&String::from_utf8(output.stdout)?))
        };
        let ignored = list(&["--ignored"])?;
        if let Some(test) = ignored.first() {
            bail!("{} {test} is ignored: run it or remove it", self.name);
        }
        let tests = list(&[])?;
        let scenario = |test: String| Scenario {
            program: self.name.clone(),
            tests: vec![test.clone()],
            name: test,
            executable: self.executable.clone(),
        };
        Ok(tests.into_iter().map(scenario).collect())
    }
}

fn names(list: &str) -> Vec<String> {
    list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_test_programs_are_selected_from_cargo_messages() {
        let messages = br#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"firstlight_e2e"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"firstlight_e2e"},"profile":{"test":true},"executable":"/t/deps/firstlight_e2e-1"}
not json
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"guest"},"profile":{"test":true},"executable":"/t/deps/guest-1"}
{"reason":"build-finished","success":true}
"#;
        let guest = Program { name: "guest".into(), executable: "/t/deps/guest-1".into() };
        assert_eq!(executables(messages), [guest]);
    }

    #[test]
    fn names_exclude_benchmarks_and_counts() {
        assert_eq!(names("a::b: test\nc: benchmark\nd: test\n\n2 tests, 1 benchmark\n"), ["a::b", "d"]);
    }
}
