//! The process: how it comes up, restarts and ends.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: what fails here is the finding")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Output;

use firstlight_fake_fm::board::Failed;
use firstlight_fake_fm::call::{Call, Payload};
use firstlight_fake_fm::control::Command;
use firstlight_fake_fm::home::Home;
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use firstlight_fake_fm::wire::{self, Request};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fake-fm");

/// Fast, so that only what a test is about takes time.
fn quick() -> Scenario {
    Scenario { start_ms: 0, list_ms: 0, activate_ms: 0, deactivate_ms: 0, ..Scenario::default() }
}

fn call(home: &Home, request: Call) -> i32 {
    let mut stream = UnixStream::connect(home.socket()).unwrap();
    wire::request(&mut stream, &Request::Call(request)).unwrap().rc
}

/// Runs it to its end.
fn output(home: &Home, arguments: &[&str]) -> Output {
    home.command(Path::new(PROGRAM), arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn fm_starts_serves_and_terminates() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    // An H100's: only the log tells.
    let failed = Failed { gpus: [2].into(), switches: [1].into(), ..Failed::default() };
    home.write(&[], &Scenario { failed, ..quick() }).unwrap();
    let mut fm = home.start(Path::new(PROGRAM), &[]).unwrap();
    fm.wait_for(Phase::Ready).unwrap();
    assert!(home.state_file().exists());
    assert_eq!(call(&home, Call::Activate(3)), 0);
    let mut stream = UnixStream::connect(home.socket()).unwrap();
    let reply = wire::request(&mut stream, &Request::Call(Call::List)).unwrap();
    let Payload::List { partitions, most } = reply.payload else { panic!("{reply:?}") };
    assert_eq!((partitions.len(), most), (15, 15));
    assert_eq!(partitions.iter().filter(|it| it.is_active).map(|it| it.id).collect::<Vec<_>>(), [3]);
    fm.control.send(&Command::Sxid { switch: 2, code: 20_034 }).unwrap();
    assert_eq!(fm.terminate().unwrap(), Some(0));
    assert!(stream.read(&mut [0]).is_ok_and(|length| length == 0), "old connections end");
    let log = std::fs::read_to_string(home.log()).unwrap();
    assert!(log.contains("Successfully configured all the available NVSwitches") && log.contains("SXid 20034"));
    assert!(log.contains("on NVSwitch 1") && log.contains("Xid 74 on GPU with physical id 2"));
    assert!(std::fs::read_to_string(home.journal()).unwrap().contains(r#""op":"activate","ids":[3],"rc":0"#));
}

#[test]
fn starting_fm_refuses_calls() {
    const LONG: u64 = 600_000;
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    home.write(&[], &Scenario { listen_ms: LONG, ..quick() }).unwrap();
    let mut fm = home.start(Path::new(PROGRAM), &[]).unwrap();
    assert!(UnixStream::connect(home.socket()).is_err(), "it does not listen");
    fm.kill().unwrap();

    home.write(&[], &Scenario { start_ms: LONG, ..quick() }).unwrap();
    let mut fm = home.start(Path::new(PROGRAM), &[]).unwrap();
    while UnixStream::connect(home.socket()).is_err() {
        fm.wait_for(Phase::Starting).unwrap();
    }
    for request in [Call::List, Call::Activate(3), Call::Deactivate(3), Call::FailedDevices, Call::Unsupported] {
        assert_eq!(call(&home, request), -8);
    }
    assert_eq!(call(&home, Call::SetActivated(vec![])), -3);
    assert!(!home.state_file().exists(), "nothing to restart from");
    assert_eq!(fm.terminate().unwrap(), Some(0));
}

#[test]
fn killed_fm_is_restarted_with_the_list() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    home.write(&[], &quick()).unwrap();
    let mut fm = home.start(Path::new(PROGRAM), &[]).unwrap();
    fm.wait_for(Phase::Ready).unwrap();
    assert_eq!(call(&home, Call::Activate(3)), 0);
    fm.kill().unwrap();
    assert!(UnixStream::connect(home.socket()).is_err(), "the socket file exists, without a listener");
    home.write(&[], &Scenario { tenants: [3].into(), ..quick() }).unwrap();

    let mut fm = home.start(Path::new(PROGRAM), &["--restart"]).unwrap();
    fm.wait_for(Phase::RestartWait).unwrap();
    for request in [Call::List, Call::Activate(4), Call::Deactivate(3), Call::FailedDevices, Call::Unsupported] {
        assert_eq!(call(&home, request), -8);
    }
    assert_eq!(call(&home, Call::SetActivated(vec![3, 7])), -1);
    assert_eq!(call(&home, Call::SetActivated(vec![3, 4])), 0);
    assert_eq!(call(&home, Call::SetActivated(vec![3, 4])), -3, "once");
    let snapshot = fm.control.snapshot().unwrap();
    assert_eq!((snapshot.phase, snapshot.active), (Phase::ReadyRestarted, [3, 4].into()));
    assert!(snapshot.violations.is_empty(), "{:?}", snapshot.violations);
    assert_eq!(fm.terminate().unwrap(), Some(0));

    let mut fm = home.start(Path::new(PROGRAM), &["-r"]).unwrap();
    fm.wait_for(Phase::RestartWait).unwrap();
    assert_eq!(call(&home, Call::SetActivated(vec![4])), 0);
    assert_eq!(fm.control.snapshot().unwrap().violations.len(), 2, "forgotten, and cut");
    assert_eq!(fm.terminate().unwrap(), Some(70));
}

#[test]
fn fm_without_the_list_exits() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    home.write(&[("FABRIC_MODE_RESTART", "1")], &Scenario { restart_window_ms: 100, ..quick() }).unwrap();
    let first = output(&home, &[]);
    assert_eq!(first.status.code(), Some(1));
    assert!(said(&first).contains("failed to read the state file"), "the first start: {}", said(&first));

    home.write(&[], &quick()).unwrap();
    let mut fm = home.start(Path::new(PROGRAM), &[]).unwrap();
    fm.wait_for(Phase::Ready).unwrap();
    fm.kill().unwrap();
    home.write(&[], &Scenario { restart_window_ms: 100, ..quick() }).unwrap();
    let late = output(&home, &["--restart"]);
    assert_eq!(late.status.code(), Some(1));
    assert!(said(&late).contains("no list of activated partitions within 100 ms"));

    home.write(&[], &Scenario { version: "575.57.08".into(), ..quick() }).unwrap();
    assert!(said(&output(&home, &["--restart"])).contains("is of version 610.43.02 on h100"));
    std::fs::write(home.state_file(), "{").unwrap();
    assert!(said(&output(&home, &["--restart"])).contains("corrupt"));
}

#[test]
fn failed_starts_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    let mismatch = Scenario { driver_version: Some("575.57.08".into()), ..quick() };
    home.write(&[], &mismatch).unwrap();
    let refused = output(&home, &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("don't match with driver version 575.57.08"));

    home.write(&[("FM_STAY_RESIDENT_ON_FAILURES", "1")], &mismatch).unwrap();
    let mut fm = home.start(Path::new(PROGRAM), &[]).unwrap();
    fm.wait_for(Phase::FailedResident).unwrap();
    assert_eq!((call(&home, Call::List), call(&home, Call::SetActivated(vec![]))), (-8, -3));
    assert_eq!(fm.terminate().unwrap(), Some(0));

    for (keys, scenario, error) in [
        (vec![("DAEMONIZE", "1")], quick(), "DAEMONIZE=1: the stand-in stays in the foreground"),
        (vec![("FABRIC_MODE", "9")], quick(), "FABRIC_MODE=9"),
        (vec![("FM_CMD_UNIX_SOCKET_PATH", "/nowhere/socket")], quick(), "/nowhere/socket"),
        (vec![("STATE_FILE_NAME", "/nowhere/state")], quick(), "failed to write the state file"),
        (vec![], Scenario { table: "h200".into(), ..quick() }, "no table h200"),
        (vec![], Scenario { start_fails: Some("no switch was found".into()), ..quick() }, "no switch was found"),
    ] {
        home.write(&keys, &scenario).unwrap();
        let output = output(&home, &[]);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains(error), "{}", said(&output));
    }
    std::fs::remove_file(home.config()).unwrap();
    assert!(said(&output(&home, &[])).contains("fabricmanager.cfg"));
    let version = output(&home, &["-v"]);
    assert_eq!(String::from_utf8_lossy(&version.stdout).trim_end(), "Fabric Manager version is : 610.43.02");
}

