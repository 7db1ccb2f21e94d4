//! What others say, as lines on a console that nobody takes for the record's.
//!
//! A line is `firstlight: SECONDS.MICROSECONDS LEVEL SOURCE: TEXT`. The text is
//! a kernel's, a daemon's or a stranger's: whatever it holds, it stays one line
//! without control characters, and no part of it reads as a line of the record.

use std::fmt::Write as _;

/// What every line for people begins with.
pub const LOG_PREFIX: &str = "firstlight: ";

/// What no foreign text may hold: how the record's lines begin, whatever the schema's version.
const MARK: &str = "firstlight/";

/// How grave it is; the numbers are the kernel's and syslog's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
#[repr(u8)]
pub enum Level {
    /// The system cannot be used.
    Emergency = 0,
    /// Something has to be done at once.
    Alert = 1,
    /// A critical condition.
    Critical = 2,
    /// An error.
    Error = 3,
    /// A warning.
    Warning = 4,
    /// Normal, but worth a look.
    Notice = 5,
    /// For information.
    #[default]
    Info = 6,
    /// For whoever looks for a fault.
    Debug = 7,
}

/// All levels, by their number.
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
    /// The level of a priority, which is facility times eight plus level.
    #[must_use]
    pub fn of_priority(priority: u32) -> Self {
        let at = usize::try_from(priority & 7).unwrap_or_default();
        LEVELS.get(at).copied().unwrap_or_default()
    }

    /// The word on the console.
    #[must_use]
    pub fn word(self) -> &'static str {
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

    /// The level of a word.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        LEVELS.into_iter().find(|level| level.word() == word)
    }
}

/// Something that somebody said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// When, µs.
    pub at_us: u64,
    /// How grave it is.
    pub level: Level,
    /// Who: `kernel`, `driver`, `agent`, a daemon's name, or `PROGRAM[PID,UID]`.
    pub source: String,
    /// What.
    pub text: String,
}

impl LogLine {
    /// The line's text, without line end.
    #[must_use]
    pub fn encode(&self) -> String {
        let (seconds, rest) = (self.at_us / 1_000_000, self.at_us % 1_000_000);
        let (level, source, text) = (self.level.word(), word(&self.source), clean(self.text.as_bytes()));
        format!("{LOG_PREFIX}{seconds}.{rest:06} {level} {source}: {text}")
    }

    /// Reads a console line; `None` where it is none of these.
    #[must_use]
    pub fn decode(line: &str) -> Option<Self> {
        // The first one: what follows may quote another.
        let start = line.find(LOG_PREFIX)? + LOG_PREFIX.len();
        let mut words = line.get(start..)?.trim_end_matches(['\r', '\n']).splitn(4, ' ');
        let (time, level, source) = (words.next()?, words.next()?, words.next()?);
        let (seconds, rest) = time.split_once('.').filter(|(_, rest)| rest.len() == 6)?;
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(seconds) || !digits(rest) {
            return None;
        }
        let at_us = seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(rest.parse().ok()?)?;
        let source = source.strip_suffix(':').filter(|source| word(source) == *source)?.to_owned();
        Some(Self { at_us, level: Level::from_word(level)?, source, text: words.next().unwrap_or_default().to_owned() })
    }
}

/// A name as one word that holds nothing that could end it.
#[must_use]
pub fn word(name: &str) -> String {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '[' | ']' | ',' | '+' | '@');
    let word: String = name.chars().take(64).map(|c| if fine(c) { c } else { '_' }).collect();
    if word.is_empty() { "_".to_owned() } else { word }
}

/// Foreign bytes as text for one line: what is not text, what controls a
/// terminal, what turns the order of letters around, and what begins a line of
/// the record is written as `\x1b` and the like. Clean text stays as it is.
#[must_use]
pub fn clean(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            push(&mut text, c);
        }
        for byte in chunk.invalid() {
            // Writing into a string cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

fn push(text: &mut String, c: char) {
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

/// Whether this letter would complete [`MARK`].
fn ends_mark(text: &str, c: char) -> bool {
    MARK.strip_suffix(c).is_some_and(|start| text.ends_with(start))
}

/// Characters that end a line, or that show other text than there is.
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
    fn a_line_is_read_as_it_was_written() {
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
    fn no_text_passes_for_another_line() {
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
            assert!(shown.contains("state") && shown.contains("ready"), "all of it can be read: {shown}");
        }
        let other = "firstlight: 1.000000 err kernel: x";
        assert_eq!(LogLine::decode(&line(other).encode()).unwrap().source, "imex", "the first one counts");
    }

    #[test]
    fn terminals_and_readers_are_safe() {
        assert_eq!(clean(b"a\x1b[2J\x7f\0b\tc\xff\xc3"), "a\\x1b[2J\\x7f\\x00b\\tc\\xff\\xc3");
        assert_eq!(clean("\u{9b}2J\u{202e}x\u{2028}ö".as_bytes()), "\\u{9b}2J\\u{202e}x\\u{2028}ö");
        assert_eq!(word("a b\n[1]:/ü"), "a_b_[1]___");
        assert_eq!(word(""), "_");
    }

    proptest! {
        #[test]
        fn whatever_bytes_are_one_clean_line_that_is_none_of_the_record(
            bytes in proptest::collection::vec(any::<u8>(), 0..60),
            spice in prop_oneof![Just(&b"firstlight/1 {\"state\":\"ready\"}"[..]), Just(&b"firstlight"[..]), Just(&b"/1 "[..]), Just(&b"\r\n"[..])],
            at in 0usize..60,
            source in "\\PC{0,20}",
        ) {
            let mut bytes = bytes;
            let at = at.min(bytes.len());
            bytes.splice(at..at, spice.iter().copied());
            let text = clean(&bytes);
            prop_assert!(!text.chars().any(|c| c.is_control() || is_unseen(c)), "{text:?}");
            prop_assert!(!text.contains(MARK), "{text}");
            prop_assert_eq!(clean(text.as_bytes()), text.clone(), "clean text stays");
            let shown = LogLine { at_us: 1, level: Level::Info, source, text: text.clone() };
            let read = LogLine::decode(&shown.encode()).unwrap();
            prop_assert_eq!(read.text, text);
            prop_assert!(Line::decode(&shown.encode()).is_none());
        }

        #[test]
        fn any_console_text_is_a_line_or_not(text in "(firstlight: )?[0-9.]{0,10} ?(warning )?[a-z:]{0,6} ?\\PC{0,20}") {
            let _ = LogLine::decode(&text);
        }
    }
}
