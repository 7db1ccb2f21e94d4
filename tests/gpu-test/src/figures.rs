//! Figures, in the format of `cargo xtask bench`.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;
use serde::Serialize;

/// The figures of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) bench: &'static str,
    pub(crate) machine: String,
    pub(crate) figures: Vec<Figure>,
}

/// One figure.
#[derive(Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) what: String,
    pub(crate) unit: &'static str,
    pub(crate) ours: f64,
    pub(crate) peer: Option<f64>,
    pub(crate) peer_name: Option<&'static str>,
    pub(crate) goal: String,
    pub(crate) holds: bool,
}

impl Figure {
    /// Creates a time without a goal, because machines differ. A missing time fails.
    pub(crate) fn time(what: impl Into<String>, ms: Option<f64>) -> Self {
        let ours = ms.unwrap_or(f64::NAN);
        Self::new(what.into(), "ms", ours, "a time".to_owned(), ms.is_some_and(|ms| ms >= 0.0))
    }

    /// Creates a number that must equal `expected`.
    pub(crate) fn equals(what: impl Into<String>, ours: Option<f64>, expected: f64) -> Self {
        let holds = ours.is_some_and(|ours| (ours - expected).abs() < 1e-9);
        Self::new(what.into(), "", ours.unwrap_or(f64::NAN), format!("= {expected}"), holds)
    }

    /// Creates a condition.
    pub(crate) fn holds(what: impl Into<String>, holds: bool) -> Self {
        Self::new(what.into(), "", f64::from(u8::from(holds)), "= 1".to_owned(), holds)
    }

    fn new(what: String, unit: &'static str, ours: f64, goal: String, holds: bool) -> Self {
        Self { what, unit, ours, peer: None, peer_name: None, goal, holds }
    }
}

impl Figures {
    /// Whether every goal holds.
    pub(crate) fn hold(&self) -> bool {
        !self.figures.is_empty() && self.figures.iter().all(|figure| figure.holds)
    }

    /// Formats the figures as a table.
    pub(crate) fn print(&self) -> String {
        let mut text = format!("gpu-test on {}\n{:72} {:>12} {:>10}  HOLDS\n", self.machine, "WHAT", "OURS", "GOAL");
        for figure in &self.figures {
            let ours = match figure.unit {
                "" => format!("{}", figure.ours),
                unit => format!("{:.3} {unit}", figure.ours),
            };
            let verdict = if figure.holds { "yes" } else { "NO" };
            let _ = writeln!(text, "{:72} {ours:>12} {:>10}  {verdict}", figure.what, figure.goal);
        }
        text
    }

    /// Writes the figures as JSON.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_wrong_figures_fail() {
        assert!(!Figure::time("x", None).holds && Figure::time("x", Some(1.0)).holds);
        assert!(!Figure::equals("x", None, 1.0).holds && !Figure::equals("x", Some(2.0), 1.0).holds);
        let mut figures = Figures { bench: "gpu", machine: "m".into(), figures: vec![] };
        assert!(!figures.hold(), "a run without figures proves nothing");
        figures.figures = vec![Figure::equals("x", Some(1.0), 1.0)];
        assert!(figures.hold());
        figures.figures.push(Figure::holds("y", false));
        assert!(!figures.hold() && figures.print().contains("NO"));
    }
}
