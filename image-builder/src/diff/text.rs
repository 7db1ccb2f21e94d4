//! What changed, for people.

use std::fmt::Write as _;

use firstlight_image::{FileRecord, PackageRecord};

use super::{Change, Diff, Measured, Total, growth};

/// So many files are shown if not all are wanted.
const MOST_FILES: usize = 40;

/// Two values of more characters than this get a line each.
const LONG: usize = 90;

/// A record may be anybody's: what it says must not steer a terminal.
fn shown(text: &str) -> String {
    text.chars().fold(String::new(), |mut shown, one| {
        match one {
            '"' | '\'' | '\\' => shown.push(one),
            _ => shown.extend(one.escape_debug()),
        }
        shown
    })
}

fn sign<T>(change: &Change<T>) -> char {
    match (&change.a, &change.b) {
        (None, _) => '+',
        (_, None) => '-',
        _ => '~',
    }
}

impl Diff {
    /// One line for each change; of files the 40 that changed most, or `all`.
    #[must_use]
    pub fn text(&self, all: bool) -> String {
        let (a, b) = (shown(&self.a), shown(&self.b));
        let mut text = match self.same {
            true => format!("{a} and {b} are the same image\n"),
            false => format!("from {a} to {b}:\n"),
        };
        section(&mut text, "", &self.facts, value);
        section(&mut text, "results, in bytes", &self.outputs, sizes);
        section(&mut text, "packages", &self.packages, package);
        self.files(&mut text, all);
        section(&mut text, "directories, links and devices", &self.others, other);
        self.totals(&mut text);
        section(&mut text, "programs that made it (no difference of the image)", &self.tools, package);
        section(&mut text, "suites (no difference of the image)", &self.suites, value);
        text
    }

    fn files(&self, text: &mut String, all: bool) {
        let count = |wanted: char| self.files.iter().filter(|file| sign(file) == wanted).count();
        let grown: i128 = self.files.iter().map(growth).sum();
        let title = format!(
            "files: {} added, {} removed, {} changed, {grown:+} bytes in all",
            count('+'),
            count('-'),
            count('~')
        );
        let most = if all { usize::MAX } else { MOST_FILES };
        let (some, rest) = self.files.split_at(most.min(self.files.len()));
        section(text, &title, some, file);
        if !rest.is_empty() {
            let _ = writeln!(text, "  and {} files that changed less: --all shows them", rest.len());
        }
    }

    fn totals(&self, text: &mut String) {
        let changed: Vec<&Total> = self.totals.iter().filter(|total| total.a != total.b).collect();
        if changed.is_empty() {
            return;
        }
        let _ = writeln!(text, "bytes by where files are from");
        for Total { origin, a, b } in changed {
            let growth = i128::from(*b) - i128::from(*a);
            let _ = writeln!(text, "  {growth:>+12}  {a:>11} -> {b:>11}  {}", shown(origin));
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
    let what = shown(&change.what);
    match (&change.a, &change.b) {
        (Some(a), Some(b)) if a.len() + b.len() > LONG => {
            format!("{what}:\n         {}\n      -> {}", shown(a), shown(b))
        }
        (Some(a), Some(b)) => format!("{what}: {} -> {}", shown(a), shown(b)),
        (one, other) => format!("{what}: {}", shown(one.as_deref().or(other.as_deref()).unwrap_or_default())),
    }
}

fn other(change: &Change<String>) -> String {
    format!("/{}", value(change))
}

fn sizes<T: Measured>(change: &Change<T>) -> String {
    let side = |side: &Option<T>| side.as_ref().map_or_else(String::new, |one| one.size().to_string());
    format!("{:>+12}  {:>11} -> {:>11}  {}", growth(change), side(&change.a), side(&change.b), shown(&change.what))
}

fn file(change: &Change<FileRecord>) -> String {
    let mode = |side: &Option<FileRecord>| side.as_ref().and_then(|file| file.mode);
    let change_of_mode = match (mode(&change.a), mode(&change.b)) {
        (Some(a), Some(b)) if a != b => format!("  mode {a:o} -> {b:o}"),
        _ => String::new(),
    };
    format!("{}{change_of_mode}", sizes(&Change { what: format!("/{}", change.what), ..change.clone() }))
}

fn package(change: &Change<PackageRecord>) -> String {
    let name = shown(&change.what);
    match (&change.a, &change.b) {
        (Some(a), Some(b)) => {
            let (from, to) = (shown(&a.version), shown(&b.version));
            let suite = match a.suite == b.suite {
                true => shown(&a.suite),
                false => format!("{} -> {}", shown(&a.suite), shown(&b.suite)),
            };
            match a.version == b.version && a.suite == b.suite {
                true => format!("{name} {from} ({suite}): another file of the same version"),
                false => format!("{name} {from} -> {to} ({suite})"),
            }
        }
        (one, other) => {
            let one = one.as_ref().or(other.as_ref());
            one.map_or(name.clone(), |one| format!("{name} {} ({})", shown(&one.version), shown(&one.suite)))
        }
    }
}
