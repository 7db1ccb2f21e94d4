//! The daemon as it runs: its own process, libnvfm's stand-in opened by dlopen, and a
//! fabric manager's stand-in that can be killed.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod doctor;
mod inventory;
mod metrics;
mod news;
mod probe;
mod support;
mod tls;

use std::time::{Duration, Instant};

use firstlight_fabric_api::v1 as api;
use firstlight_fake_fm::ask::Op;
use firstlight_fake_fm::codes::Family;
use firstlight_fake_fm::control::{Command, Fault};
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use support::{Stand, activate, count, deactivate, quick};
use tonic::Code;

#[test]
fn an_operator_sees_and_steers_the_fabric() {
    let mut stand = Stand::new(&quick("h100"));
    tokio_main(async { stand.until("the fabric is seen", |health| health.ok).await });
    let (listed, _, code) = stand.typed(&["list"]);
    assert_eq!(code, 0);
    assert!(listed.starts_with("PARTITION ID  STATUS    GPUs  NVLINKS  GPU PHYSICAL IDs\n"), "{listed}");
    assert!(listed.contains("\n0             Inactive  8     144      1,2,3,4,5,6,7,8\n"), "{listed}");
    assert_eq!(listed.lines().count(), 2 + 15);
    let (planned, ..) = stand.typed(&["plan", "--gpus", "2"]);
    assert_eq!(planned, "Partition 3 with GPUs 1,3; partitions 0,1 are then not free any more\n");
    let (said, _, code) = stand.typed(&["activate", "--gpus", "2", "--owner", "vm-1", "--request-id", "r1"]);
    assert_eq!((said.as_str(), code), ("Successfully activated partition 3 with GPUs 1,3\n", 0));
    let (said, _, code) = stand.typed(&["activate", "--gpus", "2", "--owner", "vm-1", "--request-id", "r1"]);
    assert!(said.contains("(it was, for the same request)") && code == 0, "{said}");
    let (status, ..) = stand.typed(&["status", "3"]);
    assert!(status.starts_with("Partition 3: active, vm-1's\nPHYSICAL ID  UUID  PCI BUS ID  NVLINKS  RATE (MB/s)\n"));
    assert!(status.contains("\n1            N/A   N/A         18/18    26562\n"), "{status}");
    // What scripts go by.
    for (arguments, code, said) in [
        (&["activate", "--gpus", "3", "--owner", "a"][..], 2, "partitions of 1, 2, 4 and 8"),
        (&["activate", "--modules", "1,1", "--owner", "a"], 2, "named twice"),
        (&["activate", "--modules", "1,64", "--owner", "a"], 2, "64 is no module id"),
        (&["activate", "--gpus", "8", "--owner", "a"], 3, "GPUs 1,3 are taken; the largest that is free has 4"),
        (&["activate", "3", "--owner", "a"], 3, "GPUs 1,3 are partition 3, and it is not free"),
        (&["activate", "--gpus", "1", "--owner", "a b"], 2, "owner \"a b\""),
        (&["status", "77"], 4, "there is no partition 77"),
        (&["deactivate", "77", "--owner", "a"], 4, "there is no partition 77"),
        (&["deactivate", "3", "--owner", "vm-2"], 5, "partition 3 is vm-1's, not vm-2's"),
        (&["activate", "--gpus", "1", "--owner", "vm-1", "--request-id", "r1"], 5, "r1 was used before"),
        (&["quarantine", "9", "--reason", "x"], 4, "there is no GPU 9"),
        (&["activate", "--owner", "a"], 2, "required"),
    ] {
        let (out, error, found) = stand.typed(arguments);
        assert_eq!((found, out.as_str()), (code, ""), "{arguments:?}: {error}");
        assert!(error.contains(said), "{said} in {error}");
    }
    let (_, error, code) = stand.typed(&["--json", "status", "77"]);
    let error: serde_json::Value = serde_json::from_str(&error).unwrap();
    assert_eq!((error["exit"].as_i64(), code), (Some(4), 4));
    assert_eq!(stand.typed(&["quarantine", "8", "--reason", "Xid 79"]).2, 0);
    let (health, _, code) = stand.typed(&["health"]);
    assert!(health.contains("GPU 8 is in quarantine (Xid 79): fmctl release 8") && code == 9, "{health}");
    let (_, error, code) = stand.typed(&["activate", "14", "--owner", "a"]);
    assert!(error.contains("GPUs 8 are in quarantine") && code == 3, "{error}");
    assert_eq!(stand.typed(&["release", "8"]).0, "GPU 8 can be given again\n");
    let (said, ..) = stand.typed(&["reconcile", "4=vm-4", "3=vm-1"]);
    assert_eq!(said, "activate partition 4 for vm-4\nNothing was done: --yes does it\n");
    assert_eq!(stand.typed(&["reconcile", "4=vm-4", "--yes"]).2, 0);
    let listed: serde_json::Value = serde_json::from_str(&stand.typed(&["--json", "list"]).0).unwrap();
    let active: Vec<_> = listed["partitions"].as_array().unwrap().iter().filter(|one| one["active"] == true).collect();
    assert_eq!((active.len(), &active[0]["owner"]), (1, &serde_json::json!("vm-4")));
    assert_eq!(listed["baseboard"], "h100");
    assert_eq!(stand.typed(&["deactivate", "4", "--owner", "vm-4"]).0, "Successfully deactivated partition 4\n");
    assert_eq!(stand.typed(&["deactivate", "4", "--owner", "vm-4"]).0, "Partition 4 was not active\n");
    let (health, error, code) = stand.typed(&["health"]);
    let versions = concat!("fm-partitiond ", env!("CARGO_PKG_VERSION"), ", fabric manager 610.43.02, driver unknown");
    assert_eq!((health, error, code), (format!("All is well\nVersions: {versions}\n"), String::new(), 0));
    assert!(stand.typed(&["completions", "bash"]).0.contains("_fmctl()"));
    stand.kill_daemon();
    let (_, error, code) = stand.typed(&["list"]);
    assert!(error.contains("cannot reach fm-partitiond on") && code == 7, "{error}");
    stand.assert_unharmed();
}

