//! Calls about the guest, and `CopyFile`.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::{Duration, Instant, SystemTime};

use firstlight_agent_api::agent::{
    CopyFileRequest, GetDiagnosticDataRequest, GetMetricsRequest, GuestDetailsRequest, MemHotplugByProbeRequest,
    OnlineCPUMemRequest, ReseedRandomDevRequest, SetGuestDateTimeRequest,
};
use firstlight_agent_api::health::CheckRequest;
use firstlight_agent_api::oci;
use ttrpc::Code;

use crate::support::{Agent, require_guest, short, spec, with_containers};

const SHARE: &str = "/run/kata-containers/shared/containers";

fn code(error: &ttrpc::Error) -> (Code, String) {
    match error {
        ttrpc::Error::RpcStatus(status) => (status.code(), status.message().to_owned()),
        other => panic!("not an RPC status: {other}"),
    }
}

fn file(path: &str, mode: u32, data: &[u8]) -> CopyFileRequest {
    CopyFileRequest {
        path: path.into(),
        file_size: i64::try_from(data.len()).unwrap(),
        file_mode: mode,
        dir_mode: 0o040_755,
        uid: 1000,
        gid: 1001,
        data: data.to_vec(),
        ..Default::default()
    }
}

#[test]
fn guest_details_and_version_are_reported() {
    with_containers(async || {
        let agent = Agent::start().await;
        let version = agent.health.version(short(), &CheckRequest::new()).await.unwrap();
        assert_eq!((version.grpc_version.as_str(), version.agent_version.is_empty()), ("0.0.1", false));
        let request = GuestDetailsRequest { mem_block_size: true, mem_hotplug_probe: true, ..Default::default() };
        let details = agent.calls.get_guest_details(short(), &request).await.unwrap();
        let block = fs::read_to_string("/sys/devices/system/memory/block_size_bytes").unwrap_or_default();
        assert_eq!(details.mem_block_size_bytes, u64::from_str_radix(block.trim(), 16).unwrap_or(0));
        assert_eq!(details.agent_details.version, version.agent_version);
        assert!(details.agent_details.supports_seccomp && !details.agent_details.init_daemon);
    });
}

#[test]
fn metrics_have_kata_names_and_one_type_line_each() {
    with_containers(async || {
        let agent = Agent::start().await;
        let metrics = async || agent.calls.get_metrics(short(), &GetMetricsRequest::new()).await.unwrap().metrics;
        let scrapes = |text: &str| -> u32 {
            text.lines().find_map(|line| line.strip_prefix("kata_agent_scrape_count ")).unwrap().parse().unwrap()
        };
        let (first, second) = (metrics().await, metrics().await);
        assert_eq!((scrapes(&first), scrapes(&second)), (1, 2));
        for start in [
            "kata_agent_total_rss ",
            "kata_agent_proc_status{item=\"vmrss\"} ",
            "kata_guest_load{item=\"load1\"} ",
            "kata_guest_cpu_time{cpu=\"total\",item=\"user\"} ",
            "kata_guest_meminfo{item=\"mem_total\"} ",
            "kata_guest_netdev_stat{interface=\"lo\",item=\"recv_bytes\"} ",
            "firstlight_containers 0",
        ] {
            assert_eq!(second.lines().filter(|line| line.starts_with(start)).count(), 1, "{start}\n{second}");
        }
        let mut heads: Vec<&str> = second.lines().filter(|line| line.starts_with("# TYPE ")).collect();
        let all = heads.len();
        heads.sort_unstable();
        heads.dedup();
        assert!(all > 10 && heads.len() == all);
    });
}

#[test]
fn random_device_is_reseeded() {
    with_containers(async || {
        let agent = Agent::start().await;
        let reseed = async |data: &[u8]| {
            let request = ReseedRandomDevRequest { data: data.to_vec(), ..Default::default() };
            agent.calls.reseed_random_dev(short(), &request).await
        };
        reseed(&[7; 512]).await.unwrap();
        let (why, message) = code(&reseed(&[]).await.unwrap_err());
        assert!(why == Code::INTERNAL && message.contains("missing entropy data"), "{message}");
    });
}

