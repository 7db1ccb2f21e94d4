//! Metrics in Prometheus' text format, served over HTTP.

mod http;

use std::fmt::Write as _;
use std::time::Duration;

pub use http::{Address, Listener, serve};

use crate::change_stats::{BOUNDS_MS, Changes, KINDS, OUTCOMES};
use crate::view::View;

/// A metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// The name after `firstlight_fabric_`.
    pub name: &'static str,
    /// `gauge`, `counter` or `histogram`.
    pub kind: &'static str,
    /// The labels, with their values.
    pub labels: &'static str,
    /// The help text, with the unit.
    pub help: &'static str,
}

const fn gauge(name: &'static str, labels: &'static str, help: &'static str) -> Metric {
    Metric { name, kind: "gauge", labels, help }
}

/// All metrics, in the order of the output.
pub const METRICS: &[Metric] = &[
    gauge("manager_up", "", "1 if the last poll of the fabric manager succeeded"),
    gauge("list_age_seconds", "", "Age of the fabric manager's list; absent before the first"),
    gauge("partitions", "state: active, free, changing, unavailable", "Partitions that the fabric manager lists"),
    gauge("free_partitions", "gpus", "Free partitions by size"),
    gauge("largest_free_gpus", "", "GPUs of the largest free partition"),
    gauge("unowned_partitions", "", "Active partitions without a recorded owner"),
    gauge("quarantined_gpus", "", "GPUs excluded from allocation"),
    gauge("faulty_switches", "", "NVSwitches with a fatal SXid that were not released"),
    gauge("outage", "", "1 if tenants' partitions were lost, until reconciliation"),
    gauge("module_map_verified", "", "1 if the PCI address of every GPU was measured"),
    Metric {
        name: "changes_total",
        kind: "counter",
        labels: "kind: activate, deactivate; outcome: done, failed, unknown",
        help: "Changes since the daemon's start",
    },
    Metric { name: "change_duration_seconds", kind: "histogram", labels: "kind", help: "Durations of changes" },
    gauge("change_in_progress_seconds", "", "Elapsed time of the change in progress; 0 if none"),
    gauge("journal_bytes", "", "Length of the journal file"),
    gauge("build_info", "version", "1, labelled with the daemon's version"),
];

const PREFIX: &str = "firstlight_fabric_";

impl Metric {
    /// Returns the metric's row in the document's table.
    #[must_use]
    pub fn row(&self) -> String {
        let Self { name, kind, labels, help } = self;
        format!("| `{PREFIX}{name}` | {kind} | {labels} | {help} |\n")
    }
}

/// Returns all metrics in Prometheus' text format.
#[must_use]
pub fn text(view: &View) -> String {
    let mut out = String::new();
    for metric in METRICS {
        let name = format!("{PREFIX}{}", metric.name);
        // Writing to a String cannot fail.
        let _ = writeln!(out, "# HELP {name} {}\n# TYPE {name} {}", metric.help, metric.kind);
        for (labels, value) in samples(view, metric.name) {
            let _ = writeln!(out, "{name}{labels} {value}");
        }
    }
    out
}

fn seconds(duration: Duration) -> String {
    format!("{:.3}", duration.as_secs_f64())
}

