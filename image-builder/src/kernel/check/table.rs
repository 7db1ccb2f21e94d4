//! Markdown tables of the rules.

use std::fmt::Write as _;

use super::rules::Rules;
use crate::kernel::fragment::{Class, Requirement};

/// Formats the rules as the generated part of `docs/kernel-configs.md`.
#[must_use]
pub fn markdown(rules: &Rules) -> String {
    let mut text = String::from("| `--for` | kernel | fragments |\n|---|---|---|\n");
    for purpose in &rules.purposes {
        let hints = match purpose.hints.as_slice() {
            [] => String::new(),
            hints => format!("; as hints: {}", hints.join(", ")),
        };
        let _ = writeln!(
            text,
            "| `{}` | {} | {}{hints} |",
            purpose.name,
            purpose.description,
            purpose.fragments.join(", ")
        );
    }
    for (name, requirements) in &rules.fragments {
        let _ = write!(text, "\n### {name}\n\n| symbol | requirement | kernels | reason |\n|---|---|---|---|\n");
        for (at, one) in requirements.iter().enumerate() {
            let same = at > 0 && requirements[at - 1].reason == one.reason;
            let _ = writeln!(text, "{}", row(one, same));
        }
    }
    text.push_str("\n### Renamed symbols\n\n| old name | new name | since | |\n|---|---|---|---|\n");
    for renamed in &rules.renamed {
        let inverted = if renamed.inverted { "inverted " } else { "" };
        let new = renamed.new.as_deref().map_or("always".to_owned(), |new| format!("`{new}`"));
        let _ = writeln!(text, "| `{}` | {new} | {} | {inverted}{} |", renamed.old, renamed.since, renamed.note);
    }
    text.push_str("\n### Versions\n\n| purposes | since | feature | without it |\n|---|---|---|---|\n");
    for one in &rules.milestones {
        let _ = writeln!(text, "| {} | {} | {} | {} |", one.purposes.join(", "), one.since, one.feature, one.without);
    }
    text
}

fn row(requirement: &Requirement, same_reason: bool) -> String {
    let tag = &requirement.tag;
    let value = match requirement.value.as_str() {
        "y" => String::new(),
        value => format!("={value}"),
    };
    let mut level = match (tag.class, &tag.module) {
        (Class::Build, _) => "not checked".to_owned(),
        (Class::Forbid, _) => "must be off".to_owned(),
        (Class::Require, None) => "required".to_owned(),
        (Class::Require, Some(module)) => format!("required, or module `{module}`"),
        (Class::Hint, None) => "hint".to_owned(),
        (Class::Hint, Some(module)) => format!("hint, or module `{module}`"),
    };
    for other in &tag.or {
        let _ = write!(level, "; or `{other}`");
    }
    if requirement.check_only {
        level.push_str("; check only");
    }
    let kernels = match tag.kernels.to_string() {
        all if all == "all" => String::new(),
        some => some,
    };
    let mut reason = if same_reason { "as above".to_owned() } else { requirement.reason.clone() };
    if let (false, Some(without)) = (same_reason, &requirement.without) {
        let _ = write!(reason, " {}: {without}", if requirement.value == "n" { "Otherwise" } else { "Without it" });
    }
    format!("| `{}{value}` | {level} | {kernels} | {} |", requirement.symbol, reason.replace('|', "\\|"))
}
