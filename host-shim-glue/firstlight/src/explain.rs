//! An error as one text for whoever typed the command.

use std::error::Error;

/// The error and its causes, each once: some errors say their cause
/// themselves, others leave it to whoever prints them.
#[must_use]
pub fn explain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let words = inner.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Sample {
        #[error("says it: {0}")]
        Says(#[source] std::io::Error),
        #[error("leaves it")]
        Leaves(#[source] std::io::Error),
    }

    #[test]
    fn every_cause_is_said_once() {
        let io = || std::io::Error::other("disk on fire");
        assert_eq!(explain(&Sample::Says(io())), "says it: disk on fire");
        assert_eq!(explain(&Sample::Leaves(io())), "leaves it: disk on fire");
    }
}
