//! `cargo xtask check`: everything that needs no guest.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::bail;
use firstlight_lab::binaries::workspace;

use crate::cargo::{cargo, must};

/// Options of `check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Formatting, lints, licences, documents.
pub(crate) fn check(_: &Args) -> anyhow::Result<ExitCode> {
    cargo(&["fmt", "--all", "--check"])?;
    // Tests that need more than a host has are behind features; they are linted all the same.
    let features = "firstlight-agent/real,firstlight-init/real,firstlight-lab/online";
    let clippy = ["clippy", "--quiet", "--locked", "--workspace", "--all-targets", "--features", features];
    cargo(&[&clippy[..], &["--", "-D", "warnings"]].concat())?;
    deny()?;
    crate::crates::check()?;
    crate::words::check()?;
    documents()?;
    crate::conformance::check()?;
    Ok(ExitCode::SUCCESS)
}

/// The version that is installed where there is none: the same everywhere.
const DENY_VERSION: &str = "0.20.2";

/// Licences, sources and bans, by cargo-deny; kept in the lab's cache.
fn deny() -> anyhow::Result<()> {
    let tools = firstlight_lab::cache_root()?.join("tools");
    let installed = tools.join("bin/cargo-deny");
    if !installed.is_file() {
        eprintln!("xtask: cargo-deny is not in {}; building it once takes some minutes", tools.display());
        let root = tools.display().to_string();
        cargo(&["install", "--quiet", "--locked", "--root", &root, "--version", DENY_VERSION, "cargo-deny"])?;
    }
    // Advisories need a database from outside; a machine without one must still
    // be able to run every check.
    let program = installed.display().to_string();
    must(&program, &["--log-level", "error", "check", "licenses", "bans", "sources"])
}

/// Tables in documents that come from the code: the document, and the program
/// and option that print it, which the marker in the document names too.
const TABLES: &[(&str, &str, &str)] = &[
    ("docs/kernel-command-line.md", "firstlight-init", "--print-params"),
    ("docs/kernel-command-line.md", "firstlight-agent", "--print-params"),
    ("docs/boot-plan.md", "firstlight-init", "--print-plan"),
    ("docs/daemons.md", "firstlight-init", "--print-daemons"),
    ("docs/failures.md", "firstlight-init", "--example failures"),
    ("docs/kernel-configs.md", "firstlight-image-builder", "kernel check --print-tables"),
    ("docs/driver.md", "firstlight-image-builder", "matrix"),
    ("docs/driver.md", "firstlight-image-builder", "profiles"),
];

const END: &str = "<!-- generated: end -->";

/// What is before a generated part.
fn begin(program: &str, option: &str) -> String {
    format!("<!-- generated: {program} {option} -->\n")
}

/// Compares, or with `FIRSTLIGHT_BLESS=1` rewrites, the generated parts of documents.
fn documents() -> anyhow::Result<()> {
    for (document, package, option) in TABLES {
        let path = workspace().join(document);
        let text = std::fs::read_to_string(&path)?;
        let program = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let mut command = Command::new(program);
        command.current_dir(workspace()).args(["run", "--quiet", "--locked", "--package", package]);
        // An example prints a table that is no business of its program.
        match option.strip_prefix("--example ") {
            Some(example) => command.args(["--example", example]),
            None => command.arg("--").args(option.split(' ')),
        };
        let output = command.output()?;
        if !output.status.success() {
            bail!("{package} {option} failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        let wanted = replaced(&text, &begin(package, option), &String::from_utf8(output.stdout)?, &path)?;
        if wanted == text {
            continue;
        }
        if std::env::var_os("FIRSTLIGHT_BLESS").is_some() {
            std::fs::write(&path, wanted)?;
            eprintln!("xtask: {document} rewritten");
        } else {
            bail!("{document} is not what the code prints: run FIRSTLIGHT_BLESS=1 cargo xtask check");
        }
    }
    Ok(())
}

fn replaced(text: &str, begin: &str, table: &str, path: &Path) -> anyhow::Result<String> {
    let parts = text.split_once(begin).and_then(|(head, rest)| rest.split_once(END).map(|(_, tail)| (head, tail)));
    let Some((head, tail)) = parts else { bail!("{}: no part {begin:?}", path.display()) };
    Ok(format!("{head}{begin}{table}{END}{tail}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_part_is_replaced_and_must_exist() {
        let (one, two) = (begin("a", "--x"), begin("b", "--x"));
        let text = format!("a\n{one}old\n{END}\nb\n{two}other\n{END}\n");
        let wanted = format!("a\n{one}old\n{END}\nb\n{two}new\n{END}\n");
        assert_eq!(replaced(&text, &two, "new\n", Path::new("x")).unwrap(), wanted);
        assert!(replaced("a", &one, "new", Path::new("x")).is_err());
    }
}
