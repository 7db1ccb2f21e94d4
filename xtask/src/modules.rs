//! Checks which top-level modules of a crate use which, against a table.
//!
//! Only `crate::` paths outside comments and tests count. Tests are `tests.rs` files and what
//! follows `#[cfg(test)]` at the start of a line: tests may use everything.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use firstlight_lab::binaries::workspace;

/// The modules of a crate, and the modules that each may use besides itself.
type Table = &'static [(&'static str, &'static [&'static str])];

/// Crates, by the directory of their sources. Every table is without cycles: a module uses only
/// those before it.
const CRATES: &[(&str, Table)] = &[(
    "image-builder/src",
    &[
        ("cache", &[]),
        ("packages", &["cache"]),
        ("kernel", &["cache", "packages"]),
        ("tree", &["cache", "kernel"]),
        ("driver", &["cache", "packages", "kernel", "tree"]),
        ("format", &["cache", "packages", "tree"]),
        ("image", &["cache", "packages", "kernel", "tree", "driver", "format"]),
        // The binary uses the library by its name.
        ("commands", &[]),
    ],
)];

/// Fails if a module uses another that the table does not allow, or the table allows an unused one.
pub(crate) fn check() -> anyhow::Result<()> {
    let mut errors = Vec::new();
    for (dir, table) in CRATES {
        let mut files = Vec::new();
        read(&workspace().join(dir), Path::new(dir), &mut files)?;
        errors.extend(errors_of(Path::new(dir), table, &files));
    }
    if errors.is_empty() {
        return Ok(());
    }
    bail!("{}\nthe rules are in xtask/src/modules.rs", errors.join("\n"))
}

/// Reads all Rust files below a directory. Their paths start with `name`.
fn read(dir: &Path, name: &Path, files: &mut Vec<(PathBuf, String)>) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("failed to list {}", dir.display()))? {
        let path = entry?.path();
        let name = name.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            read(&path, &name, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
            files.push((name, text));
        }
    }
    Ok(())
}

fn errors_of(dir: &Path, table: &[(&str, &[&str])], files: &[(PathBuf, String)]) -> Vec<String> {
    let (mut errors, mut used) = (Vec::new(), Vec::new());
    for (index, (module, allowed)) in table.iter().enumerate() {
        for later in allowed.iter().filter(|name| !table[..index].iter().any(|(earlier, _)| earlier == *name)) {
            errors.push(format!("{}: {module} may not use {later}, which is not before it", dir.display()));
        }
    }
    for (path, text) in files {
        let below = path.strip_prefix(dir).unwrap_or(path);
        let first = below.components().next().map(|it| it.as_os_str().to_string_lossy().into_owned());
        let module = first.unwrap_or_default().trim_end_matches(".rs").to_owned();
        if module == "lib" || module == "main" || below.file_name().is_some_and(|name| name == "tests.rs") {
            continue;
        }
        let Some((_, allowed)) = table.iter().find(|(name, _)| *name == module) else {
            errors.push(format!("{}: module {module} is not in the table", path.display()));
            continue;
        };
        for (line, other) in modules_used(text) {
            if other != module && !allowed.contains(&other.as_str()) {
                errors.push(format!("{}:{line}: module {module} may not use {other}", path.display()));
            }
            used.push((module.clone(), other));
        }
    }
    for (module, allowed) in table {
        for other in allowed.iter().filter(|other| !used.iter().any(|(a, b)| a == module && b == *other)) {
            errors.push(format!("{}: {module} does not use {other}: remove it from the table", dir.display()));
        }
    }
    errors
}

/// Returns the modules that follow `crate::`, with their line numbers.
fn modules_used(text: &str) -> Vec<(usize, String)> {
    let mut used = Vec::new();
    let code = text.split("\n#[cfg(test)]").next().unwrap_or(text);
    for (at, _) in code.match_indices("crate::") {
        let line_start = code[..at].rfind('\n').map_or(0, |newline| newline + 1);
        // Not a comment, and not the end of another name.
        let before = &code[line_start..at];
        if before.trim_start().starts_with("//") || before.ends_with(|last: char| last.is_alphanumeric() || last == '_')
        {
            continue;
        }
        let line = code[..at].matches('\n').count() + 1;
        let rest = &code[at + "crate::".len()..];
        let names = if let Some(group) = rest.strip_prefix('{') { first_names(group) } else { vec![name(rest)] };
        used.extend(names.into_iter().map(|name| (line, name)));
    }
    used
}

/// Returns the identifier at the start of a path.
fn name(path: &str) -> String {
    path.chars().take_while(|character| character.is_alphanumeric() || *character == '_').collect()
}

/// Returns the first identifiers of the paths of a group, up to its closing brace.
fn first_names(group: &str) -> Vec<String> {
    let (mut names, mut depth, mut start) = (Vec::new(), 0_usize, 0);
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.push(name(group[start..at].trim_start()));
                start = at + 1;
                if character == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[(&str, &[&str])] = &[("low", &[]), ("high", &["low"])];

    fn errors(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> = files.iter().map(|(path, text)| (Path::new("c/src").join(path), (*text).into())).collect();
        errors_of(Path::new("c/src"), TABLE, &files)
    }

    const USE: (&str, &str) = ("high/mod.rs", "use crate::low::Name;\n");

    #[test]
    fn module_uses_only_what_its_row_allows() {
        assert_eq!(errors(&[USE, ("low.rs", "use crate::low::x;\n"), ("lib.rs", "pub mod low;")]), [""; 0]);
        let bad = errors(&[USE, ("low/file.rs", "// a\nuse crate::{low, high::{a, low}};\n")]);
        assert_eq!(bad, ["c/src/low/file.rs:2: module low may not use high"]);
        assert_eq!(errors(&[USE, ("new.rs", "")]), ["c/src/new.rs: module new is not in the table"]);
    }

    #[test]
    fn comments_and_tests_do_not_count() {
        let text = "/// As [`crate::high`].\nfn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::high;\n}\n";
        assert_eq!(errors(&[USE, ("low.rs", text), ("low/tests.rs", "use crate::high;")]), [""; 0]);
    }

    #[test]
    fn superfluous_permission_and_cycle_are_errors() {
        assert_eq!(errors(&[]), ["c/src: high does not use low: remove it from the table"]);
        let cycle: &[(&str, &[&str])] = &[("low", &["high"]), ("high", &["low"])];
        let files =
            [(PathBuf::from("s/low.rs"), "use crate::high;".into()), ("s/high.rs".into(), "crate::low::f()".into())];
        assert_eq!(errors_of(Path::new("s"), cycle, &files), ["s: low may not use high, which is not before it"]);
    }

    #[test]
    fn every_name_of_a_group_is_found() {
        let text =
            "use crate::{\n    a,\n    b::{c, d},\n    e::f,\n};\nfn g() { crate::h::i() }\nuse other_crate::j;\n";
        let names: Vec<_> = modules_used(text).into_iter().map(|(line, name)| format!("{line} {name}")).collect();
        assert_eq!(names, ["1 a", "1 b", "1 e", "6 h"]);
    }
}
