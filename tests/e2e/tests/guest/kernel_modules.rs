//! Kernel modules of an image: compressed, with options and soft dependencies,
//! loaded for a device on the bus; and containers that cannot load any.

use std::time::Duration;

use firstlight_boot_record::{BootRecord, Outcome};
use firstlight_e2e::lab;
use firstlight_vm::{Device, Vm};
use tokio::time::timeout;

use crate::hotplug_cpu_memory::sandbox_with_module;
use crate::support::{Files, booted, output};

/// Every capability that Linux 6.12 has.
const CAPABILITIES: &str = "AUDIT_CONTROL AUDIT_READ AUDIT_WRITE BLOCK_SUSPEND BPF CHECKPOINT_RESTORE CHOWN DAC_OVERRIDE \
    DAC_READ_SEARCH FOWNER FSETID IPC_LOCK IPC_OWNER KILL LEASE LINUX_IMMUTABLE MAC_ADMIN MAC_OVERRIDE MKNOD NET_ADMIN \
    NET_BIND_SERVICE NET_BROADCAST NET_RAW PERFMON SETFCAP SETGID SETPCAP SETUID SYSLOG SYS_ADMIN SYS_BOOT SYS_CHROOT \
    SYS_MODULE SYS_NICE SYS_PACCT SYS_PTRACE SYS_RAWIO SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG WAKE_ALARM";

/// The bit of `CAP_SYS_MODULE`.
const SYS_MODULE: u64 = 1 << 16;

/// Waits until the unit `modules` has ended; returns its detail.
async fn detail(vm: &mut Vm) -> String {
    let ended = |record: &BootRecord| record.unit("modules").is_some_and(|unit| unit.end_us.is_some());
    let seen = timeout(Duration::from_secs(60), vm.console().wait_for(ended)).await;
    assert!(seen.is_ok_and(|seen| seen), "the unit ends:\n{}", vm.console_tail());
    let record = vm.console().record().unwrap();
    let unit = record.unit("modules").unwrap();
    assert_eq!(unit.outcome, Outcome::Ok, "{unit:?}");
    unit.detail.clone()
}

#[test]
fn compressed_modules_load_with_options_and_softdeps_and_containers_lack_cap_sys_module() {
    let files = Files::make();
    let image = lab().variant("modules").unwrap();
    let packed = image.contents.files.keys().filter(|path| path.ends_with(".ko.xz")).count();
    let plain = image.contents.files.keys().filter(|path| path.ends_with(".ko")).count();
    assert!(packed >= 8 && plain == 0, "{packed} packed, {plain} plain");
    let scenario = files
        .scenario_of(image.initrd, vec![Device::Watchdog])
        .parameter("firstlight.lockdown=off")
        .parameter("loop.max_loop=5");
    scenario.watched(async |vm| {
        let agent = booted(vm).await;
        let detail = detail(vm).await;
        println!("  {detail}");
        assert!(detail.contains("i6300esb") && detail.contains("watchdog"), "{detail}");
        assert!(detail.contains("PID 1 carries out no install line"), "{detail}");

        // By an alias that the image defines.
        sandbox_with_module(&agent, "network-for-tests", &["numdummies=3"]).await.unwrap();
        let script = "basename /sys/bus/pci/drivers/i6300*/0000:*; cd /sys/module/loop/parameters; cat max_loop hw_queue_depth; \
            ls /sys/class/net | grep -c dummy; ls /sys/class/net | grep -c ifb";
        let said = output(&agent, &files.request("look", script, &[])).await;
        let lines: Vec<&str> = said.lines().collect();
        // The watchdog has its driver. Options of the command line and of the request override the image's options; the
        // image's other options apply.
        assert!(lines[0].starts_with("0000:"), "{said}");
        assert_eq!(lines[1..], ["5", "64", "3", "4"], "{said}");
        let reported = |record: &BootRecord| record.events.iter().any(|event| event.kind == "module-requested");
        assert!(timeout(Duration::from_secs(60), vm.console().wait_for(reported)).await.unwrap());
        let record = vm.console().record().unwrap();
        let event = record.events.iter().find(|event| event.kind == "module-requested").unwrap();
        println!("  {}", event.detail);
        let place = |name: &str| event.detail.find(&format!("{name} ")).unwrap_or_else(|| panic!("{name}: {event:?}"));
        assert!(place("loop") < place("dummy") && place("dummy") < place("ifb"), "{event:?}");
        assert!(event.detail.contains("softdep of dummy: no module no_such_module"), "{event:?}");

        // A privileged container, as Kubernetes requests it: it starts with all capabilities except CAP_SYS_MODULE.
        let mut request = files.request("privileged", "grep ^Cap /proc/self/status", &[]);
        let all: Vec<String> = CAPABILITIES.split_whitespace().map(|name| format!("CAP_{name}")).collect();
        let process = request.OCI.mut_or_insert_default().Process.mut_or_insert_default();
        let capabilities = process.Capabilities.mut_or_insert_default();
        (capabilities.Bounding, capabilities.Effective) = (all.clone(), all.clone());
        (capabilities.Permitted, capabilities.Inheritable) = (all.clone(), all.clone());
        let said = output(&agent, &request).await;
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:"] {
            let text = said.lines().find_map(|line| line.strip_prefix(set)).unwrap();
            let bits = u64::from_str_radix(text.trim(), 16).unwrap();
            assert_eq!(bits, ((1 << all.len()) - 1) & !SYS_MODULE, "{said}");
        }
        let warned = |record: &BootRecord| {
            let event = record.events.iter().find(|event| event.kind == "container-warning");
            event.is_some_and(|event| {
                event.object == "privileged" && event.detail.contains("capabilities CAP_SYS_MODULE are not granted")
            })
        };
        assert!(timeout(Duration::from_secs(60), vm.console().wait_for(warned)).await.unwrap());
    });
}

#[test]
fn blacklisted_driver_is_not_loaded_for_its_device() {
    let files = Files::make();
    let scenario = files.scenario("modules", vec![Device::Watchdog]).parameter("modprobe.blacklist=i6300esb");
    scenario.watched(async |vm| {
        let agent = booted(vm).await;
        let detail = detail(vm).await;
        assert!(!detail.contains("i6300esb"), "{detail}");
        let script = "ls /sys/module | grep -c i6300esb; ls /sys/bus/pci/devices/*/modalias | wc -l";
        agent.create_sandbox("sandbox").await.unwrap();
        let said = output(&agent, &files.request("look", script, &[])).await;
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines[0], "0", "{said}");
        assert!(lines[1].parse::<u32>().unwrap() > 1, "{said}");
    });
}
