//! Starts a separate agent for each test, in a mount namespace with its own `/run` and cgroup v2, listening on a
//! Unix socket.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firstlight_agent_api::agent::{
    CreateContainerRequest, CreateSandboxRequest, ExecProcessRequest, PauseContainerRequest, ReadStreamRequest,
    RemoveContainerRequest, ResumeContainerRequest, SignalProcessRequest, StartContainerRequest, WaitProcessRequest,
};
use firstlight_agent_api::agent_ttrpc::AgentServiceClient;
use firstlight_agent_api::health_ttrpc::HealthClient;
use firstlight_agent_api::oci;
use ttrpc::r#async::Client;
use ttrpc::context::{Context, with_duration};

/// Prepares the mount namespace and execs the agent.
const SCRIPT: &str = r#"
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
[ -e /var/run ] || ln -s /run /var/run
[ -z "$CMDLINE" ] || mount --bind "$CMDLINE" /proc/cmdline
[ -z "$PCI" ] || [ ! -d /sys/bus/pci/devices ] || mount --bind "$PCI" /sys/bus/pci/devices
exec "$AGENT"
"#;

/// Runs a test; fails it with the reason on a machine that cannot run containers.
pub(crate) fn with_containers(test: impl AsyncFnOnce()) {
    assert_containers_can_run();
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test());
}

pub(crate) fn assert_containers_can_run() {
    assert!(rustix::process::geteuid().is_root(), "containers cannot be run here: not root");
    assert!(Path::new("/bin/busybox").exists(), "containers cannot be run here: no /bin/busybox (static)");
}

/// Aborts a test that cannot be run on this machine. The bundle's script recognises the message and reports the
/// test as not run.
pub(crate) fn not_runnable(why: impl std::fmt::Display) -> ! {
    panic!("not runnable here: {why}");
}

/// Aborts a test outside of a guest, because it changes state of the whole machine.
pub(crate) fn require_guest(why: &str) {
    if !Path::new("/run/firstlight").exists() {
        not_runnable(format_args!("{why}: only in a guest (cargo test -p firstlight-e2e agent_in_guest)"));
    }
}

/// Aborts a test if the kernel lacks a file system.
pub(crate) fn require_file_system(name: &str) {
    let all = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !all.lines().any(|line| line.split_whitespace().next_back() == Some(name)) {
        not_runnable(format_args!("this kernel has no file system {name} (modprobe {name})"));
    }
}

/// Returns the agent's program: `FIRSTLIGHT_AGENT`, or the one built with this test.
pub(crate) fn program() -> PathBuf {
    std::env::var_os("FIRSTLIGHT_AGENT").unwrap_or_else(|| env!("CARGO_BIN_EXE_firstlight-agent").into()).into()
}

/// Runs a test with a new agent.
pub(crate) fn with_agent<F: AsyncFnOnce(Agent)>(test: F) {
    with_containers(async || test(Agent::start().await).await);
}

/// Returns the code and the message of an error.
pub(crate) fn code<T: std::fmt::Debug>(result: ttrpc::Result<T>) -> (ttrpc::Code, String) {
    match result.unwrap_err() {
        ttrpc::Error::RpcStatus(status) => (status.code(), status.message().to_owned()),
        other => panic!("{other:?}"),
    }
}

/// Returns the size of a long test: the environment variable `NAME`, or `tests.NAME=` of the guest's kernel
/// command line.
pub(crate) fn amount(name: &str, default: usize) -> usize {
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let parameter =
        line.split_whitespace().find_map(|word| word.strip_prefix("tests.")?.strip_prefix(name)?.strip_prefix('='));
    let text = std::env::var(name).ok().or(parameter.map(str::to_owned));
    text.map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: invalid number")))
}

/// A running agent, with clients.
pub(crate) struct Agent {
    process: Child,
    /// The directory of the containers' roots; the same path inside the namespace.
    pub(crate) dir: tempfile::TempDir,
    pub(crate) calls: AgentServiceClient,
    pub(crate) health: HealthClient,
    pub(crate) address: String,
}

pub(crate) fn short() -> Context {
    with_duration(Duration::from_secs(20))
}

