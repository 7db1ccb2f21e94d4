//! The agent without PID 1, and its calls.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use firstlight_agent_api::agent::{
    CreateContainerRequest, CreateSandboxRequest, ExecProcessRequest, RemoveContainerRequest, SignalProcessRequest,
    StartContainerRequest, WaitProcessRequest,
};
use firstlight_agent_api::agent_ttrpc::AgentServiceClient;
use firstlight_agent_api::health::CheckRequest;
use firstlight_agent_api::health_ttrpc::HealthClient;
use ttrpc::r#async::Client;
use ttrpc::context::{Context as Deadline, with_duration};

use crate::bundle::Bundle;

/// The container whose lifecycle is measured.
const SHORT: &str = "bench-short";
/// The container of the exec processes.
const LONG: &str = "bench-long";
/// The agent's bundle directory.
const BUNDLES: &str = "/run/kata-containers";

pub(crate) struct Agent {
    process: Child,
    log: PathBuf,
    calls: AgentServiceClient,
    health: HealthClient,
}

fn deadline() -> Deadline {
    with_duration(Duration::from_mins(1))
}

fn named(container: &str) -> String {
    container.to_owned()
}

impl Agent {
    /// Starts the agent, and returns when it has responded to a Check.
    pub(crate) async fn start(program: &Path, dir: &Path) -> Result<Self> {
        let log = dir.join("agent.log");
        let address = format!("unix://{}", dir.join("agent.sock").display());
        let process = Command::new(program)
            .env_clear()
            .env("AGENT_ADDR", &address)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).with_context(|| log.display().to_string())?)
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let begin = Instant::now();
        let client = loop {
            match Client::connect(&address).await {
                Ok(client) => break client,
                Err(error) if begin.elapsed() > Duration::from_secs(20) => {
                    bail!("timed out after 20 s waiting for the agent to listen: {error}; see {}", log.display())
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
            }
        };
        let agent =
            Self { process, log, calls: AgentServiceClient::new(client.clone()), health: HealthClient::new(client) };
        agent.check().await?;
        Ok(agent)
    }

    pub(crate) async fn check(&self) -> Result<()> {
        self.health.check(deadline(), &CheckRequest::new()).await.context("Check")?;
        Ok(())
    }

    /// Returns the pids of the server, its runtime, and the preforked worker if there is one.
    fn pids(&self) -> Result<Vec<(&'static str, u32)>> {
        let child = |parent: u32| -> Result<Option<u32>> {
            let path = format!("/proc/{parent}/task/{parent}/children");
            let children = fs::read_to_string(&path).context(path)?;
            children.split_whitespace().next().map(|pid| pid.parse().context("a child's pid")).transpose()
        };
        let server = self.process.id();
        let runtime = child(server)?.context("the agent has no child")?;
        let mut all = vec![("agent", server), ("runtime", runtime)];
        all.extend(child(runtime)?.map(|worker| ("preforked worker", worker)));
        Ok(all)
    }

    /// Returns the CPU time of the agent's processes since their start, µs.
    pub(crate) fn cpu_us(&self) -> Result<f64> {
        let mut total = 0.0;
        for (_, pid) in self.pids()? {
            let path = format!("/proc/{pid}/schedstat");
            let text = fs::read_to_string(&path).context(path)?;
            let nanos: f64 = text.split_whitespace().next().unwrap_or_default().parse().context("schedstat")?;
            total += nanos / 1000.0;
        }
        Ok(total)
    }

    pub(crate) fn resident_kib(&self) -> Result<Vec<(&'static str, f64)>> {
        let size = |pid: u32| -> Result<f64> {
            let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
            line.trim().trim_end_matches(" kB").trim().parse().context("VmRSS")
        };
        self.pids()?.into_iter().map(|(who, pid)| Ok((who, size(pid)?))).collect()
    }

    /// Returns the size of the log in bytes.
    #[expect(clippy::cast_precision_loss, reason = "a log of this bench fits")]
    pub(crate) fn logged(&self) -> Result<f64> {
        Ok(fs::metadata(&self.log)?.len() as f64)
    }

    pub(crate) async fn sandbox(&mut self) -> Result<()> {
        let request =
            CreateSandboxRequest { hostname: "bench".into(), sandbox_id: "bench".into(), ..Default::default() };
        self.calls.create_sandbox(deadline(), &request).await.context("CreateSandbox")?;
        Ok(())
    }

    async fn create(&self, bundle: &Bundle, container: &str, command: &[&str]) -> Result<()> {
        let mut request = CreateContainerRequest::new();
        request.container_id = named(container);
        request.exec_id = named(container);
        request.OCI = Some(bundle.spec(container, command)).into();
        self.calls.create_container(deadline(), &request).await.context("CreateContainer")?;
        Ok(())
    }

    async fn begin(&self, container: &str) -> Result<()> {
        let request = StartContainerRequest { container_id: named(container), ..Default::default() };
        self.calls.start_container(deadline(), &request).await.context("StartContainer")?;
        Ok(())
    }

    async fn wait(&self, container: &str, exec: &str) -> Result<()> {
        let request = WaitProcessRequest { container_id: named(container), exec_id: exec.into(), ..Default::default() };
        let reply = self.calls.wait_process(deadline(), &request).await.context("WaitProcess")?;
        if reply.status != 0 {
            bail!("process {exec:?} of {container} exited with {}", reply.status);
        }
        Ok(())
    }

    async fn remove(&self, container: &str) -> Result<()> {
        let request = RemoveContainerRequest { container_id: named(container), ..Default::default() };
        self.calls.remove_container(deadline(), &request).await.context("RemoveContainer")?;
        Ok(())
    }

    /// Measures a container's lifecycle, step by step.
    pub(crate) async fn run_lifecycle(&self, bundle: &Bundle) -> Result<Vec<(&'static str, Duration)>> {
        let mut spans = Vec::new();
        let mut begin = Instant::now();
        let mut lap = |step| {
            let now = Instant::now();
            spans.push((step, now - begin));
            begin = now;
        };
        self.create(bundle, SHORT, &["/bin/true"]).await?;
        lap("create");
        self.begin(SHORT).await?;
        lap("start");
        self.wait(SHORT, "").await?;
        lap("wait");
        self.remove(SHORT).await?;
        lap("remove");
        Ok(spans)
    }

    /// Returns the configuration that the agent passes to its runtime, so that crun and runc run the same container.
    pub(crate) async fn configuration(&self, bundle: &Bundle) -> Result<serde_json::Value> {
        self.create(bundle, SHORT, &["/bin/true"]).await?;
        let path = Path::new(BUNDLES).join(SHORT).join("config.json");
        let text = fs::read(&path).with_context(|| path.display().to_string())?;
        self.begin(SHORT).await?;
        self.wait(SHORT, "").await?;
        self.remove(SHORT).await?;
        let mut config: serde_json::Value = serde_json::from_slice(&text).context("the agent's config.json")?;
        config["root"]["path"] = bundle.root.display().to_string().into();
        Ok(config)
    }

    pub(crate) async fn start_long(&self, bundle: &Bundle) -> Result<()> {
        self.create(bundle, LONG, &["/bin/sleep", "100000"]).await?;
        self.begin(LONG).await
    }

    /// Measures an exec process, from the call to its exit code.
    pub(crate) async fn exec(&self, round: u32) -> Result<Duration> {
        let exec = format!("exec-{round}");
        let mut request = ExecProcessRequest::new();
        request.container_id = named(LONG);
        request.exec_id.clone_from(&exec);
        request.process = Some(Bundle::process(&["/bin/true"])).into();
        let begin = Instant::now();
        self.calls.exec_process(deadline(), &request).await.context("ExecProcess")?;
        self.wait(LONG, &exec).await?;
        Ok(begin.elapsed())
    }

    pub(crate) async fn remove_long(&self) -> Result<()> {
        let request = SignalProcessRequest { container_id: named(LONG), signal: 9, ..Default::default() };
        self.calls.signal_process(deadline(), &request).await.context("SignalProcess")?;
        self.remove(LONG).await
    }

    /// Kills the server; its runtime then exits too.
    pub(crate) fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
