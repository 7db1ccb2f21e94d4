//! What came of judging a kernel, for people and for programs.

use std::fmt::Write as _;

use serde::Serialize;

use super::rules::{Milestone, Rule};
use super::{Subject, severity};
use crate::kernel::version::Version;

/// Changes when a program that reads the report has to be changed.
pub const SCHEMA: &str = "firstlight.kernel-check/1";

/// Lines for people are broken here.
const WIDTH: usize = 110;

/// Whether the kernel will do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It will.
    Fits,
    /// A rule is broken.
    DoesNotFit,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The kernel will not do.
    Error,
    /// It would be better.
    Hint,
}

/// What is the matter with a symbol.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "status")]
pub enum Status {
    /// It could be switched on, and is not.
    Off,
    /// It must not be on.
    On,
    /// It is a module and has to be built in.
    Module,
    /// The configuration does not mention it: this kernel does not know it, or what it depends on is off.
    Absent,
    /// This kernel does not know it.
    Unknown,
    /// What it depends on is not as it has to be.
    Blocked {
        /// What that is.
        by: Vec<String>,
    },
    /// Nobody can ask for it: it follows from others.
    Promptless {
        /// Those others.
        by: Vec<String>,
    },
    /// Others switch it on.
    Selected {
        /// Those others.
        by: Vec<String>,
    },
    /// A number is too small, or a list without some word.
    Other,
    /// The kernel is too old.
    Version,
}

/// A rule that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The symbol as this kernel calls it, without `CONFIG_`; empty if it is about the kernel's version.
    pub symbol: String,
    /// What is wanted.
    pub wanted: String,
    /// What the configuration says, if it mentions it.
    pub found: Option<String>,
    /// What is the matter.
    #[serde(flatten)]
    pub status: Status,
    /// Why it is wanted.
    pub reason: String,
    /// What to do.
    pub advice: String,
    /// The rule's place.
    pub rule: String,
}

/// A module that does what a symbol is about, because that is not built in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct NeededModule {
    /// Its name.
    pub module: String,
    /// The symbol.
    pub symbol: String,
    /// The image has to have it.
    pub required: bool,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// What was judged.
    pub origin: String,
    /// Which kernel that is, as far as it says so.
    pub kernel: Option<String>,
    /// What for.
    pub purposes: Vec<String>,
    /// Whether it will do.
    pub verdict: Verdict,
    /// How many rules hold.
    pub fits: usize,
    /// Those that do not, the worst first.
    pub findings: Vec<Finding>,
    /// Modules for what is not built in.
    pub modules: Vec<NeededModule>,
    /// What is odd about the configuration.
    pub notes: Vec<String>,
}

impl Finding {
    pub(super) fn of_symbol(rule: &Rule, name: &str, value: Option<&str>, status: Status) -> Self {
        let asked = &rule.asked;
        let wanted = match (&asked.tag.module, asked.value.as_str()) {
            (Some(_), "y") => "y or m".to_owned(),
            (_, value) => value.to_owned(),
        };
        Self {
            severity: severity(rule.class),
            symbol: name.to_owned(),
            found: value.map(str::to_owned),
            advice: advice(rule, name, &status),
            wanted,
            status,
            reason: asked.reason.clone(),
            rule: format!("kernel-configs/{}.config:{}", rule.fragment, asked.line),
        }
    }

    pub(super) fn of_version(milestone: &Milestone, since: Version) -> Self {
        Self {
            severity: Severity::Hint,
            symbol: String::new(),
            wanted: format!("{since} or later"),
            found: None,
            status: Status::Version,
            reason: milestone.what.clone(),
            advice: format!("a newer kernel; else {}", milestone.without),
            rule: "kernel-configs/check/versions.toml".to_owned(),
        }
    }

