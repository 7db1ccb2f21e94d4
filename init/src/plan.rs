//! The format of a boot plan, and its validation.
//!
//! A plan is a table of [`UnitSpec`]. [`check`] turns it into a [`Graph`], in which every id is an
//! index, or returns the error; no unit starts before that. The type of ids is a parameter.

use std::fmt::{Display, Write as _};
use std::time::Duration;

use firstlight_boot_record::Severity;

/// One unit of the plan, as written in the table.
#[derive(Debug, Clone, Copy)]
pub struct UnitSpec<I: 'static> {
    /// The unique id.
    pub id: I,
    /// For a template: the unit whose end reports the objects that it is instantiated for.
    pub per: Option<I>,
    /// Units that must have succeeded before this one starts; if one did not succeed, this one is
    /// skipped.
    pub needs: &'static [I],
    /// Units that must have ended, with any outcome.
    pub after: After<I>,
    /// Maximum duration; `None` if another component supervises the duration.
    pub deadline: Option<Duration>,
    /// The consequence of its failure.
    pub severity: Severity,
    /// The description for the documentation.
    pub about: &'static str,
    /// What to check if the unit does not end in time.
    pub hint: &'static str,
}

/// The units that must have ended before a unit starts.
#[derive(Debug, Clone, Copy)]
pub enum After<I: 'static> {
    /// The listed units.
    These(&'static [I]),
    /// All other units of the plan.
    AllOthers,
}

/// A unit with its dependencies resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node<I> {
    /// See [`UnitSpec::id`]; an instance of a template has its own id.
    pub id: I,
    /// See [`UnitSpec::per`].
    pub per: Option<usize>,
    /// See [`UnitSpec::needs`].
    pub needs: Vec<usize>,
    /// See [`UnitSpec::after`].
    pub after: Vec<usize>,
    /// See [`UnitSpec::deadline`]; in µs.
    pub deadline_us: Option<u64>,
    /// See [`UnitSpec::severity`].
    pub severity: Severity,
    /// See [`UnitSpec::hint`].
    pub hint: &'static str,
}

/// A valid plan: every edge leads to a unit, and there are no cycles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Graph<I> {
    nodes: Vec<Node<I>>,
}

impl<I> Graph<I> {
    /// The units in plan order.
    #[must_use]
    pub fn nodes(&self) -> &[Node<I>] {
        &self.nodes
    }
}

/// Why a plan is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Two units have the same name.
    #[error("boot plan: two units are named {0}; rename one")]
    Duplicate(String),
    /// A unit refers to an unknown unit.
    #[error("boot plan: unit {unit} names {missing}, which is not in the plan")]
    Unknown {
        /// The unit with the reference.
        unit: String,
        /// The unknown name.
        missing: String,
    },
    /// A cycle: units that wait for each other.
    #[error("boot plan: these units wait for each other, so none can start: {}", .0.join(", "))]
    Cycle(Vec<String>),
    /// `needs` refers to a template, which may have no instance.
    #[error("boot plan: unit {unit} needs the template {template}; it can only come after it")]
    NeedsTemplate {
        /// The unit with the reference.
        unit: String,
        /// The template.
        template: String,
    },
    /// A template could start before its objects are known.
    #[error("boot plan: template {template} is expanded by {per}, so it has to need it or come after it")]
    Unordered {
        /// The template.
        template: String,
        /// The unit that reports the template's objects.
        per: String,
    },
}

/// Checks a table and resolves its ids.
///
/// # Errors
/// A duplicate or unknown id, a cycle, or a template that is used wrongly.
pub fn check<I: Copy + PartialEq + Display>(table: &[UnitSpec<I>]) -> Result<Graph<I>, PlanError> {
    let mut nodes = Vec::with_capacity(table.len());
    for (at, unit) in table.iter().enumerate() {
        if table[..at].iter().any(|other| other.id == unit.id) {
            return Err(PlanError::Duplicate(unit.id.to_string()));
        }
        let needs = resolve_needs(table, unit)?;
        let after = match unit.after {
            After::AllOthers => (0..table.len()).filter(|other| *other != at).collect(),
            After::These(ids) => ids.iter().map(|id| index_of(table, unit, *id)).collect::<Result<Vec<_>, _>>()?,
        };
        let per = unit.per.map(|id| index_of(table, unit, id)).transpose()?;
        if let Some(index) = per.filter(|index| !needs.contains(index) && !after.contains(index)) {
            let per = table[index].id.to_string();
            return Err(PlanError::Unordered { template: unit.id.to_string(), per });
        }
        let deadline_us = unit.deadline.map(|limit| u64::try_from(limit.as_micros()).unwrap_or(u64::MAX));
        nodes.push(Node { id: unit.id, per, needs, after, deadline_us, severity: unit.severity, hint: unit.hint });
    }
    Graph::new(nodes)
}

fn index_of<I: PartialEq + Display>(table: &[UnitSpec<I>], unit: &UnitSpec<I>, id: I) -> Result<usize, PlanError> {
    let unknown = || PlanError::Unknown { unit: unit.id.to_string(), missing: id.to_string() };
    table.iter().position(|other| other.id == id).ok_or_else(unknown)
}

