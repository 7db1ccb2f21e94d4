//! Per-source rate limits of log lines: a burst and a sustained rate.
//!
//! Pure: no I/O; the time is an argument. Sources do not share budgets. Any user of the guest can
//! create peers (processes that write to `/dev/log`), so the number of tracked peers is bounded,
//! and all peers together also share one budget.

use super::Source;

/// The burst of one source, lines.
pub const BURST: u64 = 200;

/// Time per line at the sustained rate, µs: 20 lines per second.
pub const PER_LINE_US: u64 = 50_000;

/// Time per line of the budget shared by all peers, µs: twice the rate of one source.
const POOL_PER_LINE_US: u64 = PER_LINE_US / 2;

/// Maximum number of tracked peers.
pub const MOST_PEERS: usize = 32;

/// Time from the first dropped line to the report of the dropped lines, µs.
pub const REPORT_DELAY_US: u64 = 5_000_000;

/// A token bucket, stored as the time at which it will be full again, µs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Bucket {
    full_at: u64,
}

impl Bucket {
    fn has(self, now: u64, per_line: u64) -> bool {
        self.full_at.saturating_sub(now) < BURST * PER_LINE_US - (PER_LINE_US - per_line)
    }

    fn take(&mut self, now: u64, per_line: u64) {
        self.full_at = self.full_at.max(now).saturating_add(per_line);
    }
}

#[derive(Debug, Clone)]
struct Row {
    source: Source,
    bucket: Bucket,
    used: u64,
    dropped: Dropped,
}

/// Number of dropped lines that are not reported yet, and the time of the first one, µs.
#[derive(Debug, Clone, Copy, Default)]
struct Dropped {
    lines: u64,
    since: u64,
}

impl Dropped {
    fn add(&mut self, now: u64, lines: u64) {
        if self.lines == 0 {
            self.since = now;
        }
        self.lines = self.lines.saturating_add(lines);
    }

    fn due(self) -> Option<u64> {
        (self.lines > 0).then(|| self.since.saturating_add(REPORT_DELAY_US))
    }
}

/// A report of the dropped lines of one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppedLines {
    /// The source's name.
    pub name: String,
    /// Number of dropped lines.
    pub lines: u64,
    /// Time of the first dropped line, µs.
    pub since: u64,
}

/// The rate limiter of all sources.
#[derive(Debug, Default)]
pub struct Limiter {
    rows: Vec<Row>,
    /// The budget that all peers share.
    pool: Bucket,
    /// Dropped lines of peers that were evicted before the report.
    forgotten: Dropped,
}

fn is_peer(source: &Source) -> bool {
    matches!(source, Source::Peer(_))
}

/// Returns whether two sources share a budget: a process has one budget, regardless of its name,
/// which it can change.
fn same(a: &Source, b: &Source) -> bool {
    match (a, b) {
        (Source::Peer(a), Source::Peer(b)) => (a.pid, a.user) == (b.pid, b.user),
        _ => a == b,
    }
}

impl Limiter {
    /// Returns whether a line is within the rate limit; if not, the line is counted as dropped.
    pub fn take(&mut self, now: u64, source: &Source) -> bool {
        let at = self.row(now, source);
        let pool = is_peer(source).then_some(&mut self.pool);
        let Some(row) = self.rows.get_mut(at) else { return false };
        row.used = now;
        let shared = pool.as_ref().is_none_or(|pool| pool.has(now, POOL_PER_LINE_US));
        if !shared || !row.bucket.has(now, PER_LINE_US) {
            row.dropped.add(now, 1);
            return false;
        }
        row.bucket.take(now, PER_LINE_US);
        if let Some(pool) = pool {
            pool.take(now, POOL_PER_LINE_US);
        }
        true
    }

    fn row(&mut self, now: u64, source: &Source) -> usize {
        if let Some(at) = self.rows.iter().position(|row| same(&row.source, source)) {
            return at;
        }
        if is_peer(source) && self.rows.iter().filter(|row| is_peer(&row.source)).count() >= MOST_PEERS {
            self.evict_one(now);
        }
        let row = Row { source: source.clone(), bucket: Bucket::default(), used: now, dropped: Dropped::default() };
        self.rows.push(row);
        self.rows.len() - 1
    }

    /// Evicts the least recently used peer. The peer gets a full budget if it writes again; the
    /// shared budget is not reset.
    fn evict_one(&mut self, now: u64) {
        let peers = self.rows.iter().enumerate().filter(|(_, row)| is_peer(&row.source));
        let Some(at) = peers.min_by_key(|(_, row)| row.used).map(|(at, _)| at) else { return };
        let row = self.rows.remove(at);
        if row.dropped.lines > 0 {
            let since = row.dropped.since;
            self.forgotten.add(now, row.dropped.lines);
            self.forgotten.since = self.forgotten.since.min(since);
        }
    }

