//! Probes, with a check command that queries the fabric manager's stand-in.

use std::fs;
use std::time::{Duration, Instant};

use firstlight_fake_fm::call::Op;
use firstlight_fake_fm::control::Command as FmCommand;
use rustix::process::{Pid, Signal, kill_process};

use crate::block_on;
use crate::inventory::{SERVER, sorted};
use crate::support::{FAKE_FM, Fixture, output_of};

impl Fixture {
    /// A check command that reports a fabric if the GPU's real module is in an active partition.
    fn check(&self) -> String {
        let cases: String = SERVER.iter().map(|(pci, module)| format!("{pci}) module={module};; ")).collect();
        let log = self.dir.path().join("checks");
        format!(
            "case $FIRSTLIGHT_PROBE_PCI in {cases} *) echo 'no such GPU'; exit 3;; esac; \
             echo $FIRSTLIGHT_PROBE_PCI $FIRSTLIGHT_PROBE_MODULE_ID >> {}; FAKE_FM={} exec {} --fabric-of $module",
            log.display(),
            self.home.scenario().display(),
            FAKE_FM.display()
        )
    }

    fn checks(&self) -> usize {
        fs::read_to_string(self.dir.path().join("checks")).unwrap_or_default().lines().count()
    }

    fn probe(&self, gpus: &str, check: &str, more: &[&str]) -> (String, String, i32) {
        let arguments = ["inventory", "probe", "--pci", gpus, "--baseboard-serial", "S1", "--check", check];
        self.run_fmctl(&[&arguments, more].concat())
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
fn probe_finds_the_modules_of_all_gpus() {
    for table in ["h100", "b200"] {
        let mut fixture = Fixture::seen(table);
        let (shown, progress, code) = fixture.probe(&all(), &fixture.check(), &[]);
        assert_eq!(code, 0, "{progress}");
        assert!(
            progress.contains("fmctl: testing 0000:0f:00.0 as module 1: partition ")
                && progress.contains("fmctl: 0000:0f:00.0 is module 5\n")
        );
        assert!(shown.contains("5          0000:0f:00.0  N/A   18/18  probe of partition "), "{shown}");
        assert!(shown.ends_with("Verified: every GPU was measured\n"), "{shown}");
        assert!((9..=36).contains(&fixture.checks()), "{}", fixture.checks());
        let inventory: serde_json::Value =
            serde_json::from_str(&fixture.run_fmctl(&["--json", "inventory"]).0).unwrap();
        for (pci, module) in SERVER {
            assert_eq!(inventory["baseboard_modules"][module as usize - 1]["entry"]["pci"], pci);
        }
        assert_eq!(fixture.run_fmctl(&["plan", "--gpus", "8"]).2, 0);
        // Measured GPUs are not probed again.
        let before = fixture.checks();
        let (_, progress, code) = fixture.probe(&all(), &fixture.check(), &[]);
        assert!(progress.contains("0000:0f:00.0 is module 5: measured before") && code == 0, "{progress}");
        assert_eq!(fixture.checks(), before);
        let guess = fixture.table("guess", &SERVER);
        assert_eq!(fixture.probe(&all(), &fixture.check(), &["--replace", "--initial-map", &guess]).2, 0);
        assert_eq!(fixture.checks(), before + 8, "a check for each GPU");
        fixture.assert_off();
    }
}

#[test]
fn probe_detects_a_wrong_table() {
    let mut fixture = Fixture::seen("h100");
    let table = fixture.table("sorted", &sorted());
    assert_eq!(fixture.run_fmctl(&["inventory", "set", &table, "--baseboard-serial", "S1"]).2, 0);
    assert_eq!(fixture.run_fmctl(&["activate", "--gpus", "2", "--owner", "a"]).2, 5, "the map is not verified");
    let (_, error, code) = fixture.probe("0000:0f:00.0", &fixture.check(), &[]);
    assert_eq!(code, 5, "{error}");
    assert!(error.contains("the map has module 5 at 0000:86:00.0 (operator), not at 0000:0f:00.0"), "{error}");
    assert!(
        error.contains("the map has 0000:0f:00.0 as module 1 (operator), not as 5; nothing was changed"),
        "{error}"
    );
    fixture.assert_off();
    let (_, error, code) = fixture.probe(&all(), &fixture.check(), &["--replace"]);
    assert_eq!(code, 0, "{error}");
    let (planned, ..) = fixture.run_fmctl(&["plan", "--gpus", "2"]);
    assert!(planned.starts_with("Partition 3 with GPUs 1,3 at 0000:86:00.0,0000:87:00.0; "), "{planned}");
    // The wrong table contradicts the measurement.
    let (_, error, code) = fixture.run_fmctl(&["inventory", "set", &table, "--baseboard-serial", "S1"]);
    assert!(
        error.contains("the map has module 5 at 0000:0f:00.0 (probe (partition 11)), not at 0000:86:00.0") && code == 5,
        "{error}"
    );
    // A statement alone does not verify the correct table.
    let good = fixture.table("good", &SERVER);
    assert_eq!(fixture.run_fmctl(&["inventory", "forget"]).2, 0);
    assert_eq!(fixture.run_fmctl(&["inventory", "set", &good, "--baseboard-serial", "S1"]).2, 0);
    let before = fixture.checks();
    assert_eq!(fixture.probe(&all(), &fixture.check(), &[]).2, 0);
    assert_eq!(fixture.checks(), before + 8);
    assert_eq!(fixture.run_fmctl(&["health"]).2, 0);
    fixture.assert_off();
}

#[test]
fn failed_check_aborts_the_probe_and_deactivates_its_partition() {
    let mut fixture = Fixture::seen("h100");
    let (_, error, code) = fixture.probe("0000:0f:00.0", "echo starting; echo 'no room for a guest' >&2; exit 3", &[]);
    assert!(error.contains("the probe of 0000:0f:00.0 as module 1 was stopped: the check ended with exit status: 3: no room for a guest; partition 7 is deactivated") && code == 1, "{error}");
    fixture.assert_off();
    let (_, error, code) = fixture.probe("0000:0f:00.0", "exit 10", &[]);
    assert!(
        error.contains("0000:0f:00.0 got a fabric as none of the modules 1,2,3,4,5,6,7,8: was it reset") && code == 1,
        "{error}"
    );
    fixture.assert_off();
    let (_, error, code) = fixture.probe("0000:0f:00.0", "sleep 100", &["--check-timeout", "1"]);
    assert!(error.contains("the check has not ended within 1 s; partition 7 is deactivated") && code == 1, "{error}");
    fixture.assert_off();
    assert_eq!(fixture.probe("0000:0f:00.0,0000:0f:00.0", "exit 0", &[]).2, 2);
    // A tenant has a GPU that has to be probed.
    assert_eq!(fixture.run_fmctl(&["activate", "--gpus", "1", "--owner", "vm-1"]).2, 0);
    fixture.fm.control.send(&FmCommand::Tenant { partition: 7, running: true }).unwrap();
    let (_, error, code) = fixture.probe("0000:0f:00.0", &fixture.check(), &[]);
    assert!(
        error.contains("module 1 has to be probed, and its partition 7 is active for vm-1") && code == 5,
        "{error}"
    );
    assert_eq!(fixture.checks(), 0);
    fixture.fm.control.send(&FmCommand::Tenant { partition: 7, running: false }).unwrap();
    assert_eq!(fixture.run_fmctl(&["deactivate", "7", "--owner", "vm-1"]).2, 0);
    // A killed probe has left its partition active.
    assert_eq!(fixture.run_fmctl(&["activate", "7", "--owner", "fmctl-probe"]).2, 0);
    let (_, error, code) = fixture.probe("0000:0f:00.0", &fixture.check(), &[]);
    assert!(error.contains("if none runs, fmctl deactivate 7 --owner fmctl-probe") && code == 5, "{error}");
    assert_eq!(fixture.run_fmctl(&["deactivate", "7", "--owner", "fmctl-probe"]).2, 0);
    fixture.assert_off();
}

#[test]
fn interrupted_probe_and_killed_daemon_leave_no_active_partition() {
    let mut fixture = Fixture::seen("h100");
    let mark = fixture.dir.path().join("mark");
    let begin = |fixture: &Fixture, then: &str| {
        let check = format!("touch {}; {then}", mark.display());
        let arguments = ["inventory", "probe", "--pci", "0000:0f:00.0", "--baseboard-serial", "S1", "--check", &check];
        let mut command = fixture.fmctl_command(&arguments);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let child = command.spawn().unwrap();
        let start = Instant::now();
        while !mark.exists() {
            assert!(start.elapsed() < Duration::from_secs(20), "no check was started");
            std::thread::sleep(Duration::from_millis(5));
        }
        fs::remove_file(&mark).unwrap();
        child
    };
    for signal in [Signal::INT, Signal::TERM] {
        let child = begin(&fixture, "sleep 1000");
        assert_eq!(fixture.fm.control.snapshot().unwrap().active.len(), 1);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let (_, error, code) = output_of(&child.wait_with_output().unwrap());
        assert!(error.contains("interrupted; partition 7 is deactivated") && code == 1, "{error}");
        fixture.assert_off();
    }
    let release = fixture.dir.path().join("release");
    let child = begin(&fixture, &format!("while ! test -e {}; do sleep 0.02; done; exit 3", release.display()));
    fixture.kill_daemon();
    fs::write(&release, "").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    fixture.start_daemon();
    let (_, error, code) = output_of(&child.wait_with_output().unwrap());
    assert!(error.contains("partition 7 is deactivated") && code == 1, "{error}");
    block_on(async { fixture.until("the fabric was polled", |health| health.fabric_manager).await });
    fixture.assert_off();
    // The daemon dies while FM is activating: the probe does not learn the outcome.
    fixture.fm.control.send(&FmCommand::Hang(Some(Op::Activate))).unwrap();
    let arguments = ["inventory", "probe", "--pci", "0000:0f:00.0", "--baseboard-serial", "S1", "--check", "exit 0"];
    let mut command = fixture.fmctl_command(&arguments);
    let child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    fixture.fm.wait_until(|snapshot| snapshot.hanging).unwrap();
    fixture.kill_daemon();
    fixture.fm.control.send(&FmCommand::Release).unwrap();
    fixture.fm.wait_until(|snapshot| !snapshot.active.is_empty()).unwrap();
    fixture.start_daemon();
    let (_, error, code) = output_of(&child.wait_with_output().unwrap());
    assert!(error.contains("module 1 was stopped: ") && error.contains("partition 7 is deactivated"), "{error}");
    assert_eq!(code, 1);
    fixture.assert_off();
}