#[test]
fn other_fabric_modes_and_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::new(dir.path());
    let internal = dir.path().join("internal");
    home.write(&[("FABRIC_MODE", "0"), ("UNIX_SOCKET_PATH", internal.to_str().unwrap())], &quick()).unwrap();
    let mut fm = home.start(Path::new(PROGRAM), &["-g", "0x0123456789abcdef"]).unwrap();
    fm.wait_for(Phase::Ready).unwrap();
    assert_eq!(call(&home, Call::List), -3);
    let mut trap = UnixStream::connect(&internal).unwrap();
    assert_eq!(wire::request(&mut trap, &Request::Hello).unwrap().rc, 0);
    assert_eq!(wire::request(&mut trap, &Request::Call(Call::List)).unwrap().rc, -4);

    // Garbage ends one connection.
    let mut good = UnixStream::connect(home.socket()).unwrap();
    let mut bad = UnixStream::connect(home.socket()).unwrap();
    bad.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    assert!(!bad.read(&mut [0]).is_ok_and(|length| length > 0));
    assert_eq!(wire::request(&mut good, &Request::Hello).unwrap().rc, 0);
    assert_eq!(fm.terminate().unwrap(), Some(0));

    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    home.write(&[("FM_CMD_UNIX_SOCKET_PATH", ""), ("FM_CMD_PORT_NUMBER", &port.to_string())], &quick()).unwrap();
    let mut fm = home.start(Path::new(PROGRAM), &[]).unwrap();
    fm.wait_for(Phase::Ready).unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(wire::request(&mut stream, &Request::Call(Call::List)).unwrap().rc, 0);
}
