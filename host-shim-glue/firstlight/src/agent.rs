//! Client of the agent: the calls of a Kata shim, with timeouts.

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

/// Mount point of the shared directory in the guest, as in Kata.
pub const SHARED: &str = "/run/kata-containers/shared/containers/";

/// The tag of the shared directory, as Kata calls it.
pub const SHARED_TAG: &str = "kataShared";

/// Bytes requested per read, equal to Kata's Go shim.
const READ: u32 = 32 * 1024;

/// Maximum output in the report, bytes; the rest is only reported as it arrives.
const MAX_OUTPUT: usize = 1 << 20;

/// Maximum length of a guest's error text, characters.
const MAX_TEXT: usize = 2000;

/// Returns the storages that a shim requests for every sandbox: the shared directory and `/dev/shm`.
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
    /// The agent returned an error.
    #[error("{call}: {code}: {text}")]
    Refused {
        /// The call.
        call: &'static str,
        /// The status code's name, e.g. `NOT_FOUND`.
        code: String,
        /// The agent's error text.
        text: String,
    },
    /// The agent did not reply.
    #[error("{call}: no reply: {source}")]
    Lost {
        /// The call.
        call: &'static str,
        /// The connection's error.
        source: ttrpc::Error,
    },
    /// The agent's boot record is invalid.
    #[error("BootRecord.Get: {0}")]
    Record(#[from] ReadError),
}

impl AgentError {
    /// Returns whether a container was refused because its command does not exist. The protocol has no code for that, so
    /// the agent's text decides.
    #[must_use]
    pub fn is_command_not_found(&self) -> bool {
        let Self::Refused { call: "CreateContainer" | "StartContainer", text, .. } = self else { return false };
        // libcontainer's words: executable 'NAME' not found in $PATH, for absolute paths too.
        text.contains("executable") && text.contains("not found")
    }
}

fn failed(call: &'static str) -> impl FnOnce(ttrpc::Error) -> AgentError {
    move |error| match error {
        // Untrusted input from the guest: reduce it to one line without control characters.
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
    /// Timeout of calls that do not wait for an event.
    call_timeout: Duration,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").finish_non_exhaustive()
    }
}

/// An output stream of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Agent {
    /// Creates a ttrpc client on `stream`; `call_timeout` bounds every call that does
    /// not wait for an event.
    #[must_use]
    pub fn new(stream: UnixStream, call_timeout: Duration) -> Self {
        let client = ttrpc::r#async::Client::new(Socket::new(stream));
        Self {
            agent: AgentServiceClient::new(client.clone()),
            health: HealthClient::new(client.clone()),
            record: BootRecordClient::new(client),
            call_timeout,
        }
    }

    /// Returns the same connection with another timeout for calls that do not wait.
    #[must_use]
    pub fn with_call_timeout(mut self, call_timeout: Duration) -> Self {
        self.call_timeout = call_timeout;
        self
    }

    /// Returns the generated client, for calls without a method here.
    #[must_use]
    pub fn calls(&self) -> &AgentServiceClient {
        &self.agent
    }

    fn context(&self) -> Context {
        context::with_duration(self.call_timeout)
    }

    /// Calls `Health.Check`.
    ///
    /// # Errors
    /// The agent does not reply in time.
    pub async fn check(&self) -> Result<(), AgentError> {
        self.health.check(self.context(), &CheckRequest::new()).await.map(drop).map_err(failed("Health.Check"))
    }

    /// Returns PID 1's current boot record.
    ///
    /// # Errors
    /// The agent does not reply, or the record is invalid.
    pub async fn boot_record(&self) -> Result<BootRecord, AgentError> {
        let call = self.record.get(self.context(), &GetBootRecordRequest::new()).await;
        Ok(BootRecord::from_json(&call.map_err(failed("BootRecord.Get"))?.json)?)
    }

    /// Creates the sandbox as a shim does: shared directory, `/dev/shm`, host name; then gets the guest's details.
    ///
    /// # Errors
    /// The agent refused, or a storage cannot be mounted.
    pub async fn create_sandbox(&self, id: &str) -> Result<(), AgentError> {
        self.create_sandbox_with(id, sandbox_storages()).await
    }

    /// Creates the sandbox with these storages; then gets the guest's details.
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

    /// Creates a container; the agent waits for its GPUs, up to `deadline`.
    ///
    /// # Errors
    /// The agent's, which names the GPU that failed or is missing.
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
    /// The agent's.
    pub async fn start_container(&self, id: &str) -> Result<(), AgentError> {
        let request = StartContainerRequest { container_id: id.into(), ..StartContainerRequest::default() };
        self.agent.start_container(self.context(), &request).await.map(drop).map_err(failed("StartContainer"))
    }

    /// Reads an output stream to its end; returns its first MiB. `receive` gets all bytes as they arrive, and an empty
    /// slice at the end.
    ///
    /// # Errors
    /// The agent's.
    pub async fn read_all(
        &self,
        id: &str,
        output: Output,
        mut receive: impl FnMut(&[u8]),
    ) -> Result<String, AgentError> {
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
            receive(&reply.data);
            if reply.data.is_empty() {
                return Ok(String::from_utf8_lossy(&bytes).into_owned());
            }
            let room = MAX_OUTPUT.saturating_sub(bytes.len());
            bytes.extend_from_slice(&reply.data[..reply.data.len().min(room)]);
        }
    }

    /// Waits for a container's exit; returns its exit code, or 128 plus the signal number.
    ///
    /// # Errors
    /// The agent's.
    pub async fn wait(&self, id: &str) -> Result<i32, AgentError> {
        let request =
            WaitProcessRequest { container_id: id.into(), exec_id: id.into(), ..WaitProcessRequest::default() };
        let reply = self.agent.wait_process(context::with_timeout(0), &request).await.map_err(failed("WaitProcess"))?;
        Ok(reply.status)
    }

    /// Removes an exited container.
    ///
    /// # Errors
    /// The agent's.
    pub async fn remove_container(&self, id: &str) -> Result<(), AgentError> {
        let request = RemoveContainerRequest { container_id: id.into(), ..RemoveContainerRequest::default() };
        self.agent.remove_container(self.context(), &request).await.map(drop).map_err(failed("RemoveContainer"))
    }

    /// Destroys the sandbox, which powers the guest off.
    ///
    /// # Errors
    /// The agent's.
    pub async fn destroy_sandbox(&self) -> Result<(), AgentError> {
        let call = self.agent.destroy_sandbox(self.context(), &DestroySandboxRequest::new()).await;
        call.map(drop).map_err(failed("DestroySandbox"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_command_is_distinguished_from_a_missing_file() {
        let refused = |call, text: &str| AgentError::Refused { call, code: "INTERNAL".into(), text: text.into() };
        let libcontainers = "failed to prepare init: executable '/bin/absent' not found in $PATH";
        assert!(refused("StartContainer", libcontainers).is_command_not_found());
        assert!(!refused("CreateSandbox", libcontainers).is_command_not_found());
        let volume = "failed to open /data: No such file or directory";
        assert!(!refused("CreateContainer", volume).is_command_not_found());
    }
}
