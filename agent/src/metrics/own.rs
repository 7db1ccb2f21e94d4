//! Metrics of the agent's process, with the names of Kata's agent.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use firstlight_metrics_text::{Kind, Text};

use super::read;

/// Number of scrapes since the agent's start.
static SCRAPES: AtomicU64 = AtomicU64::new(0);

/// Exported lines of `/proc/self/status`; KiB, or a number.
const STATUS: &[&str] = &[
    "VmPeak",
    "VmSize",
    "VmLck",
    "VmPin",
    "VmHWM",
    "VmRSS",
    "RssAnon",
    "RssFile",
    "RssShmem",
    "VmData",
    "VmStk",
    "VmExe",
    "VmLib",
    "VmPTE",
    "VmSwap",
    "HugetlbPages",
    "voluntary_ctxt_switches",
    "nonvoluntary_ctxt_switches",
];

/// Positions of fields of `/proc/self/stat` after the process name.
mod field {
    pub(super) const UTIME: usize = 11;
    pub(super) const STIME: usize = 12;
    pub(super) const CUTIME: usize = 13;
    pub(super) const CSTIME: usize = 14;
    pub(super) const THREADS: usize = 17;
    pub(super) const VSIZE: usize = 20;
    pub(super) const RSS: usize = 21;
}

pub(super) fn write(text: &mut Text, proc: &Path) {
    let scrapes = SCRAPES.fetch_add(1, Ordering::Relaxed) + 1;
    text.family("kata_agent_scrape_count", Kind::Counter, "Metrics scrape count").sample(&[], scrapes);
    stat(text, &read(proc, "self/stat"));
    let status = read(proc, "self/status");
    let mut family = text.family("kata_agent_proc_status", Kind::Gauge, "Agent process status, KiB or counts");
    for name in STATUS {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let value = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        if let Some(value) = value {
            family.sample(&[("item", &name.to_lowercase())], value);
        }
    }
    let mut family = text.family("kata_agent_io_stat", Kind::Gauge, "Agent process I/O, bytes or counts");
    for (name, value) in read(proc, "self/io").lines().filter_map(|line| line.split_once(": ")) {
        if let Ok(value) = value.trim().parse::<u64>() {
            family.sample(&[("item", name)], value);
        }
    }
}

fn stat(text: &mut Text, stat: &str) {
    let Some((_, rest)) = stat.rsplit_once(") ") else { return };
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    let time = number(field::UTIME).saturating_add(number(field::STIME)) / ticks;
    text.gauge("kata_agent_threads", "Agent process threads", number(field::THREADS));
    text.gauge("kata_agent_total_time", "Agent process total CPU time, seconds", time);
    text.gauge("kata_agent_total_vm", "Agent process virtual memory, bytes", number(field::VSIZE));
    text.gauge("kata_agent_total_rss", "Agent process resident memory, bytes", number(field::RSS).saturating_mul(page));
    let mut family = text.family("kata_agent_proc_stat", Kind::Gauge, "Agent process times, clock ticks");
    for (item, at) in
        [("utime", field::UTIME), ("stime", field::STIME), ("cutime", field::CUTIME), ("cstime", field::CSTIME)]
    {
        family.sample(&[("item", item)], number(at));
    }
}
