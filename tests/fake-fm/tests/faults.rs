//! The process when a test has its say, and when it is killed at any time.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: what fails here is the finding")]

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use firstlight_fake_fm::call::{Call, Op};
use firstlight_fake_fm::control::{Command, Fault, Latency};
use firstlight_fake_fm::home::{Home, Running};
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use firstlight_fake_fm::wire::{self, Request};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fake-fm");

fn quick() -> Scenario {
    Scenario { start_ms: 0, list_ms: 0, activate_ms: 0, deactivate_ms: 0, ..Scenario::default() }
}

fn started(home: &Home, scenario: &Scenario) -> Running {
    home.write(&[], scenario).unwrap();
    let mut fm = home.start(Path::new(PROGRAM), &[]).unwrap();
    fm.wait_for(Phase::Ready).unwrap();
    fm
}

fn call(home: &Home, request: Call) -> i32 {
    let mut stream = UnixStream::connect(home.socket()).unwrap();
    wire::request(&mut stream, &Request::Call(request)).unwrap().rc
}

#[test]
fn injected_reply_contradicts_the_effect() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    let mut fm = started(&home, &Scenario { table: "b200".into(), ..quick() });
    let late = Fault { op: Some(Op::Activate), rc: -5, after_ms: 100, take_effect: true, times: 1 };
    fm.control.send(&Command::Fault(late)).unwrap();
    let start = Instant::now();
    assert_eq!(call(&home, Call::Activate(4)), -5);
    assert!(start.elapsed() >= Duration::from_millis(100));
    assert_eq!(call(&home, Call::Activate(4)), -17, "it is active");
    assert_eq!(call(&home, Call::Activate(8)), -24);
    assert_eq!(call(&home, Call::Deactivate(5)), -18);
    assert!(fm.control.send(&Command::Tenant { partition: 99, running: true }).is_err());
    assert_eq!(fm.terminate().unwrap(), Some(0));
}

#[test]
fn calls_wait_for_each_other_and_hang() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    let mut fm = started(&home, &quick());
    fm.control.send(&Command::Latency(Latency { activate_ms: Some(100), ..Latency::default() })).unwrap();
    let start = Instant::now();
    thread::scope(|scope| {
        for id in [3, 4, 5] {
            let home = &home;
            scope.spawn(move || assert_eq!(call(home, Call::Activate(id)), 0));
        }
    });
    assert!(start.elapsed() >= Duration::from_millis(300));

    fm.control.send(&Command::Hang(Some(Op::Deactivate))).unwrap();
    assert_eq!(call(&home, Call::List), 0, "of another kind");
    thread::scope(|scope| {
        let hung = scope.spawn(|| call(&home, Call::Deactivate(3)));
        let snapshot = fm.wait_until(|snapshot| snapshot.hanging).unwrap();
        assert_eq!(snapshot.active, [3, 4, 5].into());
        fm.control.send(&Command::Release).unwrap();
        assert_eq!(hung.join().unwrap(), 0);
    });
    assert!(!fm.control.snapshot().unwrap().hanging);
}

#[test]
fn violations_set_the_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    let mut fm = started(&home, &quick());
    assert_eq!(call(&home, Call::Activate(1)), 0);
    fm.control.send(&Command::Tenant { partition: 1, running: true }).unwrap();
    assert_eq!(call(&home, Call::Activate(3)), -7, "refused, and should not have been asked");
    let violations = fm.control.snapshot().unwrap().violations;
    assert_eq!(violations, ["partition 3 is to be activated, of GPUs that the tenant of 1 has"]);
    assert_eq!(fm.terminate().unwrap(), Some(70));
    assert!(std::fs::read_to_string(home.journal()).unwrap().contains("violation"));
}

#[test]
fn killed_at_any_time_the_state_file_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    drop(started(&home, &quick()));
    for wait in 0..20 {
        let mut fm = home.start(Path::new(PROGRAM), &[]).unwrap();
        thread::sleep(Duration::from_micros(wait * 150));
        fm.kill().unwrap();
        let mut again = home.start(Path::new(PROGRAM), &["--restart"]).unwrap();
        again.wait_for(Phase::RestartWait).unwrap();
    }
}
