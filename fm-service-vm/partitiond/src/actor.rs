//! One thread that asks FM, and everybody else, who does not wait for it.
//!
//! libnvfm blocks for as long as FM likes. So one thread has the engine, takes one
//! command after the other, and shows how the fabric is through a channel that can be
//! looked into at any time. Who has waited long enough leaves; what was
//! begun goes on, and what was not begun is not begun for who has left.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use firstlight_partitions::{Choice, PartitionId};
use tokio::sync::{oneshot, watch};

use crate::engine::{Activated, Engine, Noted, Said, Wish};
use crate::fabric::Fabric;
use crate::fault::Fault;
use crate::look::Step;
use crate::manager::News;
use crate::refused::Refused;
use crate::view::View;

/// Partitions and whose they are.
pub type Wanted = Vec<(PartitionId, String)>;

type Answer<T> = oneshot::Sender<Result<T, Refused>>;

/// What the engine can be asked for.
enum Command {
    Plan(Wish, Answer<Choice>),
    Activate {
        request: String,
        wish: Wish,
        owner: String,
        answer: Answer<Activated>,
    },
    Deactivate {
        request: String,
        partition: PartitionId,
        owner: String,
        answer: Answer<bool>,
    },
    Reconcile {
        request: String,
        wanted: Wanted,
        dry_run: bool,
        answer: Answer<Vec<Step>>,
    },
    Quarantine {
        gpu: u32,
        reason: String,
        answer: Answer<()>,
    },
    Release {
        gpu: u32,
        answer: Answer<bool>,
    },
    Mended {
        switch: String,
        answer: Answer<()>,
    },
    SetMap {
        request: String,
        said: Said,
        answer: Answer<Noted>,
    },
    ForgetMap {
        request: String,
        answer: Answer<bool>,
    },
    /// Nobody waits for these.
    Heard {
        boot: String,
        number: u64,
        fault: Fault,
    },
    Manager(News),
}

impl Command {
    /// Nobody waits for the answer any more.
    fn is_left(&self) -> bool {
        match self {
            Self::Plan(_, answer) => answer.is_closed(),
            Self::Activate { answer, .. } => answer.is_closed(),
            Self::Deactivate { answer, .. } | Self::Release { answer, .. } | Self::ForgetMap { answer, .. } => {
                answer.is_closed()
            }
            Self::SetMap { answer, .. } => answer.is_closed(),
            Self::Reconcile { answer, .. } => answer.is_closed(),
            Self::Quarantine { answer, .. } | Self::Mended { answer, .. } => answer.is_closed(),
            Self::Heard { .. } | Self::Manager(_) => false,
        }
    }

    /// Does it, and says how its answer is given.
    fn carry_out<F: Fabric>(self, engine: &mut Engine<F>) -> Box<dyn FnOnce()> {
        match self {
            Self::Plan(wish, answer) => given(answer, engine.plan(wish)),
            Self::Activate { request, wish, owner, answer } => given(answer, engine.activate(&request, wish, &owner)),
            Self::Deactivate { request, partition, owner, answer } => {
                given(answer, engine.deactivate(&request, partition, &owner))
            }
            Self::Reconcile { wanted, dry_run: true, answer, .. } => given(answer, engine.steps(&wanted)),
            Self::Reconcile { request, wanted, answer, .. } => given(answer, engine.reconcile(&request, &wanted)),
            Self::Quarantine { gpu, reason, answer } => given(answer, engine.quarantine(gpu, &reason)),
            Self::Release { gpu, answer } => given(answer, engine.release(gpu)),
            Self::Mended { switch, answer } => given(answer, engine.mended(&switch)),
            Self::Heard { .. } | Self::Manager(_) => Box::new(|| ()),
            Self::SetMap { request, said, answer } => given(answer, engine.set_map(&request, said)),
            Self::ForgetMap { request, answer } => given(answer, engine.forget_map(&request)),
        }
    }
}

/// Who asked may have left meanwhile, which changes nothing.
fn given<T: 'static>(answer: Answer<T>, result: Result<T, Refused>) -> Box<dyn FnOnce()> {
    Box::new(move || drop(answer.send(result)))
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// The engine's own.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// Nobody knows yet.
    #[error(
        "the fabric manager has not answered within {} s; what was begun may still come to be, and is settled before the \
         next change: list the partitions", waited.as_secs()
    )]
    Late {
        /// How long was waited.
        waited: Duration,
    },
    /// The thread is gone: a fault of this program.
    #[error("the daemon ends")]
    Ends,
}

/// The engine's thread, for whoever wants something of it.
#[derive(Debug, Clone)]
pub struct Handle {
    commands: Sender<Command>,
    view: watch::Receiver<View>,
    patience: Duration,
}

/// Starts the thread. It looks at the fabric at once, and whenever `between` has
/// passed without a command; who waits for an answer does so for `patience`.
///
/// # Errors
/// There can be no thread.
pub fn start<F: Fabric + Send + 'static>(
    engine: Engine<F>,
    between: Duration,
    patience: Duration,
) -> std::io::Result<Handle> {
    let (commands, receiver) = channel();
    let mut first = View::new(engine.state().clone());
    first.modules = Arc::clone(engine.modules().known());
    let (shown, view) = watch::channel(first);
    thread::Builder::new().name("fabric".to_owned()).spawn(move || run(engine, &receiver, &shown, between))?;
    Ok(Handle { commands, view, patience })
}

