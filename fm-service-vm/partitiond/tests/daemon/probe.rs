//! Modules found by trying, with a check that asks the fabric manager's stand-in.

use std::fs;
use std::time::{Duration, Instant};

use firstlight_fake_fm::ask::Op;
use firstlight_fake_fm::control::Command as Tell;
use rustix::process::{Pid, Signal, kill_process};

use crate::inventory::{SERVER, sorted};
use crate::support::{FAKE_FM, Stand, told};
use crate::tokio_main;

impl Stand {
    /// A guest with the GPU, as far as a fabric manager sees one: it has a fabric if its module has one.
    fn check(&self) -> String {
        let cases: String = SERVER.iter().map(|(pci, module)| format!("{pci}) module={module};; ")).collect();
        let log = self.dir.path().join("checks");
        format!(
            "case $FIRSTLIGHT_PROBE_PCI in {cases} *) echo 'no such GPU'; exit 3;; esac; \
             echo $FIRSTLIGHT_PROBE_PCI $FIRSTLIGHT_PROBE_MODULE >> {}; FAKE_FM={} exec {} --fabric-of $module",
            log.display(),
            self.home.scenario().display(),
            FAKE_FM.display()
        )
    }

    fn checks(&self) -> usize {
        fs::read_to_string(self.dir.path().join("checks")).unwrap_or_default().lines().count()
    }

    fn probe(&self, gpus: &str, check: &str, more: &[&str]) -> (String, String, i32) {
        let arguments = ["inventory", "probe", "--gpus", gpus, "--serial", "S1", "--check", check];
        self.typed(&[&arguments, more].concat())
    }

    fn assert_off(&mut self) {
        let snapshot = self.fm.control.snapshot().unwrap();
        assert!(snapshot.active.is_empty() && snapshot.violations.is_empty(), "{snapshot:?}");
    }
}

fn all() -> String {
    SERVER.map(|(pci, _)| pci).join(",")
}

#[test]
fn a_probe_finds_the_modules_of_all_gpus() {
    for table in ["h100", "b200"] {
        let mut stand = Stand::seen(table);
        let (shown, progress, code) = stand.probe(&all(), &stand.check(), &[]);
        assert_eq!(code, 0, "{progress}");
        assert!(
            progress.contains("fmctl: is 0000:0f:00.0 module 1? Partition ")
                && progress.contains("fmctl: 0000:0f:00.0 is module 5\n")
        );
        assert!(shown.contains("5          0000:0f:00.0  N/A   18/18  probe of partition "), "{shown}");
        assert!(shown.ends_with("It is verified: every GPU was measured\n"), "{shown}");
        assert!((9..=36).contains(&stand.checks()), "{}", stand.checks());
        let inventory: serde_json::Value = serde_json::from_str(&stand.typed(&["--json", "inventory"]).0).unwrap();
        for (pci, module) in SERVER {
            assert_eq!(inventory["modules"][module as usize - 1]["entry"]["pci"], pci);
        }
        assert_eq!(stand.typed(&["plan", "--gpus", "8"]).2, 0);
        // It is known, and nothing is done again.
        let before = stand.checks();
        let (_, progress, code) = stand.probe(&all(), &stand.check(), &[]);
        assert!(progress.contains("0000:0f:00.0 is module 5: it was measured before") && code == 0, "{progress}");
        assert_eq!(stand.checks(), before);
        let guess = stand.table("guess", &SERVER);
        assert_eq!(stand.probe(&all(), &stand.check(), &["--replace", "--guess", &guess]).2, 0);
        assert_eq!(stand.checks(), before + 8, "a check for each GPU");
        stand.assert_off();
    }
}

#[test]
fn a_wrong_table_is_found_out() {
    let mut stand = Stand::seen("h100");
    let table = stand.table("sorted", &sorted());
    assert_eq!(stand.typed(&["inventory", "set", &table, "--serial", "S1"]).2, 0);
    assert_eq!(stand.typed(&["activate", "--gpus", "2", "--owner", "a"]).2, 5, "it is not believed");
    let (_, error, code) = stand.probe("0000:0f:00.0", &stand.check(), &[]);
    assert_eq!(code, 5, "{error}");
    assert!(error.contains("the map has module 5 at 0000:86:00.0 (operator), not at 0000:0f:00.0"), "{error}");
    assert!(
        error.contains("the map has 0000:0f:00.0 as module 1 (operator), not as 5; nothing was changed"),
        "{error}"
    );
    stand.assert_off();
    let (_, error, code) = stand.probe(&all(), &stand.check(), &["--replace"]);
    assert_eq!(code, 0, "{error}");
    let (planned, ..) = stand.typed(&["plan", "--gpus", "2"]);
    assert!(planned.starts_with("Partition 3 with GPUs 1,3 at 0000:86:00.0,0000:87:00.0; "), "{planned}");
    // Who says the wrong one once more is told.
    let (_, error, code) = stand.typed(&["inventory", "set", &table, "--serial", "S1"]);
    assert!(
        error.contains("the map has module 5 at 0000:0f:00.0 (probe (partition 11)), not at 0000:86:00.0") && code == 5,
        "{error}"
    );
    // The right one is not verified by being said.
    let good = stand.table("good", &SERVER);
    assert_eq!(stand.typed(&["inventory", "forget"]).2, 0);
    assert_eq!(stand.typed(&["inventory", "set", &good, "--serial", "S1"]).2, 0);
    let before = stand.checks();
    assert_eq!(stand.probe(&all(), &stand.check(), &[]).2, 0);
    assert_eq!(stand.checks(), before + 8);
    assert_eq!(stand.typed(&["health"]).2, 0);
    stand.assert_off();
}

