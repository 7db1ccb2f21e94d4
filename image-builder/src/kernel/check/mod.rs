//! Checks the configuration of a built kernel against the rules of its purposes.

mod report;
mod rules;
pub mod table;

use super::dot_config::DotConfig;
use super::fragment::Class;
use super::kconfig::{self, Tree};
use super::version::Version;

pub use report::{Finding, NeededModule, Report, SCHEMA, Severity, Status, Verdict};
pub use rules::{Rule, Rules};

/// A kernel configuration to check.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// The configuration's source, as displayed.
    pub origin: &'a str,
    /// The configuration.
    pub config: &'a DotConfig,
    /// The kernel's source tree, if available: it explains why a symbol is off.
    pub source: Option<&'a Tree>,
}

/// Checks a kernel configuration against the rules of `purposes`.
///
/// # Errors
/// A purpose is unknown.
pub fn check_config(rules: &Rules, purposes: &[String], subject: Subject<'_>) -> Result<Report, rules::Error> {
    let mut report = Report::new(purposes, subject);
    let checker = Checker { rules, subject, version: subject.config.version() };
    for rule in rules.for_purposes(purposes)? {
        match checker.check_rule(&rule) {
            Outcome::Satisfied { module } => {
                report.fits += 1;
                let required = rule.class == Class::Require;
                report.modules.extend(module.map(|module| NeededModule {
                    module,
                    symbol: rule.requirement.symbol,
                    required,
                }));
            }
            Outcome::Violated(finding) => report.findings.push(finding),
        }
    }
    for (milestone, since) in rules.milestones_of(purposes) {
        if checker.version.is_some_and(|version| version < since) {
            report.findings.push(Finding::of_version(milestone, since));
        }
    }
    if checker.version.is_none() {
        report.notes.push("the configuration does not state its kernel version: version rules were skipped".to_owned());
    }
    if subject.source.is_none() && report.findings.iter().any(|finding| finding.status == Status::Absent) {
        report.notes.push(
            "a symbol that is not mentioned is unknown to this kernel, or one of its dependencies is off: pass the \
             unpacked kernel source with --source DIR to find out which"
                .to_owned(),
        );
    }
    report.sort();
    Ok(report)
}

enum Outcome {
    Satisfied { module: Option<String> },
    Violated(Finding),
}

struct Checker<'a> {
    rules: &'a Rules,
    subject: Subject<'a>,
    version: Option<Version>,
}

/// A symbol as the configuration has it, possibly under another name.
struct Resolved<'a> {
    /// The symbol's name in this kernel.
    name: &'a str,
    /// `None` if the configuration does not mention the symbol.
    value: Option<&'a str>,
    /// This kernel always includes the feature and no longer has the symbol.
    always: bool,
}

impl Checker<'_> {
    fn check_rule(&self, rule: &Rule) -> Outcome {
        let requirement = &rule.requirement;
        let found = self.resolve(&requirement.symbol);
        let gone = self.version.is_some_and(|version| requirement.tag.kernels.is_after(version));
        if found.always || (found.value.is_none() && gone) {
            return Outcome::Satisfied { module: None };
        }
        let accepts_module = requirement.tag.module.is_some();
        if satisfies(&requirement.value, found.value, accepts_module) {
            let module = requirement.tag.module.clone().filter(|_| found.value == Some("m"));
            return Outcome::Satisfied { module };
        }
        let alternative = requirement
            .tag
            .or
            .iter()
            .any(|other| satisfies(&requirement.value, self.resolve(other).value, accepts_module));
        if alternative {
            return Outcome::Satisfied { module: None };
        }
        let status = self.status(rule, &found);
        Outcome::Violated(Finding::of_symbol(rule, found.name, found.value, status))
    }

    /// Looks a symbol up by its name, or by its name in other kernel versions.
    fn resolve<'s>(&'s self, symbol: &'s str) -> Resolved<'s> {
        let config = self.subject.config;
        let own = Resolved { name: symbol, value: config.value(symbol), always: false };
        if own.value.is_some() {
            return own;
        }
        for renamed in &self.rules.renamed {
            let other = if renamed.old == symbol { renamed.new.as_deref() } else { Some(renamed.old.as_str()) };
            if renamed.old != symbol && renamed.new.as_deref() != Some(symbol) {
                continue;
            }
            let since = Version::leading(&renamed.since);
            let is_new = self.version.zip(since).is_some_and(|(version, since)| version >= since);
            match other {
                None if is_new => return Resolved { always: true, ..own },
                None => {}
                Some(other) => {
                    let value = config.value(other);
                    // An unmentioned inverted symbol is indistinguishable from one that is off.
                    let value = match (renamed.inverted, value) {
                        (true, Some("y")) => Some("n"),
                        (true, Some("n")) => Some("y"),
                        (true, None) if is_new => Some("y"),
                        (_, value) => value,
                    };
                    if value.is_some() {
                        return Resolved { name: other, value, always: false };
                    }
                }
            }
        }
        own
    }

    fn status(&self, rule: &Rule, found: &Resolved<'_>) -> Status {
        let expected = rule.requirement.value.as_str();
        let explained = self.subject.source.map(|tree| tree.explain(found.name, expected, self.subject.config));
        match (expected, found.value) {
            ("n", Some(_)) => match explained {
                Some(kconfig::Explanation::Selected(by)) => Status::Selected { by },
                _ => Status::On,
            },
            ("y" | "m", None | Some("n")) => {
                let older = self.version.filter(|version| rule.requirement.tag.kernels.is_before(*version));
                match (found.value, older, explained) {
                    (None, Some(_), _) | (_, _, Some(kconfig::Explanation::Unknown)) => Status::Unknown,
                    (_, _, Some(kconfig::Explanation::Blocked(by))) => Status::Blocked { by },
                    (_, _, Some(kconfig::Explanation::Promptless(by))) => Status::Promptless { by },
                    (Some(_), _, _) | (_, _, Some(_)) => Status::Off,
                    (None, None, None) => Status::Absent,
                }
            }
            ("y", Some("m")) => match explained {
                Some(kconfig::Explanation::Blocked(by)) => Status::Blocked { by },
                _ => Status::Module,
            },
            (_, None) => Status::Absent,
            _ => Status::Mismatch,
        }
    }
}

/// Whether a value satisfies the expected one: a module where one is accepted, a number at least as large, a list
/// that contains every expected item.
fn satisfies(expected: &str, value: Option<&str>, accepts_module: bool) -> bool {
    let unquoted = |text: &'_ str| text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).map(str::to_owned);
    match (expected, value) {
        ("n", value) => matches!(value, None | Some("n")),
        (_, None) => false,
        ("y", Some(value)) => value == "y" || (value == "m" && accepts_module),
        ("m", Some(value)) => matches!(value, "y" | "m"),
        (expected, Some(value)) => match (unquoted(expected), unquoted(value)) {
            (Some(expected), Some(value)) => {
                expected.split(',').all(|word| value.split(',').any(|other| other == word))
            }
            _ => match (expected.parse::<i64>(), value.parse::<i64>()) {
                (Ok(expected), Ok(value)) => value >= expected,
                _ => expected == value,
            },
        },
    }
}

/// Returns the severity of a violated rule.
fn severity(class: Class) -> Severity {
    match class {
        Class::Require | Class::Forbid => Severity::Error,
        Class::Hint | Class::Build => Severity::Hint,
    }
}

#[cfg(test)]
mod tests;
