use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::*;

/// A sample: name, labels, value.
type Sample = (String, BTreeMap<String, String>, f64);

/// Parses the text format as a scraper does, independently of the writer.
fn parse(text: &str) -> Vec<Sample> {
    let (mut samples, mut types, mut current) = (Vec::new(), BTreeSet::new(), String::new());
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["counter", "gauge"].contains(&kind), "{line}");
            assert!(types.insert(name.to_owned()), "{name} has two TYPE lines");
            name.clone_into(&mut current);
        } else if line.starts_with('#') {
            assert!(line.starts_with("# HELP "), "{line}");
        } else {
            let sample = sample(line);
            assert_eq!(sample.0, current, "a sample outside of its family");
            samples.push(sample);
        }
    }
    let distinct: BTreeSet<_> = samples.iter().map(|(name, labels, _)| (name, labels)).collect();
    assert_eq!(distinct.len(), samples.len(), "two samples have the same name and labels");
    samples
}

fn sample(line: &str) -> Sample {
    let end = line.find(['{', ' ']).unwrap();
    let (name, mut rest) = line.split_at(end);
    assert!(
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':') && !name.starts_with(char::is_numeric)
    );
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            rest = rest.trim_start_matches(',');
            let (label, tail) = rest.split_once("=\"").unwrap();
            assert!(label.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'), "{line}");
            let (mut value, mut chars) = (String::new(), tail.char_indices());
            let closed = loop {
                match chars.next().unwrap() {
                    (at, '"') => break at,
                    (_, '\\') => value.push(match chars.next().unwrap().1 {
                        'n' => '\n',
                        c @ ('"' | '\\') => c,
                        c => panic!("escape {c:?} in {line}"),
                    }),
                    (_, c) => value.push(c),
                }
            };
            assert!(labels.insert(label.to_owned(), value).is_none(), "{line}");
            rest = &tail[closed + 1..];
        }
        rest = &rest[1..];
    }
    (name.to_owned(), labels, rest.strip_prefix(' ').unwrap().parse().unwrap())
}

fn value(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let expected: BTreeMap<String, String> = labels.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
    samples.iter().find(|(n, l, _)| n == name && *l == expected).map(|(_, _, value)| *value)
}

#[test]
fn metrics_of_a_fake_proc_have_katas_names() {
    let root = tempfile::tempdir().unwrap();
    let proc = root.path().join("proc");
    let status = "Name:\tx\nVmRSS:\t    1234 kB\nvoluntary_ctxt_switches:\t9\n";
    for (file, text) in [
        ("self/stat", "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 250 150 5 6 20 0 3 0 100 4096000 25 9 9\n"),
        ("self/status", status),
        ("self/io", "rchar: 11\nread_bytes: 12\n"),
        ("loadavg", "0.50 0.25 0.10 2/77 999\n"),
        ("stat", "cpu  10 20 30 40 50 60 70 80 90 100\ncpu0 1 2 3\nintr 5\n"),
        ("vmstat", "nr_free_pages 42\nrubbish\n"),
        ("net/dev", "Inter-| x\n face |bytes\n  eth\"0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"),
        ("diskstats", " 254 0 vda 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17\n"),
        ("meminfo", "MemTotal:  4 kB\nHugePages_Total:  3\nPercpu: 2 kB\n"),
        ("mounts", "/dev/vdb /data ext4 rw 0 0\n"),
    ] {
        fs::create_dir_all(proc.join(file).parent().unwrap()).unwrap();
        fs::write(proc.join(file), text).unwrap();
    }
    fs::create_dir(root.path().join("data")).unwrap();
    let samples = parse(&metrics(&proc, root.path(), &AgentState::default()));
    let page = f64::from(u32::try_from(rustix::param::page_size()).unwrap());
    for (name, labels, expected) in [
        ("kata_agent_threads", &[][..], 3.0),
        ("kata_agent_total_time", &[], 4.0),
        ("kata_agent_total_vm", &[], 4_096_000.0),
        ("kata_agent_total_rss", &[], 25.0 * page),
        ("kata_agent_proc_stat", &[("item", "cutime")], 5.0),
        ("kata_agent_proc_status", &[("item", "vmrss")], 1234.0),
        ("kata_agent_proc_status", &[("item", "voluntary_ctxt_switches")], 9.0),
        ("kata_agent_io_stat", &[("item", "read_bytes")], 12.0),
        ("kata_guest_load", &[("item", "load5")], 0.25),
        ("kata_guest_tasks", &[("item", "cur")], 2.0),
        ("kata_guest_tasks", &[("item", "max")], 77.0),
        ("kata_guest_cpu_time", &[("cpu", "total"), ("item", "guest_nice")], 100.0),
        ("kata_guest_cpu_time", &[("cpu", "0"), ("item", "system")], 3.0),
        ("kata_guest_vm_stat", &[("item", "nr_free_pages")], 42.0),
        ("kata_guest_netdev_stat", &[("interface", "eth\"0"), ("item", "recv_multicast")], 8.0),
        ("kata_guest_netdev_stat", &[("interface", "eth\"0"), ("item", "sent_carrier")], 15.0),
        ("kata_guest_diskstat", &[("disk", "vda"), ("item", "weighted_time_in_progress")], 11.0),
        ("kata_guest_diskstat", &[("disk", "vda"), ("item", "time_flushing")], 17.0),
        ("kata_guest_meminfo", &[("item", "mem_total")], 4096.0),
        ("kata_guest_meminfo", &[("item", "hugepages_total")], 3.0),
        ("kata_guest_meminfo", &[("item", "per_cpu")], 2048.0),
    ] {
        assert_eq!(value(&samples, name, labels), Some(expected), "{name} {labels:?}");
    }
    let disk = |item| [("mount", "/data"), ("device", "/dev/vdb"), ("item", item)];
    assert!(value(&samples, "kata_guest_filesystem_bytes", &disk("total")).unwrap() > 0.0);
    assert!(value(&samples, "kata_guest_filesystem_inodes", &disk("available")).is_some());
    assert!(value(&samples, "kata_agent_scrape_count", &[]).unwrap() >= 1.0);
}