#[test]
fn a_check_that_fails_stops_the_probe_and_leaves_nothing_active() {
    let mut stand = Stand::seen("h100");
    let (_, error, code) = stand.probe("0000:0f:00.0", "echo starting; echo 'no room for a guest' >&2; exit 3", &[]);
    assert!(error.contains("the probe of 0000:0f:00.0 as module 1 was stopped: the check ended with exit status: 3: no room for a guest; partition 7 is deactivated") && code == 1, "{error}");
    stand.assert_off();
    let (_, error, code) = stand.probe("0000:0f:00.0", "exit 10", &[]);
    assert!(
        error.contains("0000:0f:00.0 got a fabric as none of the modules 1,2,3,4,5,6,7,8: was it reset") && code == 1,
        "{error}"
    );
    stand.assert_off();
    let (_, error, code) = stand.probe("0000:0f:00.0", "sleep 100", &["--check-timeout", "1"]);
    assert!(error.contains("the check has not ended within 1 s; partition 7 is deactivated") && code == 1, "{error}");
    stand.assert_off();
    assert_eq!(stand.probe("0000:0f:00.0,0000:0f:00.0", "exit 0", &[]).2, 2);
    // Somebody runs on a GPU that would have to be tried.
    assert_eq!(stand.typed(&["activate", "--gpus", "1", "--owner", "vm-1"]).2, 0);
    stand.fm.control.tell(&Tell::Tenant { partition: 7, running: true }).unwrap();
    let (_, error, code) = stand.probe("0000:0f:00.0", &stand.check(), &[]);
    assert!(
        error.contains("module 1 would have to be tried, and partition 7 with it is active for vm-1") && code == 5,
        "{error}"
    );
    assert_eq!(stand.checks(), 0);
    stand.fm.control.tell(&Tell::Tenant { partition: 7, running: false }).unwrap();
    assert_eq!(stand.typed(&["deactivate", "7", "--owner", "vm-1"]).2, 0);
    // One that was killed has left its partition.
    assert_eq!(stand.typed(&["activate", "7", "--owner", "fmctl-probe"]).2, 0);
    let (_, error, code) = stand.probe("0000:0f:00.0", &stand.check(), &[]);
    assert!(error.contains("if none runs, fmctl deactivate 7 --owner fmctl-probe") && code == 5, "{error}");
    assert_eq!(stand.typed(&["deactivate", "7", "--owner", "fmctl-probe"]).2, 0);
    stand.assert_off();
}

#[test]
fn an_operator_may_interrupt_it_and_the_daemon_may_die_meanwhile() {
    let mut stand = Stand::seen("h100");
    let mark = stand.dir.path().join("mark");
    let begin = |stand: &Stand, then: &str| {
        let check = format!("touch {}; {then}", mark.display());
        let arguments = ["inventory", "probe", "--gpus", "0000:0f:00.0", "--serial", "S1", "--check", &check];
        let mut command = stand.fmctl_command(&arguments);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let child = command.spawn().unwrap();
        let begun = Instant::now();
        while !mark.exists() {
            assert!(begun.elapsed() < Duration::from_secs(20), "no check was begun");
            std::thread::sleep(Duration::from_millis(5));
        }
        fs::remove_file(&mark).unwrap();
        child
    };
    for signal in [Signal::INT, Signal::TERM] {
        let child = begin(&stand, "sleep 1000");
        assert_eq!(stand.fm.control.snapshot().unwrap().active.len(), 1);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let (_, error, code) = told(&child.wait_with_output().unwrap());
        assert!(error.contains("it was interrupted; partition 7 is deactivated") && code == 1, "{error}");
        stand.assert_off();
    }
    let release = stand.dir.path().join("release");
    let child = begin(&stand, &format!("while ! test -e {}; do sleep 0.02; done; exit 3", release.display()));
    stand.kill_daemon();
    fs::write(&release, "").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    stand.start_daemon();
    let (_, error, code) = told(&child.wait_with_output().unwrap());
    assert!(error.contains("partition 7 is deactivated") && code == 1, "{error}");
    tokio_main(async { stand.until("the fabric is seen", |health| health.fabric_manager).await });
    stand.assert_off();
    // It dies while the fabric manager is at the activation: whoever probes is not told whether that came to be.
    stand.fm.control.tell(&Tell::Hang(Some(Op::Activate))).unwrap();
    let arguments = ["inventory", "probe", "--gpus", "0000:0f:00.0", "--serial", "S1", "--check", "exit 0"];
    let mut command = stand.fmctl_command(&arguments);
    let child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    stand.fm.wait_until(|snapshot| snapshot.hanging).unwrap();
    stand.kill_daemon();
    stand.fm.control.tell(&Tell::Release).unwrap();
    stand.fm.wait_until(|snapshot| !snapshot.active.is_empty()).unwrap();
    stand.start_daemon();
    let (_, error, code) = told(&child.wait_with_output().unwrap());
    assert!(error.contains("module 1 was stopped: ") && error.contains("partition 7 is deactivated"), "{error}");
    assert_eq!(code, 1);
    stand.assert_off();
}
