//! How many lines each source may have: a burst, and so many per second.
//!
//! Pure: time comes in. A source that has used up its budget takes nothing from
//! another's. Sources that anybody can make, the processes that write to
//! `/dev/log`, are bounded in number and share a budget beside their own.

use super::Source;

/// Lines that one source may have at once.
pub const BURST: u64 = 200;

/// How long one line uses up, µs: what may come in the long run is the inverse.
pub const PER_LINE_US: u64 = 50_000;

/// All peers together may have twice that.
const POOL_PER_LINE_US: u64 = PER_LINE_US / 2;

/// Peers that are remembered.
pub const MOST_PEERS: usize = 32;

/// How long it takes until somebody is told of lines that were left out, µs.
pub const TELL_US: u64 = 5_000_000;

/// A token bucket, by the time at which it will be full again.
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
    missing: Missing,
}

/// Lines left out and not told yet.
#[derive(Debug, Clone, Copy, Default)]
struct Missing {
    lines: u64,
    since: u64,
}

impl Missing {
    fn add(&mut self, now: u64, lines: u64) {
        if self.lines == 0 {
            self.since = now;
        }
        self.lines = self.lines.saturating_add(lines);
    }

    fn due(self) -> Option<u64> {
        (self.lines > 0).then(|| self.since.saturating_add(TELL_US))
    }
}

/// Lines of one source that were left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Whose.
    pub name: String,
    /// How many.
    pub lines: u64,
    /// Since when, µs.
    pub since: u64,
}

/// All budgets.
#[derive(Debug, Default)]
pub struct Limiter {
    rows: Vec<Row>,
    /// What all peers share.
    pool: Bucket,
    /// Of peers that are forgotten.
    forgotten: Missing,
}

fn is_peer(source: &Source) -> bool {
    matches!(source, Source::Peer(_))
}

/// Whether both have one budget: a process has one whatever it calls itself.
fn same(a: &Source, b: &Source) -> bool {
    match (a, b) {
        (Source::Peer(a), Source::Peer(b)) => (a.pid, a.user) == (b.pid, b.user),
        _ => a == b,
    }
}

impl Limiter {
    /// Whether a line that comes now is handed on; else it is counted.
    pub fn take(&mut self, now: u64, source: &Source) -> bool {
        let at = self.row(now, source);
        let pool = is_peer(source).then_some(&mut self.pool);
        let Some(row) = self.rows.get_mut(at) else { return false };
        row.used = now;
        let shared = pool.as_ref().is_none_or(|pool| pool.has(now, POOL_PER_LINE_US));
        if !shared || !row.bucket.has(now, PER_LINE_US) {
            row.missing.add(now, 1);
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
            self.forget_one(now);
        }
        let row = Row { source: source.clone(), bucket: Bucket::default(), used: now, missing: Missing::default() };
        self.rows.push(row);
        self.rows.len() - 1
    }

    /// Forgets the peer that has been silent for longest. Its budget begins anew
    /// should it come again; the pool's does not.
    fn forget_one(&mut self, now: u64) {
        let peers = self.rows.iter().enumerate().filter(|(_, row)| is_peer(&row.source));
        let Some(at) = peers.min_by_key(|(_, row)| row.used).map(|(at, _)| at) else { return };
        let row = self.rows.remove(at);
        if row.missing.lines > 0 {
            let since = row.missing.since;
            self.forgotten.add(now, row.missing.lines);
            self.forgotten.since = self.forgotten.since.min(since);
        }
    }

    /// When [`Limiter::left_out`] has something, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.rows.iter().map(|row| row.missing).chain([self.forgotten]).filter_map(Missing::due).min()
    }

    /// Who had lines left out, where that is due, or with `all` at once. They are told once.
    pub fn left_out(&mut self, now: u64, all: bool) -> Vec<LeftOut> {
        let mut told = Vec::new();
        let mut tell = |missing: &mut Missing, name: &dyn Fn() -> String| {
            if missing.due().is_some_and(|at| all || at <= now) {
                told.push(LeftOut { name: name(), lines: missing.lines, since: missing.since });
                *missing = Missing::default();
            }
        };
        for row in &mut self.rows {
            let source = &row.source;
            tell(&mut row.missing, &|| source.name());
        }
        tell(&mut self.forgotten, &|| "others at /dev/log".to_owned());
        told
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
    fn a_burst_passes_then_a_trickle_and_the_rest_is_told() {
        let mut limiter = Limiter::default();
        assert_eq!(passed(&mut limiter, 0, &Source::Kernel, 1000), BURST);
        assert_eq!(passed(&mut limiter, 2 * PER_LINE_US, &Source::Kernel, 1000), 2);
        assert_eq!(passed(&mut limiter, BURST * PER_LINE_US * 2, &Source::Kernel, 1000), BURST);
        assert_eq!(limiter.left_out(TELL_US - 1, false), []);
        assert_eq!(limiter.next_deadline(), Some(TELL_US));
        let told = limiter.left_out(TELL_US, false);
        assert_eq!(told, [LeftOut { name: "kernel".into(), lines: 3000 - 2 * BURST - 2, since: 0 }]);
        assert_eq!((limiter.left_out(u64::MAX, true), limiter.next_deadline()), (vec![], None));
    }

    #[test]
    fn nobodys_flood_takes_the_drivers_errors_away() {
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
    fn a_flood_from_many_processes_is_one_flood() {
        let mut limiter = Limiter::default();
        let all: u64 = (0..10_000).map(|pid| u64::from(limiter.take(3, &peer(pid)))).sum();
        assert!((BURST..=2 * BURST).contains(&all), "{all} lines");
        assert!(limiter.rows.len() <= MOST_PEERS, "{} rows", limiter.rows.len());
        let told: u64 = limiter.left_out(TELL_US + 3, false).iter().map(|row| row.lines).sum();
        assert_eq!(told, 10_000 - all, "each is counted");
    }

    #[test]
    fn a_name_is_no_new_budget() {
        let mut limiter = Limiter::default();
        passed(&mut limiter, 0, &peer(5), 1000);
        let renamed = Source::Peer(Peer { pid: 5, user: 0, program: "other".into() });
        assert_eq!(passed(&mut limiter, 0, &renamed, 10), 0);
    }

    proptest! {
        #[test]
        fn whatever_comes_stays_within_its_bounds(
            walk in proptest::collection::vec((0u64..400_000, 0u8..6, 0i32..100), 1..400),
        ) {
            let mut limiter = Limiter::default();
            let (mut now, mut peers, mut driver, mut came, mut went, mut told) = (0, 0u64, 0u64, 0u64, 0u64, 0u64);
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
                told += limiter.left_out(now, false).iter().map(|row| row.lines).sum::<u64>();
                prop_assert!(limiter.rows.len() <= MOST_PEERS + 3);
                prop_assert!(driver <= BURST + now / PER_LINE_US + 1);
                prop_assert!(peers <= 2 * BURST + now / POOL_PER_LINE_US + 1, "{peers}");
                prop_assert!(limiter.next_deadline().is_none_or(|at| at > now));
            }
            told += limiter.left_out(now, true).iter().map(|row| row.lines).sum::<u64>();
            prop_assert_eq!(came, went + told, "each line is handed on or told of");
        }
    }
}