#[test]
fn gpu_metrics_have_pci_addresses() {
    let json = |pci: &str, index: u32, phase: &str, rest: &str| -> GpuState {
        let text = format!(r#"{{"pci":"{pci}","index":{index},"phase":"{phase}","step":"","attempts":1{rest}}}"#);
        serde_json::from_str(&text).unwrap()
    };
    let gpus = vec![json("0000:01:00.0", 0, "ready", r#","attach_us":1500000"#), json("0000:02:00.0", 1, "failed", "")];
    let state = AgentState { gpus, containers: 3, log_dropped: 2 };
    let samples = parse(&metrics(Path::new("/nonexistent"), Path::new("/nonexistent"), &state));
    let ready = |pci, index| value(&samples, "firstlight_gpu_ready", &[("pci", pci), ("index", index)]);
    assert_eq!((ready("0000:01:00.0", "0"), ready("0000:02:00.0", "1")), (Some(1.0), Some(0.0)));
    let attach = |pci, index| value(&samples, "firstlight_gpu_attach_seconds", &[("pci", pci), ("index", index)]);
    assert_eq!((attach("0000:01:00.0", "0"), attach("0000:02:00.0", "1")), (Some(1.5), None));
    assert_eq!(value(&samples, "firstlight_containers", &[]), Some(3.0));
    assert_eq!(value(&samples, "firstlight_log_dropped_total", &[]), Some(2.0));
    assert!(!samples.iter().any(|(name, ..)| name.starts_with("kata_guest")), "missing files");
}

#[test]
fn metrics_of_this_machine_are_well_formed() {
    let samples = parse(&metrics(Path::new("/proc"), Path::new("/"), &AgentState::default()));
    for name in [
        "kata_agent_threads",
        "kata_agent_total_rss",
        "kata_agent_proc_status",
        "kata_agent_io_stat",
        "kata_guest_load",
        "kata_guest_cpu_time",
        "kata_guest_vm_stat",
        "kata_guest_netdev_stat",
        "kata_guest_meminfo",
    ] {
        assert!(samples.iter().any(|(n, ..)| n == name), "{name}");
    }
    let free = value(&samples, "kata_guest_meminfo", &[("item", "mem_available")]).unwrap();
    let total = value(&samples, "kata_guest_meminfo", &[("item", "mem_total")]).unwrap();
    assert!(total > 1e8 && free <= total);
}
