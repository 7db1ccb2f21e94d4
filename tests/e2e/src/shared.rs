//! One guest for several tests, which run at the same time.
//!
//! A boot takes seconds, and many questions need no boot of their own. Tests in a module whose name begins with
//! `shared_` use one [`Shared`] guest; `cargo xtask test` runs the selected ones of a module in one process.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use firstlight::agent::{Agent, AgentError, Output, SHARED_TAG};
use firstlight::container;
use firstlight::run::{Container, Deadlines};
use firstlight_boot_record::{BootRecord, State};
use firstlight_oci::Image;
use firstlight_vm::{Console, Share, Vm};
use tempfile::TempDir;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::{Scenario, lab};

/// A guest that is started by the first test that uses it and stopped after the last one.
#[derive(Debug)]
pub struct Shared {
    scenario: fn() -> Scenario,
    guest: Mutex<Weak<SharedGuest>>,
}

impl Shared {
    /// Returns a guest that is not started yet; `scenario` describes its machine.
    #[must_use]
    pub const fn new(scenario: fn() -> Scenario) -> Self {
        Self { scenario, guest: Mutex::new(Weak::new()) }
    }

    /// Returns the guest with its sandbox; starts it if no other test uses it now.
    ///
    /// # Panics
    /// The guest does not boot.
    #[must_use]
    pub fn guest(&self) -> Arc<SharedGuest> {
        let mut current = self.guest.lock().unwrap_or_else(PoisonError::into_inner);
        current.upgrade().unwrap_or_else(|| {
            let guest = Arc::new(SharedGuest::start((self.scenario)()));
            *current = Arc::downgrade(&guest);
            guest
        })
    }
}

/// A running guest with a sandbox. Dropping it stops the machine.
#[derive(Debug)]
pub struct SharedGuest {
    started: Started,
    /// Root directories of the containers, shared with the guest.
    dir: TempDir,
    containers: AtomicUsize,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Handles to a guest whose sandbox exists.
#[derive(Debug)]
struct Started {
    handle: Handle,
    agent: Agent,
    console: Console,
}

impl SharedGuest {
    /// Starts the guest on a thread of its own: its processes are killed when the thread that started them ends.
    fn start(mut scenario: Scenario) -> Self {
        let dir = tempfile::Builder::new().prefix("firstlight-shared-").tempdir().expect("a directory for containers");
        scenario.guest.shares.push(Share { tag: SHARED_TAG.to_owned(), dir: dir.path().to_owned() });
        let (ready, started) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            scenario.watched(async |vm| {
                let agent = boot(vm).await;
                let console = vm.console().clone();
                let handle = Handle::current();
                // Both fail only if the tests are gone.
                let _ = ready.send(Started { handle, agent, console });
                let _ = stopped.await;
            });
        });
        let started = started.recv().expect("the guest boots: its thread's message is above");
        Self { started, dir, containers: AtomicUsize::new(1), stop: Some(stop), thread: Some(thread) }
    }

    /// Returns the guest's boot record when the boot has ended.
    ///
    /// # Panics
    /// The boot does not end, or the agent does not reply.
    pub fn record(&self) -> BootRecord {
        self.started.handle.block_on(async {
            let ended = |record: &BootRecord| !matches!(record.state, State::Booting);
            let seen = timeout(Deadlines::default().boot, self.started.console.wait_for(ended)).await;
            assert!(seen.is_ok_and(|seen| seen), "the boot ends:\n{}", self.started.console.tail());
            self.started.agent.boot_record().await.expect("the agent replies")
        })
    }

    /// Runs a container with the lab's busybox image until it exits, and removes it. `gpus` are CDI names.
    ///
    /// # Panics
    /// The agent does not reply.
    pub fn run(&self, command: &[&str], gpus: &[&str]) -> Container {
        self.run_image(&lab().busybox_image, command, gpus)
    }

    /// Runs [`container::probe_command`] like [`SharedGuest::run`].
    ///
    /// # Panics
    /// The agent does not reply.
    pub fn probe(&self, gpus: &[&str]) -> Container {
        let command = container::probe_command();
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        self.run(&command, gpus)
    }

    /// Runs a container with the image in an OCI layout, like [`SharedGuest::run`].
    ///
    /// # Panics
    /// The image is unusable, or the agent does not reply.
    pub fn run_image(&self, image: &Path, command: &[&str], gpus: &[&str]) -> Container {
        let id = format!("shared-{}", self.containers.fetch_add(1, Ordering::Relaxed));
        let image = Image::open(image).expect("the image is an OCI layout");
        let root = self.dir.path().join(&id).join("rootfs");
        std::fs::create_dir_all(&root).expect("the root directory is created");
        image.unpack(&root).expect("the image is unpacked");
        let [command, gpus] = [command, gpus].map(|list| list.iter().map(ToString::to_string).collect::<Vec<_>>());
        let spec = container::spec(&id, &image, &command, &gpus);
        let agent = &self.started.agent;
        let run = async {
            agent.create_container(&id, spec, Deadlines::default().create).await?;
            agent.start_container(&id).await?;
            let read = |output| agent.read_all(&id, output, |_| ());
            let (stdout, stderr) = tokio::try_join!(read(Output::Stdout), read(Output::Stderr))?;
            let exit_code = Some(agent.wait(&id).await?);
            agent.remove_container(&id).await?;
            Ok(Container { exit_code, stdout, stderr, ..Container::default() })
        };
        self.started.handle.block_on(run).unwrap_or_else(|error: AgentError| {
            let refused = matches!(error, AgentError::Refused { .. });
            assert!(refused, "container {id}: {error}\n{}", self.started.console.tail());
            let command_not_found = error.is_command_not_found();
            Container { command_not_found, error: Some(error.to_string()), ..Container::default() }
        })
    }
}

impl Drop for SharedGuest {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("end of the shared guest's console:\n{}", self.started.console.tail());
        }
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Time for one call to the agent.
const CALL: Duration = Duration::from_secs(90);

/// Waits until the agent listens, connects, and creates the sandbox.
async fn boot(vm: &Vm) -> Agent {
    let listens = |record: &BootRecord| record.event("agent-listening").is_some();
    let seen = timeout(Deadlines::default().boot, vm.console().wait_for(listens)).await;
    assert!(seen.is_ok_and(|seen| seen), "the agent listens:\n{}", vm.console_tail());
    let stream = vm.connect(1024, Deadlines::default().boot).await.expect("the agent accepts connections");
    let agent = Agent::new(stream, CALL);
    agent.create_sandbox("shared").await.expect("the sandbox is created");
    agent
}
