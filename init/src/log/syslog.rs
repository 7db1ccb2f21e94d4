//! Parser of messages to `/dev/log`: roughly `<PRIORITY>Nov 21 18:40:02 program[7]: text` (RFC
//! 3164).

use firstlight_boot_record::{Level, sanitize};

/// Maximum number of bytes of a message that are logged.
pub const MOST_TEXT: usize = 1024;

/// The highest valid priority: facility 23, level 7 (23 * 8 + 7).
const MOST_PRIORITY: u32 = 191;

/// A parsed message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The severity.
    pub level: Level,
    /// The text, without timestamp and line ends.
    pub text: String,
}

/// Parses a datagram, given its first bytes and its full length. Returns `None` if it has no text.
#[must_use]
pub fn parse(bytes: &[u8], length: usize) -> Option<Message> {
    let (level, rest) = match priority(bytes) {
        Some((priority, rest)) => (Level::from_priority(priority), rest),
        None => (Level::Notice, bytes),
    };
    let rest = without_time(rest);
    let shown = rest.get(..MOST_TEXT).unwrap_or(rest);
    // Some programs append a zero byte or a newline.
    let text = shown.trim_ascii_end();
    let text = text.strip_suffix(b"\0").unwrap_or(text).trim_ascii_end();
    if text.is_empty() {
        return None;
    }
    let mut text = sanitize(text);
    let missing = rest.len() - shown.len() + length.saturating_sub(bytes.len());
    if missing > 0 {
        text.push_str(&format!(" [{missing} bytes more]"));
    }
    Some(Message { level, text })
}

/// Parses `<N>` at the start, with N at most [`MOST_PRIORITY`]; returns N and the rest.
fn priority(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let rest = bytes.strip_prefix(b"<")?;
    let end = rest.iter().take(4).position(|byte| *byte == b'>')?;
    let digits = rest.get(..end).filter(|digits| !digits.is_empty() && digits.iter().all(u8::is_ascii_digit))?;
    let number = digits.iter().fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
    (number <= MOST_PRIORITY).then_some((number, rest.get(end + 1..).unwrap_or_default()))
}

/// Removes a timestamp such as `Nov 21 18:40:02 `; the forwarded line has the monotonic time
/// instead.
fn without_time(bytes: &[u8]) -> &[u8] {
    const SHAPE: &[u8] = b"Aaa _0 00:00:00 ";
    let fits = |(byte, shape): (&u8, &u8)| match shape {
        b'A' => byte.is_ascii_uppercase(),
        b'a' => byte.is_ascii_lowercase(),
        b'0' => byte.is_ascii_digit(),
        b'_' => byte.is_ascii_digit() || *byte == b' ',
        other => byte == other,
    };
    match bytes.split_at_checked(SHAPE.len()) {
        Some((time, rest)) if time.iter().zip(SHAPE).all(fits) => rest,
        _ => bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::{Line, LogLine, State};
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> (Level, String) {
        let message = parse(bytes, bytes.len()).unwrap();
        (message.level, message.text)
    }

    #[test]
    fn messages_of_c_libraries_are_parsed() {
        for (bytes, level, text) in [
            (&b"<27>Nov 21 18:40:02 nv-fabricmanager[7]: link 3\n"[..], Level::Error, "nv-fabricmanager[7]: link 3"),
            (b"<13>Nov  1 08:00:00 a: b\0", Level::Notice, "a: b"),
            (b"<191>x", Level::Debug, "x"),
            (b"<0>x", Level::Emergency, "x"),
            (b"no priority", Level::Notice, "no priority"),
            (b"<14>Nov 21 18:40 a: b", Level::Info, "Nov 21 18:40 a: b"),
        ] {
            assert_eq!(read(bytes), (level, text.to_owned()));
        }
    }

    #[test]
    fn invalid_priority_is_part_of_the_text() {
        for bytes in [&b"<192>x"[..], b"<>x", b"<-1>x", b"<+1>x", b"<0001>x", b"<1x", b"<999999999999>x", b"< 1>x"] {
            assert_eq!(read(bytes), (Level::Notice, String::from_utf8_lossy(bytes).into_owned()));
        }
    }

    #[test]
    fn empty_datagram_has_no_line() {
        for bytes in [&b""[..], b"<13>", b"<13>\0", b"\n", b"<13>Nov 21 18:40:02 ", b" \0"] {
            assert_eq!(parse(bytes, bytes.len()), None, "{bytes:?}");
        }
    }

    #[test]
    fn long_messages_are_truncated_with_a_mark() {
        let long = [b"<14>".to_vec(), vec![b'x'; 3000]].concat();
        let (_, text) = read(&long);
        assert!(text.len() < MOST_TEXT + 30 && text.ends_with(&format!("[{} bytes more]", 3000 - MOST_TEXT)), "{text}");
        // Bytes that did not fit into the buffer count too.
        assert!(parse(&long, 10_000).unwrap().text.ends_with(&format!("[{} bytes more]", 10_000 - 4 - MOST_TEXT)));
    }

    #[test]
    fn message_cannot_impersonate_record_line() {
        let forged = Line::State(State::Ready).encode().unwrap();
        let (level, text) = read(format!("<11>x\n{forged}\x1b[2J").as_bytes());
        let line = LogLine { at_us: 1, level, source: "x".into(), text }.encode();
        assert!(Line::decode(&line).is_none() && line.lines().count() == 1 && !line.contains('\x1b'), "{line}");
    }

    proptest! {
        #[test]
        fn any_datagram_is_one_bounded_line(
            head in "(<[0-9+ -]{0,5}>?)?(Nov [ 0-9][0-9] [0-9:]{8} )?",
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
            more in 0usize..100_000,
        ) {
            let bytes = [head.into_bytes(), bytes].concat();
            if let Some(message) = parse(&bytes, bytes.len() + more) {
                // A byte shown as `\u{e007f}` was four bytes; one shown as `\x1b` was one.
                prop_assert!(message.text.len() <= 4 * MOST_TEXT + 30, "{}", message.text.len());
                prop_assert!(!message.text.chars().any(char::is_control));
                prop_assert!(more == 0 || message.text.ends_with(" bytes more]"));
            }
        }
    }
}