pub(crate) fn tokio_main<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

#[tokio::test]
async fn both_generations_and_the_library_before_580() {
    for (table, family, variant) in [
        ("h100", Family::Nvl4, "575"),
        ("h100", Family::Nvl5, "610"),
        ("b200", Family::Nvl5, "610"),
        ("a100-16", Family::Nvl4, "610"),
    ] {
        let mut stand = Stand::with(&Scenario { codes: Some(family), ..quick(table) }, variant, "20");
        let mut client = stand.client().await;
        let given = client.activate(activate("r1", 4, "a")).await.unwrap().into_inner();
        // Somebody else had a say: it is active already, or not any more.
        let partition = given.partition;
        let fault = |op, rc, take_effect| Fault { op: Some(op), rc, after_ms: 0, take_effect, times: 1 };
        stand.fm.control.tell(&Command::Fault(fault(Op::Activate, -5, true))).unwrap();
        let other = client.activate(activate("r2", 2, "b")).await.unwrap().into_inner();
        assert_ne!(other.partition, partition, "{table}");
        stand.fm.control.tell(&Command::Fault(fault(Op::Deactivate, -10, false))).unwrap();
        let error = client.deactivate(deactivate("d1", partition, "a")).await.unwrap_err();
        assert_eq!(error.code(), Code::Aborted, "{error:?}");
        assert!(error.message().contains("NVLink error (-10)"), "{error:?}");
        assert!(client.deactivate(deactivate("d2", partition, "a")).await.unwrap().into_inner().was_active);
        assert_eq!(stand.fm.control.snapshot().unwrap().active.into_iter().collect::<Vec<_>>(), [other.partition]);
        stand.assert_unharmed();
    }
}

