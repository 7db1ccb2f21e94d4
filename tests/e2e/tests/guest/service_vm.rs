//! A service VM as its host uses it: synthetic NVSwitches, a stand-in for the fabric manager under PID 1, and the
//! partition daemon, reached through vsock.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use firstlight_boot_record::Outcome;
use firstlight_e2e::{Scenario, lab};
use firstlight_lab::Guest;
use firstlight_vm::{Device, Vm};
use serde_json::Value;
use tokio::time::sleep;

use crate::gpu_hotplug::{CONSOLE, shell};
use crate::support::booted;

/// Timeout of waits that do not depend on the fabric manager.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A service VM, with or without a state disk.
fn scenario(disk: Option<&Path>) -> Scenario {
    let image = lab().service_vm().unwrap();
    let devices = vec!["nvswitch".parse().unwrap(); 4];
    let serial = "firstlight-state".to_owned();
    let hardware = disk.map(|file| Device::DiskWithSerial { file: file.to_owned(), serial }).into_iter().collect();
    Scenario::guest(Guest { devices, hardware, initrd: Some(image.initrd), ..Guest::default() })
        .parameter("firstlight.baseboard-serial=1650123456789")
        .parameter("agent.debug_console")
        .parameter(&format!("agent.debug_console_vport={CONSOLE}"))
}

/// Creates a state disk as `firstlight service-vm define` does.
fn state_disk(dir: &Path) -> PathBuf {
    let path = dir.join("state.img");
    std::fs::File::create(&path).unwrap().set_len(32 << 20).unwrap();
    let made = Command::new("mkfs.ext4").args(["-q", "-F", "-L", "firstlight-state"]).arg(&path).status().unwrap();
    assert!(made.success());
    path
}

/// fmctl on the host, connected through vsock.
struct Host {
    fmctl: PathBuf,
    address: String,
}

impl Host {
    fn of(vm: &Vm) -> Self {
        Self { fmctl: lab().fmctl().unwrap(), address: format!("hvsock:{}", vm.vsock().display()) }
    }

    /// Runs fmctl; returns stdout, stderr and exit code.
    fn run_fmctl(&self, arguments: &[&str]) -> (String, String, i32) {
        let output =
            Command::new(&self.fmctl).args(["--connect", &self.address, "--timeout", "20"]).args(arguments).output();
        let output = output.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (text(&output.stdout), text(&output.stderr), output.status.code().unwrap_or(-1))
    }

    /// Runs fmctl successfully; returns stdout.
    fn run_fmctl_ok(&self, arguments: &[&str]) -> String {
        let (out, error, code) = self.run_fmctl(arguments);
        assert_eq!(code, 0, "{arguments:?}: {out}{error}");
        out
    }

    /// Waits until the health meets a condition.
    async fn health(&self, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
        let begin = Instant::now();
        loop {
            let (out, error, _) = self.run_fmctl(&["--json", "health"]);
            let health = serde_json::from_str(&out).unwrap_or(Value::Null);
            if condition(&health) {
                return health;
            }
            assert!(begin.elapsed() < TIMEOUT, "{what}: {out}{error}");
            sleep(Duration::from_millis(100)).await;
        }
    }

    async fn wait_for_fabric_manager(&self) {
        self.health("the fabric manager answers", |health| health["fabric_manager"] == true).await;
    }

    async fn wait_until_healthy(&self) {
        self.health("there are no problems", |health| health["ok"] == true).await;
    }

    /// Returns ids and owners of active partitions.
    fn active(&self) -> Vec<(u64, String)> {
        let list: Value = serde_json::from_str(&self.run_fmctl_ok(&["--json", "list"])).unwrap();
        let all = list["partitions"].as_array().unwrap();
        let active = all.iter().filter(|one| one["active"] == true);
        active.map(|one| (one["id"].as_u64().unwrap(), one["owner"].as_str().unwrap().to_owned())).collect()
    }
}

/// Kills QEMU, as a power cut would.
async fn kill(vm: &Vm) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(vm.pid().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    sleep(Duration::from_millis(200)).await;
}