    /// What is the matter, as a phrase behind the symbol.
    fn phrase(&self) -> String {
        let found = self.found.as_deref().unwrap_or("not mentioned");
        let wanted = &self.wanted;
        match &self.status {
            Status::Off => format!("is off, wanted {wanted}"),
            Status::On => format!("is {found}, must be off"),
            Status::Module => "is a module, has to be built in".to_owned(),
            Status::Absent => format!("is not mentioned, wanted {wanted}"),
            Status::Unknown => format!("is unknown to this kernel, wanted {wanted}"),
            Status::Blocked { by } => format!("is {found}, wanted {wanted}: {}", by.join(", ")),
            Status::Promptless { .. } => format!("is {found}, wanted {wanted}; nobody can ask for it"),
            Status::Selected { by } => format!("is {found}, switched on by {}", by.join(", ")),
            Status::Other => format!("is {found}, wanted {wanted}"),
            Status::Version => format!("{wanted} is wanted"),
        }
    }
}

/// What to do about a symbol.
fn advice(rule: &Rule, name: &str, status: &Status) -> String {
    let value = &rule.asked.value;
    let since = rule.asked.tag.kernels.since;
    let todo = match status {
        Status::Module => format!("build the kernel with CONFIG_{name}=y"),
        Status::On => format!("build the kernel without CONFIG_{name}"),
        Status::Absent => format!("build the kernel with CONFIG_{name}={value} and with what it depends on"),
        Status::Unknown => match since {
            Some(since) => format!("take a kernel from {since} on"),
            None => "take another kernel".to_owned(),
        },
        Status::Blocked { .. } => format!("change what it depends on, then CONFIG_{name}={value}"),
        Status::Promptless { by } if by.is_empty() => {
            "it follows from other symbols; none of them can be asked for".to_owned()
        }
        Status::Promptless { by } => format!("switch on one of {}", by.join(", ")),
        Status::Selected { by } => format!("build the kernel without {}", by.join(", ")),
        Status::Off | Status::Other | Status::Version => format!("build the kernel with CONFIG_{name}={value}"),
    };
    let instead = match rule.asked.tag.or.as_slice() {
        [] => String::new(),
        others => format!(", or with CONFIG_{}", others.join(", CONFIG_")),
    };
    match &rule.asked.without {
        Some(without) => format!("{todo}{instead}; else {without}"),
        None => format!("{todo}{instead}"),
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

    /// Findings of one severity.
    pub fn of(&self, severity: Severity) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| finding.severity == severity)
    }

    /// What is found about a symbol, by the name that it has in this kernel.
    #[must_use]
    pub fn about(&self, symbol: &str) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.symbol == symbol)
    }

    /// For people: the verdict first, then what is wrong, the worst first.
    #[must_use]
    pub fn text(&self) -> String {
        let (errors, hints) = (self.of(Severity::Error).count(), self.of(Severity::Hint).count());
        let verdict = match self.verdict {
            Verdict::Fits => "fits",
            Verdict::DoesNotFit => "does not fit",
        };
        let kernel = self.kernel.as_deref().map_or(String::new(), |kernel| format!(" (Linux {kernel})"));
        let mut text = format!(
            "{}{kernel}: {verdict} for {}; {errors} errors, {hints} hints, {} rules hold\n",
            self.origin,
            self.purposes.join(", "),
            self.fits
        );
        for (title, severity) in [("errors", Severity::Error), ("hints", Severity::Hint)] {
            if self.of(severity).next().is_some() {
                let _ = write!(text, "\n{title}:\n");
            }
            for finding in self.of(severity) {
                let subject = match finding.symbol.as_str() {
                    "" => "Linux".to_owned(),
                    symbol => format!("CONFIG_{symbol}"),
                };
                wrap(&mut text, 2, &format!("{subject} {}", finding.phrase()));
                wrap(&mut text, 6, &format!("why: {}", finding.reason));
                wrap(&mut text, 6, &format!("do:  {}", finding.advice));
            }
        }
        for (title, required) in [("modules that the image has to have", true), ("modules that it may have", false)] {
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

/// Appends a paragraph; its second and later lines stand four columns further in.
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
