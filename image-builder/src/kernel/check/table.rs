//! The rules as tables for documents.

use std::fmt::Write as _;

use super::rules::Rules;
use crate::kernel::fragment::{Asked, Class};

/// What `docs/kernel-configs.md` has in its generated part.
#[must_use]
pub fn markdown(rules: &Rules) -> String {
    let mut text = String::from("| `--for` | judges | by |\n|---|---|---|\n");
    for purpose in &rules.purposes {
        let hints = match purpose.hints.as_slice() {
            [] => String::new(),
            hints => format!("; hints by {}", hints.join(", ")),
        };
        let _ = writeln!(text, "| `{}` | {} | {}{hints} |", purpose.name, purpose.what, purpose.fragments.join(", "));
    }
    for (name, asked) in &rules.fragments {
        let _ = write!(text, "\n### {name}\n\n| symbol | judged | kernels | why |\n|---|---|---|---|\n");
        for (at, one) in asked.iter().enumerate() {
            let same = at > 0 && asked[at - 1].reason == one.reason;
            let _ = writeln!(text, "{}", row(one, same));
        }
    }
    text.push_str("\n### Other names\n\n| before | name | since | |\n|---|---|---|---|\n");
    for renamed in &rules.renamed {
        let reversed = if renamed.reversed { "on means off " } else { "" };
        let now = renamed.now.as_deref().map_or("always".to_owned(), |now| format!("`{now}`"));
        let _ = writeln!(text, "| `{}` | {now} | {} | {reversed}{} |", renamed.was, renamed.since, renamed.why);
    }
    text.push_str("\n### Versions\n\n| for | since | what | before |\n|---|---|---|---|\n");
    for one in &rules.milestones {
        let _ = writeln!(text, "| {} | {} | {} | {} |", one.purposes.join(", "), one.since, one.what, one.without);
    }
    text
}

fn row(asked: &Asked, same_reason: bool) -> String {
    let tag = &asked.tag;
    let value = match asked.value.as_str() {
        "y" => String::new(),
        value => format!("={value}"),
    };
    let mut judged = match (tag.class, &tag.module) {
        (Class::Build, _) => "no".to_owned(),
        (Class::Forbid, _) => "must be off".to_owned(),
        (Class::Require, None) => "required".to_owned(),
        (Class::Require, Some(module)) => format!("required, or module `{module}`"),
        (Class::Hint, None) => "hint".to_owned(),
        (Class::Hint, Some(module)) => format!("hint; module `{module}` does"),
    };
    for other in &tag.or {
        let _ = write!(judged, "; `{other}` does");
    }
    if asked.only_judged {
        judged.push_str("; not asked for");
    }
    let kernels = match tag.kernels.to_string() {
        all if all == "all" => String::new(),
        some => some,
    };
    let mut why = if same_reason { "as above".to_owned() } else { asked.reason.clone() };
    if let (false, Some(without)) = (same_reason, &asked.without) {
        let _ = write!(why, " {}: {without}", if asked.value == "n" { "Otherwise" } else { "Without it" });
    }
    format!("| `{}{value}` | {judged} | {kernels} | {} |", asked.symbol, why.replace('|', "\\|"))
}
