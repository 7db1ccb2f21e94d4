//! Problems of a host, each with its remedy.

use std::fmt;

use serde::Serialize;

/// A problem and its remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The object and what is wrong with it.
    pub message: String,
    /// What to try next.
    pub remedy: String,
}

impl Problem {
    /// Creates a problem.
    #[must_use]
    pub fn new(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { message: message.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.message, self.remedy)
    }
}

/// Joins problems into one text.
#[must_use]
pub fn joined(problems: &[Problem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
