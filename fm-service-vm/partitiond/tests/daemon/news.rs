//! What the daemon hears without being asked: the kernel's log, PID 1, and which versions there are.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use firstlight_fake_fm::machine::Phase;
use firstlight_init_control::{FromInit, ToInit, decode, encode};
use tonic::Code;

use crate::support::{Stand, activate, quick};

/// A stand whose daemon is told more.
fn stand(table: &str, more: &[&str]) -> Stand {
    let mut stand = Stand::new(&quick(table));
    stand.kill_daemon();
    stand.more.extend(more.iter().map(ToString::to_string));
    stand.start_daemon();
    stand
}

/// A record of the kernel's log is read whole, so it is written whole.
fn kernel_says(log: &mut File, record: &str) {
    log.write_all(format!("{record}\n").as_bytes()).unwrap();
}

const FATAL: &str = "nvidia-nvswitch2: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up";

#[tokio::test]
async fn a_fatal_error_of_a_switch_keeps_partitions_from_new_tenants_until_somebody_has_looked() {
    let log = tempfile::tempdir().unwrap();
    let path = log.path().join("kmsg");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    // Who opens it for both waits for nobody, and it does not end.
    let mut kernel = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut stand = stand("h100", &["--kernel-log", &path.display().to_string()]);
    let mut client = stand.client().await;
    let before = client.activate(activate("r0", 2, "before")).await.unwrap().into_inner();

    // What a process writes is not the kernel's, and what has passed is no trouble.
    kernel_says(&mut kernel, &format!("11,1,1,-;{FATAL}"));
    kernel_says(&mut kernel, &format!("3,2,1,-;{}", FATAL.replace("Fatal", "Non-fatal")));
    let health = stand.until("the note", |health| !health.notes.is_empty()).await;
    assert!(health.ok, "{health:?}");
    assert!(
        health.notes[0].starts_with("NVSwitch 0000:05:00.0: 1 errors that passed, the last: SXid 20034"),
        "{health:?}"
    );
    client.activate(activate("r1", 2, "a")).await.unwrap();

    kernel_says(&mut kernel, &format!("3,3,1,-;{FATAL}"));
    let health = stand.until("the trouble", |health| !health.ok).await;
    assert!(
        health.troubles[0].contains("SXid 20034, Fatal, Link 30")
            && health.troubles[0].contains("fmctl release 0000:05:00.0")
    );
    let (_, error, code) = stand.typed(&["activate", "--gpus", "2", "--owner", "b"]);
    assert!(error.contains("NVSwitch 0000:05:00.0 had a fatal error") && code == 5, "{code}: {error}");
    assert_eq!(stand.typed(&["plan", "--gpus", "2"]).2, 5);
    // A lone GPU needs no switch; who has a partition keeps it.
    assert_eq!(stand.typed(&["activate", "--gpus", "1", "--owner", "c"]).2, 0);
    assert!(stand.fm.control.snapshot().unwrap().active.contains(&before.partition));

    // Also after the daemon's end, and what was heard is not heard again.
    stand.kill_daemon();
    stand.start_daemon();
    stand.until("it is known", |health| !health.ok).await;
    assert_eq!(stand.typed(&["release", "0000:09:00.0"]).2, 4);
    assert_eq!(
        stand.typed(&["release", "0000:05:00.0"]),
        ("NVSwitch 0000:05:00.0 can be given again\n".into(), String::new(), 0)
    );
    kernel_says(&mut kernel, &format!("3,3,1,-;{FATAL}\n3,2,1,-;{}", FATAL.replace("Fatal", "Non-fatal")));
    stand.until("the old lines are read again", |health| !health.notes.is_empty()).await;
    assert_eq!(
        stand.typed(&["activate", "--gpus", "2", "--owner", "b"]).2,
        0,
        "once mended, an old line does not count"
    );
    kernel_says(&mut kernel, &format!("3,4,1,-;{FATAL}"));
    stand.until("a new one does", |health| !health.ok).await;
    stand.assert_unharmed();
}

