//! Boot records as self-contained SVG.

use std::fmt::Write as _;

use firstlight_boot_record::BootRecord;

use crate::rows::{RowStyle, last_us, rows};

const ROW: u32 = 20;
const NAMES: u32 = 250;
const AXIS: u32 = 860;
const TOP: u32 = 56;

fn colour(style: RowStyle) -> &'static str {
    match style {
        RowStyle::Kernel => "#b0b7c3",
        RowStyle::Good => "#3b82f6",
        RowStyle::Serving => "#34a853",
        RowStyle::Bad => "#dc2626",
        RowStyle::Missing => "#f59e0b",
    }
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // XML cannot represent most control characters.
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[expect(clippy::cast_precision_loss, reason = "pixels")]
fn x(us: u64, last: u64) -> f64 {
    f64::from(NAMES) + us as f64 / last as f64 * f64::from(AXIS)
}

/// Returns the distance of two ticks: 1, 2 or 5 times a power of ten, for 5 to 12 ticks.
fn tick(last: u64) -> u64 {
    let mut step: u64 = 1;
    loop {
        for factor in [1, 2, 5] {
            let candidate = step.saturating_mul(factor);
            if last / candidate < 12 {
                return candidate;
            }
        }
        step = step.saturating_mul(10);
    }
}

/// Renders the boot as an SVG document: a bar per row, details as tooltips.
#[must_use]
pub fn svg(record: &BootRecord) -> String {
    let rows = rows(record);
    let last = last_us(&rows);
    let count = u32::try_from(rows.len()).unwrap_or(u32::MAX / ROW - 10);
    let (width, height) = (NAMES + AXIS + 110, TOP + count * ROW + 16);
    let mut out = String::new();
    let _ = writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">"#
    );
    let _ = writeln!(out, r##"<rect width="100%" height="100%" fill="#fff"/>"##);
    let mode = record.mode.as_ref().map_or("-", |mode| mode.name.as_str());
    let _ = writeln!(
        out,
        r#"<text x="10" y="20" font-size="15" font-weight="bold">Boot of kernel {}, mode {}</text>"#,
        escape(&record.kernel.release),
        escape(mode)
    );
    let step = tick(last);
    let mut at = 0;
    while at <= last {
        let x = x(at, last);
        let bottom = height - 12;
        let _ = writeln!(out, r##"<line x1="{x:.1}" y1="44" x2="{x:.1}" y2="{bottom}" stroke="#e5e7eb"/>"##);
        let _ =
            writeln!(out, r##"<text x="{x:.1}" y="40" text-anchor="middle" fill="#6b7280">{} ms</text>"##, at / 1000);
        match at.checked_add(step) {
            Some(next) => at = next,
            None => break,
        }
    }
    let mut y = TOP;
    for row in &rows {
        let middle = y + ROW / 2 + 3;
        let _ = writeln!(out, r#"<text x="{}" y="{middle}" text-anchor="end">{}</text>"#, NAMES - 8, escape(&row.name));
        let worked = row.processor_us.map(|us| format!(" ({}.{} ms of CPU time)", us / 1000, us % 1000 / 100));
        let tooltip = format!("{}: {}{} {}", row.name, row.outcome, worked.unwrap_or_default(), row.detail);
        let _ = writeln!(out, "<g><title>{}</title>", escape(&tooltip));
        if let Some(start) = row.start_us {
            let end = row.end_us.unwrap_or(if row.style == RowStyle::Good { start } else { last });
            let mut part = |from: u64, to: u64, fill: &str| {
                let (left, right) = (x(from, last), x(to.max(from), last));
                let width = (right - left).max(1.5);
                let bar = ROW - 6;
                let top = y + 3;
                let _ = writeln!(
                    out,
                    r#"<rect x="{left:.1}" y="{top}" width="{width:.1}" height="{bar}" rx="2" fill="{fill}"/>"#
                );
            };
            match row.ready_us {
                Some(ready) => {
                    part(start, ready, colour(RowStyle::Good));
                    part(ready, end, colour(row.style));
                }
                None => part(start, end, colour(row.style)),
            }
            let took = row.ready_us.unwrap_or(end).saturating_sub(start);
            let right = x(end.max(start), last) + 5.0;
            let label = format!("{}.{} ms", took / 1000, took % 1000 / 100);
            let _ = writeln!(out, r##"<text x="{right:.1}" y="{middle}" fill="#374151">{label}</text>"##);
        } else {
            let _ = writeln!(
                out,
                r#"<text x="{NAMES}" y="{middle}" fill="{}">{}</text>"#,
                colour(row.style),
                escape(&row.outcome)
            );
        }
        let _ = writeln!(out, "</g>");
        y += ROW;
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::{Outcome, Severity, Unit};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn svg_of_any_record_is_well_formed(name in "\\PC{0,12}", detail in ".{0,20}", start in proptest::option::of(any::<u64>()), end in proptest::option::of(any::<u64>())) {
            let mut record = BootRecord::new("1", 5);
            record.units.push(Unit {
                name, need: vec![], severity: Severity::Optional, deadline_us: 0, start_us: start, ready_us: None,
                end_us: end, processor_us: end, outcome: Outcome::Failed, detail, pci: None,
            });
            let text = svg(&record);
            // Every '<' opens a known tag, and every group is closed.
            for (at, _) in text.match_indices('<') {
                let rest = &text[at + 1..];
                prop_assert!(["svg", "/svg", "rect", "text", "/text", "line", "g>", "/g>", "title", "/title"].iter().any(|t| rest.starts_with(t)), "{}", &rest[..20.min(rest.len())]);
            }
            prop_assert_eq!(text.matches("<g>").count(), text.matches("</g>").count());
            prop_assert!(!text.contains("NaN"));
        }
    }

    #[test]
    fn tick_distances_are_round_numbers() {
        assert_eq!(tick(4_800_000), 500_000);
        assert_eq!(tick(1), 1);
        assert!(tick(u64::MAX) > 0);
    }
}
