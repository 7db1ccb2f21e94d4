//! Events from outside: the kernel log, PID 1's reports, and version mismatches.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use firstlight_fake_fm::machine::Phase;
use firstlight_init_control::{FromInit, ToInit, decode, encode};
use tonic::Code;

use crate::support::{Fixture, activate, quick};

/// Starts a fixture with more daemon options.
fn fixture(table: &str, more: &[&str]) -> Fixture {
    let mut fixture = Fixture::new(&quick(table));
    fixture.kill_daemon();
    fixture.more.extend(more.iter().map(ToString::to_string));
    fixture.start_daemon();
    fixture
}

/// Writes one complete record, as the kernel does.
fn kernel_says(log: &mut File, record: &str) {
    log.write_all(format!("{record}\n").as_bytes()).unwrap();
}

const FATAL: &str = "nvidia-nvswitch2: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up";

#[tokio::test]
async fn fatal_sxid_blocks_new_multi_gpu_partitions_until_release() {
    let log = tempfile::tempdir().unwrap();
    let path = log.path().join("kmsg");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    // Opened for reading and writing, a FIFO blocks no open and has no end of file.
    let mut kernel = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut fixture = fixture("h100", &["--kernel-log", &path.display().to_string()]);
    let mut client = fixture.client().await;
    let before = client.activate(activate("r0", 2, "before")).await.unwrap().into_inner();

    // Records of processes are ignored, and a non-fatal SXid is only a note.
    kernel_says(&mut kernel, &format!("11,1,1,-;{FATAL}"));
    kernel_says(&mut kernel, &format!("3,2,1,-;{}", FATAL.replace("Fatal", "Non-fatal")));
    let health = fixture.until("the note", |health| !health.notes.is_empty()).await;
    assert!(health.ok, "{health:?}");
    assert!(health.notes[0].starts_with("NVSwitch 0000:05:00.0: 1 errors, the last: SXid 20034"), "{health:?}");
    client.activate(activate("r1", 2, "a")).await.unwrap();

    kernel_says(&mut kernel, &format!("3,3,1,-;{FATAL}"));
    let health = fixture.until("the fatal error", |health| !health.ok).await;
    assert!(
        health.problems[0].contains("SXid 20034, Fatal, Link 30")
            && health.problems[0].contains("fmctl release 0000:05:00.0")
    );
    let (_, error, code) = fixture.run_fmctl(&["activate", "--gpus", "2", "--owner", "b"]);
    assert!(error.contains("NVSwitch 0000:05:00.0 had a fatal error") && code == 5, "{code}: {error}");
    assert_eq!(fixture.run_fmctl(&["plan", "--gpus", "2"]).2, 5);
    // A single GPU needs no switch, and existing partitions stay active.
    assert_eq!(fixture.run_fmctl(&["activate", "--gpus", "1", "--owner", "c"]).2, 0);
    assert!(fixture.fm.control.snapshot().unwrap().active.contains(&before.partition));

    // The fault survives a daemon restart, and old records are not processed again.
    fixture.kill_daemon();
    fixture.start_daemon();
    fixture.until("it is reported", |health| !health.ok).await;
    assert_eq!(fixture.run_fmctl(&["release", "0000:09:00.0"]).2, 4);
    assert_eq!(
        fixture.run_fmctl(&["release", "0000:05:00.0"]),
        ("NVSwitch 0000:05:00.0 is available again\n".into(), String::new(), 0)
    );
    kernel_says(&mut kernel, &format!("3,3,1,-;{FATAL}\n3,2,1,-;{}", FATAL.replace("Fatal", "Non-fatal")));
    fixture.until("the old lines are read again", |health| !health.notes.is_empty()).await;
    assert_eq!(
        fixture.run_fmctl(&["activate", "--gpus", "2", "--owner", "b"]).2,
        0,
        "once mended, an old line does not count"
    );
    kernel_says(&mut kernel, &format!("3,4,1,-;{FATAL}"));
    fixture.until("a new one does", |health| !health.ok).await;
    fixture.assert_no_violations();
}

#[tokio::test]
async fn gpu_with_a_listed_address_is_quarantined_by_its_xid() {
    let log = tempfile::tempdir().unwrap();
    let path = log.path().join("kmsg");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let mut kernel = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut fixture = fixture("a100-8", &["--kernel-log", &path.display().to_string()]);
    fixture.until("the fabric was polled", |health| health.ok).await;
    let mut client = fixture.client().await;
    let listed = client.list(firstlight_fabric_api::v1::ListRequest {}).await.unwrap().into_inner();
    let gpu = &listed.partitions[0].gpus[2];
    let slot = gpu.pci.strip_prefix("0000").unwrap().rsplit_once('.').unwrap().0;
    kernel_says(&mut kernel, &format!("3,7,1,-;NVRM: Xid (PCI:{slot}): 79, pid=1, GPU has fallen off the bus."));
    let health = fixture.until("the quarantine", |health| !health.ok).await;
    let said = format!("GPU {} is quarantined (Xid 79, pid=1, GPU has fallen off the bus.)", gpu.physical_id);
    assert!(health.problems[0].starts_with(&said), "{health:?}");
    // An Xid of an unlisted GPU is a note.
    kernel_says(&mut kernel, "3,8,1,-;NVRM: Xid (PCI:0000:ee:00): 31, pid=1, x");
    let health = fixture.until("the note", |health| !health.notes.is_empty()).await;
    assert!(health.notes[0].starts_with("GPU 0000:ee:00: 1 errors"), "{health:?}");
    fixture.assert_no_violations();
}

