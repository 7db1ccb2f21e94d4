//! The thread that owns the engine, and the handle by which requests reach it.
//!
//! libnvfm calls block without a bound. So one thread owns the engine, executes commands one by one, and publishes
//! the state through a watch channel that can be read at any time. A caller whose timeout has passed gets an error; a
//! change that was started continues, and a command whose caller has left is not started.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use firstlight_partitions::{Choice, PartitionId};
use tokio::sync::{oneshot, watch};

use crate::engine::{Activated, Engine, ModuleMapUpdate, ModuleMapUpdateResult, PartitionRequest};
use crate::error::EngineError;
use crate::fabric::Fabric;
use crate::fault::Fault;
use crate::manager::ManagerState;
use crate::snapshot::Step;
use crate::view::View;

/// Partitions and their owners.
pub type DesiredPartitions = Vec<(PartitionId, String)>;

type Reply<T> = oneshot::Sender<Result<T, EngineError>>;

/// Commands to the engine.
enum Command {
    Plan(PartitionRequest, Reply<Choice>),
    Activate {
        request: String,
        partition_request: PartitionRequest,
        owner: String,
        reply: Reply<Activated>,
    },
    Deactivate {
        request: String,
        partition: PartitionId,
        owner: String,
        reply: Reply<bool>,
    },
    Reconcile {
        request: String,
        desired: DesiredPartitions,
        dry_run: bool,
        reply: Reply<Vec<Step>>,
    },
    Quarantine {
        gpu: u32,
        reason: String,
        reply: Reply<()>,
    },
    Release {
        gpu: u32,
        reply: Reply<bool>,
    },
    ReleaseSwitch {
        switch: String,
        reply: Reply<()>,
    },
    SetMap {
        request: String,
        update: ModuleMapUpdate,
        reply: Reply<ModuleMapUpdateResult>,
    },
    ForgetMap {
        request: String,
        reply: Reply<bool>,
    },
    /// No reply is sent to these.
    KernelFault {
        boot_id: String,
        sequence: u64,
        fault: Fault,
    },
    ManagerState(ManagerState),
}

impl Command {
    /// Whether the caller has dropped the receiver of the reply.
    fn is_abandoned(&self) -> bool {
        match self {
            Self::Plan(_, reply) => reply.is_closed(),
            Self::Activate { reply, .. } => reply.is_closed(),
            Self::Deactivate { reply, .. } | Self::Release { reply, .. } | Self::ForgetMap { reply, .. } => {
                reply.is_closed()
            }
            Self::SetMap { reply, .. } => reply.is_closed(),
            Self::Reconcile { reply, .. } => reply.is_closed(),
            Self::Quarantine { reply, .. } | Self::ReleaseSwitch { reply, .. } => reply.is_closed(),
            Self::KernelFault { .. } | Self::ManagerState(_) => false,
        }
    }

    /// Executes the command and returns a closure that sends the reply.
    fn execute<F: Fabric>(self, engine: &mut Engine<F>) -> Box<dyn FnOnce()> {
        match self {
            Self::Plan(partition_request, reply) => deferred_reply(reply, engine.plan(partition_request)),
            Self::Activate { request, partition_request, owner, reply } => {
                deferred_reply(reply, engine.activate(&request, partition_request, &owner))
            }
            Self::Deactivate { request, partition, owner, reply } => {
                deferred_reply(reply, engine.deactivate(&request, partition, &owner))
            }
            Self::Reconcile { desired, dry_run: true, reply, .. } => deferred_reply(reply, engine.steps(&desired)),
            Self::Reconcile { request, desired, reply, .. } => {
                deferred_reply(reply, engine.reconcile(&request, &desired))
            }
            Self::Quarantine { gpu, reason, reply } => deferred_reply(reply, engine.quarantine(gpu, &reason)),
            Self::Release { gpu, reply } => deferred_reply(reply, engine.release(gpu)),
            Self::ReleaseSwitch { switch, reply } => deferred_reply(reply, engine.release_switch(&switch)),
            Self::KernelFault { .. } | Self::ManagerState(_) => Box::new(|| ()),
            Self::SetMap { request, update, reply } => deferred_reply(reply, engine.set_map(&request, update)),
            Self::ForgetMap { request, reply } => deferred_reply(reply, engine.forget_map(&request)),
        }
    }
}

