//! A fabric manager's stand-in, the daemon before it, and who asks.

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

/// Longer than anything that is waited for.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) static FAKE_FM: LazyLock<PathBuf> = LazyLock::new(|| build().unwrap());
static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| build_library("").unwrap());
static FMCTL: LazyLock<PathBuf> = LazyLock::new(|| {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["build", "--quiet", "--locked", "--package", "firstlight-fmctl"];
    assert!(Command::new(cargo).args(arguments).status().unwrap().success());
    let daemon = Path::new(env!("CARGO_BIN_EXE_fm-partitiond"));
    daemon.with_file_name("fmctl")
});

/// All of it, in a directory.
pub(crate) struct Stand {
    pub(crate) home: Home,
    pub(crate) fm: Running,
    pub(crate) dir: tempfile::TempDir,
    daemon: Option<Child>,
    /// Which library the daemon is given.
    variant: &'static str,
    /// How long it lets callers wait, in seconds.
    pub(crate) patience: &'static str,
    /// How often it looks by itself, in seconds.
    pub(crate) look_every: &'static str,
    /// What else it is told.
    pub(crate) more: Vec<String>,
}

/// Nothing takes time that a test does not ask for.
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

impl Stand {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        Self::with(scenario, "610", "20")
    }

    pub(crate) fn with(scenario: &Scenario, variant: &'static str, patience: &'static str) -> Self {
        // Most tests are of partitions; those of the map have a stand that is strict.
        Self::told(scenario, variant, patience, &["--allow-unverified-map"])
    }

    /// Where several GPUs are given by a verified map only, as by default.
    pub(crate) fn strict(scenario: &Scenario) -> Self {
        Self::told(scenario, "610", "20", &[])
    }

    pub(crate) fn told(scenario: &Scenario, variant: &'static str, patience: &'static str, more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        home.write(&[], scenario).unwrap();
        let mut fm = home.start(&FAKE_FM, &[]).unwrap();
        fm.wait_for(Phase::Ready).unwrap();
        let mut stand = Self { home, fm, dir, daemon: None, variant, patience, look_every: "0.05", more: Vec::new() };
        stand.more.extend(more.iter().map(ToString::to_string));
        stand.start_daemon();
        stand
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

    /// One with a journal and a socket of its own.
    pub(crate) fn another_daemon(&self, journal: &Path, socket: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fm-partitiond"));
        command.arg("--journal").arg(journal).arg("--listen").arg(socket);
        command.arg("--fabric-manager").arg(format!("unix:{}", self.home.socket().display()));
        command.arg("--libnvfm").arg(&*LIBRARY).env("FAKE_NVFM", self.variant);
        command.arg("--fabric-manager-program").arg(&*FAKE_FM);
        if !self.more.iter().any(|word| word == "--kernel-log") {
            command.arg("--no-kernel-log");
        }
        command.args(["--look-every", self.look_every, "--connect-timeout", "10", "--patience", self.patience]);
        command
    }

    pub(crate) fn start_daemon(&mut self) {
        let daemon = self.daemon_command().stderr(Stdio::null()).spawn().unwrap();
        self.daemon = Some(daemon);
    }

    /// As a crash does.
    pub(crate) fn kill_daemon(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    /// The fabric manager dies and comes again.
    pub(crate) fn restart_fm(&mut self, arguments: &[&str]) {
        self.fm.kill().unwrap();
        self.fm = self.home.start(&FAKE_FM, arguments).unwrap();
    }

    /// Whoever asks; the daemon may be just beginning.
    pub(crate) async fn client(&self) -> FabricClient<Channel> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", self.socket().display())).unwrap();
        let begun = Instant::now();
        loop {
            match endpoint.connect().await {
                Ok(channel) => return FabricClient::new(channel),
                Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the daemon's view of the fabric is as wanted.
    pub(crate) async fn until(&self, what: &str, wanted: impl Fn(&api::HealthResponse) -> bool) -> api::HealthResponse {
        let mut client = self.client().await;
        let begun = Instant::now();
        loop {
            let health = client.health(api::HealthRequest {}).await.unwrap().into_inner();
            if wanted(&health) {
                return health;
            }
            assert!(begun.elapsed() < PATIENCE, "{what}: {health:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The same from elsewhere.
    pub(crate) fn typed_alone(&self, arguments: &[&str]) -> (String, String, i32) {
        told(&Command::new(&*FMCTL).args(arguments).output().unwrap())
    }

    /// What an operator types.
    pub(crate) fn fmctl_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&*FMCTL);
        command.arg("--connect").arg(format!("unix:{}", self.socket().display())).args(arguments);
        command
    }

    pub(crate) fn fmctl(&self, arguments: &[&str]) -> Output {
        self.fmctl_command(arguments).output().unwrap()
    }

    /// What it prints, its complaint, and its exit code.
    pub(crate) fn typed(&self, arguments: &[&str]) -> (String, String, i32) {
        told(&self.fmctl(arguments))
    }

    /// What the stand-in says was never to be.
    pub(crate) fn assert_unharmed(&mut self) {
        let snapshot = self.fm.control.snapshot().unwrap();
        assert!(snapshot.violations.is_empty(), "{:?}", snapshot.violations);
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

pub(crate) fn told(output: &Output) -> (String, String, i32) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr), output.status.code().unwrap())
}

pub(crate) fn count(count: u32) -> Option<api::Ask> {
    Some(api::Ask { what: Some(api::ask::What::Count(count)) })
}

pub(crate) fn activate(request: &str, gpus: u32, owner: &str) -> api::ActivateRequest {
    let (request_id, owner) = (request.to_owned(), owner.to_owned());
    api::ActivateRequest { request_id, ask: count(gpus), owner, ..Default::default() }
}

pub(crate) fn deactivate(request: &str, partition: u32, owner: &str) -> api::DeactivateRequest {
    api::DeactivateRequest { request_id: request.to_owned(), partition, owner: owner.to_owned() }
}
