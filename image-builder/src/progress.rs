//! One line of plain text per long step.

use std::time::Duration;

/// Where the lines about long steps go.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    area: Option<&'static str>,
}

impl Progress {
    /// Lines on standard error, each beginning with `area`.
    #[must_use]
    pub fn stderr(area: &'static str) -> Self {
        Self { area: Some(area) }
    }

    /// No lines at all.
    #[must_use]
    pub fn quiet() -> Self {
        Self { area: None }
    }

    /// Says what begins now, or what the user should know about it.
    pub fn say(&self, line: impl std::fmt::Display) {
        if let Some(area) = self.area {
            eprintln!("{area}: {line}");
        }
    }
}

/// A size as people read it: `173 MB`.
#[must_use]
pub fn megabytes(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{} kB", bytes.div_ceil(1_000)),
        1_000_000..10_000_000 => format!("{}.{} MB", bytes / 1_000_000, bytes / 100_000 % 10),
        _ => format!("{} MB", bytes / 1_000_000),
    }
}

/// A span as people read it: `1.4 s`.
#[must_use]
pub fn seconds(span: Duration) -> String {
    format!("{}.{} s", span.as_secs(), span.subsec_millis() / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(megabytes(0), "0 kB");
        assert_eq!(megabytes(1), "1 kB");
        assert_eq!(megabytes(999_999), "1000 kB");
        assert_eq!(megabytes(2_345_678), "2.3 MB");
        assert_eq!(megabytes(173_900_000), "173 MB");
        assert_eq!(seconds(Duration::from_millis(1_450)), "1.4 s");
    }
}