#[tokio::test]
async fn a_library_that_is_not_to_be_believed_changes_nothing() {
    let said = "it speaks of 200 partitions";
    let mut stand = Stand::with(&quick("h100"), "counts", "20");
    let mut client = stand.client().await;
    let error = client.activate(activate("r1", 1, "a")).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error:?}");
    assert!(error.message().contains(said) && error.message().contains("of one version"), "{error:?}");
    let health = client.health(api::HealthRequest {}).await.unwrap().into_inner();
    assert!(!health.ok && health.troubles.iter().any(|one| one.contains(said)), "{health:?}");
    assert!(stand.fm.control.snapshot().unwrap().active.is_empty());
    // One of quite another version does not even begin.
    drop(client);
    stand.kill_daemon();
    let output = stand.daemon_command().env("FAKE_NVFM", "version-6").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("fmLibInit: version mismatch (-6)"), "{error}");
}

#[tokio::test]
async fn who_lists_does_not_wait_for_a_change_that_hangs() {
    let mut stand = Stand::with(&quick("h100"), "610", "1");
    stand.until("the fabric is seen", |health| health.ok).await;
    let mut client = stand.client().await;
    stand.fm.control.tell(&Command::Hang(Some(Op::Activate))).unwrap();
    let begun = Instant::now();
    let late = tokio::spawn({
        let mut client = client.clone();
        async move { client.activate(activate("r1", 2, "a")).await }
    });
    let busy = |health: &api::HealthResponse| health.under_way_ms > 0;
    stand.until("the change is under way", busy).await;
    let mut times = Vec::new();
    for _ in 0..200 {
        let asked = Instant::now();
        let list = client.list(api::ListRequest {}).await.unwrap().into_inner();
        times.push(asked.elapsed());
        let changing: Vec<u32> = list.partitions.iter().filter(|one| one.under_way).map(|one| one.id).collect();
        assert_eq!(changing, [3]);
        assert!(list.partitions.iter().all(|one| one.id != 3 || !one.free), "nobody else is told that it is free");
    }
    let error = late.await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error:?}");
    assert!(error.message().contains("may still come to be"), "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    // The issue's bound is 20 ms for the 99th of a hundred; here it is that no list waited for the change.
    times.sort();
    println!("99th of a hundred lists while a change hangs: {:?}", times[197]);
    assert!(times[197] < Duration::from_millis(500), "{:?}", times[197]);
    stand.fm.control.tell(&Command::Release).unwrap();
    stand.until("the change has ended", |health| health.ok && health.under_way_ms == 0).await;
    let again = client.activate(activate("r1", 2, "a")).await.unwrap().into_inner();
    assert!(again.again, "it had come to be");
    stand.assert_unharmed();
}

#[tokio::test]
async fn a_manager_that_dies_and_resumes_keeps_its_tenants() {
    let mut stand = Stand::new(&Scenario { restart_window_ms: 10_000, ..quick("b200") });
    let mut client = stand.client().await;
    let given = client.activate(activate("r1", 4, "a")).await.unwrap().into_inner();
    // The manager's next life knows whose virtual machine runs.
    let tenants = [given.partition].into();
    stand.home.write(&[], &Scenario { tenants, restart_window_ms: 10_000, ..quick("b200") }).unwrap();
    stand.fm.kill().unwrap();
    let health = stand.until("it is gone", |health| !health.fabric_manager).await;
    assert!(health.troubles[0].contains("does not run, or listens elsewhere"), "{health:?}");
    let (listed, warned, code) = stand.typed(&["list"]);
    assert!(
        listed.contains("Active") && warned.contains("s ago; since then: list the partitions: fmConnect"),
        "{warned}"
    );
    assert_eq!(code, 0);
    let error = client.activate(activate("r2", 1, "b")).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
    stand.restart_fm(&["--restart"]);
    stand.fm.wait_for(Phase::ReadyRestarted).unwrap();
    stand.until("it is there again", |health| health.ok).await;
    assert_eq!(stand.fm.control.snapshot().unwrap().active.into_iter().collect::<Vec<_>>(), [given.partition]);
    assert!(client.activate(activate("r1", 4, "a")).await.unwrap().into_inner().again);
    assert!(!client.activate(activate("r2", 1, "b")).await.unwrap().into_inner().again);
    stand.assert_unharmed();
}