/// The receiver may have been dropped, which is not an error.
fn deferred_reply<T: 'static>(reply: Reply<T>, result: Result<T, EngineError>) -> Box<dyn FnOnce()> {
    Box::new(move || drop(reply.send(result)))
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The engine's error.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The timeout has passed; the outcome is unknown.
    #[error(
        "the fabric manager has not answered within {} s; a change that was started may still complete, and its outcome is determined before the \
         next change: list the partitions", waited.as_secs()
    )]
    TimedOut {
        /// The timeout.
        waited: Duration,
    },
    /// The thread is gone: a bug in this program.
    #[error("the daemon is shutting down")]
    ShuttingDown,
}

/// A handle to the engine's thread.
#[derive(Debug, Clone)]
pub struct Handle {
    commands: Sender<Command>,
    view: watch::Receiver<View>,
    timeout: Duration,
}

/// Starts the thread. It polls the fabric manager immediately, and after each `poll_interval` without a command;
/// requests fail after `timeout`.
///
/// # Errors
/// The thread cannot be created.
pub fn start<F: Fabric + Send + 'static>(
    engine: Engine<F>,
    poll_interval: Duration,
    timeout: Duration,
) -> std::io::Result<Handle> {
    let (commands, receiver) = channel();
    let mut first = View::new(engine.state().clone());
    first.module_map = Arc::clone(engine.module_map().known());
    let (views, view) = watch::channel(first);
    thread::Builder::new().name("fabric".to_owned()).spawn(move || run(engine, &receiver, &views, poll_interval))?;
    Ok(Handle { commands, view, timeout })
}

