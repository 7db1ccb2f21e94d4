//! Repeated activations and deactivations while other clients list, and while the daemon and the fabric manager are
//! killed, for `cargo xtask soak --fabric`. Arguments: the daemon, the stand-ins of the fabric manager and of
//! libnvfm, the number of cycles, and the duration of each change in ms. Panics at the first violation.
#![expect(clippy::unwrap_used, reason = "a program for a soak: what fails ends it")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::fabric_client::FabricClient;
use firstlight_fake_fm::home::{Home, Running};
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use tonic::transport::{Channel, Endpoint};

/// Number of listing clients.
const LISTENERS: usize = 63;

/// Pause between their requests.
const PAUSE: Duration = Duration::from_millis(50);

/// Cycles between kills of the fabric manager, and of the daemon.
const MANAGER: u32 = 50;
const DAEMON: u32 = 37;

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(120);

struct Fixture {
    home: Home,
    programs: Vec<PathBuf>,
    fm: Running,
    daemon: Child,
    dir: tempfile::TempDir,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn daemon(program: &Path, library: &Path, home: &Home, dir: &Path) -> Child {
    let mut command = Command::new(program);
    command.arg("--journal").arg(dir.join("partitions.journal")).arg("--listen").arg(dir.join("socket-of-ours"));
    command.arg("--fabric-manager").arg(format!("unix:{}", home.socket().display()));
    command.args(["--poll-interval", "1", "--timeout", "60", "--allow-unverified-map", "--no-kernel-log"]);
    command.arg("--libnvfm").arg(library).stderr(std::process::Stdio::null()).spawn().unwrap()
}

async fn client(dir: &Path) -> FabricClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("unix://{}", dir.join("socket-of-ours").display())).unwrap();
    let start = Instant::now();
    loop {
        if let Ok(channel) = endpoint.connect().await {
            return FabricClient::new(channel);
        }
        assert!(start.elapsed() < TIMEOUT, "the daemon does not answer");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

impl Fixture {
    fn start(programs: Vec<PathBuf>, latency: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        let (activate_ms, deactivate_ms) = (latency, latency);
        let scenario = Scenario { start_ms: 0, list_ms: 0, activate_ms, deactivate_ms, ..Scenario::default() };
        home.write(&[], &scenario).unwrap();
        let mut fm = home.start(&programs[1], &[]).unwrap();
        fm.wait_for(Phase::Ready).unwrap();
        let daemon = daemon(&programs[0], &programs[2], &home, dir.path());
        Self { home, programs, fm, daemon, dir }
    }

    fn kill_daemon(&mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
        self.daemon = daemon(&self.programs[0], &self.programs[2], &self.home, self.dir.path());
    }

    fn kill_manager(&mut self) {
        self.fm.kill().unwrap();
        self.fm = self.home.start(&self.programs[1], &["--restart"]).unwrap();
    }

    /// Retries an activation until it succeeds; the request id makes it idempotent.
    async fn activated(&self, cycle: u32, owner: &str) -> u32 {
        let partition_request =
            Some(api::PartitionRequest { selector: Some(api::partition_request::Selector::Count(1 << (cycle % 3))) });
        let request = api::ActivateRequest {
            request_id: format!("a{cycle}"),
            partition_request,
            owner: owner.to_owned(),
            ..Default::default()
        };
        let start = Instant::now();
        loop {
            match client(self.dir.path()).await.activate(request.clone()).await {
                Ok(given) => return given.into_inner().partition,
                Err(error) => assert!(start.elapsed() < TIMEOUT, "cycle {cycle}: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn deactivated(&self, cycle: u32, partition: u32, owner: &str) {
        let (request_id, owner) = (format!("d{cycle}"), owner.to_owned());
        let request = api::DeactivateRequest { request_id, partition, owner };
        let start = Instant::now();
        while let Err(error) = client(self.dir.path()).await.deactivate(request.clone()).await {
            assert!(start.elapsed() < TIMEOUT, "cycle {cycle}: {error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Lists until the end; returns the durations, except for requests to a killed daemon.
async fn list(dir: PathBuf, over: Arc<AtomicBool>) -> Vec<Duration> {
    let mut times = Vec::new();
    while !over.load(Ordering::Relaxed) {
        let mut client = client(&dir).await;
        while !over.load(Ordering::Relaxed) {
            let start = Instant::now();
            if client.list(api::ListRequest {}).await.is_err() {
                break;
            }
            times.push(start.elapsed());
            tokio::time::sleep(PAUSE).await;
        }
    }
    times
}

async fn soak(fixture: &mut Fixture, count: u32) -> Vec<Duration> {
    let over = Arc::new(AtomicBool::new(false));
    let dir = fixture.dir.path().to_owned();
    let listeners: Vec<_> = (0..LISTENERS).map(|_| tokio::spawn(list(dir.clone(), Arc::clone(&over)))).collect();
    // At least one partition is always active, and no kill may deactivate it.
    let mut held: BTreeMap<u32, (u32, String)> = BTreeMap::new();
    for cycle in 0..count {
        let owner = format!("t{cycle}");
        if cycle % MANAGER == MANAGER - 1 {
            fixture.kill_manager();
        }
        if cycle % DAEMON == DAEMON - 1 {
            fixture.kill_daemon();
        }
        let partition = fixture.activated(cycle, &owner).await;
        assert!(held.insert(partition, (cycle, owner)).is_none(), "partition {partition} was given twice");
        let active: Vec<u32> = fixture.fm.control.snapshot().unwrap().active.into_iter().collect();
        assert_eq!(active, held.keys().copied().collect::<Vec<_>>(), "cycle {cycle}");
        // At most two, so that four of the eight GPUs are free for the next.
        if held.len() > 1 {
            let oldest = *held.iter().min_by_key(|(_, (cycle, _))| *cycle).unwrap().0;
            let (cycle, owner) = held.remove(&oldest).unwrap();
            fixture.deactivated(cycle, oldest, &owner).await;
        }
    }
    for (partition, (cycle, owner)) in held {
        fixture.deactivated(cycle, partition, &owner).await;
    }
    over.store(true, Ordering::Relaxed);
    let mut times = Vec::new();
    for listener in listeners {
        times.extend(listener.await.unwrap());
    }
    times.sort();
    times
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [daemon, fm, library, count, latency] = arguments.as_slice() else {
        eprintln!("usage: cycles DAEMON FAKE-FM LIBNVFM CYCLES LATENCY-MS");
        std::process::exit(2);
    };
    let (count, latency) = (count.parse().unwrap(), latency.parse().unwrap());
    let mut fixture = Fixture::start([daemon, fm, library].map(PathBuf::from).to_vec(), latency);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let start = Instant::now();
    let lists = runtime.block_on(soak(&mut fixture, count));
    let snapshot = fixture.fm.control.snapshot().unwrap();
    assert!(snapshot.violations.is_empty() && snapshot.active.is_empty(), "{snapshot:?}");
    println!(
        "{count} cycles of {latency} ms and {latency} ms in {:.0} s: the fabric manager was killed {} times, the daemon {}; {} \
         lists of {LISTENERS} others took {:.1} ms at the median and {:.1} ms at most, 99 of 100",
        start.elapsed().as_secs_f64(),
        count / MANAGER,
        count / DAEMON,
        lists.len(),
        lists[lists.len() / 2].as_secs_f64() * 1e3,
        lists[lists.len() * 99 / 100].as_secs_f64() * 1e3,
    );
}
