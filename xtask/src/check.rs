//! `cargo xtask check`: formatting, lints, licences and other static checks.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail};
use firstlight_lab::binaries::workspace;

use crate::cargo::{cargo, run_program};
use crate::steps::not_run;

/// Options of `check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Checks formatting, lints, licences, dependencies of crates and modules, discouraged words and generated documents.
pub(crate) fn check(_: &Args) -> anyhow::Result<ExitCode> {
    cargo(&["fmt", "--all", "--check"])?;
    // Tests with requirements that not every host meets are behind features; they are linted too.
    let features = "firstlight-agent/real,firstlight-init/real,firstlight-lab/online";
    let clippy = ["clippy", "--quiet", "--locked", "--workspace", "--all-targets", "--features", features];
    cargo(&[&clippy[..], &["--", "-D", "warnings"]].concat())?;
    check_dependencies()?;
    crate::crates::check()?;
    crate::modules::check()?;
    check_documents()?;
    crate::words::check()?;
    crate::conformance::check()?;
    Ok(ExitCode::SUCCESS)
}

/// The version of cargo-deny that is installed, the same on every machine.
const DENY_VERSION: &str = "0.20.2";

/// Checks licences, sources, banned crates and advisories with cargo-deny, which is in the lab's cache. Without it, only
/// CI builds it, which takes minutes.
fn check_dependencies() -> anyhow::Result<()> {
    let tools = firstlight_lab::cache_root()?.join("tools");
    let installed = tools.join("bin/cargo-deny");
    let root = tools.display().to_string();
    if !installed.is_file() {
        let install = ["install", "--debug", "--locked", "--root", &root, "--version", DENY_VERSION, "cargo-deny"];
        if std::env::var_os("CI").is_none() {
            not_run(format!(
                "licences, sources, banned crates and advisories: cargo-deny is not in {root}; CI runs them, and here: \
                 cargo {}",
                install.join(" ")
            ));
            return Ok(());
        }
        eprintln!("xtask: building cargo-deny once, which takes some minutes");
        cargo(&install)?;
    }
    let program = installed.display().to_string();
    run_program(&program, &["--log-level", "error", "check", "licenses", "bans", "sources"])?;
    check_advisories(&program)
}

/// Checks the dependencies for known vulnerabilities. Their database is downloaded; without it the check is reported as
/// not run.
fn check_advisories(program: &str) -> anyhow::Result<()> {
    let mut command = Command::new(program);
    command.current_dir(workspace()).args(["--color", "never", "--log-level", "error", "check", "advisories"]);
    let output = command.output().with_context(|| format!("failed to start {program}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    match advisory_result(output.status.success(), &text) {
        Advisories::Clean => {}
        Advisories::NoDatabase(reason) => not_run(format!("advisories (known vulnerabilities): {reason}")),
        Advisories::Found => bail!("cargo-deny check advisories failed:\n{}", text.trim()),
    }
    Ok(())
}

/// Result of a check of advisories.
#[derive(Debug, PartialEq, Eq)]
enum Advisories {
    /// No dependency has one.
    Clean,
    /// The database could not be fetched: the reason, one line.
    NoDatabase(String),
    /// A dependency has one.
    Found,
}

fn advisory_result(succeeded: bool, text: &str) -> Advisories {
    let failure = text.lines().find(|line| line.contains("advisory database"));
    match (succeeded, failure) {
        (true, _) => Advisories::Clean,
        (false, Some(line)) => {
            let cause = text.lines().find(|line| line.starts_with("fatal:")).unwrap_or_default();
            let line = line.split_once("] ").map_or(line, |(_, message)| message);
            Advisories::NoDatabase(format!("{} {cause}", line.split(" with ").next().unwrap_or(line)).trim().to_owned())
        }
        (false, None) => Advisories::Found,
    }
}

/// Generated tables: the document, and the package and option that print the table, which the marker in
/// the document repeats.
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

/// Returns the marker before a generated part.
fn begin_marker(program: &str, option: &str) -> String {
    format!("<!-- generated: {program} {option} -->\n")
}

/// Compares the generated parts of documents with the code, or rewrites them if `FIRSTLIGHT_BLESS` is set.
fn check_documents() -> anyhow::Result<()> {
    for (document, package, option) in TABLES {
        let path = workspace().join(document);
        let text = std::fs::read_to_string(&path)?;
        let program = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let mut command = Command::new(program);
        command.current_dir(workspace()).args(["run", "--quiet", "--locked", "--package", package]);
        // A table that the program itself does not need to print is printed by an example.
        match option.strip_prefix("--example ") {
            Some(example) => command.args(["--example", example]),
            None => command.arg("--").args(option.split(' ')),
        };
        let output = command.output()?;
        if !output.status.success() {
            bail!("{package} {option} failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        let expected = replace_table(&text, &begin_marker(package, option), &String::from_utf8(output.stdout)?, &path)?;
        if expected == text {
            continue;
        }
        if std::env::var_os("FIRSTLIGHT_BLESS").is_some() {
            std::fs::write(&path, expected)?;
            eprintln!("xtask: {document} rewritten");
        } else {
            bail!("{document} differs from what the code prints: run FIRSTLIGHT_BLESS=1 cargo xtask check");
        }
    }
    Ok(())
}

fn replace_table(text: &str, begin: &str, table: &str, path: &Path) -> anyhow::Result<String> {
    let parts = text.split_once(begin).and_then(|(head, rest)| rest.split_once(END).map(|(_, tail)| (head, tail)));
    let Some((head, tail)) = parts else { bail!("{}: marker not found: {begin:?}", path.display()) };
    Ok(format!("{head}{begin}{table}{END}{tail}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_database_is_not_a_finding() {
        let offline = "2026-01-01 [ERROR] failed to fetch advisory database https://example.org/db with cli: failed to \
                       clone\nCloning into 'x'...\nfatal: unable to access 'https://example.org/db/': no route\n";
        let reason = "failed to fetch advisory database https://example.org/db fatal: unable to access \
                      'https://example.org/db/': no route";
        assert_eq!(advisory_result(false, offline), Advisories::NoDatabase(reason.into()));
        assert_eq!(advisory_result(true, ""), Advisories::Clean);
        assert_eq!(advisory_result(false, "error[vulnerability]: use after free in x"), Advisories::Found);
    }

    #[test]
    fn generated_part_is_replaced_and_must_exist() {
        let (one, two) = (begin_marker("a", "--x"), begin_marker("b", "--x"));
        let text = format!("a\n{one}old\n{END}\nb\n{two}other\n{END}\n");
        let expected = format!("a\n{one}old\n{END}\nb\n{two}new\n{END}\n");
        assert_eq!(replace_table(&text, &two, "new\n", Path::new("x")).unwrap(), expected);
        assert!(replace_table("a", &one, "new", Path::new("x")).is_err());
    }
}
