//! Encodes log records as lines of JSON, in the format of Kata's agent.

use std::time::{Duration, SystemTime};

use log::{Level, Record};
use serde::Serialize;

/// Maximum bytes of a message. With every byte escaped it still fits into one write to vsock.
const MAX_MESSAGE: usize = 6000;

#[derive(Serialize)]
struct Line<'a> {
    msg: &'a str,
    level: &'a str,
    ts: String,
    name: &'a str,
    source: &'a str,
    pid: String,
    version: &'a str,
    subsystem: &'a str,
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::Error => "ERRO",
        Level::Warn => "WARN",
        Level::Info => "INFO",
        Level::Debug => "DEBG",
        Level::Trace => "TRCE",
    }
}

/// Encodes one record, with newline.
pub(super) fn line(record: &Record<'_>) -> String {
    text(record.level(), record.target(), &record.args().to_string(), SystemTime::now())
}

/// Encodes a message about the log itself.
pub(super) fn notice(message: &str) -> String {
    text(Level::Warn, "log", message, SystemTime::now())
}

/// Encodes a forwarded message of the kernel, a driver or a daemon; `level` is that of PID 1.
pub(super) fn forwarded(level: &str, source: &str, message: &str) -> String {
    let level = match level {
        "emerg" | "alert" | "crit" => "CRIT",
        "err" => "ERRO",
        "warning" => "WARN",
        "debug" => "DEBG",
        _ => "INFO",
    };
    // The source distinguishes these from the agent's own messages.
    line_of(level, "guest", source, message, SystemTime::now())
}

fn text(level: Level, target: &str, message: &str, now: SystemTime) -> String {
    line_of(level_name(level), "agent", target.strip_prefix("firstlight_agent::").unwrap_or(target), message, now)
}

fn line_of(level: &str, source: &str, subsystem: &str, message: &str, now: SystemTime) -> String {
    let mut message = message.replace(char::is_control, " ");
    if let Some(end) = (0..=MAX_MESSAGE).rev().find(|at| message.is_char_boundary(*at)) {
        message.truncate(end);
    }
    let line = Line {
        msg: &message,
        level,
        ts: timestamp(now),
        // Readers filter by the name of Kata's agent.
        name: "kata-agent",
        source,
        pid: std::process::id().to_string(),
        version: env!("CARGO_PKG_VERSION"),
        subsystem,
    };
    let mut text = serde_json::to_string(&line).unwrap_or_default();
    text.push('\n');
    text
}

/// Formats as RFC 3339 with nanoseconds, UTC.
fn timestamp(now: SystemTime) -> String {
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:09}Z", since.subsec_nanos())
}

/// Converts days since 1970 to year, month and day. A guest's clock is within a few centuries of
/// 1970, so a loop is sufficient.
fn date(mut days: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // Any 400 years have 146,097 days.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    loop {
        let len = 365 + u64::from(is_leap(year));
        if days < len {
            break;
        }
        days -= len;
        year += 1;
    }
    let mut month = 1;
    for len in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < len {
            break;
        }
        days -= len;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_every_field_of_katas_format() {
        let now = SystemTime::UNIX_EPOCH + Duration::new(1_795_248_000, 42);
        let line = text(Level::Error, "firstlight_agent::copy", "a \"quoted\"\nline", now);
        assert!(line.ends_with("}\n") && line.matches('\n').count() == 1);
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        for (field, expected) in [
            ("msg", "a \"quoted\" line"),
            ("level", "ERRO"),
            ("ts", "2026-11-21T08:00:00.000000042Z"),
            ("name", "kata-agent"),
            ("source", "agent"),
            ("pid", &std::process::id().to_string()),
            ("version", env!("CARGO_PKG_VERSION")),
            ("subsystem", "copy"),
        ] {
            assert_eq!(value[field], expected, "{field}");
        }
    }

    #[test]
    fn forwarded_messages_have_their_own_source() {
        for (level, expected) in
            [("emerg", "CRIT"), ("err", "ERRO"), ("warning", "WARN"), ("notice", "INFO"), ("?", "INFO")]
        {
            let line = forwarded(level, "imex", "a\nb \u{9b}2J");
            let value: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert_eq!(
                (&value["level"], &value["source"], &value["subsystem"], &value["msg"]),
                (&expected.into(), &"guest".into(), &"imex".into(), &"a b  2J".into())
            );
        }
    }

    #[test]
    fn long_messages_are_truncated_at_character_boundaries() {
        let line = text(Level::Info, "x", &"\"ä".repeat(9000), SystemTime::now());
        assert!(line.len() < 16 * 1024, "{}", line.len());
        assert!(serde_json::from_str::<serde_json::Value>(&line).is_ok());
    }

    #[test]
    fn dates_match_the_calendar() {
        // From `date -u -d @SECONDS`.
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00"),
            (951_782_400, "2000-02-29T00:00:00"),
            (951_868_799, "2000-02-29T23:59:59"),
            (951_868_800, "2000-03-01T00:00:00"),
            (1_735_689_599, "2024-12-31T23:59:59"),
            (4_107_542_400, "2100-03-01T00:00:00"),
            (8_277_292_036, "2232-04-18T23:47:16"),
        ] {
            let text = timestamp(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
            assert_eq!(text.split('.').next(), Some(expected));
        }
    }
}
