//! The daemon as a process, with the stand-ins of libnvfm, opened by dlopen, and of the fabric manager, which can be
//! killed.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod doctor;
mod external_events;
mod inventory;
mod metrics;
mod probe;
mod support;
mod tls;

use std::time::{Duration, Instant};

use firstlight_fabric_api::v1 as api;
use firstlight_fake_fm::call::Op;
use firstlight_fake_fm::codes::Family;
use firstlight_fake_fm::control::{Command, Fault};
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use support::{Fixture, activate, count, deactivate, quick};
use tonic::Code;

#[test]
fn fmctl_lists_activates_and_deactivates() {
    let mut fixture = Fixture::new(&quick("h100"));
    block_on(async { fixture.until("the fabric was polled", |health| health.ok).await });
    let (listed, _, code) = fixture.run_fmctl(&["list"]);
    assert_eq!(code, 0);
    assert!(listed.starts_with("PARTITION ID  STATUS    GPUs  NVLINKS  GPU PHYSICAL IDs\n"), "{listed}");
    assert!(listed.contains("\n0             Inactive  8     144      1,2,3,4,5,6,7,8\n"), "{listed}");
    assert_eq!(listed.lines().count(), 2 + 15);
    let (planned, ..) = fixture.run_fmctl(&["plan", "--gpus", "2"]);
    assert_eq!(planned, "Partition 3 with GPUs 1,3; blocks larger partitions 0,1\n");
    let (said, _, code) = fixture.run_fmctl(&["activate", "--gpus", "2", "--owner", "vm-1", "--request-id", "r1"]);
    assert_eq!((said.as_str(), code), ("Successfully activated partition 3 with GPUs 1,3\n", 0));
    let (said, _, code) = fixture.run_fmctl(&["activate", "--gpus", "2", "--owner", "vm-1", "--request-id", "r1"]);
    assert!(said.contains("(already done by the same request)") && code == 0, "{said}");
    let (status, ..) = fixture.run_fmctl(&["status", "3"]);
    assert!(
        status.starts_with("Partition 3: active, owner vm-1\nPHYSICAL ID  UUID  PCI BUS ID  NVLINKS  RATE (MB/s)\n")
    );
    assert!(status.contains("\n1            N/A   N/A         18/18    26562\n"), "{status}");
    // Exit codes for scripts.
    for (arguments, code, said) in [
        (&["activate", "--gpus", "3", "--owner", "a"][..], 2, "partitions of 1, 2, 4 and 8"),
        (&["activate", "--module-ids", "1,1", "--owner", "a"], 2, "named twice"),
        (&["activate", "--module-ids", "1,64", "--owner", "a"], 2, "invalid module id 64"),
        (&["activate", "--gpus", "8", "--owner", "a"], 3, "GPUs 1,3 are taken; the largest that is free has 4"),
        (&["activate", "3", "--owner", "a"], 3, "GPUs 1,3 are partition 3, and it is not free"),
        (&["activate", "--gpus", "1", "--owner", "a b"], 2, "owner \"a b\""),
        (&["status", "77"], 4, "there is no partition 77"),
        (&["deactivate", "77", "--owner", "a"], 4, "there is no partition 77"),
        (&["deactivate", "3", "--owner", "vm-2"], 5, "partition 3 is owned by vm-1, not by vm-2"),
        (&["activate", "--gpus", "1", "--owner", "vm-1", "--request-id", "r1"], 5, "r1 was used before"),
        (&["quarantine", "9", "--reason", "x"], 4, "there is no GPU 9"),
        (&["activate", "--owner", "a"], 2, "required"),
    ] {
        let (out, error, found) = fixture.run_fmctl(arguments);
        assert_eq!((found, out.as_str()), (code, ""), "{arguments:?}: {error}");
        assert!(error.contains(said), "{said} in {error}");
    }
    let (_, error, code) = fixture.run_fmctl(&["--json", "status", "77"]);
    let error: serde_json::Value = serde_json::from_str(&error).unwrap();
    assert_eq!((error["exit_code"].as_i64(), code), (Some(4), 4));
    assert_eq!(fixture.run_fmctl(&["quarantine", "8", "--reason", "Xid 79"]).2, 0);
    let (health, _, code) = fixture.run_fmctl(&["health"]);
    assert!(health.contains("GPU 8 is quarantined (Xid 79): fmctl release 8") && code == 9, "{health}");
    let (_, error, code) = fixture.run_fmctl(&["activate", "14", "--owner", "a"]);
    assert!(error.contains("GPUs 8 are quarantined") && code == 3, "{error}");
    assert_eq!(fixture.run_fmctl(&["release", "8"]).0, "GPU 8 is available again\n");
    let (said, ..) = fixture.run_fmctl(&["reconcile", "4=vm-4", "3=vm-1"]);
    assert_eq!(said, "activate partition 4 for vm-4\nDry run: nothing was changed, --yes applies the steps\n");
    assert_eq!(fixture.run_fmctl(&["reconcile", "4=vm-4", "--yes"]).2, 0);
    let listed: serde_json::Value = serde_json::from_str(&fixture.run_fmctl(&["--json", "list"]).0).unwrap();
    let active: Vec<_> = listed["partitions"].as_array().unwrap().iter().filter(|one| one["active"] == true).collect();
    assert_eq!((active.len(), &active[0]["owner"]), (1, &serde_json::json!("vm-4")));
    assert_eq!(listed["baseboard"], "h100");
    assert_eq!(fixture.run_fmctl(&["deactivate", "4", "--owner", "vm-4"]).0, "Successfully deactivated partition 4\n");
    assert_eq!(fixture.run_fmctl(&["deactivate", "4", "--owner", "vm-4"]).0, "Partition 4 was not active\n");
    let (health, error, code) = fixture.run_fmctl(&["health"]);
    let versions = concat!("fm-partitiond ", env!("CARGO_PKG_VERSION"), ", fabric manager 610.43.02, driver unknown");
    assert_eq!((health, error, code), (format!("No problems\nVersions: {versions}\n"), String::new(), 0));
    assert!(fixture.run_fmctl(&["completions", "bash"]).0.contains("_fmctl()"));
    fixture.kill_daemon();
    let (_, error, code) = fixture.run_fmctl(&["list"]);
    assert!(error.contains("failed to connect to fm-partitiond on") && code == 7, "{error}");
    fixture.assert_no_violations();
}

pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
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
        let mut fixture = Fixture::with(&Scenario { codes: Some(family), ..quick(table) }, variant, "20");
        let mut client = fixture.client().await;
        let given = client.activate(activate("r1", 4, "a")).await.unwrap().into_inner();
        // The reply contradicts the effect.
        let partition = given.partition;
        let fault = |op, rc, take_effect| Fault { op: Some(op), rc, after_ms: 0, take_effect, times: 1 };
        fixture.fm.control.send(&Command::Fault(fault(Op::Activate, -5, true))).unwrap();
        let other = client.activate(activate("r2", 2, "b")).await.unwrap().into_inner();
        assert_ne!(other.partition, partition, "{table}");
        fixture.fm.control.send(&Command::Fault(fault(Op::Deactivate, -10, false))).unwrap();
        let error = client.deactivate(deactivate("d1", partition, "a")).await.unwrap_err();
        assert_eq!(error.code(), Code::Aborted, "{error:?}");
        assert!(error.message().contains("NVLink error (-10)"), "{error:?}");
        assert!(client.deactivate(deactivate("d2", partition, "a")).await.unwrap().into_inner().was_active);
        assert_eq!(fixture.fm.control.snapshot().unwrap().active.into_iter().collect::<Vec<_>>(), [other.partition]);
        fixture.assert_no_violations();
    }
}

#[tokio::test]
async fn invalid_library_reply_changes_nothing() {
    let said = "the reply lists 200 partitions";
    let mut fixture = Fixture::with(&quick("h100"), "counts", "20");
    let mut client = fixture.client().await;
    let error = client.activate(activate("r1", 1, "a")).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error:?}");
    assert!(error.message().contains(said) && error.message().contains("of one version"), "{error:?}");
    let health = client.health(api::HealthRequest {}).await.unwrap().into_inner();
    assert!(!health.ok && health.problems.iter().any(|one| one.contains(said)), "{health:?}");
    assert!(fixture.fm.control.snapshot().unwrap().active.is_empty());
    // A library of an incompatible version prevents the start.
    drop(client);
    fixture.kill_daemon();
    let output = fixture.daemon_command().env("FAKE_NVFM", "version-6").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("fmLibInit: version mismatch (-6)"), "{error}");
}