/// Writes measurements of a host with H100: module ids are unrelated to addresses.
fn measured(dir: &Path) -> String {
    let buses = [(0x0f, 5), (0x10, 7), (0x41, 6), (0x44, 8), (0x86, 1), (0x87, 3), (0xb8, 2), (0xbb, 4)];
    let line = |(bus, module): &(u32, u32)| {
        format!(
            "{{\"host_pci\":\"0000:{bus:02x}:00.0\",\"module_id\":{module},\"serial\":\"{bus}\",\"uuid\":\"GPU-{bus}\"}}\n"
        )
    };
    let path = dir.join("measured.jsonl");
    std::fs::write(&path, buses.iter().map(line).collect::<String>()).unwrap();
    path.display().to_string()
}

/// Asserts that the stand-in has seen no violation.
async fn assert_unharmed(vm: &Vm) {
    let said = shell(vm, "cd /run; echo wrong=$(grep -c violation fake-fm.log) calls=$(wc -l < fake-fm.log).").await;
    assert!(said.contains("wrong=0 calls=") && !said.contains("calls=0."), "{said}");
}

#[test]
fn host_controls_the_fabric_through_vsock() {
    let dir = tempfile::tempdir().unwrap();
    let console = scenario(None).watched(async |vm| {
        let agent = booted(vm).await;
        let host = Host::of(vm);
        host.wait_for_fabric_manager().await;
        let listed = host.run_fmctl_ok(&["list"]);
        assert!(listed.starts_with("PARTITION ID  STATUS    GPUs  NVLINKS  GPU PHYSICAL IDs\n"), "{listed}");
        assert!(listed.contains("\n0             Inactive  8     144      1,2,3,4,5,6,7,8\n"), "{listed}");
        assert_eq!(listed.lines().count(), 2 + 15);
        let (health, _, code) = host.run_fmctl(&["--json", "health"]);
        let health: Value = serde_json::from_str(&health).unwrap();
        assert!(code == 9 && health["problems"][0].as_str().unwrap().contains("fmctl inventory nvml"), "{health}");
        assert_eq!(
            (&health["fabric_manager_version"], &health["driver_version"]),
            (&"550.163.01".into(), &"550.163.01".into())
        );

        let record = agent.boot_record().await.unwrap();
        assert_eq!(record.mode.as_ref().unwrap().name, "service-vm-nvl4");
        for name in ["fabricmanager", "partitiond", "state"] {
            assert_eq!(record.unit(name).unwrap().outcome, Outcome::Ok, "{:?}", record.unit(name));
        }
        assert!(record.unit("state").unwrap().detail.contains("no disk has the serial number firstlight-state"));
        assert!(record.unit("partitiond").unwrap().start_us >= record.unit("fabricmanager").unwrap().ready_us);

        // Several GPUs are refused until they are measured.
        let (_, error, code) = host.run_fmctl(&["activate", "--gpus", "2", "--owner", "vm-1"]);
        assert!(error.contains("fmctl inventory") && code == 5, "{error}");
        let (_, error, code) =
            host.run_fmctl(&["inventory", "nvml", &measured(dir.path()), "--baseboard-serial", "1650999999999"]);
        assert!(error.contains("1650123456789") && code == 5, "not the baseboard that the host has declared: {error}");
        host.run_fmctl_ok(&["inventory", "nvml", &measured(dir.path()), "--baseboard-serial", "1650123456789"]);
        let planned = host.run_fmctl_ok(&["plan", "--pci", "0000:86:00.0,0000:b8:00.0,0000:87:00.0,0000:bb:00.0"]);
        assert!(planned.starts_with("Partition 1 with GPUs 1,2,3,4"), "{planned}");

        host.wait_until_healthy().await;
        let doctor = host.run_fmctl_ok(&["doctor"]);
        assert!(doctor.lines().count() > 5 && !doctor.contains("FAIL"), "{doctor}");
        assert!(host.run_fmctl_ok(&["metrics"]).contains("\nfirstlight_fabric_module_map_verified 1\n"));

        // A tenant's activation.
        host.run_fmctl_ok(&["activate", "--gpus", "2", "--owner", "vm-1", "--guest-driver", "550.163.01"]);
        let (_, error, code) =
            host.run_fmctl(&["activate", "--gpus", "1", "--owner", "vm-2", "--guest-driver", "535.129.03"]);
        assert!(error.contains("use an image with driver 550.163.01") && code == 5, "{error}");
        assert_eq!(host.active(), [(3, "vm-1".to_owned())]);

        // FM dies under a tenant: PID 1 restarts it, and it gets the list of active partitions.
        shell(vm, "kill -9 $(pidof fake-fm)").await;
        host.health("its exit is reported", |health| health["ok"] == false).await;
        host.wait_until_healthy().await;
        assert_eq!(host.active(), [(3, "vm-1".to_owned())]);
        assert!(shell(vm, "tr '\\0' ' ' < /proc/$(pidof fake-fm)/cmdline").await.contains("--restart"));
        // The daemon dies as well.
        shell(vm, "kill -9 $(pidof fm-partitiond)").await;
        host.wait_until_healthy().await;
        assert_eq!(host.active(), [(3, "vm-1".to_owned())]);

        // A fatal SXid: new tenants get single GPUs only.
        shell(vm, "echo '20034, Fatal, Link 30 LTSSM Fault Up' > /sys/module/nvidia/parameters/standin_sxid").await;
        let health = host.health("the fault", |health| health["ok"] == false).await;
        assert!(health["problems"][0].as_str().unwrap().contains("SXid 20034, Fatal, Link 30"), "{health}");
        assert_eq!(host.run_fmctl(&["activate", "--gpus", "4", "--owner", "vm-3"]).2, 5);
        host.run_fmctl_ok(&["activate", "--gpus", "1", "--owner", "vm-3"]);
        let switch = health["problems"][0].as_str().unwrap().rsplit(' ').next().unwrap().to_owned();
        host.run_fmctl_ok(&["release", &switch]);
        host.run_fmctl_ok(&["deactivate", "3", "--owner", "vm-1"]);
        assert!(shell(vm, "echo active=$(fmctl list | grep -c ' Active ')").await.contains("active=1\r"));
        assert_unharmed(vm).await;
    });
    assert!(console.contains("fabric.sock, vsock port 1030 fabric_manager=unix:"), "{console}");
}

