//! The agent's client: what a Kata shim says, with deadlines.

use std::time::Duration;

use firstlight_agent_api::agent::{
    CreateContainerRequest, CreateSandboxRequest, DestroySandboxRequest, GuestDetailsRequest, ReadStreamRequest,
    RemoveContainerRequest, StartContainerRequest, Storage, WaitProcessRequest,
};
use firstlight_agent_api::agent_ttrpc::AgentServiceClient;
use firstlight_agent_api::firstlight::GetBootRecordRequest;
use firstlight_agent_api::firstlight_ttrpc::BootRecordClient;
use firstlight_agent_api::health::CheckRequest;
use firstlight_agent_api::health_ttrpc::HealthClient;
use firstlight_agent_api::oci::Spec;
use firstlight_boot_record::{BootRecord, ReadError};
use tokio::net::UnixStream;
use ttrpc::r#async::transport::Socket;
use ttrpc::context::{self, Context};

/// Where an unmodified shim has its shared directory mounted in the guest.
pub const SHARED: &str = "/run/kata-containers/shared/containers/";

/// The tag of the shared directory, as Kata calls it.
pub const SHARED_TAG: &str = "kataShared";

/// The most bytes asked for in one read; what Kata's Go shim asks for.
const READ: u32 = 32 * 1024;

/// Output kept for the report; the rest is counted only.
const MAX_OUTPUT: usize = 1 << 20;

/// The longest error text taken from a guest, characters.
const MAX_TEXT: usize = 2000;

/// What a shim asks to have mounted for every sandbox: the shared directory and `/dev/shm`.
#[must_use]
pub fn sandbox_storages() -> Vec<Storage> {
    let storage = |driver: &str, source: &str, fstype: &str, options: &[&str], mount_point: &str| Storage {
        driver: driver.into(),
        source: source.into(),
        fstype: fstype.into(),
        options: options.iter().map(ToString::to_string).collect(),
        mount_point: mount_point.into(),
        ..Storage::default()
    };
    let shm = ["noexec", "nosuid", "nodev", "mode=1777", "size=67108864"];
    vec![
        storage("virtio-fs", SHARED_TAG, "virtiofs", &["nodev"], SHARED),
        storage("ephemeral", "shm", "tmpfs", &shm, "/run/kata-containers/sandbox/shm"),
    ]
}

/// Why a call to the agent failed.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The agent answered with an error.
    #[error("{call}: {code}: {text}")]
    Refused {
        /// The call.
        call: &'static str,
        /// The status code's name, e.g. `NOT_FOUND`.
        code: String,
        /// What the agent says about it.
        text: String,
    },
    /// The agent did not answer.
    #[error("{call}: no answer: {source}")]
    Lost {
        /// The call.
        call: &'static str,
        /// What happened to the connection.
        source: ttrpc::Error,
    },
    /// The agent's boot record cannot be read.
    #[error("BootRecord.Get: {0}")]
    Record(#[from] ReadError),
}

fn failed(call: &'static str) -> impl FnOnce(ttrpc::Error) -> AgentError {
    move |error| match error {
        // The text comes from the guest: one line, without control characters.
        ttrpc::Error::RpcStatus(status) => AgentError::Refused {
            call,
            code: format!("{:?}", status.code()),
            text: status.message.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_TEXT).collect(),
        },
        source => AgentError::Lost { call, source },
    }
}

/// A connection to the agent of one guest.
#[derive(Clone)]
pub struct Agent {
    agent: AgentServiceClient,
    health: HealthClient,
    record: BootRecordClient,
    /// For calls that should be quick.
    short: Duration,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").finish_non_exhaustive()
    }
}

