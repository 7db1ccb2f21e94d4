//! Parses dates of release files and formats dates of records.

/// Parses a date of a release file into seconds since 1970: `Sat, 14 Nov 2026 09:57:18 UTC`.
pub(crate) fn seconds(date: &str) -> Option<i64> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let words: Vec<&str> = date.split_whitespace().collect();
    let [_, day, month, year, time, zone] = words[..] else { return None };
    if !["UTC", "GMT", "+0000"].contains(&zone) {
        return None;
    }
    let number = |text: &str, most: i64| {
        let fine = !text.is_empty() && text.len() <= 4 && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<i64>().ok().filter(|number| fine && *number <= most)
    };
    let month = i64::try_from(MONTHS.iter().position(|name| *name == month)?).ok()? + 1;
    let (day, year) = (number(day, 31)?, number(year, 9999)?);
    let mut parts = time.split(':');
    let (hour, minute, second) = (number(parts.next()?, 23)?, number(parts.next()?, 59)?, number(parts.next()?, 60)?);
    if parts.next().is_some() || year < 1970 || day == 0 {
        return None;
    }
    // With years that begin in March the leap day is the last day.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second)
}

/// Formats seconds since 1970 as ISO 8601: `2026-11-14T09:57:18Z`. Years have
/// four digits, so anything outside of 1970 to 9999 is `None`.
pub(crate) fn iso8601(seconds: i64) -> Option<String> {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // From 0000-03-01 on, in eras of 400 years; years that begin in March.
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    let year = year + 400 * era;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    (1970..=9999).contains(&year).then(|| format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z"))
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
