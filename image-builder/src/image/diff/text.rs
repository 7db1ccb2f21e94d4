//! Formats differences as text.

use std::fmt::Write as _;

use firstlight_image::{FileRecord, PackageRecord};

use super::{Change, Diff, HasSize, Total, growth};

/// Number of files shown without `--all`.
const MAX_FILES: usize = 40;

/// Two values with more bytes than this in total are shown on separate lines.
const MAX_LINE: usize = 90;

/// Escapes control characters: records are untrusted and must not contain terminal
/// escape sequences.
fn escape(text: &str) -> String {
    text.chars().fold(String::new(), |mut escaped, one| {
        match one {
            '"' | '\'' | '\\' => escaped.push(one),
            _ => escaped.extend(one.escape_debug()),
        }
        escaped
    })
}

/// Returns `+` for an addition, `-` for a removal and `~` for a change.
fn sign<T>(change: &Change<T>) -> char {
    match (&change.a, &change.b) {
        (None, _) => '+',
        (_, None) => '-',
        _ => '~',
    }
}

impl Diff {
    /// Returns one line for each change; of files the 40 with the largest change of size, or `all`.
    #[must_use]
    pub fn text(&self, all: bool) -> String {
        let (a, b) = (escape(&self.a), escape(&self.b));
        let mut text = match self.same {
            true => format!("{a} and {b} are the same image\n"),
            false => format!("from {a} to {b}:\n"),
        };
        section(&mut text, "", &self.facts, value);
        section(&mut text, "outputs, in bytes", &self.outputs, sizes);
        section(&mut text, "packages", &self.packages, package);
        self.files(&mut text, all);
        section(&mut text, "directories, links and devices", &self.others, other);
        self.totals(&mut text);
        section(&mut text, "build tools (ignored in the comparison)", &self.tools, package);
        section(&mut text, "suites (ignored in the comparison)", &self.suites, value);
        text
    }

    fn files(&self, text: &mut String, all: bool) {
        let count = |expected: char| self.files.iter().filter(|file| sign(file) == expected).count();
        let grown: i128 = self.files.iter().map(growth).sum();
        let title = format!(
            "files: {} added, {} removed, {} changed, {grown:+} bytes in total",
            count('+'),
            count('-'),
            count('~')
        );
        let limit = if all { usize::MAX } else { MAX_FILES };
        let (shown, rest) = self.files.split_at(limit.min(self.files.len()));
        section(text, &title, shown, file);
        if !rest.is_empty() {
            let _ = writeln!(text, "  and {} files with smaller changes: use --all to show them", rest.len());
        }
    }

    fn totals(&self, text: &mut String) {
        let changed: Vec<&Total> = self.totals.iter().filter(|total| total.a != total.b).collect();
        if changed.is_empty() {
            return;
        }
        let _ = writeln!(text, "total file sizes by origin, in bytes");
        for Total { origin, a, b } in changed {
            let growth = i128::from(*b) - i128::from(*a);
            let _ = writeln!(text, "  {growth:>+12}  {a:>11} -> {b:>11}  {}", escape(origin));
        }
    }
}

fn section<T>(text: &mut String, title: &str, changes: &[Change<T>], line: impl Fn(&Change<T>) -> String) {
    if changes.is_empty() {
        return;
    }
    if !title.is_empty() {
        let _ = writeln!(text, "{title}");
    }
    for change in changes {
        let _ = writeln!(text, "  {} {}", sign(change), line(change));
    }
}

fn value(change: &Change<String>) -> String {
    let what = escape(&change.what);
    match (&change.a, &change.b) {
        (Some(a), Some(b)) if a.len() + b.len() > MAX_LINE => {
            format!("{what}:\n         {}\n      -> {}", escape(a), escape(b))
        }
        (Some(a), Some(b)) => format!("{what}: {} -> {}", escape(a), escape(b)),
        (one, other) => format!("{what}: {}", escape(one.as_deref().or(other.as_deref()).unwrap_or_default())),
    }
}

fn other(change: &Change<String>) -> String {
    format!("/{}", value(change))
}

fn sizes<T: HasSize>(change: &Change<T>) -> String {
    let side = |side: &Option<T>| side.as_ref().map_or_else(String::new, |one| one.size().to_string());
    format!("{:>+12}  {:>11} -> {:>11}  {}", growth(change), side(&change.a), side(&change.b), escape(&change.what))
}

fn file(change: &Change<FileRecord>) -> String {
    let mode = |side: &Option<FileRecord>| side.as_ref().and_then(|file| file.mode);
    let mode_change = match (mode(&change.a), mode(&change.b)) {
        (Some(a), Some(b)) if a != b => format!("  mode {a:o} -> {b:o}"),
        _ => String::new(),
    };
    format!("{}{mode_change}", sizes(&Change { what: format!("/{}", change.what), ..change.clone() }))
}

fn package(change: &Change<PackageRecord>) -> String {
    let name = escape(&change.what);
    match (&change.a, &change.b) {
        (Some(a), Some(b)) => {
            let (from, to) = (escape(&a.version), escape(&b.version));
            let suite = match a.suite == b.suite {
                true => escape(&a.suite),
                false => format!("{} -> {}", escape(&a.suite), escape(&b.suite)),
            };
            match a.version == b.version && a.suite == b.suite {
                true => format!("{name} {from} ({suite}): different file of the same version"),
                false => format!("{name} {from} -> {to} ({suite})"),
            }
        }
        (one, other) => {
            let one = one.as_ref().or(other.as_ref());
            one.map_or(name.clone(), |one| format!("{name} {} ({})", escape(&one.version), escape(&one.suite)))
        }
    }
}
