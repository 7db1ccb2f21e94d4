//! Writes Prometheus' text format, version 0.0.4, from values that were read at the time of the scrape.
//!
//! ```
//! use firstlight_metrics_text::{Kind, Text};
//!
//! let mut text = Text::default();
//! let mut family = text.family("disk_bytes", Kind::Gauge, "Disks, bytes");
//! family.sample(&[("disk", "vda"), ("item", "used")], 4096_u64);
//! let text = text.finish();
//! let lines = [
//!     "# HELP disk_bytes Disks, bytes",
//!     "# TYPE disk_bytes gauge",
//!     "disk_bytes{disk=\"vda\",item=\"used\"} 4096",
//! ];
//! assert!(text.lines().eq(lines));
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod value;

use std::fmt::Write as _;

pub use value::Value;

/// Type of a metric family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Monotonic.
    Counter,
    /// Any value.
    Gauge,
    /// Counts by upper bound; see [`Family::histogram`].
    Histogram,
}

impl Kind {
    /// Returns the name in TYPE lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// The output.
#[derive(Debug, Default)]
pub struct Text(String);

/// A metric family; its HELP and TYPE lines are written before its first sample.
#[derive(Debug)]
pub struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
    kind: Kind,
    help: &'a str,
    has_header: bool,
}

impl Text {
    /// Starts a family. The format allows each name once.
    pub fn family<'a>(&'a mut self, name: &'a str, kind: Kind, help: &'a str) -> Family<'a> {
        Family { text: &mut self.0, name, kind, help, has_header: false }
    }

    /// Writes a family of one gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl Into<Value>) {
        self.family(name, Kind::Gauge, help).sample(&[], value);
    }

    /// Returns the text.
    #[must_use]
    pub fn finish(self) -> String {
        self.0
    }
}

impl Family<'_> {
    /// Writes the HELP and TYPE lines, also of a family that has no samples.
    pub fn header(&mut self) {
        if std::mem::replace(&mut self.has_header, true) {
            return;
        }
        self.text.push_str("# HELP ");
        push_name(self.text, self.name);
        self.text.push(' ');
        push_escaped(self.text, self.help, false);
        self.text.push_str("\n# TYPE ");
        push_name(self.text, self.name);
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, " {}", self.kind.name());
    }

    /// Adds a sample. Label values are arbitrary.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Into<Value>) {
        self.suffixed("", labels, value.into());
    }

    /// Adds the samples of a histogram: the upper bounds of its buckets, the count of each bucket alone, with one more
    /// for the bucket without a bound, and the sum of all observed values.
    pub fn histogram(&mut self, labels: &[(&str, &str)], bounds: &[Value], counts: &[u64], sum: impl Into<Value>) {
        let mut total = 0_u64;
        let bounds = bounds.iter().map(ToString::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(counts) {
            total = total.saturating_add(*count);
            let labels: Vec<_> = labels.iter().copied().chain([("le", bound.as_str())]).collect();
            self.suffixed("_bucket", &labels, total.into());
        }
        self.suffixed("_sum", labels, sum.into());
        self.suffixed("_count", labels, total.into());
    }

    fn suffixed(&mut self, suffix: &str, labels: &[(&str, &str)], value: Value) {
        self.header();
        push_name(self.text, self.name);
        self.text.push_str(suffix);
        for (index, (label, value)) in labels.iter().enumerate() {
            self.text.push(if index == 0 { '{' } else { ',' });
            push_name(self.text, label);
            self.text.push_str("=\"");
            push_escaped(self.text, value, true);
            self.text.push('"');
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{end} {value}");
    }
}

/// Writes the name of a metric or a label; what is no letter, digit or underscore becomes an underscore.
fn push_name(text: &mut String, name: &str) {
    let is_valid = |at: usize, c: char| c.is_ascii_alphabetic() || c == '_' || at > 0 && c.is_ascii_digit();
    text.extend(name.char_indices().map(|(at, c)| if is_valid(at, c) { c } else { '_' }));
}

/// Escapes backslashes and newlines, and quotes in label values.
fn push_escaped(text: &mut String, value: &str, quotes: bool) {
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '"' if quotes => text.push_str("\\\""),
            c => text.push(c),
        }
    }
}

#[cfg(test)]
mod tests;
