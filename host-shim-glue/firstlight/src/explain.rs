//! Formatting an error with its causes for the user.

use std::error::Error;

/// Formats an error and its causes, each once: some errors include their cause in
/// their text, others leave it to the caller.
#[must_use]
pub fn explain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let message = inner.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
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
        #[error("includes it: {0}")]
        Includes(#[source] std::io::Error),
        #[error("omits it")]
        Omits(#[source] std::io::Error),
    }

    #[test]
    fn every_cause_is_printed_once() {
        let io = || std::io::Error::other("disk on fire");
        assert_eq!(explain(&Sample::Includes(io())), "includes it: disk on fire");
        assert_eq!(explain(&Sample::Omits(io())), "omits it: disk on fire");
    }
}
