//! Report of a kernel check, as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::rules::{Milestone, Rule};
use super::{Subject, severity};
use crate::kernel::version::Version;

/// Schema version of the JSON report; changes on incompatible changes.
pub const SCHEMA: &str = "firstlight.kernel-check/1";

/// Line width of the text report.
const WIDTH: usize = 110;

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// No error was found.
    Fits,
    /// A rule of severity error is violated.
    DoesNotFit,
}

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The kernel is unusable for the purpose.
    Error,
    /// Recommended, not required.
    Hint,
}

/// Why a rule is violated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "status")]
pub enum Status {
    /// The symbol is off and could be enabled.
    Off,
    /// The symbol is on and must be off.
    On,
    /// The symbol is a module and must be built in.
    Module,
    /// The configuration does not mention the symbol: this kernel does not have it, or a dependency is off.
    Absent,
    /// This kernel does not have the symbol.
    Unknown,
    /// A dependency of the symbol is not met.
    Blocked {
        /// The unmet dependencies.
        by: Vec<String>,
    },
    /// The symbol has no prompt: only `select` enables it.
    Promptless {
        /// The symbols that select it.
        by: Vec<String>,
    },
    /// Other symbols select it.
    Selected {
        /// The symbols that select it.
        by: Vec<String>,
    },
    /// A number is too small, or a list lacks an item.
    Mismatch,
    /// The kernel is too old.
    Version,
}

/// A violated rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Severity.
    pub severity: Severity,
    /// The symbol's name in this kernel, without `CONFIG_`; empty for a rule on the kernel version.
    pub symbol: String,
    /// The expected value.
    pub expected: String,
    /// The configured value, if the configuration mentions the symbol.
    pub found: Option<String>,
    /// Why the rule is violated.
    #[serde(flatten)]
    pub status: Status,
    /// Why the value is expected.
    pub reason: String,
    /// How to fix it.
    pub advice: String,
    /// Where the rule is defined: file and line.
    pub rule: String,
}

/// A module that satisfies a rule whose symbol is not built in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct NeededModule {
    /// Module name.
    pub module: String,
    /// The symbol it satisfies.
    pub symbol: String,
    /// Whether the image must contain the module.
    pub required: bool,
}

/// Report of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// The checked configuration's source.
    pub origin: String,
    /// The kernel version, if the configuration states it.
    pub kernel: Option<String>,
    /// The purposes that were checked.
    pub purposes: Vec<String>,
    /// The result.
    pub verdict: Verdict,
    /// Number of satisfied rules.
    pub fits: usize,
    /// Violated rules, most severe first.
    pub findings: Vec<Finding>,
    /// Modules that satisfy rules whose symbols are not built in.
    pub modules: Vec<NeededModule>,
    /// Anomalies of the configuration.
    pub notes: Vec<String>,
}

impl Finding {
    pub(super) fn of_symbol(rule: &Rule, name: &str, value: Option<&str>, status: Status) -> Self {
        let requirement = &rule.requirement;
        let expected = match (&requirement.tag.module, requirement.value.as_str()) {
            (Some(_), "y") => "y or m".to_owned(),
            (_, value) => value.to_owned(),
        };
        Self {
            severity: severity(rule.class),
            symbol: name.to_owned(),
            found: value.map(str::to_owned),
            advice: advice(rule, name, &status),
            expected,
            status,
            reason: requirement.reason.clone(),
            rule: format!("kernel-configs/{}.config:{}", rule.fragment, requirement.line),
        }
    }

    pub(super) fn of_version(milestone: &Milestone, since: Version) -> Self {
        Self {
            severity: Severity::Hint,
            symbol: String::new(),
            expected: format!("{since} or later"),
            found: None,
            status: Status::Version,
            reason: milestone.feature.clone(),
            advice: format!("use a newer kernel; else {}", milestone.without),
            rule: "kernel-configs/check/versions.toml".to_owned(),
        }
    }

    /// Describes the violation, as a phrase that follows the symbol.
    fn phrase(&self) -> String {
        let found = self.found.as_deref().unwrap_or("not mentioned");
        let expected = &self.expected;
        match &self.status {
            Status::Off => format!("is off, expected {expected}"),
            Status::On => format!("is {found}, must be off"),
            Status::Module => "is a module, must be built in".to_owned(),
            Status::Absent => format!("is not mentioned, expected {expected}"),
            Status::Unknown => format!("is unknown to this kernel, expected {expected}"),
            Status::Blocked { by } => format!("is {found}, expected {expected}: {}", by.join(", ")),
            Status::Promptless { .. } => format!("is {found}, expected {expected}; it has no prompt"),
            Status::Selected { by } => format!("is {found}, selected by {}", by.join(", ")),
            Status::Mismatch => format!("is {found}, expected {expected}"),
            Status::Version => format!("{expected} is expected"),
        }
    }
}

