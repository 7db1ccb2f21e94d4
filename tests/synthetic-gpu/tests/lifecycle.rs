//! The program's lifecycle as the lab uses it: readiness and reliable exit.
#![expect(clippy::unwrap_used, reason = "a test: what fails here is the finding")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

fn start(dir: &Path, devices: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_synthetic-gpu"))
        .arg(dir)
        .args(devices)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn wait_ready(child: &mut Child) {
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
}

fn exits(child: &mut Child) -> bool {
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            return true;
        }
        thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    false
}

fn sockets(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[test]
fn serves_until_stdin_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = start(dir.path(), &["h100", "h200:bar=1G", "nvswitch", "cx7", "pmc"]);
    wait_ready(&mut child);
    assert_eq!(sockets(dir.path()), 5);
    drop(child.stdin.take());
    assert!(exits(&mut child), "still running after stdin was closed");
    assert_eq!(sockets(dir.path()), 0);
}

#[test]
fn sigterm_removes_the_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = start(dir.path(), &["b200"]);
    wait_ready(&mut child);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(exits(&mut child), "still running after SIGTERM");
    assert_eq!(sockets(dir.path()), 0);
}

/// The parent death signal is sent when the starting thread exits, not its process: start the program from a
/// long-lived thread.
#[test]
fn exits_with_the_thread_that_started_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_owned();
    let mut child = thread::spawn(move || {
        let mut child = start(&path, &["h100"]);
        wait_ready(&mut child);
        child
    })
    .join()
    .unwrap();
    assert!(exits(&mut child), "still running after its parent exited");
    assert_eq!(sockets(dir.path()), 0);
}

#[test]
fn invalid_device_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let output = start(dir.path(), &["h100", "h100:bar=3G"]).wait_with_output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("h100: bar=\"3G\""), "{message}");
    assert_eq!(sockets(dir.path()), 0);
}
