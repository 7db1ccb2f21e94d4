//! Shutdown: in order, and by its deadline even if processes hang.

use std::time::Duration;

use firstlight_boot_record::BootRecord;
use firstlight_e2e::{Scenario, lab};
use firstlight_lab::Guest;
use tokio::time::timeout;

fn late(record: &BootRecord) -> Vec<(&str, &str)> {
    let late = record.events.iter().filter(|event| event.kind == "shutdown-step-timed-out");
    late.map(|event| (event.object.as_str(), event.detail.as_str())).collect()
}

#[test]
fn hung_processes_are_named_and_the_power_is_off_by_the_deadline() {
    let mut guest = Guest::with_gpus(1, Duration::from_millis(300));
    guest.initrd = Some(lab().variant("ignores-sigterm").unwrap().initrd);
    let scenario = Scenario::guest(guest)
        .parameter("firstlight.persistenced=on")
        .parameter("firstlight.imex=on")
        .parameter("firstlight.shutdown-deadline=18s")
        .command(&["/bin/true"]);
    let record = scenario.go().unwrap().boot_record;

    // Shares of 18 s: 3 s for the agent, 8.4 s for both daemons, each with a grace period of 5 s.
    let late = late(&record);
    let [(agent, why), (daemon, rest)] = late[..] else { panic!("{:?}", record.events) };
    assert_eq!((agent, daemon), ("agent", "persistenced"));
    assert!(why.contains("did not end within 3000 ms of SIGTERM"), "{why}");
    assert!(rest.contains("8400 ms"), "{rest}");
    let stopped: Vec<_> = record.events.iter().filter(|event| event.kind == "daemon-stopped").collect();
    assert!(matches!(stopped[..], [one] if one.object == "imex"), "{stopped:?}");

    let at = |what: &str| record.event(what).unwrap_or_else(|| panic!("no {what}: {:?}", record.events)).at_us;
    let elapsed = at("power-off") - at("shutdown");
    assert!(elapsed >= 11_400_000, "each step had its share: {elapsed} us");
    // A third of it is for drivers, file systems and the last console lines, which take almost no time here.
    assert!(elapsed <= 18_000_000, "{elapsed} us");
    let last = &record.event("power-off").unwrap().detail;
    assert!(last.ends_with("left: agent, persistenced"), "{last}");
}

#[test]
fn ctrl_alt_del_shuts_down_in_order_and_reboots() {
    let mut guest = Guest::with_gpus(1, Duration::from_millis(300));
    guest.initrd = Some(lab().variant("ignores-sigterm").unwrap().initrd);
    // One of its daemons sends Ctrl-Alt-Del.
    let scenario = Scenario::guest(guest).parameter("firstlight.dcgm=on").parameter("firstlight.shutdown-deadline=12s");
    scenario.watched(async |vm| {
        // QEMU runs with -no-reboot: it exits when the guest reboots.
        let exit = timeout(Duration::from_secs(90), vm.wait()).await.expect("the guest shuts down").unwrap();
        assert!(exit.status.success());
        let record = vm.console().record().unwrap();
        assert_eq!(record.event("shutdown").map(|event| event.detail.as_str()), Some("ctrl-alt-del"));
        assert!(record.event("power-off").is_none(), "{:?}", record.events);
        let last = record.event("reboot").unwrap_or_else(|| panic!("{:?}", record.events));
        assert!(last.detail.starts_with("after ") && last.detail.ends_with("left: agent"), "{last:?}");
    });
}
