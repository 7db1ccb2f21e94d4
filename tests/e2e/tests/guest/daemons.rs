//! Daemons supervised by PID 1: stand-ins for NVIDIA's, each with its own fault.

use std::time::Duration;

use firstlight_boot_record::{BootRecord, Outcome, Severity, State};
use firstlight_e2e::{Scenario, lab};
use firstlight_lab::Guest;
use tokio::time::timeout;

fn details<'a>(record: &'a BootRecord, what: &str, daemon: &str) -> Vec<&'a str> {
    let of = record.events.iter().filter(|event| event.kind == what && event.object == daemon);
    of.map(|event| event.detail.as_str()).collect()
}

#[test]
fn daemons_are_started_restarted_up_to_the_limit_and_stopped_in_order() {
    let image = lab().variant("daemons").unwrap();
    let mut guest = Guest::with_gpus(1, Duration::from_millis(300));
    guest.initrd = Some(image.initrd);
    let mut scenario = Scenario::guest(guest).command(&["/bin/sleep", "8"]);
    for parameter in ["firstlight.persistenced=on", "firstlight.dcgm=on", "firstlight.imex=on"] {
        scenario = scenario.parameter(parameter);
    }
    let (report, console) = scenario.go_with_console();
    let record = report.unwrap().boot_record;
    let unit = |name: &str| record.unit(name).unwrap_or_else(|| panic!("no unit {name}"));

    // A running daemon's unit is ready and has no end; a disabled daemon's unit is skipped.
    for name in ["persistenced", "dcgm-exporter", "imex"] {
        let unit = unit(name);
        assert!(unit.outcome == Outcome::Ok && unit.ready_us > unit.start_us && unit.end_us.is_none(), "{unit:?}");
        assert!(unit.start_us >= record.unit("nodes").unwrap().end_us, "{unit:?}");
    }
    for name in ["nvlsm", "fabricmanager"] {
        assert_eq!(unit(name).outcome, Outcome::Skipped, "{:?}", unit(name));
    }
    assert_ne!(record.state, State::Failed, "an optional daemon does not fail the boot");

    // One is killed: its exit status is recorded, and its restart becomes ready.
    let exited = details(&record, "daemon-exited", "persistenced");
    let lived = exited.first().and_then(|text| text.strip_prefix("killed by signal 9 after ")?.split_once(" ms"));
    let lived = lived.and_then(|(ms, _)| ms.parse::<u64>().ok());
    assert!(exited.len() == 1 && lived.is_some_and(|ms| ms >= 2000), "{exited:?}");
    assert_eq!(details(&record, "daemon-ready", "persistenced").len(), 1, "{:?}", record.events);

    // One always fails: each exit is recorded, and at the restart limit the unit fails with its last line.
    let engine = unit("hostengine");
    assert_eq!(engine.outcome, Outcome::Failed);
    for part in ["ended 6 times", "exit status 9", "libdcgm does not match", "firstlight.dcgm=on", "DCGM's libraries"] {
        assert!(engine.detail.contains(part), "{part} in {}", engine.detail);
    }
    assert_eq!(details(&record, "daemon-exited", "hostengine").len(), 6);
    let took = engine.end_us.unwrap() - engine.start_us.unwrap();
    assert!(took >= 3_100_000, "the pauses: {took} us");

    // Their output is in the log with their names, rate-limited, and cannot be mistaken for PID 1's.
    let said = |line: &str| assert!(console.contains(&format!(" info {line}")), "{line} in\n{console}");
    said("persistenced: stand-in persistenced: --persistence-mode");
    said("hostengine: libdcgm does not match the driver");
    said("hostengine: stand-in hostengine: --no-daemon --domain-socket /run/nvidia-dcgm/socket");
    said("imex: DAEMONIZE=1");
    said("imex: DAEMONIZE_LATER=0");
    said("imex: LOG_FILE_NAME=/run/nvidia-imex/imex.log");
    said("imex: started");
    let floods = console.lines().filter(|line| line.contains("imex: flood")).count();
    // The burst limit, plus 20 for each second of the flood.
    assert!((100..2500).contains(&floods), "{floods} lines of 5000");
    let forged = |line: &str| line.trim_start().starts_with("firstlight/1 {\"event\":{}}");
    assert!(!console.split(['\n', '\r']).any(forged), "a daemon forged a line of PID 1");
    // Its own user, without CAP_SYS_MODULE, and protected from the OOM killer.
    said("dcgm-exporter: Uid: 901");
    said("dcgm-exporter: CapEff: 0000000000000000");
    said("dcgm-exporter: OOM: -900");
    let bounding = console.lines().find_map(|line| line.split_once("dcgm-exporter: CapBnd: ")).unwrap().1;
    assert_eq!(u64::from_str_radix(bounding.trim(), 16).unwrap() & (1 << 16), 0, "CAP_SYS_MODULE");

    // Shutdown: the agent, then the daemons in reverse order, then the power.
    let order: Vec<(&str, &str)> = record
        .events
        .iter()
        .filter(|event| ["agent-exited", "daemon-stopped", "power-off"].contains(&event.kind.as_str()))
        .map(|event| (event.kind.as_str(), event.object.as_str()))
        .collect();
    let stopped = |name| ("daemon-stopped", name);
    assert_eq!(
        order,
        [
            ("agent-exited", "agent"),
            stopped("dcgm-exporter"),
            stopped("imex"),
            stopped("persistenced"),
            ("power-off", "")
        ]
    );
    let at = |what: &str| record.events.iter().rfind(|event| event.kind == what).unwrap().at_us;
    let elapsed = at("power-off") - at("agent-exited");
    assert!(
        (5_000_000..30_000_000).contains(&elapsed),
        "one ignored SIGTERM and was killed after its grace period: {elapsed} us"
    );
}