    /// Returns when [`Limiter::take_dropped`] has a report next, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.rows.iter().map(|row| row.dropped).chain([self.forgotten]).filter_map(Dropped::due).min()
    }

    /// Returns and clears the reports of dropped lines that are due; with `all`, all reports.
    pub fn take_dropped(&mut self, now: u64, all: bool) -> Vec<DroppedLines> {
        let mut reported = Vec::new();
        let mut report = |dropped: &mut Dropped, name: &dyn Fn() -> String| {
            if dropped.due().is_some_and(|at| all || at <= now) {
                reported.push(DroppedLines { name: name(), lines: dropped.lines, since: dropped.since });
                *dropped = Dropped::default();
            }
        };
        for row in &mut self.rows {
            let source = &row.source;
            report(&mut row.dropped, &|| source.name());
        }
        report(&mut self.forgotten, &|| "others at /dev/log".to_owned());
        reported
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Peer;
    use proptest::prelude::*;

    fn peer(pid: i32) -> Source {
        Source::Peer(Peer { pid, user: 0, program: format!("p{pid}") })
    }

    fn passed(limiter: &mut Limiter, now: u64, source: &Source, lines: usize) -> u64 {
        (0..lines).map(|_| u64::from(limiter.take(now, source))).sum()
    }

    #[test]
    fn burst_passes_then_sustained_rate_and_excess_is_reported() {
        let mut limiter = Limiter::default();
        assert_eq!(passed(&mut limiter, 0, &Source::Kernel, 1000), BURST);
        assert_eq!(passed(&mut limiter, 2 * PER_LINE_US, &Source::Kernel, 1000), 2);
        assert_eq!(passed(&mut limiter, BURST * PER_LINE_US * 2, &Source::Kernel, 1000), BURST);
        assert_eq!(limiter.take_dropped(REPORT_DELAY_US - 1, false), []);
        assert_eq!(limiter.next_deadline(), Some(REPORT_DELAY_US));
        let reported = limiter.take_dropped(REPORT_DELAY_US, false);
        assert_eq!(reported, [DroppedLines { name: "kernel".into(), lines: 3000 - 2 * BURST - 2, since: 0 }]);
        assert_eq!((limiter.take_dropped(u64::MAX, true), limiter.next_deadline()), (vec![], None));
    }

    #[test]
    fn floods_do_not_drop_driver_lines() {
        let mut limiter = Limiter::default();
        for source in [Source::Kernel, Source::Agent, Source::Daemon("imex"), peer(5)] {
            passed(&mut limiter, 7, &source, 5000);
        }
        for pid in 0..5000 {
            limiter.take(7, &peer(pid));
        }
        assert_eq!(passed(&mut limiter, 7, &Source::Driver, 5000), BURST);
        assert_eq!(passed(&mut limiter, 7, &Source::Daemon("hostengine"), 5000), BURST);
    }

    #[test]
    fn flood_from_many_processes_shares_one_budget() {
        let mut limiter = Limiter::default();
        let all: u64 = (0..10_000).map(|pid| u64::from(limiter.take(3, &peer(pid)))).sum();
        assert!((BURST..=2 * BURST).contains(&all), "{all} lines");
        assert!(limiter.rows.len() <= MOST_PEERS, "{} rows", limiter.rows.len());
        let reported: u64 = limiter.take_dropped(REPORT_DELAY_US + 3, false).iter().map(|row| row.lines).sum();
        assert_eq!(reported, 10_000 - all, "each is counted");
    }

    #[test]
    fn renamed_process_keeps_its_budget() {
        let mut limiter = Limiter::default();
        passed(&mut limiter, 0, &peer(5), 1000);
        let renamed = Source::Peer(Peer { pid: 5, user: 0, program: "other".into() });
        assert_eq!(passed(&mut limiter, 0, &renamed, 10), 0);
    }

    proptest! {
        #[test]
        fn any_sequence_stays_within_limits(
            walk in proptest::collection::vec((0u64..400_000, 0u8..6, 0i32..100), 1..400),
        ) {
            let mut limiter = Limiter::default();
            let (mut now, mut peers, mut driver, mut came, mut went, mut reported) = (0, 0u64, 0u64, 0u64, 0u64, 0u64);
            for (pause, kind, pid) in walk {
                now += pause;
                let source = match kind {
                    0 => Source::Kernel,
                    1 => Source::Driver,
                    2 => Source::Daemon("imex"),
                    _ => peer(pid),
                };
                for _ in 0..20 {
                    came += 1;
                    let passes = limiter.take(now, &source);
                    went += u64::from(passes);
                    match kind {
                        1 => driver += u64::from(passes),
                        3.. => peers += u64::from(passes),
                        _ => {}
                    }
                }
                reported += limiter.take_dropped(now, false).iter().map(|row| row.lines).sum::<u64>();
                prop_assert!(limiter.rows.len() <= MOST_PEERS + 3);
                prop_assert!(driver <= BURST + now / PER_LINE_US + 1);
                prop_assert!(peers <= 2 * BURST + now / POOL_PER_LINE_US + 1, "{peers}");
                prop_assert!(limiter.next_deadline().is_none_or(|at| at > now));
            }
            reported += limiter.take_dropped(now, true).iter().map(|row| row.lines).sum::<u64>();
            prop_assert_eq!(came, went + reported, "each line is forwarded or reported");
        }
    }
}
