//! Forwarded log messages as console lines, distinct from those of the boot record.
//!
//! A line is `firstlight: SECONDS.MICROSECONDS LEVEL SOURCE: TEXT`. The text is
//! untrusted input of the kernel, a daemon or any sender to `/dev/log`: it is
//! sanitized to one line without control characters, and no part of it parses as
//! a line of the boot record.

use std::fmt::Write as _;

/// The prefix of every log line.
pub const LOG_PREFIX: &str = "firstlight: ";

/// The start of every boot record line in all schema versions; sanitized text never contains it.
const MARK: &str = "firstlight/";

/// A severity level; the numbers are those of the kernel and syslog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
#[repr(u8)]
pub enum Level {
    /// The system is unusable.
    Emergency = 0,
    /// Action must be taken immediately.
    Alert = 1,
    /// A critical condition.
    Critical = 2,
    /// An error.
    Error = 3,
    /// A warning.
    Warning = 4,
    /// A normal but significant condition.
    Notice = 5,
    /// An informational message.
    #[default]
    Info = 6,
    /// A debug message.
    Debug = 7,
}

/// All levels in the order of their numbers.
pub const LEVELS: [Level; 8] = [
    Level::Emergency,
    Level::Alert,
    Level::Critical,
    Level::Error,
    Level::Warning,
    Level::Notice,
    Level::Info,
    Level::Debug,
];

impl Level {
    /// Returns the level of a syslog priority, which is facility times eight plus level.
    #[must_use]
    pub fn from_priority(priority: u32) -> Self {
        let at = usize::try_from(priority & 7).unwrap_or_default();
        LEVELS.get(at).copied().unwrap_or_default()
    }

    /// Returns the name used on the console.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Emergency => "emerg",
            Self::Alert => "alert",
            Self::Critical => "crit",
            Self::Error => "err",
            Self::Warning => "warning",
            Self::Notice => "notice",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }

    /// Returns the level of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        LEVELS.into_iter().find(|level| level.as_str() == name)
    }
}

/// A log message with its time, level and source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// Time, µs.
    pub at_us: u64,
    /// Severity level.
    pub level: Level,
    /// The sender: `kernel`, `driver`, `agent`, a daemon's name, or `PROGRAM[PID,UID]`.
    pub source: String,
    /// The message.
    pub text: String,
}

impl LogLine {
    /// Returns the console line, sanitized, without a newline.
    #[must_use]
    pub fn encode(&self) -> String {
        let (seconds, rest) = (self.at_us / 1_000_000, self.at_us % 1_000_000);
        let (level, source, text) =
            (self.level.as_str(), sanitize_source(&self.source), sanitize(self.text.as_bytes()));
        format!("{LOG_PREFIX}{seconds}.{rest:06} {level} {source}: {text}")
    }

    /// Parses a console line; `None` if it is not a log line.
    #[must_use]
    pub fn decode(line: &str) -> Option<Self> {
        // The first prefix: the message may quote another.
        let start = line.find(LOG_PREFIX)? + LOG_PREFIX.len();
        let mut tokens = line.get(start..)?.trim_end_matches(['\r', '\n']).splitn(4, ' ');
        let (time, level, source) = (tokens.next()?, tokens.next()?, tokens.next()?);
        let (seconds, rest) = time.split_once('.').filter(|(_, rest)| rest.len() == 6)?;
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(seconds) || !digits(rest) {
            return None;
        }
        let at_us = seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(rest.parse().ok()?)?;
        let source = source.strip_suffix(':').filter(|source| sanitize_source(source) == *source)?.to_owned();
        Some(Self {
            at_us,
            level: Level::from_name(level)?,
            source,
            text: tokens.next().unwrap_or_default().to_owned(),
        })
    }
}

/// Returns a source name as one token without separators, at most 64 characters.
#[must_use]
pub fn sanitize_source(name: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '[' | ']' | ',' | '+' | '@');
    let source: String = name.chars().take(64).map(|c| if is_allowed(c) { c } else { '_' }).collect();
    if source.is_empty() { "_".to_owned() } else { source }
}

