//! UpdateContainer and StatsContainer. Needs the controllers of cgroup v2.

use std::fs;

use firstlight_agent_api::agent::{CreateContainerRequest, StatsContainerRequest, Storage, UpdateContainerRequest};
use firstlight_agent_api::oci;
use ttrpc::Code;

use crate::support::{Agent, code, require_guest, short, spec, with_agent};

const MIB: i64 = 1 << 20;

async fn update(agent: &Agent, container: &str, change: impl FnOnce(&mut oci::LinuxResources)) -> ttrpc::Result<()> {
    let mut request = UpdateContainerRequest { container_id: container.into(), ..Default::default() };
    change(request.resources.mut_or_insert_default());
    agent.calls.update_container(short(), &request).await.map(|_| ())
}

fn read(agent: &Agent, container: &str, file: &str) -> String {
    fs::read_to_string(agent.group(container, file)).unwrap().trim().to_owned()
}

#[test]
fn limits_are_set_and_removed() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut limited = spec(&root, "sleep 1000");
        let resources = limited.Linux.mut_or_insert_default().Resources.mut_or_insert_default();
        resources.Memory.mut_or_insert_default().Limit = 64 * MIB;
        resources.CPU.mut_or_insert_default().Shares = 512;
        agent.create(limited, "c1").await.unwrap();
        agent.begin("c1").await;
        assert_eq!(read(&agent, "c1", "memory.max"), (64 * MIB).to_string());
        let weight = read(&agent, "c1", "cpu.weight");

        update(&agent, "c1", |resources| {
            let memory = resources.Memory.mut_or_insert_default();
            (memory.Limit, memory.Reservation) = (96 * MIB, 8 * MIB);
            let cpu = resources.CPU.mut_or_insert_default();
            (cpu.Quota, cpu.Period, cpu.Shares, cpu.Cpus) = (50_000, 200_000, 512, "0".into());
            resources.Pids.mut_or_insert_default().Limit = 77;
        })
        .await
        .unwrap();
        for (file, text) in [
            ("memory.max", (96 * MIB).to_string()),
            ("memory.low", (8 * MIB).to_string()),
            ("cpu.max", "50000 200000".to_owned()),
            ("cpu.weight", weight.clone()),
            ("cpuset.cpus", "0".to_owned()),
            ("pids.max", "77".to_owned()),
        ] {
            assert_eq!(read(&agent, "c1", file), text, "{file}");
        }
        // A partial update keeps the other values.
        update(&agent, "c1", |resources| resources.CPU.mut_or_insert_default().Period = 100_000).await.unwrap();
        assert_eq!(read(&agent, "c1", "cpu.max"), "50000 100000");
        assert_eq!(read(&agent, "c1", "memory.max"), (96 * MIB).to_string());

        // -1 removes a limit; it does not mean "unchanged".
        update(&agent, "c1", |resources| {
            resources.Memory.mut_or_insert_default().Limit = -1;
            resources.CPU.mut_or_insert_default().Quota = -1;
            resources.Pids.mut_or_insert_default().Limit = -1;
        })
        .await
        .unwrap();
        for (file, text) in [("memory.max", "max"), ("cpu.max", "max 100000"), ("pids.max", "max")] {
            assert_eq!(read(&agent, "c1", file), text, "{file}");
        }
        // The stored configuration is updated and still usable for exec.
        let config = fs::read_to_string(agent.inside("/run/kata-containers/c1/config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["linux"]["resources"]["memory"]["limit"], -1);
        assert_eq!(config["linux"]["resources"]["cpu"]["cpus"], "0");
        assert_eq!(agent.shell("c1", "e1", "echo hi").await.0, "hi\n");
        agent.remove("c1").await.unwrap();
    });
}