fn run<F: Fabric>(
    mut engine: Engine<F>,
    commands: &Receiver<Command>,
    views: &watch::Sender<View>,
    poll_interval: Duration,
) {
    let observer = views.clone();
    engine.observe(move |state| {
        observer.send_modify(|view| {
            let is_new = state.in_progress.is_some() && view.state.in_progress != state.in_progress;
            view.in_progress =
                if is_new { Some(Instant::now()) } else { view.in_progress.filter(|_| state.in_progress.is_some()) };
            view.state = state.clone();
        });
    });
    poll(&mut engine, views);
    loop {
        match commands.recv_timeout(poll_interval) {
            Ok(command) if command.is_abandoned() => continue,
            Ok(Command::KernelFault { boot_id, sequence, fault }) => {
                match engine.kernel_fault(&boot_id, sequence, &fault) {
                    Ok(true) => show(&engine, views),
                    Ok(false) => views.send_modify(|view| view.note_fault(fault)),
                    Err(error) => {
                        tracing::error!(device = %fault.device, %fault, %error, "failed to write a fault to the journal");
                    }
                }
            }
            Ok(Command::ManagerState(manager_state)) => {
                let ready = manager_state.ready;
                views.send_modify(|view| view.manager = Some(manager_state));
                // After a restart it may be waiting for the list of active partitions.
                if ready {
                    poll(&mut engine, views);
                }
            }
            // The view is updated before the reply, so that a caller sees its own change.
            Ok(command) => {
                let reply = command.execute(&mut engine);
                show(&engine, views);
                reply();
            }
            Err(RecvTimeoutError::Timeout) => poll(&mut engine, views),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Publishes the engine's state, without calling FM.
fn show<F>(engine: &Engine<F>, views: &watch::Sender<View>) {
    views.send_modify(|view| {
        view.state = engine.state().clone();
        view.module_map = Arc::clone(engine.module_map().known());
        (view.change_stats, view.journal_end) = (engine.change_stats().clone(), engine.journal_end());
        // A change that is still in progress here has an unknown outcome, and nothing waits for it.
        view.in_progress = None;
        if let Some((snapshot, at)) = engine.last_snapshot().filter(|(_, at)| view.polled_at != Some(*at)) {
            (view.fabric, view.polled_at, view.poll_error) = (snapshot.clone(), Some(*at), None);
        }
    });
}

/// Polls FM and publishes the result.
fn poll<F: Fabric>(engine: &mut Engine<F>, views: &watch::Sender<View>) {
    let settled = engine.settle();
    show(engine, views);
    if let Err(error) = settled {
        views.send_modify(|view| view.poll_error = Some(error.to_string()));
    }
}

impl Handle {
    /// Returns the current view without waiting.
    #[must_use]
    pub fn view(&self) -> View {
        self.view.borrow().clone()
    }

    /// Returns a receiver that is notified of every change of the view.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<View> {
        self.view.clone()
    }

    /// Reports a fault from the kernel log; `false` if the engine's thread is gone.
    #[must_use]
    pub fn report_kernel_fault(&self, boot_id: String, sequence: u64, fault: Fault) -> bool {
        self.commands.send(Command::KernelFault { boot_id, sequence, fault }).is_ok()
    }

    /// Reports the state of the fabric manager's process.
    pub fn report_manager_state(&self, manager_state: ManagerState) {
        // Fails only during shutdown.
        let _ = self.commands.send(Command::ManagerState(manager_state));
    }

    async fn send<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, RequestError> {
        let (reply, replied) = oneshot::channel();
        self.commands.send(command(reply)).map_err(|_| RequestError::ShuttingDown)?;
        match tokio::time::timeout(self.timeout, replied).await {
            Ok(Ok(reply)) => Ok(reply?),
            Ok(Err(_)) => Err(RequestError::ShuttingDown),
            Err(_) => Err(RequestError::TimedOut { waited: self.timeout }),
        }
    }

    /// See [`Engine::plan`].
    ///
    /// # Errors
    /// As there, or a timeout.
    pub async fn plan(&self, partition_request: PartitionRequest) -> Result<Choice, RequestError> {
        self.send(|reply| Command::Plan(partition_request, reply)).await
    }

    /// See [`Engine::activate`].
    ///
    /// # Errors
    /// As there, or a timeout.
    pub async fn activate(
        &self,
        request: String,
        partition_request: PartitionRequest,
        owner: String,
    ) -> Result<Activated, RequestError> {
        self.send(|reply| Command::Activate { request, partition_request, owner, reply }).await
    }

    /// See [`Engine::deactivate`].
    ///
    /// # Errors
    /// As there, or a timeout.
    pub async fn deactivate(
        &self,
        request: String,
        partition: PartitionId,
        owner: String,
    ) -> Result<bool, RequestError> {
        self.send(|reply| Command::Deactivate { request, partition, owner, reply }).await
    }

    /// See [`Engine::reconcile`] and, for a dry run, [`Engine::steps`].
    ///
    /// # Errors
    /// As there, or a timeout.
    pub async fn reconcile(
        &self,
        request: String,
        desired: DesiredPartitions,
        dry_run: bool,
    ) -> Result<Vec<Step>, RequestError> {
        self.send(|reply| Command::Reconcile { request, desired, dry_run, reply }).await
    }

    /// See [`Engine::quarantine`].
    ///
    /// # Errors
    /// As there, or a timeout.
    pub async fn quarantine(&self, gpu: u32, reason: String) -> Result<(), RequestError> {
        self.send(|reply| Command::Quarantine { gpu, reason, reply }).await
    }

    /// See [`Engine::release_switch`].
    ///
    /// # Errors
    /// As there, or a timeout.
    pub async fn release_switch(&self, switch: String) -> Result<(), RequestError> {
        self.send(|reply| Command::ReleaseSwitch { switch, reply }).await
    }

    /// See [`Engine::release`].
    ///
    /// # Errors
    /// As there, or a timeout.
    pub async fn release(&self, gpu: u32) -> Result<bool, RequestError> {
        self.send(|reply| Command::Release { gpu, reply }).await
    }

    /// See [`Engine::set_map`].
    ///
    /// # Errors
    /// As there, or a timeout.
    pub async fn set_map(
        &self,
        request: String,
        update: ModuleMapUpdate,
    ) -> Result<ModuleMapUpdateResult, RequestError> {
        self.send(|reply| Command::SetMap { request, update, reply }).await
    }

    /// See [`Engine::forget_map`].
    ///
    /// # Errors
    /// As there, or a timeout.
    pub async fn forget_map(&self, request: String) -> Result<bool, RequestError> {
        self.send(|reply| Command::ForgetMap { request, reply }).await
    }
}
