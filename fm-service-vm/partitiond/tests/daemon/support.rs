//! The fixture: a fabric manager's stand-in, the daemon, and fmctl.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use firstlight_fabric_api::v1 as api;
use firstlight_fabric_api::v1::fabric_client::FabricClient;
use firstlight_fake_fm::home::{Home, Running, build, build_library};
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use tonic::transport::{Channel, Endpoint};

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) static FAKE_FM: LazyLock<PathBuf> = LazyLock::new(|| build().unwrap());
static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| build_library("").unwrap());
static FMCTL: LazyLock<PathBuf> = LazyLock::new(|| {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["build", "--quiet", "--locked", "--package", "firstlight-fmctl"];
    assert!(Command::new(cargo).args(arguments).status().unwrap().success());
    let daemon = Path::new(env!("CARGO_BIN_EXE_fm-partitiond"));
    daemon.with_file_name("fmctl")
});

/// All processes and files of a test.
pub(crate) struct Fixture {
    pub(crate) home: Home,
    pub(crate) fm: Running,
    pub(crate) dir: tempfile::TempDir,
    daemon: Option<Child>,
    /// The variant of the libnvfm stand-in.
    variant: &'static str,
    /// The daemon's --timeout, in seconds.
    pub(crate) timeout: &'static str,
    /// The daemon's --poll-interval, in seconds.
    pub(crate) poll_interval: &'static str,
    /// Further options of the daemon.
    pub(crate) more: Vec<String>,
}

/// Calls take no time unless a test sets one.
pub(crate) fn quick(table: &str) -> Scenario {
    Scenario {
        table: table.to_owned(),
        start_ms: 0,
        list_ms: 0,
        activate_ms: 0,
        deactivate_ms: 0,
        ..Scenario::default()
    }
}

impl Fixture {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        Self::with(scenario, "610", "20")
    }

    pub(crate) fn with(scenario: &Scenario, variant: &'static str, timeout: &'static str) -> Self {
        // Most tests do not depend on the module map; those of the map use `strict`.
        Self::with_arguments(scenario, variant, timeout, &["--allow-unverified-map"])
    }

    /// With the default: several GPUs by a verified map only.
    pub(crate) fn strict(scenario: &Scenario) -> Self {
        Self::with_arguments(scenario, "610", "20", &[])
    }

    pub(crate) fn with_arguments(
        scenario: &Scenario,
        variant: &'static str,
        timeout: &'static str,
        more: &[&str],
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        home.write(&[], scenario).unwrap();
        let mut fm = home.start(&FAKE_FM, &[]).unwrap();
        fm.wait_for(Phase::Ready).unwrap();
        let mut fixture =
            Self { home, fm, dir, daemon: None, variant, timeout, poll_interval: "0.05", more: Vec::new() };
        fixture.more.extend(more.iter().map(ToString::to_string));
        fixture.start_daemon();
        fixture
    }

    pub(crate) fn journal(&self) -> PathBuf {
        self.dir.path().join("partitions.journal")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("partitiond.sock")
    }

    pub(crate) fn daemon_command(&self) -> Command {
        let mut command = self.another_daemon(&self.journal(), &self.socket());
        command.args(&self.more);
        command
    }

    /// A daemon with its own journal and socket.
    pub(crate) fn another_daemon(&self, journal: &Path, socket: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fm-partitiond"));
        command.arg("--journal").arg(journal).arg("--listen").arg(socket);
        command.arg("--fabric-manager").arg(format!("unix:{}", self.home.socket().display()));
        command.arg("--libnvfm").arg(&*LIBRARY).env("FAKE_NVFM", self.variant);
        command.arg("--fabric-manager-program").arg(&*FAKE_FM);
        if !self.more.iter().any(|word| word == "--kernel-log") {
            command.arg("--no-kernel-log");
        }
        command.args(["--poll-interval", self.poll_interval, "--connect-timeout", "10", "--timeout", self.timeout]);
        command
    }

    pub(crate) fn start_daemon(&mut self) {
        let daemon = self.daemon_command().stderr(Stdio::null()).spawn().unwrap();
        self.daemon = Some(daemon);
    }

    /// Kills the daemon.
    pub(crate) fn kill_daemon(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    /// Kills and restarts the fabric manager.
    pub(crate) fn restart_fm(&mut self, arguments: &[&str]) {
        self.fm.kill().unwrap();
        self.fm = self.home.start(&FAKE_FM, arguments).unwrap();
    }

    /// Connects, also while the daemon is starting.
    pub(crate) async fn client(&self) -> FabricClient<Channel> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", self.socket().display())).unwrap();
        let start = Instant::now();
        loop {
            match endpoint.connect().await {
                Ok(channel) => return FabricClient::new(channel),
                Err(error) => assert!(start.elapsed() < TIMEOUT, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the daemon's health meets a condition.
    pub(crate) async fn until(
        &self,
        what: &str,
        condition: impl Fn(&api::HealthResponse) -> bool,
    ) -> api::HealthResponse {
        let mut client = self.client().await;
        let start = Instant::now();
        loop {
            let health = client.health(api::HealthRequest {}).await.unwrap().into_inner();
            if condition(&health) {
                return health;
            }
            assert!(start.elapsed() < TIMEOUT, "{what}: {health:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Runs fmctl without --connect.
    pub(crate) fn fmctl_without_connect(&self, arguments: &[&str]) -> (String, String, i32) {
        output_of(&Command::new(&*FMCTL).args(arguments).output().unwrap())
    }

    /// Prepares an fmctl command.
    pub(crate) fn fmctl_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&*FMCTL);
        command.arg("--connect").arg(format!("unix:{}", self.socket().display())).args(arguments);
        command
    }

    pub(crate) fn fmctl(&self, arguments: &[&str]) -> Output {
        self.fmctl_command(arguments).output().unwrap()
    }

    /// Runs fmctl; returns stdout, stderr and exit code.
    pub(crate) fn run_fmctl(&self, arguments: &[&str]) -> (String, String, i32) {
        output_of(&self.fmctl(arguments))
    }

    /// Asserts that the stand-in has seen no violation.
    pub(crate) fn assert_no_violations(&mut self) {
        let snapshot = self.fm.control.snapshot().unwrap();
        assert!(snapshot.violations.is_empty(), "{:?}", snapshot.violations);
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

pub(crate) fn output_of(output: &Output) -> (String, String, i32) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr), output.status.code().unwrap())
}

pub(crate) fn count(count: u32) -> Option<api::PartitionRequest> {
    Some(api::PartitionRequest { selector: Some(api::partition_request::Selector::Count(count)) })
}

pub(crate) fn activate(request: &str, gpus: u32, owner: &str) -> api::ActivateRequest {
    let (request_id, owner) = (request.to_owned(), owner.to_owned());
    api::ActivateRequest { request_id, partition_request: count(gpus), owner, ..Default::default() }
}

pub(crate) fn deactivate(request: &str, partition: u32, owner: &str) -> api::DeactivateRequest {
    api::DeactivateRequest { request_id: request.to_owned(), partition, owner: owner.to_owned() }
}