impl Agent {
    pub(crate) async fn start() -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), &[]).await
    }

    pub(crate) async fn start_in(dir: tempfile::TempDir, environment: &[(&str, &str)]) -> Self {
        Self::start_as(&["--mount"], SCRIPT, dir, environment).await
    }

    /// Starts an agent in these namespaces with this script.
    pub(crate) async fn start_as(
        namespaces: &[&str],
        script: &str,
        dir: tempfile::TempDir,
        environment: &[(&str, &str)],
    ) -> Self {
        let socket = dir.path().join("agent.sock");
        let address = format!("unix://{}", socket.display());
        let process = Command::new("unshare")
            .args(namespaces)
            .args(["/bin/sh", "-c", script])
            .env("AGENT", program())
            .env("AGENT_ADDR", &address)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let client = loop {
            match Client::connect(&address).await {
                Ok(client) => break client,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        let (calls, health) = (AgentServiceClient::new(client.clone()), HealthClient::new(client));
        Self { process, dir, calls, health, address }
    }

    /// Returns the pids of the agent's two processes, server first.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let mut all = vec![self.process.id()];
        let mut at = 0;
        while at < all.len() {
            let path = format!("/proc/{0}/task/{0}/children", all[at]);
            let children = fs::read_to_string(path).unwrap_or_default();
            all.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
            at += 1;
        }
        let is_ours = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("firstlight"))
        };
        all.retain(|pid| is_ours(pid) && !has_exited(*pid));
        all
    }

    /// Waits until both processes have exited; long enough for an emulated guest.
    pub(crate) async fn wait_for_exit(&self, why: &str) {
        for _ in 0..100 {
            if self.pids().is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("{why}: {:?} are still alive", self.pids());
    }

    /// Returns the path of a file in the agent's mount namespace.
    pub(crate) fn inside(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.pids()[0]))
    }

    /// Creates a container root with busybox and links to it.
    pub(crate) fn root(&self, container: &str) -> PathBuf {
        let root = self.dir.path().join(container).join("rootfs");
        for dir in ["bin", "dev", "etc", "proc", "sys", "tmp", "root"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        // All roots share one copy.
        let copy = self.dir.path().join("busybox");
        if !copy.exists() {
            fs::copy("/bin/busybox", &copy).unwrap();
        }
        fs::hard_link(copy, root.join("bin/busybox")).unwrap();
        for name in [
            "sh", "cat", "echo", "sleep", "true", "mknod", "head", "yes", "stty", "id", "env", "kill", "ls", "grep",
            "mkdir", "tr", "sort", "touch", "seq", "dd", "usleep", "trap", "pwd", "wc",
        ] {
            symlink("busybox", root.join("bin").join(name)).unwrap();
        }
        fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").unwrap();
        root
    }

    pub(crate) async fn sandbox(&self) {
        let request =
            CreateSandboxRequest { hostname: "guest-1".into(), sandbox_id: "s1".into(), ..Default::default() };
        self.calls.create_sandbox(short(), &request).await.unwrap();
    }

    pub(crate) async fn create(&self, spec: oci::Spec, container: &str) -> ttrpc::Result<()> {
        let mut request = CreateContainerRequest::new();
        request.container_id = container.into();
        request.exec_id = container.into();
        request.OCI = Some(spec).into();
        self.calls.create_container(short(), &request).await.map(|_| ())
    }

    pub(crate) async fn begin(&self, container: &str) {
        self.start_container(container).await.unwrap();
    }

    pub(crate) async fn start_container(&self, container: &str) -> ttrpc::Result<()> {
        let request = StartContainerRequest { container_id: container.into(), ..Default::default() };
        self.calls.start_container(short(), &request).await.map(|_| ())
    }

    /// Opens another connection.
    pub(crate) async fn connect(&self) -> AgentServiceClient {
        AgentServiceClient::new(Client::connect(&self.address).await.unwrap())
    }

    pub(crate) async fn pause(&self, container: &str) -> ttrpc::Result<()> {
        let request = PauseContainerRequest { container_id: container.into(), ..Default::default() };
        self.calls.pause_container(short(), &request).await.map(|_| ())
    }

    pub(crate) async fn resume(&self, container: &str) -> ttrpc::Result<()> {
        let request = ResumeContainerRequest { container_id: container.into(), ..Default::default() };
        self.calls.resume_container(short(), &request).await.map(|_| ())
    }

    /// Returns the path of a file of a container's cgroup.
    pub(crate) fn group(&self, container: &str, file: &str) -> PathBuf {
        self.inside(&format!("/sys/fs/cgroup/firstlight-test/{container}/{file}"))
    }

    /// Creates and starts a container that runs a shell script.
    pub(crate) async fn run(&self, container: &str, script: &str) {
        let root = self.root(container);
        self.create(spec(&root, script), container).await.unwrap();
        self.begin(container).await;
    }

    pub(crate) async fn exec(&self, container: &str, exec: &str, script: &str) -> ttrpc::Result<()> {
        let mut request = ExecProcessRequest::new();
        request.container_id = container.into();
        request.exec_id = exec.into();
        request.process = Some(process(script)).into();
        self.calls.exec_process(short(), &request).await.map(|_| ())
    }

    /// Reads a process's standard output to its end.
    pub(crate) async fn output(&self, container: &str, exec: &str) -> String {
        let mut all = Vec::new();
        loop {
            let request = ReadStreamRequest {
                container_id: container.into(),
                exec_id: exec.into(),
                len: 32768,
                ..Default::default()
            };
            let data = self.calls.read_stdout(short(), &request).await.unwrap().data;
            if data.is_empty() {
                return String::from_utf8(all).unwrap();
            }
            all.extend(data);
        }
    }

    pub(crate) async fn wait(&self, container: &str, exec: &str) -> ttrpc::Result<i32> {
        let request = WaitProcessRequest { container_id: container.into(), exec_id: exec.into(), ..Default::default() };
        self.calls.wait_process(short(), &request).await.map(|reply| reply.status)
    }

    /// Runs a script in a running container; returns its output and exit code.
    pub(crate) async fn shell(&self, container: &str, exec: &str, script: &str) -> (String, i32) {
        self.exec(container, exec, script).await.unwrap();
        let output = self.output(container, exec).await;
        (output, self.wait(container, exec).await.unwrap())
    }

    pub(crate) async fn signal(&self, container: &str, exec: &str, signal: u32) -> ttrpc::Result<()> {
        let (container_id, exec_id) = (container.into(), exec.into());
        let request = SignalProcessRequest { container_id, exec_id, signal, ..Default::default() };
        self.calls.signal_process(short(), &request).await.map(|_| ())
    }

    pub(crate) async fn remove(&self, container: &str) -> ttrpc::Result<()> {
        let request = RemoveContainerRequest { container_id: container.into(), ..Default::default() };
        self.calls.remove_container(short(), &request).await.map(|_| ())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Only the server: its runtime then kills the containers and exits too.
        let server = self.pids().first().and_then(|pid| i32::try_from(*pid).ok());
        if let Some(server) = server.and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(server, rustix::process::Signal::KILL);
        }
        let _ = self.process.wait();
    }
}