/// Returns a metric's samples: the labels or name suffix, and the value.
fn samples(view: &View, name: &str) -> Vec<(String, String)> {
    let one = |value: u64| vec![(String::new(), value.to_string())];
    let number = |value: usize| u64::try_from(value).unwrap_or(u64::MAX);
    match name {
        "manager_up" => one(u64::from(view.polled_at.is_some() && view.poll_error.is_none())),
        "list_age_seconds" => {
            view.polled_at.iter().map(|polled_at| (String::new(), seconds(polled_at.elapsed()))).collect()
        }
        "partitions" => partitions(view),
        "free_partitions" => {
            let sizes = view.free().by_size;
            sizes.iter().map(|(size, count)| (format!("{{gpus=\"{size}\"}}"), count.to_string())).collect()
        }
        "largest_free_gpus" => one(view.free().largest.into()),
        "unowned_partitions" => one(number(view.fabric.unowned(&view.state).len())),
        "quarantined_gpus" => one(number(view.state.quarantined.len())),
        "faulty_switches" => one(number(view.state.faulty_switches.len())),
        "outage" => one(u64::from(view.state.outage.is_some())),
        "module_map_verified" => {
            let verification = view.module_map.verification(&view.fabric, view.state.quarantined());
            one(u64::from(view.polled_at.is_some() && verification.is_verified()))
        }
        "changes_total" => {
            KINDS.iter().zip(&view.change_stats.kinds).flat_map(|(kind, changes)| counts(kind, changes)).collect()
        }
        "change_duration_seconds" => {
            KINDS.iter().zip(&view.change_stats.kinds).flat_map(|(kind, changes)| histogram(kind, changes)).collect()
        }
        "change_in_progress_seconds" => {
            let since = view.in_progress.map(|since| since.elapsed()).unwrap_or_default();
            vec![(String::new(), seconds(since))]
        }
        "journal_bytes" => one(view.journal_end),
        "build_info" => vec![(format!("{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), "1".to_owned())],
        _ => Vec::new(),
    }
}

fn partitions(view: &View) -> Vec<(String, String)> {
    let states = ["active", "free", "changing", "unavailable"];
    let state = |one: &firstlight_partitions::Partition| {
        let (is_changing, is_active) = (view.is_changing(one.id), view.fabric.active.contains(&one.id));
        match (is_changing, is_active, view.is_free(one.gpus)) {
            (true, ..) => "changing",
            (_, true, _) => "active",
            (.., true) => "free",
            _ => "unavailable",
        }
    };
    let all: Vec<&str> = view.fabric.table.partitions().iter().map(state).collect();
    let sample = |name: &&str| {
        let count = all.iter().filter(|one| *one == name).count();
        (format!("{{state=\"{name}\"}}"), count.to_string())
    };
    states.iter().map(sample).collect()
}

fn counts(kind: &str, changes: &Changes) -> Vec<(String, String)> {
    let sample =
        |(outcome, count): (&&str, &u64)| (format!("{{kind=\"{kind}\",outcome=\"{outcome}\"}}"), count.to_string());
    OUTCOMES.iter().zip(&changes.outcomes).map(sample).collect()
}

fn histogram(kind: &str, changes: &Changes) -> Vec<(String, String)> {
    let mut so_far = 0;
    let mut samples = Vec::new();
    let bounds = BOUNDS_MS.iter().map(|most| seconds(Duration::from_millis(*most)));
    for (bound, count) in bounds.chain(["+Inf".to_owned()]).zip(&changes.durations) {
        so_far += count;
        samples.push((format!("_bucket{{kind=\"{kind}\",le=\"{bound}\"}}"), so_far.to_string()));
    }
    samples.push((format!("_sum{{kind=\"{kind}\"}}"), seconds(changes.total)));
    samples.push((format!("_count{{kind=\"{kind}\"}}"), so_far.to_string()));
    samples
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::State;

    #[test]
    fn every_metric_is_exported_and_documented() {
        let view = View::new(State::default());
        let text = text(&view);
        for metric in METRICS {
            let name = format!("{PREFIX}{}", metric.name);
            assert!(
                text.contains(&format!("# HELP {name} ")) && text.contains(&format!("# TYPE {name} {}\n", metric.kind))
            );
            let is_empty = ["list_age_seconds", "free_partitions"].contains(&metric.name);
            let has_sample = text.lines().any(|line| line.starts_with(&name) && !line.starts_with('#'));
            assert_eq!(has_sample, !is_empty, "{name}");
        }
        let document = include_str!("../../../docs/fabric.md");
        let table: String = METRICS.iter().map(Metric::row).collect();
        assert!(document.contains(&table), "docs/fabric.md is to have:\n{table}");
    }

    #[test]
    fn histogram_buckets_are_cumulative() {
        let mut changes = Changes { total: Duration::from_millis(1500), ..Changes::default() };
        (changes.durations[0], changes.durations[3], changes.durations[10]) = (2, 1, 4);
        let samples = histogram("activate", &changes);
        let at = |labels: &str| samples.iter().find(|(name, _)| name.contains(labels)).map(|(_, value)| value.as_str());
        assert_eq!((at("le=\"0.005\""), at("le=\"0.100\""), at("le=\"60.000\"")), (Some("2"), Some("3"), Some("3")));
        assert_eq!((at("le=\"+Inf\""), at("_count"), at("_sum")), (Some("7"), Some("7"), Some("1.500")));
    }
}
