//! Checks the dependencies between the workspace's crates against a table.
//!
//! A crate's area is the first directory of its path. Development dependencies
//! are not restricted: tests may use everything.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use firstlight_lab::binaries::workspace;
use serde::Deserialize;

/// Areas, and the areas that their crates may depend on besides their own.
const AREAS: &[(&str, &[&str])] = &[
    ("common", &[]),
    ("init", &["common"]),
    ("agent", &["common"]),
    ("fm-service-vm", &["common"]),
    ("image-builder", &["common"]),
    ("host-shim-glue", &["common"]),
    // Not part of any product.
    ("tests", &["common", "init", "agent", "fm-service-vm", "image-builder", "host-shim-glue"]),
    ("xtask", &["common", "image-builder", "host-shim-glue", "tests"]),
];

/// Permitted dependencies that the table does not allow: crate, dependency, reason.
const EXCEPTIONS: &[(&str, &str, &str)] = &[];

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    /// None, `dev` or `build`.
    kind: Option<String>,
    /// The crate's directory, if it is in the workspace.
    path: Option<PathBuf>,
}

/// Fails if a crate has a dependency that the table does not allow, or an exception is unused.
pub(crate) fn check() -> anyhow::Result<()> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(workspace()).args(["metadata", "--format-version", "1", "--no-deps", "--locked"]);
    let output = command.output().context("failed to start cargo")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("failed to read cargo's metadata")?;
    let errors = errors(&metadata, &workspace(), EXCEPTIONS);
    if errors.is_empty() {
        return Ok(());
    }
    bail!("{}\nthe rules are in xtask/src/crates.rs", errors.join("\n"))
}

/// Returns the first directory of a crate's path.
fn area(path: &Path, root: &Path) -> Option<String> {
    let first = path.strip_prefix(root).ok()?.components().next()?;
    Some(first.as_os_str().to_string_lossy().into_owned())
}

fn errors(metadata: &Metadata, root: &Path, exceptions: &[(&str, &str, &str)]) -> Vec<String> {
    let members: BTreeMap<&str, &Package> = metadata
        .packages
        .iter()
        .filter(|package| metadata.workspace_members.contains(&package.id))
        .map(|package| (package.name.as_str(), package))
        .collect();
    let mut errors = Vec::new();
    let mut used = vec![false; exceptions.len()];
    for package in members.values() {
        let from = package.manifest_path.parent().and_then(|path| area(path, root)).unwrap_or_default();
        let Some((_, allowed)) = AREAS.iter().find(|(name, _)| *name == from) else {
            errors.push(format!("{}: its directory {from} is not in the table of areas", package.name));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|it| it.kind.as_deref() != Some("dev")) {
            let Some(to) = dependency.path.as_deref().and_then(|path| area(path, root)) else { continue };
            if to == from || allowed.contains(&to.as_str()) {
                continue;
            }
            let exception = exceptions.iter().position(|(a, b, _)| *a == package.name && *b == dependency.name);
            match exception {
                Some(at) => used[at] = true,
                None => errors.push(format!(
                    "{} ({from}) uses {} ({to}): crates of {from} may use {from}{}",
                    package.name,
                    dependency.name,
                    allowed.iter().map(|area| format!(", {area}")).collect::<String>()
                )),
            }
        }
    }
    let superfluous = exceptions.iter().zip(&used).filter(|(_, used)| !**used);
    errors.extend(superfluous.map(|((from, to, _), _)| format!("{from} does not use {to}: remove the exception")));
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, area: &str, uses: &[(&str, &str, Option<&str>)]) -> Package {
        let path = |area: &str, name: &str| PathBuf::from(format!("/w/{area}/{name}"));
        Package {
            id: name.into(),
            name: name.into(),
            manifest_path: path(area, name).join("Cargo.toml"),
            dependencies: uses
                .iter()
                .map(|(name, area, kind)| Dependency {
                    name: (*name).into(),
                    kind: kind.map(str::to_owned),
                    path: (!area.is_empty()).then(|| path(area, name)),
                })
                .collect(),
        }
    }

    fn errors_of(packages: Vec<Package>, exceptions: &[(&str, &str, &str)]) -> Vec<String> {
        let workspace_members = packages.iter().map(|package| package.id.clone()).collect();
        errors(&Metadata { packages, workspace_members }, Path::new("/w"), exceptions)
    }

    #[test]
    fn product_may_use_common_and_its_own_area_only() {
        let fine = package("a", "init", &[("b", "common", None), ("c", "init", Some("build")), ("serde", "", None)]);
        assert_eq!(errors_of(vec![fine], &[]), Vec::<String>::new());
        for (area, kind) in [("tests", None), ("agent", None), ("tests", Some("build"))] {
            let bad = package("a", "init", &[("x", area, kind)]);
            let errors = errors_of(vec![bad], &[]);
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].contains("a (init) uses x") && errors[0].contains("init, common"), "{errors:?}");
        }
        assert!(errors_of(vec![package("a", "init", &[("x", "tests", Some("dev"))])], &[]).is_empty());
        assert!(errors_of(vec![package("a", "new", &[])], &[])[0].contains("not in the table"));
    }

    #[test]
    fn unused_exception_is_an_error() {
        let bad = || vec![package("a", "init", &[("x", "agent", None)])];
        assert!(errors_of(bad(), &[("a", "x", "why")]).is_empty());
        assert!(errors_of(bad(), &[("a", "x", "why"), ("b", "x", "why")])[0].contains("remove the exception"));
    }
}
