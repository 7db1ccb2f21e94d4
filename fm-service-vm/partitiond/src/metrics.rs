//! Metrics in Prometheus' text format, served over HTTP.

mod http;

use std::time::Duration;

use firstlight_metrics_text::{Family, Kind, Text, Value};
pub use http::{Address, Listener, serve};

use crate::change_stats::{BOUNDS_MS, Changes, KINDS, OUTCOMES};
use crate::view::View;

/// A metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// The name after `firstlight_fabric_`.
    pub name: &'static str,
    /// The type.
    pub kind: Kind,
    /// The labels, with their values.
    pub labels: &'static str,
    /// The help text, with the unit.
    pub help: &'static str,
}

const fn gauge(name: &'static str, labels: &'static str, help: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, labels, help }
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
        kind: Kind::Counter,
        labels: "kind: activate, deactivate; outcome: done, failed, unknown",
        help: "Changes since the daemon's start",
    },
    Metric { name: "change_duration_seconds", kind: Kind::Histogram, labels: "kind", help: "Durations of changes" },
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
        format!("| `{PREFIX}{name}` | {} | {labels} | {help} |\n", kind.name())
    }
}

/// Returns all metrics in Prometheus' text format.
#[must_use]
pub fn text(view: &View) -> String {
    let mut out = Text::default();
    for metric in METRICS {
        let name = format!("{PREFIX}{}", metric.name);
        let mut family = out.family(&name, metric.kind, metric.help);
        // Metrics without samples are described too.
        family.header();
        write_samples(&mut family, view, metric.name);
    }
    out.finish()
}

/// Writes the samples of the metric `name`.
fn write_samples(family: &mut Family<'_>, view: &View, name: &str) {
    let mut one = |value: Value| family.sample(&[], value);
    match name {
        "manager_up" => one((view.polled_at.is_some() && view.poll_error.is_none()).into()),
        "list_age_seconds" => view.polled_at.iter().for_each(|polled_at| one(polled_at.elapsed().into())),
        "partitions" => write_partitions(family, view),
        "free_partitions" => {
            for (size, count) in &view.free().by_size {
                family.sample(&[("gpus", &size.to_string())], *count);
            }
        }
        "largest_free_gpus" => one(view.free().largest.into()),
        "unowned_partitions" => one(view.fabric.unowned(&view.state).len().into()),
        "quarantined_gpus" => one(view.state.quarantined.len().into()),
        "faulty_switches" => one(view.state.faulty_switches.len().into()),
        "outage" => one(view.state.outage.is_some().into()),
        "module_map_verified" => {
            let verification = view.module_map.verification(&view.fabric, view.state.quarantined());
            one((view.polled_at.is_some() && verification.is_verified()).into());
        }
        "changes_total" => write_counts(family, view),
        "change_duration_seconds" => {
            for (kind, changes) in KINDS.iter().zip(&view.change_stats.kinds) {
                write_histogram(family, kind, changes);
            }
        }
        "change_in_progress_seconds" => {
            one(view.in_progress.map(|since| since.elapsed()).unwrap_or_default().into());
        }
        "journal_bytes" => one(view.journal_end.into()),
        "build_info" => family.sample(&[("version", env!("CARGO_PKG_VERSION"))], 1_u64),
        _ => {}
    }
}

fn write_partitions(family: &mut Family<'_>, view: &View) {
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
    for name in ["active", "free", "changing", "unavailable"] {
        family.sample(&[("state", name)], all.iter().filter(|one| **one == name).count());
    }
}

fn write_counts(family: &mut Family<'_>, view: &View) {
    for (kind, changes) in KINDS.iter().zip(&view.change_stats.kinds) {
        for (outcome, count) in OUTCOMES.iter().zip(&changes.outcomes) {
            family.sample(&[("kind", kind), ("outcome", outcome)], *count);
        }
    }
}

fn write_histogram(family: &mut Family<'_>, kind: &str, changes: &Changes) {
    let bounds = BOUNDS_MS.map(|most| Duration::from_millis(most).into());
    family.histogram(&[("kind", kind)], &bounds, &changes.durations, changes.total);
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
                text.contains(&format!("# HELP {name} "))
                    && text.contains(&format!("# TYPE {name} {}\n", metric.kind.name()))
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
        let mut text = Text::default();
        write_histogram(&mut text.family("h", Kind::Histogram, ""), "activate", &changes);
        let text = text.finish();
        let value = |name: &str| text.lines().find(|line| line.contains(name))?.rsplit(' ').next();
        let bucket = |bound: &str| value(&format!("h_bucket{{kind=\"activate\",le=\"{bound}\"}}"));
        assert_eq!((bucket("0.005"), bucket("0.100"), bucket("60.000")), (Some("2"), Some("3"), Some("3")));
        assert_eq!((bucket("+Inf"), value("h_count"), value("h_sum")), (Some("7"), Some("7"), Some("1.500")));
    }
}