#[tokio::test]
async fn a_manager_that_begins_anew_is_an_outage_for_its_tenants() {
    let mut stand = Stand::new(&quick("h100"));
    let mut client = stand.client().await;
    client.activate(activate("r1", 4, "a")).await.unwrap();
    stand.restart_fm(&[]);
    let health = stand.until("it is seen", |health| health.fabric_manager && !health.ok).await;
    assert!(health.troubles[0].starts_with("the fabric has lost partitions 1 while tenants had them"), "{health:?}");
    let error = client.activate(activate("r2", 1, "b")).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error:?}");
    assert!(error.message().contains("stop those tenants, then reconcile"), "{error:?}");
    // Also a daemon that begins anew knows of it.
    stand.kill_daemon();
    stand.start_daemon();
    stand.until("it is known", |health| !health.troubles.is_empty()).await;
    assert_eq!(stand.typed(&["reconcile", "1=a", "--yes"]).2, 0);
    stand.until("all is well", |health| health.ok).await;
    assert_eq!(stand.fm.control.snapshot().unwrap().active.into_iter().collect::<Vec<_>>(), [1]);
    stand.assert_unharmed();
}

#[tokio::test]
async fn a_daemon_that_is_killed_over_and_over_gives_no_gpu_twice() {
    let mut stand = Stand::new(&Scenario { activate_ms: 3, deactivate_ms: 3, ..quick("h100") });
    let mut held: Vec<(u32, String)> = Vec::new();
    for round in 0..30_u64 {
        let mut client = stand.client().await;
        let owner = format!("t{round}");
        let size = [1, 2, 4][usize::try_from(round % 3).unwrap()];
        let request = activate(&format!("r{round}"), size, &owner);
        let asked = tokio::spawn({
            let request = request.clone();
            async move { client.activate(request).await }
        });
        // Before, while and after it is done.
        tokio::time::sleep(Duration::from_micros(400 * round)).await;
        stand.kill_daemon();
        let told = asked.await.unwrap();
        stand.start_daemon();
        let mut client = stand.client().await;
        let again = client.activate(request).await;
        match (told, again) {
            (Ok(told), again) => {
                let (told, again) = (told.into_inner(), again.unwrap().into_inner());
                assert!(again.again && again.partition == told.partition, "what was told holds: {told:?} {again:?}");
                held.push((told.partition, owner));
            }
            (Err(_), Ok(again)) => held.push((again.into_inner().partition, owner)),
            (Err(_), Err(error)) => assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}"),
        }
        let active: Vec<u32> = stand.fm.control.snapshot().unwrap().active.into_iter().collect();
        let mut known: Vec<u32> = held.iter().map(|(id, _)| *id).collect();
        known.sort_unstable();
        assert_eq!(active, known, "round {round}");
        if held.len() > 2 {
            let (partition, owner) = held.remove(0);
            client.deactivate(deactivate(&format!("d{round}"), partition, &owner)).await.unwrap();
        }
    }
    stand.assert_unharmed();
}

#[tokio::test]
async fn sixty_four_at_once_share_eight_gpus() {
    let mut stand = Stand::new(&Scenario { activate_ms: 1, deactivate_ms: 1, ..quick("h100") });
    let client = stand.client().await;
    let mut all = tokio::task::JoinSet::new();
    for who in 0..64_u32 {
        let mut client = client.clone();
        all.spawn(async move {
            let owner = format!("t{who}");
            let mut had = 0;
            for turn in 0..16 {
                let request = format!("r{who}-{turn}");
                match client.activate(activate(&request, [1, 2, 4, 8][who as usize % 4], &owner)).await {
                    Ok(given) => {
                        had += 1;
                        let partition = given.into_inner().partition;
                        let request = format!("d{who}-{turn}");
                        assert!(
                            client
                                .deactivate(deactivate(&request, partition, &owner))
                                .await
                                .unwrap()
                                .into_inner()
                                .was_active
                        );
                    }
                    Err(error) => assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}"),
                }
            }
            had
        });
    }
    let had: u32 = all.join_all().await.into_iter().sum();
    println!("{had} of 1024 requests were served");
    assert!(had > 64);
    assert!(stand.fm.control.snapshot().unwrap().active.is_empty());
    stand.assert_unharmed();
}

