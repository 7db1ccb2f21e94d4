//! Parses dates of release files and formats dates of records.

use jiff::SignedDuration;
use jiff::civil::DateTime;

/// The start of Unix time. All dates are UTC, so they need no time zone.
const EPOCH: DateTime = DateTime::constant(1970, 1, 1, 0, 0, 0, 0);

/// Parses a date of a release file into seconds since 1970: `Sat, 14 Nov 2026 09:57:18 UTC`. The day of the week is
/// not compared with the date.
pub(crate) fn seconds(date: &str) -> Option<i64> {
    let words: Vec<&str> = date.split_whitespace().collect();
    let [_, day, month, year, time, "UTC" | "GMT" | "+0000"] = words[..] else { return None };
    let date = DateTime::strptime("%d %b %Y %H:%M:%S", format!("{day} {month} {year} {time}")).ok()?;
    let seconds = date.duration_since(EPOCH).as_secs();
    (seconds >= 0).then_some(seconds)
}

/// Formats seconds since 1970 as ISO 8601: `2026-11-14T09:57:18Z`. Years have
/// four digits, so anything outside of 1970 to 9999 is `None`.
pub(crate) fn iso8601(seconds: i64) -> Option<String> {
    let date = EPOCH.checked_add(SignedDuration::from_secs(seconds)).ok()?;
    (date >= EPOCH).then(|| format!("{date}Z"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn dates_are_parsed() {
        for (date, expected) in [
            ("Thu, 01 Jan 1970 00:00:00 UTC", Some(0)),
            ("Tue, 29 Feb 2000 12:00:01 GMT", Some(951_825_601)),
            ("Sat, 14 Nov 2026 09:57:18 UTC", Some(1_794_650_238)),
            ("Sat, 14 Nov 2026 09:57:18 +0200", None),
            ("Sat, 14 Nov 2026 09:57 UTC", None),
            ("Sat, 0 Nov 2026 09:57:18 UTC", None),
            ("Sat, 29 Feb 2026 09:57:18 UTC", None),
            ("Sat, 14 Nov 2026 24:57:18 UTC", None),
            ("Sat, 14 Nov 26 09:57:18 UTC", None),
            ("Wed, 31 Dec 1969 23:59:59 UTC", None),
            // A leap second.
            ("Sat, 31 Dec 2016 23:59:60 UTC", Some(1_483_228_799)),
            ("Fri, 31 Dec 9999 23:59:59 UTC", Some(253_402_300_799)),
            ("14 Nov 2026", None),
            ("", None),
        ] {
            assert_eq!(seconds(date), expected, "{date}");
        }
    }

    #[test]
    fn seconds_are_formatted_as_dates() {
        for (seconds, expected) in [
            (0, Some("1970-01-01T00:00:00Z")),
            (951_825_601, Some("2000-02-29T12:00:01Z")),
            (1_794_650_238, Some("2026-11-14T09:57:18Z")),
            (253_402_300_799, Some("9999-12-31T23:59:59Z")),
            (253_402_300_800, None),
            (-1, None),
            (i64::MIN, None),
        ] {
            assert_eq!(iso8601(seconds).as_deref(), expected, "{seconds}");
        }
    }

    proptest! {
        #[test]
        fn dates_round_trip(seconds in 0i64..253_402_300_800) {
            let text = iso8601(seconds).unwrap();
            let months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
            let month = months[text[5..7].parse::<usize>().unwrap() - 1];
            let date = format!("Sat, {} {month} {} {} UTC", &text[8..10], &text[..4], &text[11..19]);
            prop_assert_eq!(super::seconds(&date), Some(seconds));
        }
    }
}