/// Whether a process has exited; it may still be a zombie.
pub(crate) fn has_exited(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

/// Returns a process that runs a shell script.
pub(crate) fn process(script: &str) -> oci::Process {
    let mut process = oci::Process::new();
    process.Args = ["/bin/sh", "-c", script].map(str::to_owned).into();
    process.Cwd = "/".into();
    let all = ["CAP_MKNOD", "CAP_KILL", "CAP_SETUID", "CAP_SETGID", "CAP_CHOWN", "CAP_DAC_OVERRIDE"].map(str::to_owned);
    let capabilities = process.Capabilities.mut_or_insert_default();
    capabilities.Bounding = all.clone().into();
    capabilities.Effective = all.clone().into();
    capabilities.Permitted = all.into();
    process
}

/// Returns a configuration as a shim sends it.
pub(crate) fn spec(root: &Path, script: &str) -> oci::Spec {
    let mut spec = oci::Spec::new();
    spec.Version = "1.1.0".into();
    spec.Process = Some(process(script)).into();
    spec.Root.mut_or_insert_default().Path = root.display().to_string();
    let mount = |destination: &str, kind: &str, options: &[&str]| oci::Mount {
        destination: destination.into(),
        source: kind.into(),
        type_: kind.into(),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
        ..Default::default()
    };
    spec.Mounts = vec![
        mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
        mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
    ];
    let linux = spec.Linux.mut_or_insert_default();
    linux.CgroupsPath =
        format!("/firstlight-test/{}", root.parent().and_then(Path::file_name).unwrap_or_default().display());
    linux.Namespaces =
        ["ipc", "uts", "mount"].map(|kind| oci::LinuxNamespace { Type: kind.into(), ..Default::default() }).into();
    linux.MaskedPaths = vec!["/proc/kcore".into()];
    linux.ReadonlyPaths = vec!["/proc/sys".into()];
    linux.RootfsPropagation = "rprivate".into();
    spec
}