#[test]
fn guest_clock_is_set() {
    with_containers(async || {
        require_guest("it sets the machine's clock");
        let agent = Agent::start().await;
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let set = async |sec: i64, usec: i64| {
            let request = SetGuestDateTimeRequest { Sec: sec, Usec: usec, ..Default::default() };
            agent.calls.set_guest_date_time(short(), &request).await
        };
        let (before, begin) = (now(), Instant::now());
        let later = before + Duration::from_secs(86_400);
        set(i64::try_from(later.as_secs()).unwrap(), 500_000).await.unwrap();
        let seen = now();
        let back = before + begin.elapsed();
        set(i64::try_from(back.as_secs()).unwrap(), i64::from(back.subsec_micros())).await.unwrap();
        assert!(seen >= later - Duration::from_secs(1) && seen < later + Duration::from_secs(10), "{seen:?} {later:?}");
        assert!(now() < later - Duration::from_secs(3600), "the clock is restored");
        assert_eq!(code(&set(1, 1_000_000).await.unwrap_err()).0, Code::INVALID_ARGUMENT);
        assert_eq!(code(&set(-1, 0).await.unwrap_err()).0, Code::INVALID_ARGUMENT);
    });
}

#[test]
fn cpu_is_brought_online_and_a_missing_one_delays_no_other_call() {
    with_containers(async || {
        require_guest("it switches one of the machine's CPUs off");
        let agent = Agent::start().await;
        let online = async |count: u32| {
            let request = OnlineCPUMemRequest { nb_cpus: count, ..Default::default() };
            agent.calls.online_cpu_mem(short(), &request).await
        };
        let list = || fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
        fs::write("/sys/devices/system/cpu/cpu1/online", "0").unwrap();
        assert_eq!(list(), "0\n");
        online(2).await.unwrap();
        assert_eq!(list(), "0-1\n");
        let begin = Instant::now();
        let check = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let begin = Instant::now();
            agent.health.check(short(), &CheckRequest::new()).await.unwrap();
            begin.elapsed()
        };
        let (failed, check) = tokio::join!(online(64), check);
        let (why, message) = code(&failed.unwrap_err());
        assert!(why == Code::INTERNAL && message.contains("2 of 64 CPUs are online after 5."), "{message}");
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert!(check < Duration::from_secs(3), "Check waited {check:?}");
        let probe = MemHotplugByProbeRequest { memHotplugProbeAddr: vec![1 << 40], ..Default::default() };
        let (_, message) = code(&agent.calls.mem_hotplug_by_probe(short(), &probe).await.unwrap_err());
        assert!(message.contains("0x10000000000"), "{message}");
    });
}