#[test]
fn killed_service_vm_is_an_outage_recorded_on_its_state_disk() {
    let dir = tempfile::tempdir().unwrap();
    let disk = state_disk(dir.path());
    scenario(Some(&disk)).watched(async |vm| {
        booted(vm).await;
        let host = Host::of(vm);
        host.wait_for_fabric_manager().await;
        host.run_fmctl_ok(&["inventory", "nvml", &measured(dir.path()), "--baseboard-serial", "1650123456789"]);
        host.run_fmctl_ok(&["activate", "--gpus", "4", "--owner", "vm-1"]);
        host.run_fmctl_ok(&["quarantine", "8", "--reason", "Xid 79"]);
        kill(vm).await;
    });
    scenario(Some(&disk)).watched(async |vm| {
        let agent = booted(vm).await;
        let host = Host::of(vm);
        let health = host.health("the outage", |health| health["fabric_manager"] == true).await;
        let problems = health["problems"].to_string();
        assert!(problems.contains("the fabric has lost partitions 1 while tenants had them"), "{problems}");
        assert!(problems.contains("GPU 8 is quarantined (Xid 79)"), "{problems}");
        let (_, error, code) = host.run_fmctl(&["activate", "--gpus", "1", "--owner", "vm-2"]);
        assert!(error.contains("stop those tenants, then reconcile") && code == 5, "{error}");
        let record = agent.boot_record().await.unwrap();
        assert_eq!(record.unit("state").unwrap().detail, "/dev/vda at /var/lib/firstlight");
        host.run_fmctl_ok(&["reconcile", "--yes"]);
        host.run_fmctl_ok(&["release", "8"]);
        host.run_fmctl_ok(&["activate", "--gpus", "8", "--owner", "vm-2"]);
        assert_eq!(host.active(), [(0, "vm-2".to_owned())]);
        assert_unharmed(vm).await;
    });
}

