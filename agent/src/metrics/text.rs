//! Writes Prometheus' text format, version 0.0.4.

use std::fmt::{Display, Write as _};

/// Type of a metric family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Monotonic.
    Counter,
    /// Any value.
    Gauge,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// The output.
#[derive(Debug, Default)]
pub(super) struct Text(String);

/// A metric family; its HELP and TYPE lines are written before its first sample.
#[derive(Debug)]
pub(super) struct Family<'a> {
    text: &'a mut String,
    name: &'static str,
    kind: Kind,
    help: &'static str,
    has_header: bool,
}

impl Text {
    /// Starts a family. Each name is used once.
    pub(super) fn family(&mut self, name: &'static str, kind: Kind, help: &'static str) -> Family<'_> {
        Family { text: &mut self.0, name, kind, help, has_header: false }
    }

    /// Writes a family of one gauge without labels.
    pub(super) fn gauge(&mut self, name: &'static str, help: &'static str, value: impl Display) {
        self.family(name, Kind::Gauge, help).sample(&[], value);
    }

    pub(super) fn finish(self) -> String {
        self.0
    }
}

impl Family<'_> {
    /// Adds a sample. The value is a number; label values are arbitrary.
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        // Writing into a string cannot fail.
        if !self.has_header {
            self.has_header = true;
            let _ = writeln!(self.text, "# HELP {0} {2}\n# TYPE {0} {1}", self.name, self.kind.name(), self.help);
        }
        self.text.push_str(self.name);
        for (index, (label, value)) in labels.iter().enumerate() {
            let _ = write!(self.text, "{}{label}=\"{}\"", if index == 0 { '{' } else { ',' }, escaped(value));
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{end} {value}");
    }
}

/// Escapes backslashes, quotes and newlines of a label value.
fn escaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn family_header_is_written_once_and_only_with_samples() {
        let mut text = Text::default();
        text.family("none", Kind::Gauge, "Nothing.");
        let mut family = text.family("a_total", Kind::Counter, "Some.");
        family.sample(&[("x", "1"), ("y", "\"\\\n")], 3);
        family.sample(&[], 0.5);
        assert_eq!(
            text.finish(),
            "# HELP a_total Some.\n# TYPE a_total counter\na_total{x=\"1\",y=\"\\\"\\\\\\n\"} 3\na_total 0.5\n"
        );
    }
}
