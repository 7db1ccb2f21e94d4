//! Discouraged words in tracked files, from the table `xtask/words.toml`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use firstlight_lab::binaries::workspace;
use serde::Deserialize;

/// The table.
const TABLE: &str = "xtask/words.toml";

/// Files with text of ours, by the end of their names.
const TEXTS: &[&str] = &[".rs", ".md", ".proto", ".toml", ".sh", ".c", ".h", ".S", ".rego", ".config"];

/// Text of others, or the table itself.
const LEFT_OUT: &[&str] = &["tests/fuzz/corpus/", TABLE];

/// How many findings are printed.
const SHOWN: usize = 40;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    word: Vec<Word>,
    #[serde(default)]
    exception: Vec<Exception>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Word {
    find: Vec<String>,
    instead: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Exception {
    /// A path, or the beginning of paths.
    file: String,
    /// Part of the line, as it is written there.
    line: String,
    reason: String,
}

/// Fails when a tracked file has a discouraged word, or an exception is superfluous.
pub(crate) fn check() -> anyhow::Result<()> {
    let text = fs::read_to_string(workspace().join(TABLE)).with_context(|| TABLE.to_owned())?;
    let table: Table = toml::from_str(&text).with_context(|| TABLE.to_owned())?;
    if let Some(exception) = table.exception.iter().find(|exception| exception.reason.trim().is_empty()) {
        bail!("{TABLE}: the exception for {} ({}) has no reason", exception.file, exception.line);
    }
    let mut used = vec![false; table.exception.len()];
    let mut findings = Vec::new();
    for file in tracked()? {
        // A file that was removed and not yet committed is still listed.
        let Ok(bytes) = fs::read(workspace().join(&file)) else { continue };
        findings.extend(find(&table, &file, &String::from_utf8_lossy(&bytes), &mut used));
    }
    if !findings.is_empty() {
        findings.iter().take(SHOWN).for_each(|finding| eprintln!("{finding}"));
        bail!("{} discouraged words; replacements and exceptions are in {TABLE}", findings.len());
    }
    if let Some(at) = used.iter().position(|used| !used) {
        let Exception { file, line, .. } = &table.exception[at];
        bail!("{TABLE}: the exception for {file} ({line}) matches nothing: remove it");
    }
    Ok(())
}

fn tracked() -> anyhow::Result<Vec<String>> {
    let output = Command::new("git").current_dir(workspace()).args(["ls-files", "-z"]).output();
    let output = output.context("failed to start git")?;
    if !output.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    let ours = |name: &&str| {
        TEXTS.iter().any(|end| name.ends_with(end)) && !LEFT_OUT.iter().any(|begin| name.starts_with(begin))
    };
    Ok(names.split('\0').filter(|name| Path::new(name).extension().is_some()).filter(ours).map(str::to_owned).collect())
}

/// One line for each finding; marks the exceptions that were used.
fn find(table: &Table, file: &str, text: &str, used: &mut [bool]) -> Vec<String> {
    let mut findings = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let lower = line.to_lowercase();
        for word in &table.word {
            let Some(found) = word.find.iter().find(|found| contains_word(&lower, found)) else { continue };
            let matches = |exception: &Exception| file.starts_with(&exception.file) && line.contains(&exception.line);
            let mut excepted = false;
            for (exception, used) in table.exception.iter().zip(used.iter_mut()) {
                if matches(exception) {
                    (excepted, *used) = (true, true);
                }
            }
            if !excepted {
                findings.push(format!("{file}:{}: \"{found}\": write {}", at + 1, word.instead));
            }
        }
    }
    findings
}

/// Whether `word` stands in `line` with neither a letter nor a digit beside it; a space in it also matches `_` and `-`.
fn contains_word(line: &str, word: &str) -> bool {
    let line: String = line.chars().map(|c| if matches!(c, '_' | '-') { ' ' } else { c }).collect();
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_whole_in_comments_and_names() {
        for line in ["// nobody.", "fn nobody_waits()", "way-down", "the way down", "(nobody)"] {
            assert!(contains_word(line, "nobody") || contains_word(line, "way down"), "{line}");
        }
        for line in ["nobodys", "antinobody", "wayward down", "way  down"] {
            assert!(!contains_word(line, "nobody") && !contains_word(line, "way down"), "{line}");
        }
    }

    #[test]
    fn exception_covers_its_line_and_is_marked_as_used() {
        let table: Table = toml::from_str(
            "[[word]]\nfind = [\"nobody\"]\ninstead = \"no client\"\n\
             [[exception]]\nfile = \"a/\"\nline = \"nobody:x:\"\nreason = \"a user's name\"\n\
             [[exception]]\nfile = \"b/\"\nline = \"nobody\"\nreason = \"none\"\n",
        )
        .unwrap();
        let mut used = [false; 2];
        let text = "nobody:x:65534\nfine\n# Nobody waits\n";
        let findings = find(&table, "a/passwd.toml", text, &mut used);
        assert_eq!(findings, ["a/passwd.toml:3: \"nobody\": write no client"]);
        assert_eq!(used, [true, false]);
    }
}