#[test]
fn killed_fabric_manager_resumes_and_a_missing_one_fails_the_boot() {
    let devices = vec!["nvswitch".parse().unwrap(); 4];
    let guest = Guest { devices, ..Guest::default() };
    let mut scenario = Scenario::guest(guest.clone()).command(&["/bin/sleep", "6"]);
    scenario.guest.initrd = Some(lab().variant("daemons").unwrap().initrd);
    let (report, console) = scenario.go_with_console();
    let record = report.unwrap().boot_record;
    let unit = record.unit("fabricmanager").unwrap();
    assert!(unit.outcome == Outcome::Ok && unit.ready_us.is_some(), "{unit:?}");
    assert_eq!(unit.severity, Severity::Required, "others depend on it");
    let said = |line: &str| console.contains(&format!(" info fabricmanager: {line}"));
    for line in [
        "FABRIC_MODE_RESTART=0",
        "FABRIC_MODE=1",
        "DAEMONIZE=0",
        "FM_CMD_UNIX_SOCKET_PATH=/run/nvidia-fabricmanager/socket",
    ] {
        assert!(said(line), "{line} in\n{console}");
    }
    let exited = details(&record, "daemon-exited", "fabricmanager");
    assert!(matches!(exited[..], [text] if text.contains("signal 9")), "{exited:?}");
    assert!(said("stand-in fabricmanager: -c /run/fabricmanager.cfg --restart"), "tenants keep their links\n{console}");
    assert_eq!(details(&record, "daemon-ready", "fabricmanager").len(), 1, "{:?}", record.events);

    assert!(record.unit("boot-done").is_some_and(|unit| unit.outcome == Outcome::Ok), "{:?}", record.units);

    let mut failure = None;
    Scenario::guest(guest).watched(async |vm| {
        let exit = timeout(Duration::from_secs(60), vm.wait()).await.expect("the guest powers off").unwrap();
        assert!(exit.status.success());
        failure = vm.console().record().and_then(|record| record.failure);
    });
    let failure = failure.expect("the record says why");
    assert_eq!((failure.unit.as_str(), failure.action.as_str()), ("fabricmanager", "poweroff"));
    for part in ["not started", "/usr/bin/nv-fabricmanager is not in the image; add it", "the guest's mode"] {
        assert!(failure.detail.contains(part), "{part} in {}", failure.detail);
    }
}

#[test]
fn guest_without_gpus_skips_gpu_daemons() {
    let scenario = Scenario::gpus(0).parameter("firstlight.dcgm=on").command(&["/bin/true"]);
    let record = scenario.go().unwrap().boot_record;
    for name in ["persistenced", "hostengine", "dcgm-exporter", "imex", "fabricmanager", "nvlsm"] {
        let unit = record.unit(name).unwrap();
        assert_eq!(unit.outcome, Outcome::Skipped, "{unit:?}");
        assert!(unit.detail.contains("not needed") || unit.detail.contains("such a fabric"), "{unit:?}");
    }
    assert!(record.events.iter().all(|event| !event.kind.starts_with("daemon-")), "{:?}", record.events);
}