/// Returns how to satisfy a rule.
fn advice(rule: &Rule, name: &str, status: &Status) -> String {
    let value = &rule.requirement.value;
    let since = rule.requirement.tag.kernels.since;
    let fix = match status {
        Status::Module => format!("build the kernel with CONFIG_{name}=y"),
        Status::On => format!("build the kernel without CONFIG_{name}"),
        Status::Absent => format!("build the kernel with CONFIG_{name}={value} and its dependencies"),
        Status::Unknown => match since {
            Some(since) => format!("use Linux {since} or later"),
            None => "use another kernel version".to_owned(),
        },
        Status::Blocked { .. } => format!("satisfy its dependencies, then set CONFIG_{name}={value}"),
        Status::Promptless { by } if by.is_empty() => {
            "only other symbols enable it, and none of them has a prompt".to_owned()
        }
        Status::Promptless { by } => format!("enable one of {}", by.join(", ")),
        Status::Selected { by } => format!("build the kernel without {}", by.join(", ")),
        Status::Off | Status::Mismatch | Status::Version => format!("build the kernel with CONFIG_{name}={value}"),
    };
    let alternative = match rule.requirement.tag.or.as_slice() {
        [] => String::new(),
        others => format!(", or with CONFIG_{}", others.join(", CONFIG_")),
    };
    match &rule.requirement.without {
        Some(without) => format!("{fix}{alternative}; else {without}"),
        None => format!("{fix}{alternative}"),
    }
}

impl Report {
    pub(super) fn new(purposes: &[String], subject: Subject<'_>) -> Self {
        Self {
            schema: SCHEMA,
            origin: subject.origin.to_owned(),
            kernel: subject.config.kernel.clone(),
            purposes: purposes.to_vec(),
            verdict: Verdict::Fits,
            fits: 0,
            findings: Vec::new(),
            modules: Vec::new(),
            notes: subject.config.notes.clone(),
        }
    }

    pub(super) fn sort(&mut self) {
        self.findings.sort_by(|a, b| (a.severity, &a.symbol).cmp(&(b.severity, &b.symbol)));
        self.modules.sort();
        let broken = self.findings.iter().any(|finding| finding.severity == Severity::Error);
        self.verdict = if broken { Verdict::DoesNotFit } else { Verdict::Fits };
    }

    /// Returns the findings of one severity.
    pub fn findings_of(&self, severity: Severity) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| finding.severity == severity)
    }

    /// Returns the finding about a symbol, by its name in this kernel.
    #[must_use]
    pub fn about(&self, symbol: &str) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.symbol == symbol)
    }

    /// Formats the report as text: the verdict, then the findings, most severe first.
    #[must_use]
    pub fn text(&self) -> String {
        let (errors, hints) = (self.findings_of(Severity::Error).count(), self.findings_of(Severity::Hint).count());
        let verdict = match self.verdict {
            Verdict::Fits => "fits",
            Verdict::DoesNotFit => "does not fit",
        };
        let kernel = self.kernel.as_deref().map_or(String::new(), |kernel| format!(" (Linux {kernel})"));
        let mut text = format!(
            "{}{kernel}: {verdict} for {}; {errors} errors, {hints} hints, {} rules satisfied\n",
            self.origin,
            self.purposes.join(", "),
            self.fits
        );
        for (title, severity) in [("errors", Severity::Error), ("hints", Severity::Hint)] {
            if self.findings_of(severity).next().is_some() {
                let _ = write!(text, "\n{title}:\n");
            }
            for finding in self.findings_of(severity) {
                let subject = match finding.symbol.as_str() {
                    "" => "Linux".to_owned(),
                    symbol => format!("CONFIG_{symbol}"),
                };
                wrap(&mut text, 2, &format!("{subject} {}", finding.phrase()));
                wrap(&mut text, 6, &format!("why: {}", finding.reason));
                wrap(&mut text, 6, &format!("fix: {}", finding.advice));
            }
        }
        for (title, required) in
            [("modules that the image must contain", true), ("modules that the image may contain", false)]
        {
            let all = self.modules.iter().filter(|needed| needed.required == required);
            let names: Vec<&str> = all.map(|needed| needed.module.as_str()).collect();
            if !names.is_empty() {
                let _ = write!(text, "\n{title}:\n");
                wrap(&mut text, 2, &names.join(" "));
            }
        }
        if !self.notes.is_empty() {
            text.push('\n');
        }
        self.notes.iter().for_each(|note| wrap(&mut text, 0, &format!("note: {note}")));
        text
    }
}

/// Appends a wrapped paragraph; lines after the first have a hanging indent.
fn wrap(text: &mut String, indent: usize, paragraph: &str) {
    let mut column = 0;
    for word in paragraph.split_whitespace() {
        if column > 0 && column + 1 + word.len() > WIDTH {
            text.push('\n');
            column = 0;
            let _ = write!(text, "{:1$}", "", indent + 5);
            column += indent + 5;
        } else if column == 0 {
            let _ = write!(text, "{:1$}", "", indent);
            column += indent;
        } else {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += word.len();
    }
    text.push('\n');
}