fn resolve_needs<I: Copy + PartialEq + Display>(
    table: &[UnitSpec<I>],
    unit: &UnitSpec<I>,
) -> Result<Vec<usize>, PlanError> {
    let mut needs = Vec::with_capacity(unit.needs.len());
    for id in unit.needs {
        let index = index_of(table, unit, *id)?;
        if table[index].per.is_some() {
            return Err(PlanError::NeedsTemplate { unit: unit.id.to_string(), template: id.to_string() });
        }
        needs.push(index);
    }
    Ok(needs)
}

impl<I: Display> Graph<I> {
    /// Creates a graph of nodes with resolved indices.
    ///
    /// # Errors
    /// [`PlanError::Cycle`] with the units that wait for each other, and those that wait for them.
    pub fn new(nodes: Vec<Node<I>>) -> Result<Self, PlanError> {
        let mut open: Vec<bool> = vec![true; nodes.len()];
        loop {
            let free =
                |node: &Node<I>| node.needs.iter().chain(&node.after).all(|edge| open.get(*edge) == Some(&false));
            let next: Vec<usize> = (0..nodes.len()).filter(|at| open[*at] && free(&nodes[*at])).collect();
            if next.is_empty() {
                break;
            }
            for at in next {
                open[at] = false;
            }
        }
        let stuck: Vec<String> =
            nodes.iter().zip(&open).filter(|(_, open)| **open).map(|(node, _)| node.id.to_string()).collect();
        if stuck.is_empty() { Ok(Self { nodes }) } else { Err(PlanError::Cycle(stuck)) }
    }
}

fn severity_word(severity: Severity) -> &'static str {
    match severity {
        Severity::Required => "required",
        Severity::Degraded => "degraded",
        Severity::Optional => "optional",
    }
}

fn joined<I: Display>(ids: &[I]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns the plan as a Markdown table.
#[must_use]
pub fn print<I: Display>(table: &[UnitSpec<I>]) -> String {
    let mut text = String::from("| unit | needs | comes after | deadline | severity | what it does |\n");
    text.push_str("|---|---|---|---|---|---|\n");
    for unit in table {
        let name = match unit.per {
            Some(_) => format!("{}[PCI]", unit.id),
            None => unit.id.to_string(),
        };
        let deadline = unit.deadline.map_or_else(|| "per attempt".to_owned(), |limit| format!("{limit:?}"));
        let needs = joined(unit.needs);
        let after = match unit.after {
            After::These(ids) => joined(ids),
            After::AllOthers => "all others".to_owned(),
        };
        let severity = severity_word(unit.severity);
        // Writing into a string cannot fail.
        let _ = writeln!(text, "| {name} | {needs} | {after} | {deadline} | {severity} | {} |", unit.about);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(
        name: &'static str,
        needs: &'static [&'static str],
        after: &'static [&'static str],
        per: Option<&'static str>,
    ) -> UnitSpec<&'static str> {
        UnitSpec {
            id: name,
            per,
            needs,
            after: if after == ["*"] { After::AllOthers } else { After::These(after) },
            deadline: Some(Duration::from_secs(1)),
            severity: Severity::Degraded,
            about: "x",
            hint: "look there",
        }
    }

    #[test]
    fn names_become_indices() {
        let graph = check(&[unit("z", &["a"], &[], None), unit("a", &[], &[], None), unit("all", &[], &["*"], None)]);
        let graph = graph.unwrap();
        assert_eq!(graph.nodes()[0].needs, [1]);
        assert_eq!(graph.nodes()[2].after, [0, 1]);
        assert_eq!(graph.nodes()[0].deadline_us, Some(1_000_000));
    }

    #[test]
    fn invalid_plan_is_rejected() {
        let error = |table: &[UnitSpec<&'static str>]| check(table).unwrap_err().to_string();
        assert!(error(&[unit("a", &[], &[], None), unit("a", &[], &[], None)]).contains("two units are named a"));
        assert!(error(&[unit("a", &["b"], &[], None)]).contains("unit a names b"));
        assert!(error(&[unit("a", &["a"], &[], None)]).contains("none can start: a"));
        let cycle = error(&[unit("a", &["c"], &[], None), unit("b", &["a"], &[], None), unit("c", &[], &["b"], None)]);
        assert!(cycle.ends_with("a, b, c"), "{cycle}");
        let scan = unit("scan", &[], &[], None);
        assert!(error(&[scan, unit("gpu", &[], &[], Some("scan"))]).contains("expanded by scan"));
        let gpu = unit("gpu", &["scan"], &[], Some("scan"));
        assert!(error(&[scan, gpu, unit("cdi", &["gpu"], &[], None)]).contains("only come after"));
        assert!(check(&[scan, gpu, unit("cdi", &[], &["gpu"], None)]).is_ok());
    }

    #[test]
    fn printed_table_has_templates_and_dependencies() {
        let text = print(&[unit("scan", &[], &[], None), unit("gpu", &["scan"], &["*"], Some("scan"))]);
        assert!(text.contains("| gpu[PCI] | scan | all others | 1s | degraded | x |"), "{text}");
    }
}
