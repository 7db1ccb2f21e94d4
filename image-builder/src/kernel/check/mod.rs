//! Whether a kernel that is already built will do, and if not, why.

pub mod report;
pub mod rules;
pub mod table;

use super::dot_config::DotConfig;
use super::fragment::Class;
use super::kconfig::{self, Tree};
use super::version::Version;

pub use report::{Finding, NeededModule, Report, SCHEMA, Severity, Status, Verdict};
pub use rules::{Rule, Rules};

/// What is judged.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Where the configuration is from, for people.
    pub origin: &'a str,
    /// The configuration.
    pub config: &'a DotConfig,
    /// The source of that kernel, if it is there: it tells why a symbol is off.
    pub source: Option<&'a Tree>,
}

/// Judges a kernel for purposes.
///
/// # Errors
/// There is no such purpose.
pub fn judge(rules: &Rules, purposes: &[String], subject: Subject<'_>) -> Result<Report, rules::Error> {
    let mut report = Report::new(purposes, subject);
    let judge = Judge { rules, subject, version: subject.config.version() };
    for rule in rules.of(purposes)? {
        match judge.rule(&rule) {
            Outcome::Fits { module } => {
                report.fits += 1;
                let required = rule.class == Class::Require;
                report.modules.extend(module.map(|module| NeededModule {
                    module,
                    symbol: rule.asked.symbol,
                    required,
                }));
            }
            Outcome::Misses(finding) => report.findings.push(finding),
        }
    }
    for (milestone, since) in rules.milestones_of(purposes) {
        if judge.version.is_some_and(|version| version < since) {
            report.findings.push(Finding::of_version(milestone, since));
        }
    }
    if judge.version.is_none() {
        report.notes.push("it does not say which kernel it is of: rules on versions did not count".to_owned());
    }
    if subject.source.is_none() && report.findings.iter().any(|finding| finding.status == Status::Absent) {
        report.notes.push(
            "a symbol that is not mentioned is unknown to this kernel, or what it depends on is off: with the unpacked \
             source of this kernel, --source DIR tells which"
                .to_owned(),
        );
    }
    report.sort();
    Ok(report)
}

enum Outcome {
    Fits { module: Option<String> },
    Misses(Finding),
}

struct Judge<'a> {
    rules: &'a Rules,
    subject: Subject<'a>,
    version: Option<Version>,
}

/// What a kernel has for a symbol, perhaps by another name.
struct Found<'a> {
    /// The name that it has in this kernel.
    name: &'a str,
    /// Nothing if the configuration does not mention it.
    value: Option<&'a str>,
    /// The kernel has always what the symbol is about.
    always: bool,
}

impl Judge<'_> {
    fn rule(&self, rule: &Rule) -> Outcome {
        let asked = &rule.asked;
        let found = self.find(&asked.symbol);
        let gone = self.version.is_some_and(|version| asked.tag.kernels.is_after(version));
        if found.always || (found.value.is_none() && gone) {
            return Outcome::Fits { module: None };
        }
        let takes_module = asked.tag.module.is_some();
        if suits(&asked.value, found.value, takes_module) {
            let module = asked.tag.module.clone().filter(|_| found.value == Some("m"));
            return Outcome::Fits { module };
        }
        let instead = asked.tag.or.iter().any(|other| suits(&asked.value, self.find(other).value, takes_module));
        if instead {
            return Outcome::Fits { module: None };
        }
        let status = self.status(rule, &found);
        Outcome::Misses(Finding::of_symbol(rule, found.name, found.value, status))
    }

    /// A symbol by its name or by the one that it has in other kernels.
    fn find<'s>(&'s self, symbol: &'s str) -> Found<'s> {
        let config = self.subject.config;
        let own = Found { name: symbol, value: config.value(symbol), always: false };
        if own.value.is_some() {
            return own;
        }
        for renamed in &self.rules.renamed {
            let other = if renamed.was == symbol { renamed.now.as_deref() } else { Some(renamed.was.as_str()) };
            if renamed.was != symbol && renamed.now.as_deref() != Some(symbol) {
                continue;
            }
            let since = Version::leading(&renamed.since);
            let is_new = self.version.zip(since).is_some_and(|(version, since)| version >= since);
            match other {
                None if is_new => return Found { always: true, ..own },
                None => {}
                Some(other) => {
                    let value = config.value(other);
                    // One that is reversed and not mentioned cannot be told from one that is off.
                    let value = match (renamed.reversed, value) {
                        (true, Some("y")) => Some("n"),
                        (true, Some("n")) => Some("y"),
                        (true, None) if is_new => Some("y"),
                        (_, value) => value,
                    };
                    if value.is_some() {
                        return Found { name: other, value, always: false };
                    }
                }
            }
        }
        own
    }

    fn status(&self, rule: &Rule, found: &Found<'_>) -> Status {
        let wanted = rule.asked.value.as_str();
        let explained = self.subject.source.map(|tree| tree.explain(found.name, wanted, self.subject.config));
        match (wanted, found.value) {
            ("n", Some(_)) => match explained {
                Some(kconfig::Why::Selected(by)) => Status::Selected { by },
                _ => Status::On,
            },
            ("y" | "m", None | Some("n")) => {
                let older = self.version.filter(|version| rule.asked.tag.kernels.is_before(*version));
                match (found.value, older, explained) {
                    (None, Some(_), _) | (_, _, Some(kconfig::Why::Unknown)) => Status::Unknown,
                    (_, _, Some(kconfig::Why::Blocked(by))) => Status::Blocked { by },
                    (_, _, Some(kconfig::Why::Promptless(by))) => Status::Promptless { by },
                    (Some(_), _, _) | (_, _, Some(_)) => Status::Off,
                    (None, None, None) => Status::Absent,
                }
            }
            ("y", Some("m")) => match explained {
                Some(kconfig::Why::Blocked(by)) => Status::Blocked { by },
                _ => Status::Module,
            },
            (_, None) => Status::Absent,
            _ => Status::Other,
        }
    }
}

/// Whether a value does for one that is wanted: a module where one is taken, a number that is large enough, a list
/// with every word.
fn suits(wanted: &str, value: Option<&str>, takes_module: bool) -> bool {
    let unquoted = |text: &'_ str| text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).map(str::to_owned);
    match (wanted, value) {
        ("n", value) => matches!(value, None | Some("n")),
        (_, None) => false,
        ("y", Some(value)) => value == "y" || (value == "m" && takes_module),
        ("m", Some(value)) => matches!(value, "y" | "m"),
        (wanted, Some(value)) => match (unquoted(wanted), unquoted(value)) {
            (Some(wanted), Some(value)) => wanted.split(',').all(|word| value.split(',').any(|other| other == word)),
            _ => match (wanted.parse::<i64>(), value.parse::<i64>()) {
                (Ok(wanted), Ok(value)) => value >= wanted,
                _ => wanted == value,
            },
        },
    }
}

/// How bad it is that a rule does not hold.
fn severity(class: Class) -> Severity {
    match class {
        Class::Require | Class::Forbid => Severity::Error,
        Class::Hint | Class::Build => Severity::Hint,
    }
}

#[cfg(test)]
mod tests;
