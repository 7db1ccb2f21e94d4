//! Prometheus' text format, version 0.0.4: writing it.

use std::fmt::{Display, Write as _};

/// What kind of value a family has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// The text so far.
#[derive(Debug, Default)]
pub(super) struct Text(String);

/// A family of samples; its head is written with its first one.
#[derive(Debug)]
pub(super) struct Family<'a> {
    text: &'a mut String,
    name: &'static str,
    kind: Kind,
    help: &'static str,
    begun: bool,
}

impl Text {
    /// Begins a family. Each name is begun once.
    pub(super) fn family(&mut self, name: &'static str, kind: Kind, help: &'static str) -> Family<'_> {
        Family { text: &mut self.0, name, kind, help, begun: false }
    }

    /// A family of one gauge without labels.
    pub(super) fn gauge(&mut self, name: &'static str, help: &'static str, value: impl Display) {
        self.family(name, Kind::Gauge, help).sample(&[], value);
    }

    pub(super) fn finish(self) -> String {
        self.0
    }
}

impl Family<'_> {
    /// Adds a sample. The value is a number; labels hold anything.
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        // Writing into a string cannot fail.
        if !self.begun {
            self.begun = true;
            let _ = writeln!(self.text, "# HELP {0} {2}\n# TYPE {0} {1}", self.name, self.kind.word(), self.help);
        }
        self.text.push_str(self.name);
        for (index, (label, value)) in labels.iter().enumerate() {
            let _ = write!(self.text, "{}{label}=\"{}\"", if index == 0 { '{' } else { ',' }, escaped(value));
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{end} {value}");
    }
}

/// Backslashes, quotes and line ends would end a label's value.
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
    fn a_family_has_its_head_once_and_only_with_samples() {
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