#[test]
fn copied_files_are_complete_and_confined_to_the_share() {
    with_containers(async || {
        let agent = Agent::start().await;
        let copy = async |request: CopyFileRequest| agent.calls.copy_file(short(), &request).await.map(|_| ());
        // Three pieces of 1 MiB, as Kata's shim sends them.
        let data: Vec<u8> = (0..(3_u32 << 20)).map(|at| u8::try_from(at % 253).unwrap()).collect();
        let path = format!("{SHARE}/c1-volume/deep/data");
        for (index, piece) in data.chunks(1 << 20).enumerate() {
            let offset = i64::try_from(index << 20).unwrap();
            let whole = file(&path, 0o100_640, piece);
            let size = i64::try_from(data.len()).unwrap();
            copy(CopyFileRequest { offset, file_size: size, ..whole }).await.unwrap();
        }
        let inside = agent.inside(&path);
        assert_eq!(fs::read(&inside).unwrap(), data);
        let seen = fs::metadata(&inside).unwrap();
        assert_eq!((seen.permissions().mode() & 0o7777, seen.uid(), seen.gid()), (0o640, 1000, 1001));
        let parent = fs::metadata(inside.parent().unwrap()).unwrap();
        assert_eq!((parent.permissions().mode() & 0o7777, parent.uid()), (0o755, 1000));

        // A container with the volume plants symbolic links.
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut spec = spec(&root, "ln -s / /vol/root; ln -s ../.. /vol/up; mkdir /vol/here; ln -s /etc /vol/here/etc");
        spec.Mounts.push(oci::Mount {
            destination: "/vol".into(),
            source: format!("{SHARE}/c1-volume"),
            type_: "bind".into(),
            options: vec!["rbind".into(), "rw".into()],
            ..Default::default()
        });
        fs::create_dir(root.join("vol")).unwrap();
        agent.create(spec, "c1").await.unwrap();
        agent.begin("c1").await;
        assert_eq!(agent.wait("c1", "").await.unwrap(), 0);
        for way in ["root/tmp/planted", "up/planted", "here/etc/planted", "root/run/planted/x", "../../planted"] {
            let path = format!("{SHARE}/c1-volume/{way}");
            for (mode, data) in [(0o100_644, &b"x"[..]), (0o040_755, b""), (0o120_777, b"t")] {
                let (why, message) = code(&copy(file(&path, mode, data)).await.unwrap_err());
                assert!([Code::INTERNAL, Code::INVALID_ARGUMENT].contains(&why) && message.contains(way), "{message}");
            }
        }
        for place in ["/tmp/planted", "/run/kata-containers/shared/planted", "/etc/planted", "/run/planted"] {
            assert!(!agent.inside(place).exists(), "{place}");
        }
        let (why, _) = code(&copy(file("/etc/planted", 0o100_644, b"x")).await.unwrap_err());
        assert_eq!(why, Code::INVALID_ARGUMENT);
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn termination_log_is_returned() {
    with_containers(async || {
        let agent = Agent::start().await;
        agent.sandbox().await;
        let log = format!("{SHARE}/c1-1234-termination-log");
        agent.calls.copy_file(short(), &file(&log, 0o100_666, b"")).await.unwrap();
        let root = agent.root("c1");
        let script = "head -c 5000 /dev/zero | tr '\\0' a > /dev/termination-log; echo bye >> /dev/termination-log";
        let mut spec = spec(&root, script);
        spec.Mounts.push(oci::Mount {
            destination: "/dev/termination-log".into(),
            source: log.clone(),
            type_: "bind".into(),
            options: vec!["bind".into(), "rw".into()],
            ..Default::default()
        });
        spec.Annotations.insert("io.kubernetes.container.terminationMessagePath".into(), "/dev/termination-log".into());
        agent.create(spec, "c1").await.unwrap();
        agent.begin("c1").await;
        assert_eq!(agent.wait("c1", "").await.unwrap(), 0);
        let get = async |kind: &str, container: &str| {
            let (log_type, container_id) = (kind.into(), container.into());
            let request = GetDiagnosticDataRequest { log_type, container_id, ..Default::default() };
            agent.calls.get_diagnostic_data(short(), &request).await.map(|reply| reply.data)
        };
        let text = get("termination_log", "c1").await.unwrap();
        assert_eq!((text.len(), text.trim_start_matches('a')), (4096, "bye\n"));
        let (why, message) = code(&get("dmesg", "c1").await.unwrap_err());
        assert!(why == Code::INVALID_ARGUMENT && message.starts_with("unsupported diagnostic log_type: dmesg"));
        assert_eq!(code(&get("termination_log", "c2").await.unwrap_err()).0, Code::INVALID_ARGUMENT);
        // A symbolic link in its place is not followed.
        let inside = agent.inside(&log);
        fs::remove_file(&inside).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &inside).unwrap();
        let (why, message) = code(&get("termination_log", "c1").await.unwrap_err());
        assert!(why == Code::INTERNAL && message.contains("termination log of container c1"), "{message}");
        agent.remove("c1").await.unwrap();
    });
}
