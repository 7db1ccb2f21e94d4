//! The thread that owns the engine, and the handle by which requests reach it.
//!
//! libnvfm calls block without a bound. So one thread owns the engine, executes commands one by one, and publishes
//! the state through a watch channel that can be read at any time. A caller whose timeout has passed gets an error; a
//! change that was started continues, and a command whose caller has left is not started. An operation is a closure
//! ([`Handle::call`]), so a new one needs a method of the engine and one of the service, and nothing here.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::fabric::BoxedFabric;
use crate::fault::Fault;
use crate::manager::ManagerState;
use crate::view::View;

/// The engine that the thread owns.
pub type BoxedEngine = Engine<BoxedFabric>;

/// What the thread receives.
enum Command {
    /// An operation of a request.
    Call(Box<dyn Call>),
    /// A fault from the kernel log. No reply is sent.
    KernelFault { boot_id: String, sequence: u64, fault: Fault },
    /// The state of the fabric manager's process. No reply is sent.
    ManagerState(ManagerState),
}

/// An operation of a request, with the channel for its result.
trait Call: Send {
    /// Returns whether the caller has dropped the receiver of the reply.
    fn is_abandoned(&self) -> bool;

    /// Executes the operation and returns a closure that sends the reply.
    fn execute(self: Box<Self>, engine: &mut BoxedEngine) -> Box<dyn FnOnce()>;
}

struct PendingCall<T, O> {
    operation: O,
    reply: oneshot::Sender<Result<T, EngineError>>,
}

impl<T, O> Call for PendingCall<T, O>
where
    T: Send + 'static,
    O: FnOnce(&mut BoxedEngine) -> Result<T, EngineError> + Send,
{
    fn is_abandoned(&self) -> bool {
        self.reply.is_closed()
    }

    fn execute(self: Box<Self>, engine: &mut BoxedEngine) -> Box<dyn FnOnce()> {
        let Self { operation, reply } = *self;
        let result = operation(engine);
        // The receiver may have been dropped, which is not an error.
        Box::new(move || drop(reply.send(result)))
    }
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
pub fn start(engine: BoxedEngine, poll_interval: Duration, timeout: Duration) -> std::io::Result<Handle> {
    let (commands, receiver) = channel();
    let mut first = View::new(engine.state().clone());
    first.module_map = Arc::clone(engine.module_map().known());
    let (views, view) = watch::channel(first);
    thread::Builder::new().name("fabric".to_owned()).spawn(move || run(engine, &receiver, &views, poll_interval))?;
    Ok(Handle { commands, view, timeout })
}

fn run(mut engine: BoxedEngine, commands: &Receiver<Command>, views: &watch::Sender<View>, poll_interval: Duration) {
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
            Ok(Command::Call(call)) if call.is_abandoned() => continue,
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
            Ok(Command::Call(call)) => {
                let reply = call.execute(&mut engine);
                show(&engine, views);
                reply();
            }
            Err(RecvTimeoutError::Timeout) => poll(&mut engine, views),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Publishes the engine's state, without calling FM.
fn show(engine: &BoxedEngine, views: &watch::Sender<View>) {
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
fn poll(engine: &mut BoxedEngine, views: &watch::Sender<View>) {
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

    /// Executes an operation on the engine's thread and returns its result.
    ///
    /// # Errors
    /// Those of the operation, or a timeout. An operation that was started continues after a timeout; one whose caller has
    /// left before is not started.
    pub async fn call<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&mut BoxedEngine) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, RequestError> {
        let (reply, replied) = oneshot::channel();
        let call = Command::Call(Box::new(PendingCall { operation, reply }));
        self.commands.send(call).map_err(|_| RequestError::ShuttingDown)?;
        match tokio::time::timeout(self.timeout, replied).await {
            Ok(Ok(reply)) => Ok(reply?),
            Ok(Err(_)) => Err(RequestError::ShuttingDown),
            Err(_) => Err(RequestError::TimedOut { waited: self.timeout }),
        }
    }
}