#[tokio::test]
async fn who_watches_is_told_what_happens() {
    use api::event::What;
    let stand = Stand::new(&quick("h100"));
    stand.until("the fabric is seen", |health| health.ok).await;
    let mut client = stand.client().await;
    let mut events = client.watch(api::WatchRequest {}).await.unwrap().into_inner();
    let first = events.message().await.unwrap().unwrap();
    assert!(matches!(first.what, Some(What::State(list)) if list.largest_free == 8));
    client.activate(activate("r1", 2, "vm-1")).await.unwrap();
    client.quarantine(api::QuarantineRequest { gpu: 8, reason: "Xid 79".to_owned() }).await.unwrap();
    let (mut is_active, mut is_barred, mut is_told, mut number) = (false, false, false, first.number);
    while !(is_active && is_barred && is_told) {
        let event = events.message().await.unwrap().unwrap();
        number += 1;
        assert_eq!(event.number, number);
        match event.what.unwrap() {
            What::Partition(one) => {
                assert_eq!(one.id, 3);
                is_active |= one.active && one.owner == "vm-1" && !one.under_way;
            }
            What::Quarantined(one) => is_barred |= (one.gpu, one.reason.as_str()) == (8, "Xid 79"),
            What::Health(health) => is_told |= health.troubles.iter().any(|one| one.contains("fmctl release 8")),
            What::State(_) => {}
        }
    }
    let (said, ..) = stand.typed(&["watch", "--count", "1"]);
    assert!(said.starts_with("1 ") && said.ends_with(" 15 partitions, active: 3; largest free: 2\n"), "{said}");
}

#[tokio::test]
async fn what_is_no_request_is_refused_and_harms_nobody() {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    let stand = Stand::new(&quick("h100"));
    let mut client = stand.client().await;
    for bytes in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff"]
    {
        let mut stream = UnixStream::connect(stand.socket()).unwrap();
        // It may hang up before all is written.
        let _ = stream.write_all(bytes);
    }
    let empty = api::ActivateRequest { ask: None, ..activate("r", 1, "a") };
    assert_eq!(client.activate(empty).await.unwrap_err().code(), Code::InvalidArgument);
    let long = api::QuarantineRequest { gpu: 1, reason: "x".repeat(3 << 20) };
    client.quarantine(long).await.unwrap();
    assert_eq!(
        client.plan(api::PlanRequest { ask: count(4), unverified_map: false }).await.unwrap().into_inner().partition,
        2
    );
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(stand.socket()).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600, "nobody but root");
    // A second daemon on the same journal does not begin.
    let output = stand.daemon_command().output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("another daemon runs on it"), "{said}");
    client.list(api::ListRequest {}).await.unwrap();
}

#[test]
fn what_cannot_begin_says_why() {
    let stand = Stand::new(&quick("h100"));
    for (arguments, said) in [
        (&["--libnvfm", "/nowhere/libnvfm.so.1"][..], "cannot open libnvfm: /nowhere/libnvfm.so.1"),
        (&["--journal", "/nowhere/journal"], "cannot open /nowhere/journal: No such file"),
        (&["--fabric-manager", "unix:relative"], "path begins with /"),
        (&["--fabric-manager", "vsock:3"], "vsock:CID:PORT"),
        (&["--patience", "0"], "more than 0"),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fm-partitiond"));
        let other = stand.dir.path().join("other");
        let defaults = [("--journal", &other), ("--libnvfm", &other)];
        command.args(arguments);
        for (name, value) in defaults.iter().filter(|(name, _)| !arguments.contains(name)) {
            command.arg(name).arg(value);
        }
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(said), "{said} in {text}");
    }
}