/// As containerd configures every container with a memory limit: the swap limit equals it, so no swap.
#[test]
fn memory_limit_is_changed_without_allowing_swap() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut limited = spec(&root, "sleep 1000");
        let resources = limited.Linux.mut_or_insert_default().Resources.mut_or_insert_default();
        let memory = resources.Memory.mut_or_insert_default();
        (memory.Limit, memory.Swap) = (64 * MIB, 64 * MIB);
        agent.create(limited, "c1").await.unwrap();
        agent.begin("c1").await;
        for limit in [96 * MIB, 48 * MIB] {
            update(&agent, "c1", |all| all.Memory.mut_or_insert_default().Limit = limit).await.unwrap();
            assert_eq!(read(&agent, "c1", "memory.max"), limit.to_string());
            // Kernels without swap have no such file.
            let swap = fs::read_to_string(agent.group("c1", "memory.swap.max")).unwrap_or("0".into());
            assert_eq!(swap.trim(), "0");
        }
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn refused_limits_are_reported() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let (_, text) = code(update(&agent, "c1", |all| all.CPU.mut_or_insert_default().Cpus = "900-901".into()).await);
        assert!(text.contains("c1") && text.contains("\"900-901\" to cpuset.cpus"), "{text}");
        let wrong = |all: &mut oci::LinuxResources| {
            let memory = all.Memory.mut_or_insert_default();
            (memory.Limit, memory.Swap) = (64 * MIB, 32 * MIB);
        };
        let (kind, text) = code(update(&agent, "c1", wrong).await);
        assert!(kind == Code::INVALID_ARGUMENT && text.contains("swap"), "{text}");
        let page = |size: &str| oci::LinuxHugepageLimit { Pagesize: size.into(), Limit: 1, ..Default::default() };
        let (kind, _) = code(update(&agent, "c1", |all| all.HugepageLimits.push(page("../../../x"))).await);
        assert_eq!(kind, Code::INVALID_ARGUMENT);
        assert_eq!(code(update(&agent, "none", |_| {}).await).0, Code::INVALID_ARGUMENT);
        // An empty update succeeds.
        update(&agent, "c1", |_| {}).await.unwrap();
        assert_eq!(agent.shell("c1", "e1", "echo alive").await.0, "alive\n");
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn statistics_match_the_cgroup() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut limited = spec(&root, "sleep 1000");
        let resources = limited.Linux.mut_or_insert_default().Resources.mut_or_insert_default();
        let cpu = resources.CPU.mut_or_insert_default();
        (cpu.Quota, cpu.Period) = (10_000, 100_000);
        resources.Pids.mut_or_insert_default().Limit = 55;
        agent.create(limited, "c1").await.unwrap();
        agent.begin("c1").await;
        // Busy for over a second, throttled to ten milliseconds of every hundred.
        let busy =
            "read t x </proc/uptime; e=$((${t%.*}+2)); while [ ${t%.*} -lt $e ]; do read t x </proc/uptime; done";
        agent.shell("c1", "e1", busy).await;
        let request = StatsContainerRequest { container_id: "c1".into(), ..Default::default() };
        let stats = agent.calls.stats_container(short(), &request).await.unwrap().cgroup_stats.unwrap();
        let usage = stats.cpu_stats.cpu_usage.clone().unwrap();
        assert!(usage.total_usage > 0 && usage.usage_in_usermode > 0 && usage.percpu_usage.is_empty());
        let throttling = stats.cpu_stats.throttling_data.clone().unwrap();
        assert!(throttling.periods > 0 && throttling.throttled_periods > 0 && throttling.throttled_time > 0);
        let memory = stats.memory_stats.clone().unwrap();
        assert!(memory.usage.usage > 0 && memory.usage.max_usage >= memory.usage.usage / 2);
        assert!(memory.stats.contains_key("anon") && memory.stats.contains_key("file"), "{:?}", memory.stats);
        assert_eq!((stats.pids_stats.current, stats.pids_stats.limit), (1, 55));
        agent.remove("c1").await.unwrap();
        assert_eq!(code(agent.calls.stats_container(short(), &request).await).0, Code::INVALID_ARGUMENT);
    });
}

#[test]
fn statistics_count_huge_pages_and_failures() {
    with_agent(async |agent| {
        require_guest("huge pages are taken from the machine's memory");
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut limited = spec(&root, "sleep 1000");
        let page = oci::LinuxHugepageLimit { Pagesize: "2MB".into(), Limit: 2 << 20, ..Default::default() };
        limited.Linux.mut_or_insert_default().Resources.mut_or_insert_default().HugepageLimits = vec![page];
        let place = "/run/kata-containers/sandbox/ephemeral/huge";
        limited.Mounts.push(oci::Mount {
            destination: "/huge".into(),
            source: place.into(),
            type_: "bind".into(),
            options: vec!["rbind".into()],
            ..Default::default()
        });
        let mut request = CreateContainerRequest { container_id: "c1".into(), ..Default::default() };
        request.OCI = Some(limited).into();
        request.storages = vec![Storage {
            driver: "ephemeral".into(),
            source: "nodev".into(),
            fstype: "hugetlbfs".into(),
            mount_point: place.into(),
            options: vec!["pagesize=2097152,size=4194304".into()],
            ..Default::default()
        }];
        agent.calls.create_container(short(), &request).await.unwrap();
        agent.begin("c1").await;
        let stats = async || {
            let request = StatsContainerRequest { container_id: "c1".into(), ..Default::default() };
            let stats = agent.calls.stats_container(short(), &request).await.unwrap().cgroup_stats.unwrap();
            let pages = stats.hugetlb_stats.get("2MB").cloned().unwrap_or_else(|| panic!("{:?}", stats.hugetlb_stats));
            (pages.usage, pages.failcnt)
        };
        assert_eq!(stats().await, (0, 0));
        // Two pages are available; the container's limit is one.
        let take = |file: &str| format!("/bin/busybox fallocate -l 2097152 /huge/{file}");
        let (output, code) = agent.shell("c1", "e1", &take("one")).await;
        assert_eq!(code, 0, "{output}");
        assert_eq!(stats().await, (2 << 20, 0));
        assert_ne!(agent.shell("c1", "e2", &take("two")).await.1, 0);
        let (usage, refused) = stats().await;
        assert!(usage == 2 << 20 && refused > 0, "{usage} bytes, {refused} refused");
        agent.remove("c1").await.unwrap();
    });
}