/// Accepts PID 1's end of a connection and reads the subscription.
fn subscribed(listener: &UnixListener) -> UnixStream {
    let (stream, _) = listener.accept().unwrap();
    let mut line = String::new();
    BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(decode::<ToInit>(line.as_bytes()).unwrap(), ToInit::Subscribe);
    stream
}

fn says(stream: &mut UnixStream, ready: bool, detail: &str) {
    let daemon = |name: &str| FromInit::Daemon { name: name.to_owned(), ready, detail: detail.to_owned() };
    stream.write_all(b"not a message\n").unwrap();
    stream.write_all(&encode(&daemon("other")).unwrap()).unwrap();
    stream.write_all(&encode(&daemon("fabricmanager")).unwrap()).unwrap();
}

#[tokio::test]
async fn fm_state_from_pid_1_is_reported_and_polled_immediately() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("control.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    // The poll interval is longer than the restart window of FM.
    let mut fixture = fixture("h100", &["--init-socket", &socket.display().to_string()]);
    fixture.poll_interval = "3600";
    fixture.kill_daemon();
    fixture.start_daemon();
    let mut init = subscribed(&listener);
    // The killed daemon may have connected as well.
    listener.set_nonblocking(true).unwrap();
    while let Ok((stream, _)) = listener.accept() {
        init = stream;
        init.set_nonblocking(false).unwrap();
    }
    listener.set_nonblocking(false).unwrap();
    let mut client = fixture.client().await;
    let given = client.activate(activate("r1", 4, "a")).await.unwrap().into_inner();
    fixture.fm.kill().unwrap();
    says(&mut init, false, "killed by signal 9 after 77 ms; its last line: \"bye\"");
    let health = fixture.until("the exit is reported", |health| !health.ok).await;
    assert!(health.problems[0].contains("the fabric manager exited (killed by signal 9"), "{health:?}");

    fixture.restart_fm(&["--restart"]);
    fixture.fm.wait_for(Phase::RestartWait).unwrap();
    says(&mut init, true, "serves after 5 ms, start 2");
    fixture.fm.wait_for(Phase::ReadyRestarted).unwrap();
    let snapshot = fixture.fm.control.snapshot().unwrap();
    assert_eq!(snapshot.active.into_iter().collect::<Vec<_>>(), [given.partition]);
    fixture.until("there are no problems", |health| health.ok).await;

    // After PID 1 closes the connection, the daemon reconnects.
    drop(init);
    let mut init = subscribed(&listener);
    says(&mut init, false, "exit status 1");
    fixture.until("the second report", |health| !health.ok).await;
    fixture.assert_no_violations();
}

#[tokio::test]
async fn tenant_with_another_driver_version_is_refused_or_warned() {
    let mut fixture = Fixture::new(&quick("b200"));
    let other = |request: &str, version: &str| {
        let mut asked = activate(request, 1, "a");
        asked.guest_driver = version.to_owned();
        asked
    };
    let mut client = fixture.client().await;
    let error = client.activate(other("r1", "550.163.01")).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    for part in ["550.163.01", "610.43.02", "use an image", "--guest-driver"] {
        assert!(error.message().contains(part), "{part} in {error:?}");
    }
    for nonsense in ["latest", "1", "550.163.01 or so", "5..1"] {
        assert_eq!(
            client.activate(other("r1", nonsense)).await.unwrap_err().code(),
            Code::InvalidArgument,
            "{nonsense}"
        );
    }
    assert!(fixture.fm.control.snapshot().unwrap().active.is_empty());
    let given = client.activate(other("r1", "610.43.02")).await.unwrap().into_inner();
    assert_eq!(given.warnings, Vec::<String>::new());

    fixture.kill_daemon();
    fixture.more.extend(["--guest-driver-mismatch".to_owned(), "warn".to_owned()]);
    fixture.start_daemon();
    fixture.until("the fabric was polled", |health| health.ok).await;
    let (said, warned, code) =
        fixture.run_fmctl(&["activate", "--gpus", "1", "--owner", "b", "--guest-driver", "550.163.01"]);
    assert!(said.starts_with("Successfully activated") && code == 0, "{said}");
    assert!(warned.contains("the tenant's driver is 550.163.01"), "{warned}");
    tokio::time::sleep(Duration::from_millis(1)).await;
    fixture.assert_no_violations();
}
