//! StatsContainer: a container's statistics, from its cgroup (cgroup v2).
//!
//! A missing file (its controller is disabled) leaves zeros.

use std::fs;
use std::path::Path;

use firstlight_agent_api::agent::{
    BlkioStatsEntry, CgroupStats, CpuStats, CpuUsage, HugetlbStats, MemoryData, MemoryStats, NetworkStats, PidsStats,
    StatsContainerResponse, ThrottlingData,
};

/// A counter of a network interface, and its field.
type Counter = (&'static str, fn(&mut NetworkStats) -> &mut u64);

const COUNTERS: &[Counter] = &[
    ("rx_bytes", |stats| &mut stats.rx_bytes),
    ("rx_packets", |stats| &mut stats.rx_packets),
    ("rx_errors", |stats| &mut stats.rx_errors),
    ("rx_dropped", |stats| &mut stats.rx_dropped),
    ("tx_bytes", |stats| &mut stats.tx_bytes),
    ("tx_packets", |stats| &mut stats.tx_packets),
    ("tx_errors", |stats| &mut stats.tx_errors),
    ("tx_dropped", |stats| &mut stats.tx_dropped),
];

/// Counters of a disk, and their names in the reply. Clients on cgroup v2 expect all of them, in
/// this case, in `io_service_bytes_recursive`.
const OPERATIONS: &[(&str, &str)] = &[
    ("rbytes", "read"),
    ("wbytes", "write"),
    ("rios", "rios"),
    ("wios", "wios"),
    ("dbytes", "dbytes"),
    ("dios", "dios"),
];

/// Reads the files of a directory.
struct Group<'a>(&'a Path);

impl Group<'_> {
    fn text(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap_or_default()
    }

    /// Reads a file with one number, or `max`.
    fn number(&self, file: &str) -> u64 {
        number(self.text(file).trim())
    }
}

fn number(text: &str) -> u64 {
    if text == "max" { u64::MAX } else { text.parse().unwrap_or(0) }
}

/// Returns the value of `key` in a file of `key value` lines.
fn value(text: &str, key: &str) -> u64 {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.filter(|(name, _)| *name == key).map(|(_, value)| number(value.trim())).next().unwrap_or(0)
}

/// Returns a container's statistics; the network's are those of the guest, shared by all
/// containers.
#[must_use]
pub fn read(cgroup: &Path, sysfs: &Path) -> StatsContainerResponse {
    let group = Group(cgroup);
    let mut stats = CgroupStats::new();
    stats.cpu_stats = Some(cpu(&group)).into();
    stats.memory_stats = Some(memory(&group)).into();
    stats.pids_stats = Some(PidsStats {
        current: group.number("pids.current"),
        limit: limit(&group, "pids.max"),
        ..Default::default()
    })
    .into();
    stats.blkio_stats.mut_or_insert_default().io_service_bytes_recursive = block(&group.text("io.stat"));
    stats.hugetlb_stats = hugepages(&group);
    let mut reply = StatsContainerResponse::new();
    reply.cgroup_stats = Some(stats).into();
    reply.network_stats = network(sysfs);
    reply
}

/// Reads a limit; 0 for none, as in cgroup v1.
fn limit(group: &Group<'_>, file: &str) -> u64 {
    Some(group.number(file)).filter(|limit| *limit != u64::MAX).unwrap_or(0)
}

fn cpu(group: &Group<'_>) -> CpuStats {
    let text = group.text("cpu.stat");
    // Microseconds in the file, nanoseconds in the reply.
    let nanos = |key| value(&text, key).saturating_mul(1000);
    let mut stats = CpuStats::new();
    stats.cpu_usage = Some(CpuUsage {
        total_usage: nanos("usage_usec"),
        usage_in_kernelmode: nanos("system_usec"),
        usage_in_usermode: nanos("user_usec"),
        ..Default::default()
    })
    .into();
    stats.throttling_data = Some(ThrottlingData {
        periods: value(&text, "nr_periods"),
        throttled_periods: value(&text, "nr_throttled"),
        throttled_time: nanos("throttled_usec"),
        ..Default::default()
    })
    .into();
    stats
}

fn memory(group: &Group<'_>) -> MemoryStats {
    let text = group.text("memory.stat");
    let failures = value(&group.text("memory.events"), "max");
    let data = |name: &str| MemoryData {
        usage: group.number(&format!("memory.{name}current")),
        max_usage: group.number(&format!("memory.{name}peak")),
        limit: group.number(&format!("memory.{name}max")),
        ..Default::default()
    };
    let mut stats = MemoryStats::new();
    stats.cache = value(&text, "file");
    stats.usage = Some(MemoryData { failcnt: failures, ..data("") }).into();
    let swap_failures = value(&group.text("memory.swap.events"), "fail");
    stats.swap_usage = Some(MemoryData { failcnt: swap_failures, ..data("swap.") }).into();
    stats.kernel_usage = Some(MemoryData { usage: value(&text, "kernel"), ..Default::default() }).into();
    stats.use_hierarchy = true;
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    stats.stats = pairs.map(|(name, value)| (name.to_owned(), number(value.trim()))).collect();
    stats
}