#[tokio::test]
async fn list_does_not_wait_for_a_hanging_change() {
    let mut fixture = Fixture::with(&quick("h100"), "610", "1");
    fixture.until("the fabric was polled", |health| health.ok).await;
    let mut client = fixture.client().await;
    fixture.fm.control.send(&Command::Hang(Some(Op::Activate))).unwrap();
    let start = Instant::now();
    let late = tokio::spawn({
        let mut client = client.clone();
        async move { client.activate(activate("r1", 2, "a")).await }
    });
    let busy = |health: &api::HealthResponse| health.in_progress_ms > 0;
    fixture.until("the change is under way", busy).await;
    let mut times = Vec::new();
    for _ in 0..200 {
        let asked = Instant::now();
        let list = client.list(api::ListRequest {}).await.unwrap().into_inner();
        times.push(asked.elapsed());
        let changing: Vec<u32> = list.partitions.iter().filter(|one| one.in_progress).map(|one| one.id).collect();
        assert_eq!(changing, [3]);
        assert!(list.partitions.iter().all(|one| one.id != 3 || !one.free), "it is not free during the change");
    }
    let error = late.await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error:?}");
    assert!(error.message().contains("may still complete"), "{error:?}");
    assert!(start.elapsed() < Duration::from_secs(5));
    // The requirement is 20 ms at the 99th percentile; this bound only shows that List does not wait for the change.
    times.sort();
    println!("99th of a hundred lists while a change hangs: {:?}", times[197]);
    assert!(times[197] < Duration::from_millis(500), "{:?}", times[197]);
    fixture.fm.control.send(&Command::Release).unwrap();
    fixture.until("the change has ended", |health| health.ok && health.in_progress_ms == 0).await;
    let again = client.activate(activate("r1", 2, "a")).await.unwrap().into_inner();
    assert!(again.already_done, "the change had completed");
    fixture.assert_no_violations();
}

#[tokio::test]
async fn manager_restarted_with_the_list_keeps_tenants() {
    let mut fixture = Fixture::new(&Scenario { restart_window_ms: 10_000, ..quick("b200") });
    let mut client = fixture.client().await;
    let given = client.activate(activate("r1", 4, "a")).await.unwrap().into_inner();
    // The restarted FM checks that this tenant's partition stays active.
    let tenants = [given.partition].into();
    fixture.home.write(&[], &Scenario { tenants, restart_window_ms: 10_000, ..quick("b200") }).unwrap();
    fixture.fm.kill().unwrap();
    let health = fixture.until("FM is gone", |health| !health.fabric_manager).await;
    assert!(health.problems[0].contains("does not run, or listens elsewhere"), "{health:?}");
    let (listed, warned, code) = fixture.run_fmctl(&["list"]);
    assert!(
        listed.contains("Active") && warned.contains("s old; since then: failed to list the partitions: fmConnect"),
        "{warned}"
    );
    assert_eq!(code, 0);
    let error = client.activate(activate("r2", 1, "b")).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
    fixture.restart_fm(&["--restart"]);
    fixture.fm.wait_for(Phase::ReadyRestarted).unwrap();
    fixture.until("FM is ready again", |health| health.ok).await;
    assert_eq!(fixture.fm.control.snapshot().unwrap().active.into_iter().collect::<Vec<_>>(), [given.partition]);
    assert!(client.activate(activate("r1", 4, "a")).await.unwrap().into_inner().already_done);
    assert!(!client.activate(activate("r2", 1, "b")).await.unwrap().into_inner().already_done);
    fixture.assert_no_violations();
}

#[tokio::test]
async fn manager_restart_without_state_is_an_outage() {
    let mut fixture = Fixture::new(&quick("h100"));
    let mut client = fixture.client().await;
    client.activate(activate("r1", 4, "a")).await.unwrap();
    fixture.restart_fm(&[]);
    let health = fixture.until("the outage is reported", |health| health.fabric_manager && !health.ok).await;
    assert!(health.problems[0].starts_with("the fabric has lost partitions 1 while tenants had them"), "{health:?}");
    let error = client.activate(activate("r2", 1, "b")).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error:?}");
    assert!(error.message().contains("stop those tenants, then reconcile"), "{error:?}");
    // The outage survives a daemon restart.
    fixture.kill_daemon();
    fixture.start_daemon();
    fixture.until("it is reported", |health| !health.problems.is_empty()).await;
    assert_eq!(fixture.run_fmctl(&["reconcile", "1=a", "--yes"]).2, 0);
    fixture.until("there are no problems", |health| health.ok).await;
    assert_eq!(fixture.fm.control.snapshot().unwrap().active.into_iter().collect::<Vec<_>>(), [1]);
    fixture.assert_no_violations();
}

#[tokio::test]
async fn repeatedly_killed_daemon_never_assigns_a_gpu_twice() {
    let mut fixture = Fixture::new(&Scenario { activate_ms: 3, deactivate_ms: 3, ..quick("h100") });
    let mut held: Vec<(u32, String)> = Vec::new();
    for round in 0..30_u64 {
        let mut client = fixture.client().await;
        let owner = format!("t{round}");
        let size = [1, 2, 4][usize::try_from(round % 3).unwrap()];
        let request = activate(&format!("r{round}"), size, &owner);
        let asked = tokio::spawn({
            let request = request.clone();
            async move { client.activate(request).await }
        });
        // Killed before, during and after the change.
        tokio::time::sleep(Duration::from_micros(400 * round)).await;
        fixture.kill_daemon();
        let first = asked.await.unwrap();
        fixture.start_daemon();
        let mut client = fixture.client().await;
        let again = client.activate(request).await;
        match (first, again) {
            (Ok(first), again) => {
                let (first, again) = (first.into_inner(), again.unwrap().into_inner());
                assert!(
                    again.already_done && again.partition == first.partition,
                    "an acknowledged activation is repeated: {first:?} {again:?}"
                );
                held.push((first.partition, owner));
            }
            (Err(_), Ok(again)) => held.push((again.into_inner().partition, owner)),
            (Err(_), Err(error)) => assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}"),
        }
        let active: Vec<u32> = fixture.fm.control.snapshot().unwrap().active.into_iter().collect();
        let mut known: Vec<u32> = held.iter().map(|(id, _)| *id).collect();
        known.sort_unstable();
        assert_eq!(active, known, "round {round}");
        if held.len() > 2 {
            let (partition, owner) = held.remove(0);
            client.deactivate(deactivate(&format!("d{round}"), partition, &owner)).await.unwrap();
        }
    }
    fixture.assert_no_violations();
}

