//! `fmctl doctor` with and without problems.

use firstlight_fake_fm::machine::Phase;

use crate::block_on;
use crate::inventory::SERVER;
use crate::support::{Fixture, quick};

#[test]
fn doctor_reports_each_problem_once_with_its_remedy() {
    let mut fixture = Fixture::seen("h100");
    let (said, _, code) = fixture.run_fmctl(&["doctor"]);
    assert_eq!(code, 9);
    assert!(said.starts_with("ok    daemon: version "), "{said}");
    assert!(
        said.contains(
            "\nok    versions: fabric manager 610.43.02\nok    fabric manager: it answers\nok    list: 15 partitions, received 0 s ago\nok    baseboard: h100\n"
        ),
        "{said}"
    );
    assert!(said.contains("\nFAIL  module map: not verified, only single GPUs are given: there is no module map\n      -> run fmctl inventory nvml FILE"), "{said}");
    assert!(
        said.ends_with(
            "\nok    quarantine: no GPU\nok    owners: every active partition has an owner\nok    health: no other problems\n"
        ),
        "{said}"
    );
    let all = SERVER.map(|(pci, module)| format!("{{\"host_pci\":\"{pci}\",\"module_id\":{module}}}"));
    let file = fixture.file("all", &all.concat());
    assert_eq!(fixture.run_fmctl(&["inventory", "nvml", &file, "--baseboard-serial", "S1"]).2, 0);
    let (said, _, code) = fixture.run_fmctl(&["doctor"]);
    assert!(said.contains("\nok    module map: verified, of baseboard S1\n") && code == 0, "{said}");
    assert!(said.lines().all(|line| line.starts_with("ok    ")), "{said}");
    // Warnings do not set the exit code.
    assert_eq!(fixture.run_fmctl(&["quarantine", "8", "--reason", "Xid 79"]).2, 0);
    let (said, _, code) = fixture.run_fmctl(&["--json", "doctor"]);
    let first: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&first["ok"], code), (&true.into(), 0));
    let bad: Vec<_> = first["checks"].as_array().unwrap().iter().filter(|check| check["level"] != "ok").collect();
    assert_eq!(bad.len(), 1, "{said}");
    assert_eq!((&bad[0]["level"], &bad[0]["check"]), (&"warn".into(), &"quarantine".into()));
    // FM has a partition without a recorded owner, and then it dies.
    assert_eq!(fixture.run_fmctl(&["activate", "5", "--owner", "a"]).2, 0);
    fixture.kill_daemon();
    std::fs::remove_file(fixture.journal()).unwrap();
    fixture.start_daemon();
    block_on(async { fixture.until("the fabric was polled", |health| health.fabric_manager).await });
    let (said, _, code) = fixture.run_fmctl(&["doctor"]);
    assert!(
        said.contains("\nFAIL  owners: partitions 5 are active without a recorded owner\n      -> fmctl reconcile")
            && code == 9,
        "{said}"
    );
    assert_eq!(said.matches("FAIL").count(), 1, "{said}");
    fixture.fm.kill().unwrap();
    block_on(async { fixture.until("FM is gone", |health| !health.fabric_manager).await });
    let (said, ..) = fixture.run_fmctl(&["doctor"]);
    assert!(said.contains("\nFAIL  fabric manager: failed to list the partitions: fmConnect"), "{said}");
    assert_eq!(said.matches("fmConnect").count(), 1, "{said}");
    fixture.kill_daemon();
    let (said, _, code) = fixture.run_fmctl(&["doctor"]);
    assert!(
        said.starts_with("FAIL  daemon: failed to connect to fm-partitiond on unix:")
            && said.contains("      -> is fm-partitiond running"),
        "{said}"
    );
    assert_eq!((said.lines().count(), code), (2, 9));
}

#[test]
fn doctor_reports_lost_partitions() {
    let mut fixture = Fixture::new(&quick("h100"));
    block_on(async { fixture.until("the fabric was polled", |health| health.ok).await });
    assert_eq!(fixture.run_fmctl(&["activate", "1", "--owner", "a"]).2, 0);
    fixture.restart_fm(&[]);
    fixture.fm.wait_for(Phase::Ready).unwrap();
    block_on(async { fixture.until("the outage is reported", |health| health.fabric_manager && !health.ok).await });
    let (said, _, code) = fixture.run_fmctl(&["doctor"]);
    assert!(
        said.contains("\nFAIL  health: the fabric has lost partitions 1 while tenants had them") && code == 9,
        "{said}"
    );
    assert!(
        said.contains("\nwarn  module map: not verified, and several GPUs are given by --allow-unverified-map"),
        "{said}"
    );
}
