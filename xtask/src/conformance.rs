//! The conformance table: every call of the agent, and the tests that prove it.
//!
//! The table in `docs/agent-conformance.md` is written by hand; the check is that
//! it has one row for each call of the protocol and that the tests exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use firstlight_lab::binaries::workspace;

const DOCUMENT: &str = "docs/agent-conformance.md";

/// Protocols that the agent shares with kata-agent.
const PROTOCOLS: &[&str] = &["common/agent-api/proto/agent.proto", "common/agent-api/proto/health.proto"];

/// Directories that may contain tests.
const TESTS: &[&str] = &["agent", "common", "init", "host-shim-glue", "tests", "xtask"];

/// Beginning of the second column of a call that is not implemented; the third column has the reason.
const REFUSED: &str = "refused";

/// One row: the call, and the names of its tests.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    call: String,
    tests: Vec<String>,
    refused: bool,
}

/// Checks the table.
pub(crate) fn check() -> anyhow::Result<()> {
    let root = workspace();
    let read = |file: &str| fs::read_to_string(root.join(file)).with_context(|| format!("read {file}"));
    let rows = rows(&read(DOCUMENT)?);
    let mut calls = BTreeSet::new();
    for protocol in PROTOCOLS {
        calls.extend(rpcs(&read(protocol)?));
    }
    let mut known = BTreeSet::new();
    for dir in TESTS {
        functions(&root.join(dir), &mut known)?;
    }
    let problems = problems(&rows, &calls, &known);
    if !problems.is_empty() {
        bail!("{DOCUMENT}: {}", problems.join("; "));
    }
    Ok(())
}

/// Returns the names of a protocol's calls.
fn rpcs(proto: &str) -> impl Iterator<Item = String> {
    let name = |line: &str| {
        let rest = line.trim().strip_prefix("rpc ")?;
        Some(rest.split(|c: char| !c.is_ascii_alphanumeric()).next()?.to_owned())
    };
    proto.lines().filter_map(name).collect::<Vec<_>>().into_iter()
}

/// Returns the rows whose first cell is one name in backticks.
fn rows(document: &str) -> Vec<Row> {
    let quoted = |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let row = |line: &str| {
        let mut cells = line.strip_prefix('|')?.split('|');
        let (first, second) = (cells.next()?, cells.next()?);
        let [call] = quoted(first).try_into().ok()?;
        Some(Row { call, tests: quoted(second), refused: second.trim().starts_with(REFUSED) })
    };
    document.lines().filter_map(row).collect()
}

/// Adds the names of all functions in the Rust files below a directory.
fn functions(dir: &Path, known: &mut BTreeSet<String>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            functions(&path, known)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let name = |line: &str| {
                let rest = line.trim_start().strip_prefix("fn ")?;
                Some(rest.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).next()?.to_owned())
            };
            known.extend(text.lines().filter_map(name));
        }
    }
    Ok(())
}

fn problems(rows: &[Row], calls: &BTreeSet<String>, known: &BTreeSet<String>) -> Vec<String> {
    let mut all = Vec::new();
    for call in calls {
        match rows.iter().filter(|row| row.call == *call).count() {
            1 => {}
            0 => all.push(format!("no row for {call}")),
            count => all.push(format!("{count} rows for {call}")),
        }
    }
    for row in rows.iter().filter(|row| calls.contains(&row.call)) {
        if row.tests.is_empty() && !row.refused {
            all.push(format!("{} has no test", row.call));
        }
    }
    for row in rows {
        for test in row.tests.iter().filter(|test| !known.contains(*test)) {
            all.push(format!("{}: test {test} does not exist", row.call));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn rows_and_calls_are_parsed() {
        let calls: Vec<String> = rpcs("service X {\n  rpc Check(CheckRequest) returns (Y);\n// rpc No\n}").collect();
        assert_eq!(calls, ["Check"]);
        let read = rows("| call | test |\n|---|---|\n| `Check` | `a_b`, `c` | why |\n| `Resize` | refused | |\ntext\n");
        assert_eq!(read[0], Row { call: "Check".into(), tests: vec!["a_b".into(), "c".into()], refused: false });
        assert!(read[1].refused && read.len() == 2);
    }

    #[test]
    fn missing_rows_and_tests_are_reported() {
        let rows = rows("| `A` | `exists` |\n| `B` | |\n| `D` | `gone` |\n");
        let found = problems(&rows, &set(&["A", "B", "C"]), &set(&["exists"]));
        assert_eq!(found, ["no row for C", "B has no test", "D: test gone does not exist"]);
    }
}