/// Which of a process's two outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Agent {
    /// Speaks ttrpc over `stream`; `short` bounds every call that does not
    /// wait for something by its nature.
    #[must_use]
    pub fn new(stream: UnixStream, short: Duration) -> Self {
        let client = ttrpc::r#async::Client::new(Socket::new(stream));
        Self {
            agent: AgentServiceClient::new(client.clone()),
            health: HealthClient::new(client.clone()),
            record: BootRecordClient::new(client),
            short,
        }
    }

    /// The same connection with another bound for quick calls.
    #[must_use]
    pub fn with_patience(mut self, short: Duration) -> Self {
        self.short = short;
        self
    }

    /// Every call that the agent serves, for what has no method here.
    #[must_use]
    pub fn calls(&self) -> &AgentServiceClient {
        &self.agent
    }

    fn context(&self) -> Context {
        context::with_duration(self.short)
    }

    /// Whether the agent serves.
    ///
    /// # Errors
    /// It does not answer in time.
    pub async fn check(&self) -> Result<(), AgentError> {
        self.health.check(self.context(), &CheckRequest::new()).await.map(drop).map_err(failed("Health.Check"))
    }

    /// The boot record as PID 1 holds it now.
    ///
    /// # Errors
    /// No answer, or not a record.
    pub async fn boot_record(&self) -> Result<BootRecord, AgentError> {
        let call = self.record.get(self.context(), &GetBootRecordRequest::new()).await;
        Ok(BootRecord::from_json(&call.map_err(failed("BootRecord.Get"))?.json)?)
    }

    /// Begins the sandbox as a shim does: shared directory, `/dev/shm`, host name; then its details.
    ///
    /// # Errors
    /// The agent refused, or a storage cannot be mounted.
    pub async fn create_sandbox(&self, id: &str) -> Result<(), AgentError> {
        self.create_sandbox_with(id, sandbox_storages()).await
    }

    /// Begins the sandbox with these storages; then its details.
    ///
    /// # Errors
    /// The agent refused, or a storage cannot be mounted.
    pub async fn create_sandbox_with(&self, id: &str, storages: Vec<Storage>) -> Result<(), AgentError> {
        let request = CreateSandboxRequest {
            hostname: id.chars().take(64).collect(),
            sandbox_id: id.into(),
            storages,
            ..CreateSandboxRequest::default()
        };
        self.agent.create_sandbox(self.context(), &request).await.map_err(failed("CreateSandbox"))?;
        let details =
            GuestDetailsRequest { mem_block_size: true, mem_hotplug_probe: true, ..GuestDetailsRequest::default() };
        self.agent.get_guest_details(self.context(), &details).await.map(drop).map_err(failed("GetGuestDetails"))
    }

    /// Creates a container; waits in the agent for its GPUs, up to `deadline`.
    ///
    /// # Errors
    /// As the agent says, which names the GPU if it was one.
    pub async fn create_container(&self, id: &str, spec: Spec, deadline: Duration) -> Result<(), AgentError> {
        let request = CreateContainerRequest {
            container_id: id.into(),
            exec_id: id.into(),
            OCI: Some(spec).into(),
            ..CreateContainerRequest::default()
        };
        let call = self.agent.create_container(context::with_duration(deadline), &request).await;
        call.map(drop).map_err(failed("CreateContainer"))
    }

    /// Starts a created container.
    ///
    /// # Errors
    /// As the agent says.
    pub async fn start_container(&self, id: &str) -> Result<(), AgentError> {
        let request = StartContainerRequest { container_id: id.into(), ..StartContainerRequest::default() };
        self.agent.start_container(self.context(), &request).await.map(drop).map_err(failed("StartContainer"))
    }

    /// Reads one output to its end; at most 1 MiB is kept.
    ///
    /// # Errors
    /// As the agent says.
    pub async fn read_all(&self, id: &str, output: Output) -> Result<String, AgentError> {
        let request = ReadStreamRequest {
            container_id: id.into(),
            exec_id: id.into(),
            len: READ,
            ..ReadStreamRequest::default()
        };
        let mut bytes = Vec::new();
        loop {
            let context = context::with_timeout(0);
            let reply = match output {
                Output::Stdout => self.agent.read_stdout(context, &request).await.map_err(failed("ReadStdout"))?,
                Output::Stderr => self.agent.read_stderr(context, &request).await.map_err(failed("ReadStderr"))?,
            };
            if reply.data.is_empty() {
                return Ok(String::from_utf8_lossy(&bytes).into_owned());
            }
            let room = MAX_OUTPUT.saturating_sub(bytes.len());
            bytes.extend_from_slice(&reply.data[..reply.data.len().min(room)]);
        }
    }

    /// Waits for a container's end; its exit code, or 128 and the signal.
    ///
    /// # Errors
    /// As the agent says.
    pub async fn wait(&self, id: &str) -> Result<i32, AgentError> {
        let request =
            WaitProcessRequest { container_id: id.into(), exec_id: id.into(), ..WaitProcessRequest::default() };
        let reply = self.agent.wait_process(context::with_timeout(0), &request).await.map_err(failed("WaitProcess"))?;
        Ok(reply.status)
    }

    /// Removes an ended container.
    ///
    /// # Errors
    /// As the agent says.
    pub async fn remove_container(&self, id: &str) -> Result<(), AgentError> {
        let request = RemoveContainerRequest { container_id: id.into(), ..RemoveContainerRequest::default() };
        self.agent.remove_container(self.context(), &request).await.map(drop).map_err(failed("RemoveContainer"))
    }

    /// Ends the sandbox, which powers the guest off.
    ///
    /// # Errors
    /// As the agent says.
    pub async fn destroy_sandbox(&self) -> Result<(), AgentError> {
        let call = self.agent.destroy_sandbox(self.context(), &DestroySandboxRequest::new()).await;
        call.map(drop).map_err(failed("DestroySandbox"))
    }
}