/// Converts untrusted bytes to text for one line. Invalid UTF-8, control and
/// bidirectional characters and the prefix of record lines are escaped as `\x1b`
/// and the like. Sanitized text is returned unchanged.
#[must_use]
pub fn sanitize(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            push_escaped(&mut text, c);
        }
        for byte in chunk.invalid() {
            // Writing into a string cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

fn push_escaped(text: &mut String, c: char) {
    let code = u32::from(c);
    if c == '\t' {
        text.push_str("\\t");
    } else if c.is_control() && code < 0x80 || ends_mark(text, c) {
        let _ = write!(text, "\\x{code:02x}");
    } else if c.is_control() || is_unseen(c) {
        let _ = write!(text, "\\u{{{code:x}}}");
    } else {
        text.push(c);
    }
}

/// Returns whether appending this character completes [`MARK`].
fn ends_mark(text: &str, c: char) -> bool {
    MARK.strip_suffix(c).is_some_and(|start| text.ends_with(start))
}

/// Returns whether a character ends a line, is invisible, or reorders the displayed text.
fn is_unseen(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Line, State};
    use proptest::prelude::*;

    fn line(text: &str) -> LogLine {
        LogLine { at_us: 12_000_034, level: Level::Warning, source: "imex".into(), text: text.into() }
    }

    #[test]
    fn log_line_round_trips() {
        let text = line("link 3 is down: retry 1").encode();
        assert_eq!(text, "firstlight: 12.000034 warning imex: link 3 is down: retry 1");
        assert_eq!(LogLine::decode(&format!("[  1.2] {text}\r\n")).unwrap(), line("link 3 is down: retry 1"));
        for other in
            ["firstlight: boot failed: unit x", "firstlight: 1.2 warning imex: x", "", "firstlight: 1.000000 bad x: y"]
        {
            assert_eq!(LogLine::decode(other), None, "{other}");
        }
    }

    #[test]
    fn forged_lines_in_text_are_escaped() {
        let forged = Line::State(State::Ready).encode().unwrap();
        for text in [
            forged.clone(),
            format!("x\n{forged}"),
            format!("x\r{forged}"),
            format!("firstlight/firstlight/1 {forged}"),
        ] {
            let shown = line(&text).encode();
            assert!(Line::decode(&shown).is_none(), "{shown}");
            assert_eq!(shown.lines().count(), 1, "{shown}");
            assert!(shown.contains("state") && shown.contains("ready"), "the text stays readable: {shown}");
        }
        let other = "firstlight: 1.000000 err kernel: x";
        assert_eq!(LogLine::decode(&line(other).encode()).unwrap().source, "imex", "the first prefix wins");
    }

    #[test]
    fn control_and_invisible_characters_are_escaped() {
        assert_eq!(sanitize(b"a\x1b[2J\x7f\0b\tc\xff\xc3"), "a\\x1b[2J\\x7f\\x00b\\tc\\xff\\xc3");
        assert_eq!(sanitize("\u{9b}2J\u{202e}x\u{2028}ö".as_bytes()), "\\u{9b}2J\\u{202e}x\\u{2028}ö");
        assert_eq!(sanitize_source("a b\n[1]:/ü"), "a_b_[1]___");
        assert_eq!(sanitize_source(""), "_");
    }

    proptest! {
        #[test]
        fn any_bytes_become_one_log_line_and_no_record_line(
            bytes in proptest::collection::vec(any::<u8>(), 0..60),
            spice in prop_oneof![Just(&b"firstlight/1 {\"state\":\"ready\"}"[..]), Just(&b"firstlight"[..]), Just(&b"/1 "[..]), Just(&b"\r\n"[..])],
            at in 0usize..60,
            source in "\\PC{0,20}",
        ) {
            let mut bytes = bytes;
            let at = at.min(bytes.len());
            bytes.splice(at..at, spice.iter().copied());
            let text = sanitize(&bytes);
            prop_assert!(!text.chars().any(|c| c.is_control() || is_unseen(c)), "{text:?}");
            prop_assert!(!text.contains(MARK), "{text}");
            prop_assert_eq!(sanitize(text.as_bytes()), text.clone(), "sanitizing is idempotent");
            let shown = LogLine { at_us: 1, level: Level::Info, source, text: text.clone() };
            let read = LogLine::decode(&shown.encode()).unwrap();
            prop_assert_eq!(read.text, text);
            prop_assert!(Line::decode(&shown.encode()).is_none());
        }

        #[test]
        fn decoding_never_panics(text in "(firstlight: )?[0-9.]{0,10} ?(warning )?[a-z:]{0,6} ?\\PC{0,20}") {
            let _ = LogLine::decode(&text);
        }
    }
}
