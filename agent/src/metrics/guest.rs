//! Guest metrics, with the names of Kata's agent.

use std::path::Path;

use firstlight_metrics_text::{Kind, Text};

use super::{MAX_SERIES, read};

/// The columns of a `cpu` line of `/proc/stat`, clock ticks.
const CPU: &[&str] = &["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice"];

/// The columns of `/proc/net/dev`.
const NETDEV: &[&str] = &[
    "recv_bytes",
    "recv_packets",
    "recv_errs",
    "recv_drop",
    "recv_fifo",
    "recv_frame",
    "recv_compressed",
    "recv_multicast",
    "sent_bytes",
    "sent_packets",
    "sent_errs",
    "sent_drop",
    "sent_fifo",
    "sent_colls",
    "sent_carrier",
    "sent_compressed",
];

/// The columns of `/proc/diskstats` after the name; sectors of 512 bytes, times in ms.
const DISK: &[&str] = &[
    "reads",
    "merged",
    "sectors_read",
    "time_reading",
    "writes",
    "writes_merged",
    "sectors_written",
    "time_writing",
    "in_progress",
    "time_in_progress",
    "weighted_time_in_progress",
    "discards",
    "discards_merged",
    "sectors_discarded",
    "time_discarding",
    "flushes",
    "time_flushing",
];

pub(super) fn write(text: &mut Text, proc: &Path) {
    load(text, &read(proc, "loadavg"));
    let stat = read(proc, "stat");
    let mut family = text.family("kata_guest_cpu_time", Kind::Gauge, "Guest CPU time, clock ticks");
    for (cpu, values) in stat.lines().filter_map(|line| line.strip_prefix("cpu")?.split_once(' ')) {
        let cpu = if cpu.is_empty() { "total" } else { cpu };
        for (item, value) in CPU.iter().zip(numbers(values)) {
            family.sample(&[("cpu", cpu), ("item", item)], value);
        }
    }
    let mut family = text.family("kata_guest_vm_stat", Kind::Gauge, "Guest virtual memory statistics");
    for (item, value) in read(proc, "vmstat").lines().filter_map(|line| line.split_once(' ')) {
        if let Ok(value) = value.parse::<u64>() {
            family.sample(&[("item", item)], value);
        }
    }
    let netdev = read(proc, "net/dev");
    let mut family = text.family("kata_guest_netdev_stat", Kind::Gauge, "Guest network interfaces, bytes or counts");
    for (interface, values) in netdev.lines().filter_map(|line| line.rsplit_once(": ")).take(MAX_SERIES) {
        for (item, value) in NETDEV.iter().zip(numbers(values)) {
            family.sample(&[("interface", interface.trim()), ("item", item)], value);
        }
    }
    let disks = read(proc, "diskstats");
    let mut family = text.family("kata_guest_diskstat", Kind::Gauge, "Guest disks");
    for line in disks.lines().take(MAX_SERIES) {
        let Some(disk) = line.split_whitespace().nth(2) else { continue };
        let values = line.split_whitespace().skip(3).filter_map(|word| word.parse::<u64>().ok());
        for (item, value) in DISK.iter().zip(values) {
            family.sample(&[("disk", disk), ("item", item)], value);
        }
    }
    let mut family = text.family("kata_guest_meminfo", Kind::Gauge, "Guest memory, bytes or counts");
    for (name, value) in read(proc, "meminfo").lines().filter_map(|line| line.split_once(':')) {
        let mut words = value.split_whitespace();
        let Some(number) = words.next().and_then(|word| word.parse::<u64>().ok()) else { continue };
        let unit = if words.next() == Some("kB") { 1024 } else { 1 };
        family.sample(&[("item", &snake(name))], number.saturating_mul(unit));
    }
}

fn numbers(text: &str) -> impl Iterator<Item = u64> {
    text.split_whitespace().map_while(|word| word.parse().ok())
}

/// `0.12 0.03 0.01 1/123 4567`: loads, running and all tasks.
fn load(text: &mut Text, loadavg: &str) {
    let words: Vec<&str> = loadavg.split_whitespace().collect();
    let mut family = text.family("kata_guest_load", Kind::Gauge, "Guest load averages");
    for (item, word) in ["load1", "load5", "load15"].iter().zip(&words) {
        if let Some(value) = word.parse::<f64>().ok().filter(|value| value.is_finite()) {
            family.sample(&[("item", item)], value);
        }
    }
    let tasks = words.get(3).and_then(|word| word.split_once('/'));
    let mut family = text.family("kata_guest_tasks", Kind::Gauge, "Guest tasks: running, and all");
    for (item, word) in tasks.into_iter().flat_map(|(running, all)| [("cur", running), ("max", all)]) {
        if let Ok(value) = word.parse::<u64>() {
            family.sample(&[("item", item)], value);
        }
    }
}

/// Converts names of `/proc/meminfo` as Kata's agent does: `MemTotal` is `mem_total`,
/// `SReclaimable` is `s_reclaimable`, `DirectMap1G` is `direct_map_1G`.
fn snake(name: &str) -> String {
    if name == "Percpu" {
        return "per_cpu".to_owned();
    }
    // Kata's agent treats these two as one word.
    let name = name.replace("HugePages", "Hugepages").replace('(', "_").replace(')', "");
    let chars: Vec<char> = name.chars().collect();
    let mut snake = String::new();
    for (at, c) in chars.iter().enumerate() {
        let before = at.checked_sub(1).and_then(|at| chars.get(at));
        let after = chars.get(at + 1);
        let is_word = before.is_some_and(|before| {
            let hump = c.is_ascii_uppercase()
                && (before.is_ascii_lowercase()
                    || before.is_ascii_uppercase() && after.is_some_and(char::is_ascii_lowercase));
            hump || c.is_ascii_digit() && before.is_ascii_alphabetic()
        });
        if is_word {
            snake.push('_');
        }
        // A unit follows a digit.
        snake.push(if before.is_some_and(char::is_ascii_digit) { *c } else { c.to_ascii_lowercase() });
    }
    snake
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_names_equal_those_of_kata() {
        for (name, item) in [
            ("MemTotal", "mem_total"),
            ("Active(anon)", "active_anon"),
            ("SReclaimable", "s_reclaimable"),
            ("SUnreclaim", "s_unreclaim"),
            ("KReclaimable", "k_reclaimable"),
            ("NFS_Unstable", "nfs_unstable"),
            ("Committed_AS", "committed_as"),
            ("AnonHugePages", "anon_hugepages"),
            ("HugePages_Total", "hugepages_total"),
            ("Hugepagesize", "hugepagesize"),
            ("Hugetlb", "hugetlb"),
            ("Percpu", "per_cpu"),
            ("DirectMap4k", "direct_map_4k"),
            ("DirectMap1G", "direct_map_1G"),
            ("ShmemPmdMapped", "shmem_pmd_mapped"),
        ] {
            assert_eq!(snake(name), item);
        }
    }
}
