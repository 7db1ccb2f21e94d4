//! Boot records as a table for a terminal.

use std::fmt::Write as _;

use firstlight_boot_record::BootRecord;

use crate::critical_path::critical_path;
use crate::rows::{Row, RowStyle, last_us, rows};

/// Width of the bar, columns.
const MAX_BAR: usize = 40;

/// Below this width the bar is left out.
const MIN_BAR: usize = 10;

/// Least width of the detail, columns.
const MIN_DETAIL: usize = 24;

/// Longest detail where the width is unlimited, characters.
const MAX_DETAIL: usize = 160;

/// How a boot is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TableOptions {
    /// Width of the terminal, columns; `None` if the output is not a terminal.
    pub width: Option<usize>,
    /// Whether to list skipped units.
    pub all: bool,
}

impl TableOptions {
    /// Returns options for standard output: the width of its terminal, if it is one.
    #[must_use]
    pub fn stdout(all: bool) -> Self {
        let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
        Self { width: size.map(|size| usize::from(size.ws_col)).filter(|width| *width > 0), all }
    }
}

fn milliseconds(us: Option<u64>) -> String {
    us.map_or_else(|| "-".to_owned(), |us| format!("{}.{}", us / 1000, us % 1000 / 100))
}

/// Returns the duration until a row was ready or ended.
fn took(row: &Row) -> Option<u64> {
    let end = row.ready_us.or(row.end_us);
    row.start_us.zip(end).map(|(start, end)| end.saturating_sub(start))
}

/// Returns the column of a time, 0 to `bar - 1`.
fn column(us: u64, last: u64, bar: usize) -> usize {
    let most = bar.saturating_sub(1);
    (u128::from(us) * most as u128 / u128::from(last)).try_into().unwrap_or(most).min(most)
}

fn bar(row: &Row, last: u64, width: usize) -> String {
    let Some(start) = row.start_us else {
        return " ".repeat(width);
    };
    let begin = column(start, last, width);
    let ready = row.ready_us.map(|us| column(us, last, width));
    let unfinished = if row.style == RowStyle::Good { begin } else { width.saturating_sub(1) };
    let end = row.end_us.map_or(unfinished, |us| column(us, last, width));
    let mark = match row.style {
        RowStyle::Kernel => ':',
        RowStyle::Good => '=',
        RowStyle::Serving => '-',
        RowStyle::Bad => '!',
        RowStyle::Missing => '?',
    };
    (0..width)
        .map(|at| match at {
            at if at < begin || at > end.max(begin) => ' ',
            at if ready.is_some_and(|ready| at <= ready) => '=',
            _ => mark,
        })
        .collect()
}

/// Truncates a text to one line of at most `most` characters, without control characters.
fn shorten(text: &str, most: usize) -> String {
    let plain = || text.chars().filter(|c| !c.is_control());
    if plain().count() <= most {
        return plain().collect();
    }
    let mut line: String = plain().take(most.saturating_sub(1)).collect();
    line.push('…');
    line
}

/// The widths of columns.
struct Layout {
    name: usize,
    bar: usize,
    detail: usize,
}

/// Width of the columns between name and bar: mark, four times and their spaces.
const TIMES: usize = 2 + 4 * 9;

/// Width of the outcome and its spaces.
const OUTCOME: usize = 12;

impl Layout {
    fn new(name: usize, width: Option<usize>) -> Self {
        let Some(width) = width else { return Self { name, bar: MAX_BAR, detail: MAX_DETAIL } };
        let left = width.saturating_sub(name + TIMES + OUTCOME);
        // The detail has half of what is left, the bar the rest.
        let bar = (left / 2).min(MAX_BAR).min(left.saturating_sub(MIN_DETAIL));
        let bar = if bar < MIN_BAR { 0 } else { bar };
        Self { name, bar, detail: left.saturating_sub(bar + 2) }
    }
}

/// Renders the boot as a table: one line per row, times in milliseconds, START since the kernel's start. CPU is the CPU
/// time of the unit's thread, WAIT the rest of its duration: the unit waited for a device, the kernel, another process or
/// a processor. A line below has the total and the critical path, marked `*` in the table.
#[must_use]
pub fn table(record: &BootRecord, options: TableOptions) -> String {
    let all_rows = rows(record);
    let last = last_us(&all_rows);
    let (hidden, rows): (Vec<Row>, Vec<Row>) =
        all_rows.into_iter().partition(|row| row.outcome == "skipped" && !options.all);
    let path = critical_path(record);
    let name = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(4).max(4);
    let layout = Layout::new(name, options.width);
    let mut text = String::new();
    push_line(&mut text, &layout, "UNIT", " ", ["START ms", "TOOK ms", "CPU ms", "WAIT ms"], "", "OUTCOME", "DETAIL");
    for row in &rows {
        let took = took(row);
        let waited = took.zip(row.processor_us).map(|(took, cpu)| took.saturating_sub(cpu));
        let times = [row.start_us, took, row.processor_us, waited].map(milliseconds);
        let mark = if path.contains(&row.name.as_str()) { "*" } else { " " };
        let bar = bar(row, last, layout.bar);
        let times = times.each_ref().map(String::as_str);
        push_line(&mut text, &layout, &row.name, mark, times, &bar, &row.outcome, &row.detail);
    }
    if !hidden.is_empty() {
        let _ =
            writeln!(text, "{} units that do not apply to this guest were skipped (--all lists them)", hidden.len());
    }
    text.push_str(&summary(record, &path));
    if layout.bar > 0 {
        text.push_str(": kernel  = running  - serving  ! failed  ? not finished  * critical path\n");
    }
    if let Some(failure) = &record.failure {
        let _ = writeln!(text, "boot failed in {}: {} (then: {})", failure.unit, failure.detail, failure.action);
    }
    text
}