/// Converts `8:0 rbytes=1 wbytes=2 ...` to one entry per operation.
fn block(text: &str) -> Vec<BlkioStatsEntry> {
    let mut entries = Vec::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        let Some((major, minor)) = words.next().and_then(|device| device.split_once(':')) else { continue };
        let fields: Vec<(&str, &str)> = words.filter_map(|word| word.split_once('=')).collect();
        // A disk without counters.
        if fields.is_empty() {
            continue;
        }
        for (key, op) in OPERATIONS {
            let value = fields.iter().find(|(name, _)| name == key).map_or(0, |(_, value)| number(value));
            let (major, minor, op) = (number(major), number(minor), (*op).to_owned());
            entries.push(BlkioStatsEntry { major, minor, op, value, ..Default::default() });
        }
    }
    entries
}

fn hugepages(group: &Group<'_>) -> std::collections::HashMap<String, HugetlbStats> {
    let entries = fs::read_dir(group.0).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter_map(|name| {
            // Skips `hugetlb.SIZE.rsvd.*`.
            let size = name.strip_prefix("hugetlb.")?.strip_suffix(".current").filter(|size| !size.contains('.'))?;
            let stats = HugetlbStats {
                usage: group.number(&name),
                failcnt: value(&group.text(&format!("hugetlb.{size}.events")), "max"),
                ..Default::default()
            };
            Some((size.to_owned(), stats))
        })
        .collect()
}

fn network(sysfs: &Path) -> Vec<NetworkStats> {
    let entries = fs::read_dir(sysfs.join("class/net")).into_iter().flatten().flatten();
    let mut all: Vec<NetworkStats> = entries
        .filter_map(|entry| entry.file_name().into_string().ok().map(|name| (name, entry.path())))
        // Skips files of drivers, such as `bonding_masters`.
        .filter(|(name, path)| name != "lo" && path.join("statistics").is_dir())
        .map(|(name, path)| {
            let mut stats = NetworkStats { name, ..Default::default() };
            for (file, field) in COUNTERS {
                *field(&mut stats) = Group(&path.join("statistics")).number(file);
            }
            stats
        })
        .collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant(root: &Path, files: &[(&str, &str)]) {
        for (file, text) in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn statistics_are_converted_to_the_replys_units() {
        let root = tempfile::tempdir().unwrap();
        plant(
            root.path(),
            &[
                ("g/cpu.stat", "usage_usec 5\nuser_usec 3\nsystem_usec 2\nnr_throttled 1\nthrottled_usec 7\n"),
                ("g/memory.current", "4096\n"),
                ("g/memory.max", "max\n"),
                ("g/memory.peak", "8192\n"),
                ("g/memory.stat", "anon 1\nfile 2048\nkernel 3\n"),
                ("g/memory.events", "low 0\nmax 6\noom_kill 1\n"),
                ("g/pids.current", "3\n"),
                ("g/pids.max", "max\n"),
                // Copied from a kernel, with an unused disk.
                ("g/io.stat", "7:0 \n254:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=30 dios=3\nrubbish\n"),
                ("g/hugetlb.2MB.current", "2097152\n"),
                ("g/hugetlb.2MB.events", "max 4\n"),
                ("sys/class/net/eth0/statistics/rx_bytes", "11\n"),
                ("sys/class/net/lo/statistics/rx_bytes", "99\n"),
                ("sys/class/net/bonding_masters", "bond0\n"),
            ],
        );
        let reply = read(&root.path().join("g"), &root.path().join("sys"));
        let stats = &reply.cgroup_stats;
        assert_eq!(stats.cpu_stats.cpu_usage.total_usage, 5000);
        assert_eq!(stats.cpu_stats.throttling_data.throttled_time, 7000);
        let memory = &stats.memory_stats;
        assert_eq!((memory.usage.usage, memory.usage.max_usage, memory.usage.failcnt), (4096, 8192, 6));
        assert_eq!((memory.usage.limit, memory.cache, memory.stats["anon"]), (u64::MAX, 2048, 1));
        assert_eq!((stats.pids_stats.current, stats.pids_stats.limit), (3, 0));
        let block = &stats.blkio_stats;
        assert!(block.io_service_bytes_recursive.iter().all(|entry| (entry.major, entry.minor) == (254, 0)));
        let operations: Vec<_> =
            block.io_service_bytes_recursive.iter().map(|entry| (entry.op.as_str(), entry.value)).collect();
        let all = [("read", 10), ("write", 20), ("rios", 1), ("wios", 2), ("dbytes", 30), ("dios", 3)];
        assert_eq!((operations.as_slice(), block.io_serviced_recursive.len()), (&all[..], 0));
        assert_eq!(stats.hugetlb_stats["2MB"].failcnt, 4);
        assert_eq!(reply.network_stats.len(), 1);
        assert_eq!((reply.network_stats[0].name.as_str(), reply.network_stats[0].rx_bytes), ("eth0", 11));
    }

    #[test]
    fn missing_files_give_zeros() {
        let reply = read(Path::new("/nonexistent"), Path::new("/nonexistent"));
        assert_eq!(reply.cgroup_stats.memory_stats.usage.usage, 0);
        assert!(reply.network_stats.is_empty());
    }
}
