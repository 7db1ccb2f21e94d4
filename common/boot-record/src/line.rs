//! The record as lines on a console.
//!
//! A line is `firstlight/1 KIND JSON`, at most one per write, so that it can be
//! read by eye at three in the morning, found by `grep`, and parsed. Whatever
//! stands before the prefix (a kernel time stamp, half a line of somebody
//! else's) is passed over.

use serde::{Deserialize, Serialize};

use crate::{Event, Failure, Gpu, Mode, State, Unit};

/// What every line carries; the digit is the schema's.
pub const PREFIX: &str = "firstlight/1 ";

/// One change of the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Line {
    /// PID 1 began.
    Boot {
        /// Version of PID 1.
        init_version: String,
        /// Kernel release.
        kernel: String,
        /// When `main` began, µs.
        pid1_start_us: u64,
    },
    /// The boot's state changed.
    State(State),
    /// The mode was chosen.
    Mode(Mode),
    /// A unit ended (or a daemon became ready).
    Unit(Unit),
    /// A GPU changed.
    Gpu(Gpu),
    /// Something happened.
    Event(Event),
    /// The boot failed.
    Failure(Failure),
}

/// A console line that carries the prefix and is broken behind it.
#[derive(Debug, thiserror::Error)]
#[error("boot record line is broken (console cut or mixed?): {source}: {text:?}")]
pub struct LineError {
    text: String,
    source: serde_json::Error,
}

impl Line {
    /// The line's text, without line end.
    ///
    /// # Errors
    /// Never for the types of this crate; serialisation is fallible by type.
    pub fn encode(&self) -> Result<String, serde_json::Error> {
        let json = serde_json::to_string(self)?;
        Ok(if is_plain(&json) { format!("{PREFIX}{json}") } else { format!("{PREFIX}{}", escaped(&json)) })
    }

    /// Reads a console line; `None` where it carries none of ours.
    ///
    /// # Errors
    /// The prefix is there, but what follows is not a line of this schema.
    pub fn decode(text: &str) -> Option<Result<Self, LineError>> {
        let start = text.rfind(PREFIX)?;
        let json = text[start + PREFIX.len()..].trim_end();
        Some(serde_json::from_str(json).map_err(|source| LineError { text: json.chars().take(120).collect(), source }))
    }
}

/// What all of our lines begin with, whatever the schema's version.
const MARK: &str = "firstlight/";

/// Whether nothing in this JSON needs [`escaped`]: nearly always.
fn is_plain(json: &str) -> bool {
    // Control characters that JSON lets stand are this byte, or begin with this one.
    !json.bytes().any(|byte| matches!(byte, 0x7f | 0xc2)) && !json.contains(MARK)
}

/// A detail may quote anybody, a line like ours included: it must not be found
/// in there, nor may it redraw a terminal. Both are in strings only, where JSON
/// lets every character be written otherwise.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.replace(MARK, "firstlight\\/").chars() {
        if c.is_control() {
            text.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            text.push(c);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn found_behind_a_time_stamp_and_other_text() {
        let line = Line::Event(Event {
            at_us: 5,
            kind: "power-off".into(),
            object: String::new(),
            detail: "bye \"x\"\n".into(),
        });
        let text = format!("[    1.2] half a li{}\r\n", line.encode().unwrap());
        assert_eq!(text.trim_end().lines().count(), 1, "one line even when the detail holds a line end");
        assert_eq!(Line::decode(&text).unwrap().unwrap(), line);
        assert!(Line::decode("[    1.2] Run /init as init process").is_none());
        assert!(Line::decode("firstlight/1 {\"unit\":{\"na").unwrap().is_err());
    }

    #[test]
    fn what_a_detail_quotes_hides_no_line() {
        let forged = Line::State(State::Failed).encode().unwrap();
        let detail = format!("its last line: {forged:?} \u{1b}[2J\u{9b}2J\u{7f}");
        let line = Line::Event(Event { at_us: 5, kind: "daemon-exited".into(), object: forged, detail });
        let text = line.encode().unwrap();
        assert_eq!(Line::decode(&text).unwrap().unwrap(), line);
        assert!(!text.chars().any(char::is_control), "{text}");
    }

    proptest! {
        #[test]
        fn any_console_text_is_taken(text in "\\PC{0,80}", cut in 0usize..200) {
            let whole = format!("{text}{}", Line::State(State::Ready).encode().unwrap());
            let cut = whole.char_indices().map(|(at, _)| at).nth(cut).unwrap_or(whole.len());
            let _ = Line::decode(&whole[..cut]);
            let _ = Line::decode(&text);
        }
    }
}