fn run<F: Fabric>(mut engine: Engine<F>, commands: &Receiver<Command>, shown: &watch::Sender<View>, between: Duration) {
    let observer = shown.clone();
    engine.observe(move |state| {
        observer.send_modify(|view| {
            let is_begun = state.under_way.is_some() && view.state.under_way != state.under_way;
            view.under_way =
                if is_begun { Some(Instant::now()) } else { view.under_way.filter(|_| state.under_way.is_some()) };
            view.state = state.clone();
        });
    });
    look(&mut engine, shown);
    loop {
        match commands.recv_timeout(between) {
            Ok(command) if command.is_left() => continue,
            Ok(Command::Heard { boot, number, fault }) => match engine.heard(&boot, number, &fault) {
                Ok(true) => show(&engine, shown),
                Ok(false) => shown.send_modify(|view| view.pass(fault)),
                Err(error) => eprintln!("fm-partitiond: {}: {fault}: it cannot be written down: {error}", fault.device),
            },
            Ok(Command::Manager(news)) => {
                let serves = news.serves;
                shown.send_modify(|view| view.manager = Some(news));
                // It may wait to be told what is active.
                if serves {
                    look(&mut engine, shown);
                }
            }
            // Who is told that something is done sees it as well.
            Ok(command) => {
                let answer = command.carry_out(&mut engine);
                show(&engine, shown);
                answer();
            }
            Err(RecvTimeoutError::Timeout) => look(&mut engine, shown),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Shows what is known, without asking FM.
fn show<F>(engine: &Engine<F>, shown: &watch::Sender<View>) {
    shown.send_modify(|view| {
        view.state = engine.state().clone();
        view.modules = Arc::clone(engine.modules().known());
        (view.tally, view.journal_end) = (engine.tally().clone(), engine.journal_end());
        // Whatever is still under way is not being waited for.
        view.under_way = None;
        if let Some((look, at)) = engine.seen().filter(|(_, at)| view.looked != Some(*at)) {
            (view.look, view.looked, view.trouble) = (look.clone(), Some(*at), None);
        }
    });
}

/// Looks at the fabric, and shows it.
fn look<F: Fabric>(engine: &mut Engine<F>, shown: &watch::Sender<View>) {
    let settled = engine.settle();
    show(engine, shown);
    if let Err(error) = settled {
        shown.send_modify(|view| view.trouble = Some(error.to_string()));
    }
}

impl Handle {
    /// How the fabric is, without waiting.
    #[must_use]
    pub fn view(&self) -> View {
        self.view.borrow().clone()
    }

    /// Is told whenever that is another.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<View> {
        self.view.clone()
    }

    /// The kernel has said this; `false` if nobody is there any more who could take it.
    #[must_use]
    pub fn heard(&self, boot: String, number: u64, fault: Fault) -> bool {
        self.commands.send(Command::Heard { boot, number, fault }).is_ok()
    }

    /// PID 1 has said this of the fabric manager.
    pub fn manager(&self, news: News) {
        // Nobody is there at the daemon's end.
        let _ = self.commands.send(Command::Manager(news));
    }

    async fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, Unanswered> {
        let (answer, answered) = oneshot::channel();
        self.commands.send(command(answer)).map_err(|_| Unanswered::Ends)?;
        match tokio::time::timeout(self.patience, answered).await {
            Ok(Ok(answer)) => Ok(answer?),
            Ok(Err(_)) => Err(Unanswered::Ends),
            Err(_) => Err(Unanswered::Late { waited: self.patience }),
        }
    }

    /// See [`Engine::plan`].
    ///
    /// # Errors
    /// As there, or no answer.
    pub async fn plan(&self, wish: Wish) -> Result<Choice, Unanswered> {
        self.ask(|answer| Command::Plan(wish, answer)).await
    }

    /// See [`Engine::activate`].
    ///
    /// # Errors
    /// As there, or no answer.
    pub async fn activate(&self, request: String, wish: Wish, owner: String) -> Result<Activated, Unanswered> {
        self.ask(|answer| Command::Activate { request, wish, owner, answer }).await
    }

    /// See [`Engine::deactivate`].
    ///
    /// # Errors
    /// As there, or no answer.
    pub async fn deactivate(&self, request: String, partition: PartitionId, owner: String) -> Result<bool, Unanswered> {
        self.ask(|answer| Command::Deactivate { request, partition, owner, answer }).await
    }

    /// See [`Engine::reconcile`] and, to change nothing, [`Engine::steps`].
    ///
    /// # Errors
    /// As there, or no answer.
    pub async fn reconcile(&self, request: String, wanted: Wanted, dry_run: bool) -> Result<Vec<Step>, Unanswered> {
        self.ask(|answer| Command::Reconcile { request, wanted, dry_run, answer }).await
    }

    /// See [`Engine::quarantine`].
    ///
    /// # Errors
    /// As there, or no answer.
    pub async fn quarantine(&self, gpu: u32, reason: String) -> Result<(), Unanswered> {
        self.ask(|answer| Command::Quarantine { gpu, reason, answer }).await
    }

    /// See [`Engine::mended`].
    ///
    /// # Errors
    /// As there, or no answer.
    pub async fn mended(&self, switch: String) -> Result<(), Unanswered> {
        self.ask(|answer| Command::Mended { switch, answer }).await
    }

    /// See [`Engine::release`].
    ///
    /// # Errors
    /// As there, or no answer.
    pub async fn release(&self, gpu: u32) -> Result<bool, Unanswered> {
        self.ask(|answer| Command::Release { gpu, answer }).await
    }

    /// See [`Engine::set_map`].
    ///
    /// # Errors
    /// As there, or no answer.
    pub async fn set_map(&self, request: String, said: Said) -> Result<Noted, Unanswered> {
        self.ask(|answer| Command::SetMap { request, said, answer }).await
    }

    /// See [`Engine::forget_map`].
    ///
    /// # Errors
    /// As there, or no answer.
    pub async fn forget_map(&self, request: String) -> Result<bool, Unanswered> {
        self.ask(|answer| Command::ForgetMap { request, answer }).await
    }
}
