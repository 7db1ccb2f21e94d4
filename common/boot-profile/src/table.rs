//! Boot records as a table for a terminal.

use std::fmt::Write as _;

use firstlight_boot_record::BootRecord;

use crate::rows::{Row, RowStyle, last_us, rows};

/// Width of the bar, columns.
const BAR: u64 = 40;

/// Longest detail shown, characters.
const DETAIL: usize = 90;

fn milliseconds(us: Option<u64>) -> String {
    us.map_or_else(|| "-".to_owned(), |us| format!("{}.{}", us / 1000, us % 1000 / 100))
}

fn took(row: &Row) -> String {
    let end = row.ready_us.or(row.end_us);
    milliseconds(row.start_us.zip(end).map(|(start, end)| end.saturating_sub(start)))
}

/// Returns the column of a time, 0 to `BAR - 1`.
fn column(us: u64, last: u64) -> u64 {
    (u128::from(us) * u128::from(BAR - 1) / u128::from(last)).try_into().unwrap_or(BAR - 1)
}

fn bar(row: &Row, last: u64) -> String {
    let Some(start) = row.start_us else {
        return " ".repeat(usize::try_from(BAR).unwrap_or_default());
    };
    let begin = column(start, last);
    let ready = row.ready_us.map(|us| column(us, last));
    let end = row.end_us.map_or(if row.style == RowStyle::Good { begin } else { BAR - 1 }, |us| column(us, last));
    let mark = match row.style {
        RowStyle::Kernel => ':',
        RowStyle::Good => '=',
        RowStyle::Serving => '-',
        RowStyle::Bad => '!',
        RowStyle::Missing => '?',
    };
    (0..BAR)
        .map(|at| match at {
            at if at < begin || at > end.max(begin) => ' ',
            at if ready.is_some_and(|ready| at <= ready) => '=',
            _ => mark,
        })
        .collect()
}

/// Truncates a detail to one line without control characters.
fn shorten(text: &str) -> String {
    let mut line: String = text.chars().filter(|c| !c.is_control()).take(DETAIL).collect();
    if text.chars().count() > DETAIL {
        line.push('…');
    }
    line
}

/// Renders the boot as a table: one line per row, times in milliseconds since the
/// kernel's start. `=` running, `-` serving, `!` failed, `?` never ended. CPU is
/// the CPU time of the unit's thread.
#[must_use]
pub fn table(record: &BootRecord) -> String {
    let rows = rows(record);
    let last = last_us(&rows);
    let width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(4).max(4);
    let mut text = String::new();
    let bar_width = usize::try_from(BAR).unwrap_or_default();
    let _ = writeln!(
        text,
        "{:width$} {:>9} {:>9} {:>9} {:>7}  {:bar_width$}  {:9} DETAIL",
        "UNIT", "START ms", "READY ms", "TOOK ms", "CPU ms", "", "OUTCOME"
    );
    for row in &rows {
        let _ = writeln!(
            text,
            "{:width$} {:>9} {:>9} {:>9} {:>7}  {}  {:9} {}",
            row.name,
            milliseconds(row.start_us),
            milliseconds(row.ready_us.or(row.end_us)),
            took(row),
            milliseconds(row.processor_us),
            bar(row, last),
            row.outcome,
            shorten(&row.detail)
        );
    }
    if let Some(failure) = &record.failure {
        let _ = writeln!(text, "boot failed in {}: {} (then: {})", failure.unit, failure.detail, failure.action);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::Row;
    use firstlight_boot_record::{Event, Failure, Outcome, Severity, Unit};

    pub(crate) fn sample() -> BootRecord {
        let mut record = BootRecord::new("0.1.0", 1_000_000);
        let unit = |name: &str, start: u64, ready: Option<u64>, end: Option<u64>, outcome, detail: &str| Unit {
            name: name.into(),
            need: vec![],
            severity: Severity::Required,
            deadline_us: 1,
            start_us: (outcome != Outcome::Skipped).then_some(start),
            ready_us: ready,
            end_us: end,
            processor_us: end.map(|end| (end - start) / 4),
            outcome,
            detail: detail.into(),
            pci: None,
        };
        record.units = vec![
            unit("late", 1_500_000, None, Some(2_000_000), Outcome::Failed, "it <broke> & \"why\"\u{7}"),
            unit("mounts", 1_000_100, None, Some(1_002_300), Outcome::Ok, ""),
            unit("agent", 1_010_000, Some(1_050_000), None, Outcome::Running, "pid 7"),
            unit("never", 0, None, None, Outcome::Skipped, "needs late"),
        ];
        let event = |at_us, kind: &str, object: &str, detail: &str| Event {
            at_us,
            kind: kind.into(),
            object: object.into(),
            detail: detail.into(),
        };
        record.events = vec![
            event(2_100_000, "container-started", "c1", ""),
            event(2_200_000, "container-exited", "c1", "exit code 0"),
            event(3_000_000, "power-off", "", "asked"),
        ];
        record
    }

    #[test]
    fn rows_are_in_time_order_with_their_times() {
        let text = table(&sample());
        let names: Vec<_> =
            text.lines().skip(1).map(|line| line.split("  ").next().unwrap().trim().to_owned()).collect();
        assert_eq!(names, ["kernel", "mounts", "agent", "late", "container c1", "power-off", "never"]);
        let agent = text.lines().find(|line| line.starts_with("agent")).unwrap();
        assert!(agent.contains("1010.0") && agent.contains("1050.0") && agent.contains(" 40.0 "), "{agent}");
        assert!(agent.contains("=-"), "running, then serving: {agent}");
        let mounts = text.lines().find(|line| line.starts_with("mounts")).unwrap();
        assert!(mounts.contains(" 2.2     0.5  "), "duration and CPU time: {mounts}");
        let late = text.lines().find(|line| line.starts_with("late")).unwrap();
        assert!(late.contains("!!!") && late.contains("failed") && !late.contains('\u{7}'), "{late}");
    }

    #[test]
    fn failure_is_the_last_line() {
        let mut record = sample();
        record.failure =
            Some(Failure { unit: "late".into(), at_us: 1, detail: "it broke".into(), action: "poweroff".into() });
        assert!(table(&record).ends_with("boot failed in late: it broke (then: poweroff)\n"));
    }

    #[test]
    fn absurd_times_do_not_panic() {
        let row = Row {
            name: "x".into(),
            start_us: Some(u64::MAX),
            ready_us: Some(0),
            end_us: Some(1),
            processor_us: None,
            style: RowStyle::Good,
            outcome: String::new(),
            detail: String::new(),
        };
        assert_eq!(bar(&row, u64::MAX).chars().count(), 40);
        let mut record = sample();
        record.units[1].end_us = Some(u64::MAX);
        assert!(!table(&record).is_empty());
    }
}
