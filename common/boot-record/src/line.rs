//! Changes of the boot record as console lines.
//!
//! A line is `firstlight/1 {"KIND": ...}`, at most one per write, so that people
//! can read it, `grep` finds it, and programs parse it. Text before the prefix (a
//! kernel time stamp, a partial line of another writer) is ignored.

use serde::{Deserialize, Serialize};

use crate::{Event, Failure, Gpu, Mode, State, Unit};

/// The prefix of every line; the digit is the schema version.
pub const PREFIX: &str = "firstlight/1 ";

/// One change of the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Line {
    /// PID 1 started.
    Boot {
        /// Version of PID 1.
        init_version: String,
        /// Kernel release.
        kernel: String,
        /// Start of `main`, µs.
        pid1_start_us: u64,
    },
    /// The boot's state changed.
    State(State),
    /// The mode was chosen.
    Mode(Mode),
    /// A unit ended, or a daemon became ready.
    Unit(Unit),
    /// A GPU changed.
    Gpu(Gpu),
    /// An event outside the boot plan.
    Event(Event),
    /// The boot failed.
    Failure(Failure),
}

/// A console line that has the prefix and malformed JSON after it.
#[derive(Debug, thiserror::Error)]
#[error("malformed boot record line: {source}: {text:?}; was the console truncated or shared with another writer?")]
pub struct LineError {
    text: String,
    source: serde_json::Error,
}

impl Line {
    /// Returns the line as text, without a newline.
    ///
    /// # Errors
    /// Never for the types of this crate; serialisation is fallible by type.
    pub fn encode(&self) -> Result<String, serde_json::Error> {
        let json = serde_json::to_string(self)?;
        Ok(if is_plain(&json) { format!("{PREFIX}{json}") } else { format!("{PREFIX}{}", escaped(&json)) })
    }

    /// Parses a console line; `None` if it does not have the prefix.
    ///
    /// # Errors
    /// The text after the prefix is not valid in this schema.
    pub fn decode(text: &str) -> Option<Result<Self, LineError>> {
        let start = text.rfind(PREFIX)?;
        let json = text[start + PREFIX.len()..].trim_end();
        Some(serde_json::from_str(json).map_err(|source| LineError { text: json.chars().take(120).collect(), source }))
    }
}

/// The start of [`PREFIX`], common to all schema versions.
const MARK: &str = "firstlight/";

/// Returns whether this JSON needs no [`escaped`], which is the common case.
fn is_plain(json: &str) -> bool {
    // The control characters that JSON does not escape are DEL (0x7f) and C1, whose UTF-8 starts with 0xc2.
    !json.bytes().any(|byte| matches!(byte, 0x7f | 0xc2)) && !json.contains(MARK)
}

/// Escapes the prefix and control characters: a detail may quote untrusted input,
/// which must neither forge a record line nor redraw a terminal. Both occur in
/// strings only, where JSON can escape every character.
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
    fn line_after_a_time_stamp_and_other_text_is_found() {
        let line = Line::Event(Event {
            at_us: 5,
            kind: "power-off".into(),
            object: String::new(),
            detail: "bye \"x\"\n".into(),
        });
        let text = format!("[    1.2] half a li{}\r\n", line.encode().unwrap());
        assert_eq!(text.trim_end().lines().count(), 1, "one line even if the detail contains a newline");
        assert_eq!(Line::decode(&text).unwrap().unwrap(), line);
        assert!(Line::decode("[    1.2] Run /init as init process").is_none());
        assert!(Line::decode("firstlight/1 {\"unit\":{\"na").unwrap().is_err());
    }

    #[test]
    fn record_line_quoted_in_a_detail_is_not_parsed() {
        let forged = Line::State(State::Failed).encode().unwrap();
        let detail = format!("its last line: {forged:?} \u{1b}[2J\u{9b}2J\u{7f}");
        let line = Line::Event(Event { at_us: 5, kind: "daemon-exited".into(), object: forged, detail });
        let text = line.encode().unwrap();
        assert_eq!(Line::decode(&text).unwrap().unwrap(), line);
        assert!(!text.chars().any(char::is_control), "{text}");
    }

    proptest! {
        #[test]
        fn decoding_never_panics(text in "\\PC{0,80}", cut in 0usize..200) {
            let whole = format!("{text}{}", Line::State(State::Ready).encode().unwrap());
            let cut = whole.char_indices().map(|(at, _)| at).nth(cut).unwrap_or(whole.len());
            let _ = Line::decode(&whole[..cut]);
            let _ = Line::decode(&text);
        }
    }
}
