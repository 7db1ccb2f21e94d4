//! Benchmarks of planner and daemon for `cargo xtask bench fabric`: lines of `NAME VALUE`. Arguments: the daemon, the
//! stand-ins of the fabric manager and of libnvfm.
#![expect(clippy::unwrap_used, reason = "a program for a bench: what fails ends it")]

use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::fabric_client::FabricClient;
use firstlight_fake_fm::call::Op;
use firstlight_fake_fm::control;
use firstlight_fake_fm::home::Home;
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use firstlight_partitions::known::{A100_16, B200, H100};
use firstlight_partitions::{Allocation, Gpus, Request, Table};
use tonic::transport::{Channel, Endpoint};

/// Maximum number of states of a table.
const STATES: usize = 20_000;

fn main() {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [daemon, fm, library] = arguments.as_slice() else {
        eprintln!("usage: figures DAEMON FAKE-FM LIBNVFM");
        std::process::exit(2);
    };
    for known in [&H100, &B200, &A100_16] {
        let times = plans(&known.table());
        println!("plan-median-us-{} {}", known.name, micros(times[times.len() / 2]));
        println!("plan-worst-us-{} {}", known.name, micros(times[times.len() * 999 / 1000]));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for (latency, count) in [(0, 1000), (200, 20), (5000, 1)] {
        let mut fixture = Fixture::start(daemon, fm, library, latency);
        let times = runtime.block_on(fixture.cycles(count));
        let own = times[times.len() / 2].saturating_sub(Duration::from_millis(2 * latency));
        println!("cycle-own-ms-at-{latency} {}", micros(own) / 1000.0);
        let snapshot = fixture.fm.control.snapshot().unwrap();
        assert!(snapshot.violations.is_empty() && snapshot.active.is_empty(), "{snapshot:?}");
    }
    let mut fixture = Fixture::start(daemon, fm, library, 0);
    let lists = runtime.block_on(fixture.lists_while_a_change_hangs());
    println!("list-p99-ms {}", micros(lists[lists.len() * 99 / 100]) / 1000.0);
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Measures each plan in every reachable state, shortest first.
fn plans(table: &Table) -> Vec<Duration> {
    let mut seen = BTreeSet::from([Gpus::NONE]);
    let mut queue = VecDeque::from([Gpus::NONE]);
    let mut times = Vec::new();
    while let Some(busy) = queue.pop_front() {
        let state = Allocation { busy, quarantined: Gpus::NONE };
        for size in table.sizes() {
            let start = Instant::now();
            let planned = table.plan(&state, Request::Count(size));
            times.push(start.elapsed());
            drop(planned);
        }
        for partition in table.partitions().iter().filter(|one| !one.gpus.overlaps(busy)) {
            let next = busy.with(partition.gpus);
            if seen.len() < STATES && seen.insert(next) {
                queue.push_back(next);
            }
        }
    }
    times.sort();
    times
}

struct Fixture {
    fm: firstlight_fake_fm::home::Running,
    daemon: Child,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Fixture {
    fn start(daemon: &Path, fm: &Path, library: &Path, latency: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        let (activate_ms, deactivate_ms) = (latency, latency);
        let scenario = Scenario { start_ms: 0, list_ms: 0, activate_ms, deactivate_ms, ..Scenario::default() };
        home.write(&[], &scenario).unwrap();
        let mut fm = home.start(fm, &[]).unwrap();
        fm.wait_for(Phase::Ready).unwrap();
        let socket = dir.path().join("partitiond.sock");
        let mut command = Command::new(daemon);
        command.arg("--journal").arg(dir.path().join("partitions.journal")).arg("--listen").arg(&socket);
        command.arg("--fabric-manager").arg(format!("unix:{}", home.socket().display()));
        let daemon = command.arg("--libnvfm").arg(library).spawn().unwrap();
        Self { fm, daemon, socket, _directory: dir }
    }

    async fn client(&self) -> FabricClient<Channel> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", self.socket.display())).unwrap();
        loop {
            if let Ok(channel) = endpoint.connect().await {
                let mut client = FabricClient::new(channel);
                if client.list(api::ListRequest {}).await.is_ok() {
                    return client;
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Measures activation plus deactivation, shortest first.
    async fn cycles(&self, count: u32) -> Vec<Duration> {
        let mut client = self.client().await;
        let mut times = Vec::new();
        for cycle in 0..count {
            let start = Instant::now();
            let (request_id, owner) = (format!("a{cycle}"), "t".to_owned());
            let partition_request = Some(api::PartitionRequest {
                selector: Some(api::partition_request::Selector::Count(1 << (cycle % 4))),
            });
            let given = client
                .activate(api::ActivateRequest {
                    request_id,
                    partition_request,
                    owner: owner.clone(),
                    unverified_map: true,
                    ..Default::default()
                })
                .await
                .unwrap();
            let partition = given.into_inner().partition;
            let request_id = format!("d{cycle}");
            client.deactivate(api::DeactivateRequest { request_id, partition, owner }).await.unwrap();
            times.push(start.elapsed());
        }
        times.sort();
        times
    }

    async fn lists_while_a_change_hangs(&mut self) -> Vec<Duration> {
        let mut client = self.client().await;
        self.fm.control.send(&control::Command::Hang(Some(Op::Activate))).unwrap();
        let mut other = client.clone();
        let hanging = tokio::spawn(async move {
            let partition_request =
                Some(api::PartitionRequest { selector: Some(api::partition_request::Selector::Count(2)) });
            let (request_id, owner) = ("r".to_owned(), "t".to_owned());
            let request = api::ActivateRequest {
                request_id,
                partition_request,
                owner,
                unverified_map: true,
                ..Default::default()
            };
            other.activate(request).await
        });
        while client.health(api::HealthRequest {}).await.unwrap().into_inner().in_progress_ms == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut times = Vec::new();
        for _ in 0..2000 {
            let start = Instant::now();
            client.list(api::ListRequest {}).await.unwrap();
            times.push(start.elapsed());
        }
        self.fm.control.send(&control::Command::Release).unwrap();
        hanging.await.unwrap().unwrap();
        times.sort();
        times
    }
}