#[tokio::test]
async fn sixty_four_at_once_share_eight_gpus() {
    let mut fixture = Fixture::new(&Scenario { activate_ms: 1, deactivate_ms: 1, ..quick("h100") });
    let client = fixture.client().await;
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
    assert!(fixture.fm.control.snapshot().unwrap().active.is_empty());
    fixture.assert_no_violations();
}

#[tokio::test]
async fn watch_streams_state_and_changes() {
    use api::event::Payload;
    let fixture = Fixture::new(&quick("h100"));
    fixture.until("the fabric was polled", |health| health.ok).await;
    let mut client = fixture.client().await;
    let mut events = client.watch(api::WatchRequest {}).await.unwrap().into_inner();
    let first = events.message().await.unwrap().unwrap();
    assert!(matches!(first.payload, Some(Payload::State(list)) if list.largest_free == 8));
    client.activate(activate("r1", 2, "vm-1")).await.unwrap();
    client.quarantine(api::QuarantineRequest { gpu: 8, reason: "Xid 79".to_owned() }).await.unwrap();
    let (mut is_active, mut is_barred, mut is_reported, mut number) = (false, false, false, first.sequence);
    while !(is_active && is_barred && is_reported) {
        let event = events.message().await.unwrap().unwrap();
        number += 1;
        assert_eq!(event.sequence, number);
        match event.payload.unwrap() {
            Payload::Partition(one) => {
                assert_eq!(one.id, 3);
                is_active |= one.active && one.owner == "vm-1" && !one.in_progress;
            }
            Payload::Quarantine(one) => is_barred |= (one.gpu, one.reason.as_str()) == (8, "Xid 79"),
            Payload::Health(health) => is_reported |= health.problems.iter().any(|one| one.contains("fmctl release 8")),
            Payload::State(_) => {}
        }
    }
    let (said, ..) = fixture.run_fmctl(&["watch", "--count", "1"]);
    assert!(said.starts_with("1 ") && said.ends_with(" 15 partitions, active: 3; largest free: 2\n"), "{said}");
}

#[tokio::test]
async fn malformed_requests_are_refused_and_others_served() {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    let fixture = Fixture::new(&quick("h100"));
    let mut client = fixture.client().await;
    for bytes in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff"]
    {
        let mut stream = UnixStream::connect(fixture.socket()).unwrap();
        // The daemon may close the connection first.
        let _ = stream.write_all(bytes);
    }
    let empty = api::ActivateRequest { partition_request: None, ..activate("r", 1, "a") };
    assert_eq!(client.activate(empty).await.unwrap_err().code(), Code::InvalidArgument);
    let long = api::QuarantineRequest { gpu: 1, reason: "x".repeat(3 << 20) };
    client.quarantine(long).await.unwrap();
    assert_eq!(
        client
            .plan(api::PlanRequest { partition_request: count(4), unverified_map: false })
            .await
            .unwrap()
            .into_inner()
            .partition,
        2
    );
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(fixture.socket()).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600, "only root can open it");
    // A second daemon on the same journal does not start.
    let output = fixture.daemon_command().output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("another daemon runs on it"), "{said}");
    client.list(api::ListRequest {}).await.unwrap();
}

#[test]
fn invalid_options_are_reported_at_start() {
    let fixture = Fixture::new(&quick("h100"));
    for (arguments, said) in [
        (&["--libnvfm", "/nowhere/libnvfm.so.1"][..], "failed to open libnvfm: /nowhere/libnvfm.so.1"),
        (&["--journal", "/nowhere/journal"], "failed to open /nowhere/journal: No such file"),
        (&["--fabric-manager", "unix:relative"], "path begins with /"),
        (&["--fabric-manager", "vsock:3"], "vsock:CID:PORT"),
        (&["--timeout", "0"], "more than 0"),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fm-partitiond"));
        let other = fixture.dir.path().join("other");
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
