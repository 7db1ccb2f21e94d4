//! Post-boot hardening: operations that a booted guest denies even to root.

use std::time::{Duration, Instant};

use firstlight_boot_record::{BootRecord, LogLine, Outcome};
use firstlight_e2e::{Scenario, lab};
use firstlight_lab::Guest;
use tokio::time::sleep;

/// Boots a guest with a daemon that attempts the operations; returns its output and the record.
fn attempt(parameters: &[&str]) -> (Vec<String>, BootRecord) {
    let mut guest = Guest::with_gpus(1, Duration::from_millis(300));
    guest.initrd = Some(lab().variant("hardening").unwrap().initrd);
    let mut scenario = Scenario::guest(guest).parameter("firstlight.imex=on");
    for parameter in parameters {
        scenario = scenario.parameter(parameter);
    }
    let mut record = None;
    let console = scenario.watched(async |vm| {
        let begin = Instant::now();
        while !vm.console_tail().contains("all checks done") {
            assert!(begin.elapsed() < Duration::from_secs(90), "{}", vm.console_tail());
            sleep(Duration::from_millis(100)).await;
        }
        record = vm.console().record();
    });
    let lines = console.lines().filter_map(LogLine::decode).filter(|line| line.source == "imex");
    (lines.map(|line| line.text).collect(), record.unwrap())
}

/// Returns the daemon's result of one operation.
fn result_of<'a>(lines: &'a [String], operation: &str) -> &'a str {
    let found = lines.iter().find_map(|line| line.strip_prefix(operation)?.strip_prefix(": "));
    assert!(found.is_some(), "no {operation} in {lines:#?}");
    found.unwrap_or_default()
}

#[test]
fn operations_blocked_after_boot_fail_for_root() {
    let (lines, record) = attempt(&[]);
    for unit in ["mounts-later", "root", "lockdown"] {
        assert_eq!(record.unit(unit).map(|unit| unit.outcome), Some(Outcome::Ok), "{:?}", record.unit(unit));
    }
    assert!(result_of(&lines, "lockdown").contains("[integrity]"), "{lines:#?}");
    for (operation, why) in [
        ("root", "Read-only file system"),
        ("etc", "Read-only file system"),
        ("program in /run", "ermission denied"),
        ("program in /tmp", "ermission denied"),
        ("program in /var/log", "ermission denied"),
        ("device in /run", "ermission denied"),
        ("device in /tmp", "ermission denied"),
        ("device in /var/log", "ermission denied"),
        ("memory", "not permitted"),
        ("config", "not permitted"),
    ] {
        assert!(result_of(&lines, operation).contains(why), "{operation}: {}", result_of(&lines, operation));
    }
    assert_ne!(result_of(&lines, "module"), "open");
    assert_eq!(
        result_of(&lines, "descriptors").trim(),
        "0 1 2 3",
        "three standard descriptors, and that of the directory being read"
    );
}

#[test]
fn disabled_hardening_leaves_operations_allowed() {
    let (lines, record) = attempt(&["firstlight.root=rw", "firstlight.kernel-lockdown=none"]);
    assert_eq!(record.unit("root").map(|unit| unit.outcome), Some(Outcome::Skipped), "{:?}", record.unit("root"));
    assert_eq!(result_of(&lines, "root"), "open");
    assert_eq!(result_of(&lines, "config"), "open");
    assert!(result_of(&lines, "lockdown").contains("[none]"), "{lines:#?}");
    assert!(
        result_of(&lines, "program in /run").contains("ermission denied"),
        "noexec is not disabled by these parameters"
    );
}