#[test]
fn service_vm_killed_at_any_step_of_a_change_recovers_a_consistent_state() {
    let dir = tempfile::tempdir().unwrap();
    let disk = state_disk(dir.path());
    let activate: &[&str] = &["activate", "--gpus", "4", "--owner", "t"];
    // Each change takes 200 ms: the VM is killed before FM is called, during the call, and after it; likewise for a
    // deactivation, and between two steps of a reconciliation.
    let turns: [(&[&str], &[&str], u64); 5] = [
        (&[], activate, 10),
        (&[], activate, 120),
        (&[], activate, 400),
        (activate, &["deactivate", "1", "--owner", "t"], 120),
        (&[], &["reconcile", "1=t", "6=u", "--yes"], 300),
    ];
    let mut acknowledged_before: Option<u64> = None;
    for (turn, what) in turns.into_iter().map(Some).chain([None]).enumerate() {
        scenario(Some(&disk)).watched(async |vm| {
            booted(vm).await;
            let host = Host::of(vm);
            host.wait_for_fabric_manager().await;
            if turn == 0 {
                host.run_fmctl_ok(&["inventory", "nvml", &measured(dir.path()), "--baseboard-serial", "1650123456789"]);
            }
            // A restarted FM has no active partitions.
            assert_eq!(host.active(), [], "turn {turn}");
            let (health, ..) = host.run_fmctl(&["health"]);
            let lost =
                acknowledged_before.take().map(|partition| format!("the fabric has lost partitions {partition} while"));
            match lost {
                Some(lost) => {
                    assert!(health.contains(&lost), "an acknowledged activation is reported as lost: {health}")
                }
                // Without an acknowledgement the change may have been made or not.
                None => assert!(turn > 0 || health.starts_with("No problems"), "{health}"),
            }
            host.run_fmctl_ok(&["reconcile", "--yes"]);
            host.wait_until_healthy().await;
            let Some((before, asked, after)) = what else {
                host.run_fmctl_ok(&["activate", "--gpus", "8", "--owner", "last"]);
                return assert_unharmed(vm).await;
            };
            if !before.is_empty() {
                host.run_fmctl_ok(before);
            }
            let mut command = Command::new(&host.fmctl);
            command.args(["--connect", &host.address, "--json"]).args(asked);
            let waiting = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
            sleep(Duration::from_millis(after)).await;
            kill(vm).await;
            let output = waiting.wait_with_output().unwrap();
            if output.status.success() && asked == activate {
                let said: Value = serde_json::from_slice(&output.stdout).unwrap();
                acknowledged_before = Some(said["partition"].as_u64().unwrap());
            }
        });
    }
}

#[test]
fn unreadable_state_disk_is_reported_and_partitiond_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("state.img");
    std::fs::write(&disk, vec![0x5a; 8 << 20]).unwrap();
    scenario(Some(&disk)).watched(async |vm| {
        let agent = booted(vm).await;
        let begin = Instant::now();
        let record = loop {
            let record = agent.boot_record().await.unwrap();
            if record.unit("partitiond").is_some_and(|unit| unit.end_us.is_some()) {
                break record;
            }
            assert!(begin.elapsed() < TIMEOUT, "{record:#?}");
            sleep(Duration::from_millis(100)).await;
        };
        let state = record.unit("state").unwrap();
        assert_eq!(state.outcome, Outcome::Failed);
        assert!(
            state.detail.contains("cannot mount /dev/vda on /var/lib/firstlight") && state.detail.contains("e2fsck"),
            "{state:?}"
        );
        assert_eq!(record.unit("partitiond").unwrap().outcome, Outcome::Skipped);
        assert_eq!(record.unit("fabricmanager").unwrap().outcome, Outcome::Ok);
        let (_, error, code) = Host::of(vm).run_fmctl(&["list"]);
        assert!(error.contains("does the service VM run") && code == 7, "{error}");
    });
    assert!(std::fs::read(&disk).unwrap().iter().all(|byte| *byte == 0x5a), "the disk was not formatted");
}