#[tokio::test]
async fn a_gpu_that_the_fabric_manager_lists_by_address_is_quarantined_by_its_xid() {
    let log = tempfile::tempdir().unwrap();
    let path = log.path().join("kmsg");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let mut kernel = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut stand = stand("a100-8", &["--kernel-log", &path.display().to_string()]);
    stand.until("the fabric is seen", |health| health.ok).await;
    let mut client = stand.client().await;
    let listed = client.list(firstlight_fabric_api::v1::ListRequest {}).await.unwrap().into_inner();
    let gpu = &listed.partitions[0].gpus[2];
    let slot = gpu.pci.strip_prefix("0000").unwrap().rsplit_once('.').unwrap().0;
    kernel_says(&mut kernel, &format!("3,7,1,-;NVRM: Xid (PCI:{slot}): 79, pid=1, GPU has fallen off the bus."));
    let health = stand.until("the quarantine", |health| !health.ok).await;
    let said = format!("GPU {} is in quarantine (Xid 79, pid=1, GPU has fallen off the bus.)", gpu.physical_id);
    assert!(health.troubles[0].starts_with(&said), "{health:?}");
    // One that nobody lists is noted.
    kernel_says(&mut kernel, "3,8,1,-;NVRM: Xid (PCI:0000:ee:00): 31, pid=1, x");
    let health = stand.until("the note", |health| !health.notes.is_empty()).await;
    assert!(health.notes[0].starts_with("GPU 0000:ee:00: 1 errors"), "{health:?}");
    stand.assert_unharmed();
}

/// PID 1's end of a client's connection, which has to subscribe first.
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
    stream.write_all(&encode(&daemon("somebody")).unwrap()).unwrap();
    stream.write_all(&encode(&daemon("fabricmanager")).unwrap()).unwrap();
}

#[tokio::test]
async fn what_process_1_says_of_the_fabric_manager_is_told_and_acted_on_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("control.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    // The daemon would not look by itself before the restarted one gives up.
    let mut stand = stand("h100", &["--init", &socket.display().to_string()]);
    stand.look_every = "3600";
    stand.kill_daemon();
    stand.start_daemon();
    let mut init = subscribed(&listener);
    // The one that was killed has knocked as well, or not.
    listener.set_nonblocking(true).unwrap();
    while let Ok((stream, _)) = listener.accept() {
        init = stream;
        init.set_nonblocking(false).unwrap();
    }
    listener.set_nonblocking(false).unwrap();
    let mut client = stand.client().await;
    let given = client.activate(activate("r1", 4, "a")).await.unwrap().into_inner();
    stand.fm.kill().unwrap();
    says(&mut init, false, "killed by signal 9 after 77 ms; its last line: \"bye\"");
    let health = stand.until("the end is told", |health| !health.ok).await;
    assert!(health.troubles[0].contains("the fabric manager has ended (killed by signal 9"), "{health:?}");

    stand.restart_fm(&["--restart"]);
    stand.fm.wait_for(Phase::RestartWait).unwrap();
    says(&mut init, true, "serves after 5 ms, start 2");
    stand.fm.wait_for(Phase::ReadyRestarted).unwrap();
    let snapshot = stand.fm.control.snapshot().unwrap();
    assert_eq!(snapshot.active.into_iter().collect::<Vec<_>>(), [given.partition]);
    stand.until("all is well", |health| health.ok).await;

    // PID 1 hangs up, and is asked again.
    drop(init);
    let mut init = subscribed(&listener);
    says(&mut init, false, "exit status 1");
    stand.until("it is heard again", |health| !health.ok).await;
    stand.assert_unharmed();
}

#[tokio::test]
async fn a_tenant_with_another_driver_is_refused_or_warned() {
    let mut stand = Stand::new(&quick("b200"));
    let other = |request: &str, version: &str| {
        let mut asked = activate(request, 1, "a");
        asked.guest_driver = version.to_owned();
        asked
    };
    let mut client = stand.client().await;
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
    assert!(stand.fm.control.snapshot().unwrap().active.is_empty());
    let given = client.activate(other("r1", "610.43.02")).await.unwrap().into_inner();
    assert_eq!(given.warnings, Vec::<String>::new());

    stand.kill_daemon();
    stand.more.extend(["--guest-driver".to_owned(), "warn".to_owned()]);
    stand.start_daemon();
    stand.until("the fabric is seen", |health| health.ok).await;
    let (said, warned, code) =
        stand.typed(&["activate", "--gpus", "1", "--owner", "b", "--guest-driver", "550.163.01"]);
    assert!(said.starts_with("Successfully activated") && code == 0, "{said}");
    assert!(warned.contains("the tenant's driver is 550.163.01"), "{warned}");
    tokio::time::sleep(Duration::from_millis(1)).await;
    stand.assert_unharmed();
}
