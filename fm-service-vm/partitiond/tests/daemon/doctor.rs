//! One thing after the other, against a daemon and a manager that are well or not.

use firstlight_fake_fm::machine::Phase;

use crate::inventory::SERVER;
use crate::support::{Stand, quick};
use crate::tokio_main;

#[test]
fn a_doctor_names_each_thing_once_with_what_to_do() {
    let mut stand = Stand::seen("h100");
    let (said, _, code) = stand.typed(&["doctor"]);
    assert_eq!(code, 9);
    assert!(said.starts_with("ok    daemon: it answers, version "), "{said}");
    assert!(
        said.contains(
            "\nok    versions: fabric manager 610.43.02\nok    fabric manager: it answers\nok    list: 15 partitions, seen 0 s ago\nok    baseboard: h100\n"
        ),
        "{said}"
    );
    assert!(said.contains("\nFAIL  module map: not verified, nobody is given several GPUs: there is no module map\n      -> run fmctl inventory nvml FILE"), "{said}");
    assert!(
        said.ends_with(
            "\nok    quarantine: no GPU\nok    owners: every active partition has one\nok    health: nothing more\n"
        ),
        "{said}"
    );
    let all = SERVER.map(|(pci, module)| format!("{{\"host_pci\":\"{pci}\",\"module_id\":{module}}}"));
    let file = stand.file("all", &all.concat());
    assert_eq!(stand.typed(&["inventory", "nvml", &file, "--serial", "S1"]).2, 0);
    let (said, _, code) = stand.typed(&["doctor"]);
    assert!(said.contains("\nok    module map: verified, of baseboard S1\n") && code == 0, "{said}");
    assert!(said.lines().all(|line| line.starts_with("ok    ")), "{said}");
    // What only warns is no failure.
    assert_eq!(stand.typed(&["quarantine", "8", "--reason", "Xid 79"]).2, 0);
    let (said, _, code) = stand.typed(&["--json", "doctor"]);
    let told: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&told["ok"], code), (&true.into(), 0));
    let bad: Vec<_> = told["checks"].as_array().unwrap().iter().filter(|check| check["level"] != "ok").collect();
    assert_eq!(bad.len(), 1, "{said}");
    assert_eq!((&bad[0]["level"], &bad[0]["check"]), (&"warn".into(), &"quarantine".into()));
    // Somebody else has activated partitions, and the manager dies.
    assert_eq!(stand.typed(&["activate", "5", "--owner", "a"]).2, 0);
    stand.kill_daemon();
    std::fs::remove_file(stand.journal()).unwrap();
    stand.start_daemon();
    tokio_main(async { stand.until("the fabric is seen", |health| health.fabric_manager).await });
    let (said, _, code) = stand.typed(&["doctor"]);
    assert!(
        said.contains("\nFAIL  owners: partitions 5 are active and nobody's here\n      -> fmctl reconcile")
            && code == 9,
        "{said}"
    );
    assert_eq!(said.matches("FAIL").count(), 1, "{said}");
    stand.fm.kill().unwrap();
    tokio_main(async { stand.until("it is gone", |health| !health.fabric_manager).await });
    let (said, ..) = stand.typed(&["doctor"]);
    assert!(said.contains("\nFAIL  fabric manager: list the partitions: fmConnect"), "{said}");
    assert_eq!(said.matches("fmConnect").count(), 1, "{said}");
    stand.kill_daemon();
    let (said, _, code) = stand.typed(&["doctor"]);
    assert!(
        said.starts_with("FAIL  daemon: cannot reach fm-partitiond on unix:")
            && said.contains("      -> is fm-partitiond running"),
        "{said}"
    );
    assert_eq!((said.lines().count(), code), (2, 9));
}

#[test]
fn a_fabric_that_lost_its_partitions_is_told_by_the_doctor_as_well() {
    let mut stand = Stand::new(&quick("h100"));
    tokio_main(async { stand.until("the fabric is seen", |health| health.ok).await });
    assert_eq!(stand.typed(&["activate", "1", "--owner", "a"]).2, 0);
    stand.restart_fm(&[]);
    stand.fm.wait_for(Phase::Ready).unwrap();
    tokio_main(async { stand.until("it is seen", |health| health.fabric_manager && !health.ok).await });
    let (said, _, code) = stand.typed(&["doctor"]);
    assert!(
        said.contains("\nFAIL  health: the fabric has lost partitions 1 while tenants had them") && code == 9,
        "{said}"
    );
    assert!(
        said.contains("\nwarn  module map: not verified, and several GPUs are given by --allow-unverified-map"),
        "{said}"
    );
}