#[expect(clippy::too_many_arguments, reason = "the columns of a line")]
fn push_line(
    text: &mut String,
    layout: &Layout,
    name: &str,
    mark: &str,
    times: [&str; 4],
    bar: &str,
    outcome: &str,
    detail: &str,
) {
    let width = layout.name;
    let [start, took, cpu, waited] = times;
    let mut line = format!("{name:width$} {mark}{start:>9}{took:>9}{cpu:>9}{waited:>9} ");
    if layout.bar > 0 {
        let width = layout.bar;
        let _ = write!(line, " {bar:width$}");
    }
    let _ = write!(line, " {outcome:10}{}", shorten(detail, layout.detail));
    let _ = writeln!(text, "{}", line.trim_end());
}

/// Returns the line with the total and the critical path.
fn summary(record: &BootRecord, path: &[&str]) -> String {
    let last = path.last().and_then(|name| record.unit(name));
    let Some(end) = last.and_then(|unit| unit.ready_us.or(unit.end_us)) else { return String::new() };
    let own = end.saturating_sub(record.pid1_start_us);
    format!(
        "total {} ms: kernel {} ms, then {} ms to {}; critical path: {}\n",
        milliseconds(Some(end)),
        milliseconds(Some(record.pid1_start_us)),
        milliseconds(Some(own)),
        path.last().unwrap_or(&"-"),
        path.join(" > ")
    )
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
        let text = table(&sample(), TableOptions { width: None, all: true });
        let names: Vec<_> = text.lines().skip(1).take(7).map(|line| line[..13].trim().to_owned()).collect();
        assert_eq!(names, ["kernel", "mounts", "agent", "late", "container c1", "power-off", "never"]);
        let agent = text.lines().find(|line| line.starts_with("agent")).unwrap();
        assert!(agent.contains("1010.0") && agent.contains(" 40.0 "), "{agent}");
        assert!(agent.contains("=-"), "running, then serving: {agent}");
        let mounts = text.lines().find(|line| line.starts_with("mounts")).unwrap();
        assert!(mounts.contains(" 2.2      0.5      1.6  "), "duration, CPU time and the rest: {mounts}");
        let late = text.lines().find(|line| line.starts_with("late")).unwrap();
        assert!(late.contains("!!!") && late.contains("failed") && !late.contains('\u{7}'), "{late}");
    }

    #[test]
    fn skipped_units_are_counted_and_the_critical_path_is_marked() {
        let text = table(&sample(), TableOptions::default());
        assert!(!text.contains("never"), "{text}");
        assert!(text.contains("\n1 units that do not apply to this guest were skipped (--all lists them)\n"), "{text}");
        let marked: Vec<_> = text.lines().filter(|line| line.get(13..14) == Some("*")).collect();
        assert_eq!(marked.len(), 3, "{text}");
        let total =
            "\ntotal 2000.0 ms: kernel 1000.0 ms, then 1000.0 ms to late; critical path: mounts > agent > late\n";
        assert!(text.contains(total), "{text}");
    }

    #[test]
    fn lines_fit_the_terminal() {
        let mut record = sample();
        record.units[1].detail = "x".repeat(300);
        for width in [72, 80, 100, 120, 200] {
            let text = table(&record, TableOptions { width: Some(width), all: true });
            let rows = text.lines().take(8);
            let widest = rows.map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= width, "{widest} of {width}:\n{text}");
            assert_eq!(text.contains("= running"), width >= 100, "{text}");
        }
        let unlimited = table(&record, TableOptions::default());
        assert!(unlimited.lines().any(|line| line.ends_with('…')), "{unlimited}");
    }

    #[test]
    fn failure_is_the_last_line() {
        let mut record = sample();
        record.failure =
            Some(Failure { unit: "late".into(), at_us: 1, detail: "it broke".into(), action: "poweroff".into() });
        assert!(table(&record, TableOptions::default()).ends_with("boot failed in late: it broke (then: poweroff)\n"));
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
        assert_eq!(bar(&row, u64::MAX, 40).chars().count(), 40);
        let mut record = sample();
        record.units[1].end_us = Some(u64::MAX);
        assert!(!table(&record, TableOptions::default()).is_empty());
    }
}
