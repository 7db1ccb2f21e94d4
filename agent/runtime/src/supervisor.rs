//! The event loop that serves all containers and blocks on none.
//!
//! A call that needs libcontainer is carried out by a forked worker; this process has one thread, so it may fork
//! at any time. The loop itself takes calls, kills, and reaps.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use firstlight_sys::signals::SignalFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use crate::call_queue::{CallQueue, InFlightCall, QueuedCall, timeout_of};
use crate::children::Children;
use crate::containers::{self, unknown};
use crate::cpu_affinity::{self, CpuAffinity};
use crate::filter::FilterCache;
use crate::message::{Call, Done, Failure, FailureKind, FromRuntime, Request};
use crate::prefork::{self, Forked, Job, PreforkAction, PreforkPolicy, PreforkedWorker};
use crate::socket::{MAX_MESSAGE, MAX_REQUEST, receive, send};
use crate::worker::{self, Outcome, WorkerInput};
use crate::{helper_log, signal};

/// `SIGCHLD` has this number on every supported architecture.
const SIGCHLD: i32 = 17;

/// Options of the runtime.
#[derive(Debug, Clone)]
pub struct Options {
    /// libcontainer's state directory.
    pub state: PathBuf,
}

/// The runtime's entry of a container.
#[derive(Debug)]
struct ContainerEntry {
    bundle: PathBuf,
    cgroup: PathBuf,
    /// Whether the container has `poststart` or `poststop` hooks.
    hooks: bool,
    /// The helper log of its init process; `None` once started.
    init_log: Option<OwnedFd>,
    /// Why libcontainer's state could not be set to running.
    state_error: Option<Failure>,
}

/// The result of an attempt to carry a call out without a worker.
enum Inline {
    NeedsWorker,
    /// Started; its completion is an event of the loop.
    InProgress,
    Done(Outcome),
}

struct Supervisor {
    /// The server's socket; `None` in a worker.
    socket: Option<OwnedFd>,
    /// `None` in a worker.
    signals: Option<SignalFd>,
    state: PathBuf,
    containers: BTreeMap<String, ContainerEntry>,
    children: Children,
    queue: CallQueue,
    filters: FilterCache,
    affinity: CpuAffinity,
    /// Whether this process is pinned to one CPU.
    pinned: bool,
    preforked: Option<PreforkedWorker>,
    prefork_policy: PreforkPolicy,
}

/// Serves calls until the peer closes `socket`, then kills every container and returns. The process must have a
/// single thread.
///
/// # Errors
/// The signalfd cannot be created, or the working directory cannot be changed.
pub fn run(socket: OwnedFd, options: Options) -> std::io::Result<()> {
    let signals = SignalFd::block(&[SIGCHLD])?;
    // Hooks run in `/`, and no other directory is kept busy.
    std::env::set_current_dir("/")?;
    containers::remove_all(&options.state);
    let mut supervisor = Supervisor {
        socket: Some(socket),
        signals: Some(signals),
        state: options.state,
        containers: BTreeMap::new(),
        children: Children::default(),
        queue: CallQueue::default(),
        filters: FilterCache::default(),
        affinity: CpuAffinity::current(),
        pinned: false,
        preforked: None,
        prefork_policy: PreforkPolicy::default(),
    };
    let mut buffer = vec![0; MAX_REQUEST];
    while supervisor.run_once(&mut buffer)? {}
    supervisor.shut_down();
    Ok(())
}

impl Supervisor {
    /// Waits for events and handles them; `false` when the peer has closed the socket.
    fn run_once(&mut self, buffer: &mut [u8]) -> std::io::Result<bool> {
        while let Some(waiting) = self.queue.next() {
            self.start_worker(waiting);
        }
        let (Some(socket), Some(signals)) = (&self.socket, &self.signals) else { return Ok(false) };
        let mut waited = vec![PollFd::new(socket, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        waited.extend(self.queue.in_flight.iter().map(|running| PollFd::new(&running.answer, PollFlags::IN)));
        // Last, because it is optional. An idle worker sends nothing; an event means that it has exited.
        waited.extend(self.preforked.iter().map(|worker| PollFd::new(&worker.socket, PollFlags::IN)));
        let timeout = [self.queue.next_deadline(), self.next_prefork_action()].into_iter().flatten().min();
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut waited, timeout.as_ref()) {
            Ok(0) => {
                drop(waited);
                self.abort_timed_out();
                self.maintain_preforked();
                return Ok(true);
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let request_ready = !waited[0].revents().is_empty();
        let mut ready: Vec<bool> = waited[2..].iter().map(|fd| !fd.revents().is_empty()).collect();
        if self.preforked.is_some() && ready.pop() == Some(true) {
            self.preforked = None;
        }
        while signals.next()?.is_some() {}
        self.report_exits();
        let mut ready = ready.into_iter();
        let over: Vec<InFlightCall> =
            self.queue.in_flight.extract_if(.., |_| ready.next().unwrap_or_default()).collect();
        for running in over {
            match running.pid {
                Some(_) => self.complete(running),
                None => self.finish_start(running),
            }
        }
        self.abort_timed_out();
        if request_ready {
            let received = self.socket.as_ref().map(|socket| receive(socket, buffer));
            match received {
                Some(Ok((len @ 1.., fds))) => self.handle_packet(&buffer[..len], fds),
                Some(Err(rustix::io::Errno::AGAIN)) => {}
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    fn handle_packet(&mut self, packet: &[u8], fds: Vec<OwnedFd>) {
        self.prefork_policy.record_call();
        match serde_json::from_slice::<Request>(packet) {
            Ok(Request { id, call }) => {
                if let Some(outcome) = self.begin(id, call, fds) {
                    self.reply(Some(id), outcome);
                }
            }
            Err(error) => {
                let failure = Failure::new(FailureKind::Invalid, format!("not a request: {error}"));
                self.reply(Some(0), Err(failure));
            }
        }
    }

    /// Carries out what needs no worker, and queues the rest.
    fn begin(&mut self, id: u64, call: Call, fds: Vec<OwnedFd>) -> Option<Outcome> {
        let nothing = |()| (Done::default(), None);
        match &call {
            Call::Signal { container, exec, signal } => {
                return Some(signal::send(&self.children, container, exec, *signal).map(nothing));
            }
            Call::Kill { container } => {
                let entry = self.containers.get(container).ok_or_else(|| unknown(container));
                return Some(entry.and_then(|entry| containers::kill(container, &entry.cgroup)).map(nothing));
            }
            _ => {}
        }
        if let Err(failure) = self.check(&call) {
            return Some(Err(failure));
        }
        match self.try_inline(id, &call) {
            Inline::NeedsWorker => {}
            Inline::InProgress => return None,
            Inline::Done(outcome) => return Some(outcome),
        }
        let refused = self.queue.enqueue(QueuedCall { request: Some(id), call, fds }).err()?;
        let message = format!("{}: the call queue is full; retry later", worker::describe(&refused.call));
        Some(Err(Failure::internal(message)))
    }

    /// Checks a call against the current state.
    fn check(&self, call: &Call) -> Result<(), Failure> {
        let id = call.container();
        match call {
            Call::Create { .. } => {
                let made = |call: &Call| matches!(call, Call::Create { .. });
                if self.containers.contains_key(id) || self.queue.any(id, made) {
                    return Err(Failure::new(FailureKind::Exists, format!("container {id} exists")));
                }
            }
            Call::Exec { exec, .. } => {
                let same = |call: &Call| matches!(call, Call::Exec { exec: other, .. } if other == exec);
                if let Some(failure) = self.containers.get(id).and_then(|entry| entry.state_error.clone()) {
                    return Err(failure);
                }
                if self.children.pid(id, exec).is_some() || self.queue.any(id, same) {
                    let message = format!("process {exec} of container {id} exists");
                    return Err(Failure::new(FailureKind::Exists, message));
                }
            }
            Call::Delete { .. } if self.children.any(id) || self.queue.any(id, |_| true) => {
                let message = format!("processes of container {id} still run: kill them first");
                return Err(Failure::new(FailureKind::Invalid, message));
            }
            _ => {}
        }
        let needs_container = !matches!(call, Call::Create { .. } | Call::Namespaces { .. });
        if needs_container && !self.containers.contains_key(id) {
            return Err(unknown(id));
        }
        Ok(())
    }

    /// Starts or deletes a container without a worker: without hooks, these are a few short system calls.
    fn try_inline(&mut self, id: u64, call: &Call) -> Inline {
        let nothing = |()| (Done::default(), None);
        let container = call.container();
        let Some(entry) = self.containers.get_mut(container).filter(|entry| !entry.hooks) else {
            return Inline::NeedsWorker;
        };
        match call {
            Call::Start { .. } => {
                let Some(log) = entry.init_log.take() else { return Inline::NeedsWorker };
                if let Err(failure) = containers::start_program(&self.state, container) {
                    entry.init_log = Some(log);
                    return Inline::Done(Err(failure));
                }
                let waiting = QueuedCall { request: Some(id), call: call.clone(), fds: Vec::new() };
                self.queue.insert(None, waiting, log, None);
                Inline::InProgress
            }
            Call::Delete { .. } => match containers::remove_idle(&self.state, container, &entry.cgroup) {
                Some(result) => {
                    if result.is_ok() {
                        self.containers.remove(container);
                    }
                    Inline::Done(result.map(nothing))
                }
                None => Inline::NeedsWorker,
            },
            _ => Inline::NeedsWorker,
        }
    }

    /// Reads the helper log of an init process after start: end of file without an error event means that it has
    /// exec'ed its program.
    fn finish_start(&mut self, mut running: InFlightCall) {
        if !helper_log::read_available(&running.answer, &mut running.received) {
            self.queue.in_flight.push(running);
            return;
        }
        self.prefork_policy.record_call();
        let container = running.call.container();
        let log_text = String::from_utf8_lossy(&running.received);
        let outcome = match helper_log::first_error(&log_text) {
            "" => Ok((Done::default(), None)),
            log_text => Err(Failure::internal(format!("failed to start container {container}: {log_text}"))),
        };
        let runs = outcome.is_ok();
        self.reply(running.request, outcome);
        if runs
            && let Err(failure) = containers::mark_running(&self.state, container)
            && let Some(entry) = self.containers.get_mut(container)
        {
            // Reported to later exec calls.
            entry.state_error = Some(failure);
        }
    }

    /// Has a worker carry the call out.
    fn start_worker(&mut self, mut waiting: QueuedCall) {
        match self.filters.program(&waiting.call) {
            Ok(program) => waiting.fds.extend(program),
            Err(failure) => return self.reply(waiting.request, Err(failure)),
        }
        // A hook may use every CPU.
        let alone = self.queue.is_empty() && !matches!(waiting.call, Call::Create { hooks: true, .. });
        let Some(QueuedCall { request, call, fds }) = self.assign_to_preforked(waiting, alone) else { return };
        self.pin(alone, None);
        match prefork::fork_worker() {
            Ok(Forked::Child(copy)) => {
                let entry = self.containers.remove(call.container());
                let (bundle, init_log) = entry.map(|entry| (entry.bundle, entry.init_log)).unwrap_or_default();
                let allowed_cpus = if self.pinned { self.affinity.allowed() } else { None };
                let state = self.drop_inherited_state();
                worker::run(
                    call,
                    WorkerInput { state, bundle, fds, log: copy.log, init_log, allowed_cpus },
                    &copy.socket,
                );
                std::process::exit(0)
            }
            Ok(Forked::Parent(copy)) => self.register(copy, request, call),
            Err(error) => {
                let about = worker::describe(&call);
                let failure = Failure::internal(format!("{about}: failed to fork a worker: {error}"));
                self.reply(request, Err(failure));
            }
        }
    }

    /// Assigns the call to the preforked worker; returns the call if there is none or it cannot do it.
    fn assign_to_preforked(&mut self, waiting: QueuedCall, alone: bool) -> Option<QueuedCall> {
        // Other calls need state that only a fresh fork inherits.
        let able = matches!(waiting.call, Call::Create { .. } | Call::Exec { .. });
        let Some(worker) = self.preforked.take_if(|_| able) else { return Some(waiting) };
        self.pin(alone, Some(worker.pid));
        let QueuedCall { request, call, fds } = waiting;
        let bundle = self.containers.get(call.container()).map(|entry| entry.bundle.clone()).unwrap_or_default();
        let job = Job { call, bundle, pinned: self.pinned };
        if worker.assign(&job, &fds).is_err() {
            // The worker has been killed.
            return Some(QueuedCall { request, call: job.call, fds });
        }
        self.register(worker, request, job.call);
        None
    }

    fn register(&mut self, copy: PreforkedWorker, request: Option<u64>, call: Call) {
        let waiting = QueuedCall { request, call, fds: Vec::new() };
        self.queue.insert(Some(copy.pid), waiting, copy.socket, Some(copy.log));
    }

    /// Pins a call that is alone, and this process until the call completes, to one CPU.
    fn pin(&mut self, alone: bool, other: Option<Pid>) {
        if alone && self.affinity.pin(other) {
            self.pinned = true;
        } else {
            self.unpin();
        }
    }

    fn unpin(&mut self) {
        if std::mem::take(&mut self.pinned)
            && let Some(allowed) = self.affinity.allowed()
        {
            // A failure costs only speed.
            let _ = cpu_affinity::move_away(&allowed);
        }
    }

    /// In a worker: drops the inherited state, whose descriptors would stay open in its children, and returns the
    /// state directory.
    fn drop_inherited_state(&mut self) -> PathBuf {
        drop((self.socket.take(), self.signals.take(), self.preforked.take()));
        drop((std::mem::take(&mut self.containers), std::mem::take(&mut self.queue)));
        drop(std::mem::take(&mut self.filters));
        std::mem::take(&mut self.state)
    }

    /// Returns the time until the preforked worker needs an action.
    fn next_prefork_action(&self) -> Option<Duration> {
        if !self.queue.is_empty() {
            return None;
        }
        match self.prefork_policy.next_action(self.preforked.is_some()) {
            PreforkAction::Idle => None,
            PreforkAction::Wait(left) => Some(left),
            PreforkAction::Act => Some(Duration::ZERO),
        }
    }

    /// Preforks a worker, or discards the idle one.
    fn maintain_preforked(&mut self) {
        if !self.queue.is_empty() || self.prefork_policy.next_action(self.preforked.is_some()) != PreforkAction::Act {
            return;
        }
        if self.preforked.take().is_some() {
            // Idle: return free memory to the kernel. A failure costs only memory.
            let _ = firstlight_sys::memory::release_unused();
            return;
        }
        match prefork::fork_worker() {
            Ok(Forked::Child(copy)) => {
                let allowed = self.affinity.allowed();
                let state = self.drop_inherited_state();
                if let Some((Job { call, bundle, pinned }, fds)) = copy.wait_for_job() {
                    let allowed_cpus = allowed.filter(|_| pinned);
                    let input = WorkerInput { state, bundle, fds, log: copy.log, init_log: None, allowed_cpus };
                    worker::run(call, input, &copy.socket);
                }
                std::process::exit(0)
            }
            Ok(Forked::Parent(copy)) => self.preforked = Some(copy),
            // The next call forks its own worker and reports the error.
            Err(_) => self.prefork_policy = PreforkPolicy::default(),
        }
    }

    fn abort_timed_out(&mut self) {
        for running in self.queue.take_timed_out() {
            self.abort(running);
        }
    }

    /// Completes a call with its worker's result.
    fn complete(&mut self, mut running: InFlightCall) {
        self.prefork_policy.record_call();
        let outcome = worker::outcome(&running.answer, "", &worker::describe(&running.call)).map_err(|mut failure| {
            let mut log_text = Vec::new();
            if let Some(log) = &running.log {
                helper_log::read_available(log, &mut log_text);
            }
            let more = helper_log::errors(&String::from_utf8_lossy(&log_text));
            if !more.is_empty() {
                failure.message = format!("{}; {more}", failure.message);
            }
            failure
        });
        let made = outcome.as_ref().ok().and_then(|(done, _)| done.pid);
        let mut ended = None;
        match &running.call {
            Call::Create { container, bundle, cgroup, hooks, .. } => {
                if let Some(pid) = made {
                    let (bundle, cgroup, hooks) = (bundle.clone(), cgroup.clone(), *hooks);
                    self.containers.insert(
                        container.clone(),
                        ContainerEntry { bundle, cgroup, hooks, init_log: running.log.take(), state_error: None },
                    );
                    ended = self.children.claim(pid, running.number, container, "").map(|code| ("", code));
                }
            }
            Call::Exec { container, exec, .. } => {
                if let Some(pid) = made {
                    ended = self.children.claim(pid, running.number, container, exec).map(|code| (exec.as_str(), code));
                }
                if !self.queue.any(container, |call| matches!(call, Call::Exec { .. })) {
                    containers::remove_sockets(&self.state, container);
                }
            }
            Call::Start { container } => {
                if let Some(entry) = self.containers.get_mut(container) {
                    entry.init_log = None;
                }
            }
            Call::Delete { container } => {
                // A failed hook does not keep the container.
                if !self.state.join(container).exists() {
                    self.containers.remove(container);
                }
            }
            Call::Namespaces { .. } | Call::Signal { .. } | Call::Kill { .. } => {}
        }
        let exited = ended.map(|(exec, code)| FromRuntime::Exited {
            container: running.call.container().to_owned(),
            exec: exec.to_owned(),
            code,
        });
        self.reply(running.request, outcome);
        if let Some(exited) = exited {
            self.send(&exited, &[]);
        }
        self.unpin();
    }

    /// Aborts a call that exceeded its timeout, and kills what it has created so far.
    fn abort(&mut self, running: InFlightCall) {
        self.unpin();
        if let Some(pid) = running.pid {
            let _ = kill_process(pid, Signal::KILL);
        }
        if let Call::Create { container, cgroup, .. } = &running.call {
            let _ = containers::kill(container, cgroup);
            containers::discard(&self.state, container);
        }
        let seconds = timeout_of(&running.call).as_secs();
        let about = worker::describe(&running.call);
        let message = format!("{about} timed out after {seconds} s; is a file system or the container stuck?");
        self.reply(running.request, Err(Failure::internal(message)));
    }

    fn report_exits(&mut self) {
        for (name, code) in self.children.reap(self.queue.oldest(), self.queue.next_number()) {
            self.send(&FromRuntime::Exited { container: name.container, exec: name.exec, code }, &[]);
        }
    }

    fn reply(&self, request: Option<u64>, outcome: Outcome) {
        let Some(id) = request else { return };
        let (result, master) = match outcome {
            Ok((done, master)) => (Ok(done), master),
            Err(mut failure) => {
                failure.message = failure.message.chars().take(MAX_MESSAGE / 8).collect();
                (Err(failure), None)
            }
        };
        let fds: Vec<BorrowedFd<'_>> = master.iter().map(AsFd::as_fd).collect();
        self.send(&FromRuntime::Reply { id, result }, &fds);
    }

    fn send(&self, message: &FromRuntime, fds: &[BorrowedFd<'_>]) {
        if let (Some(socket), Ok(packet)) = (&self.socket, serde_json::to_vec(message)) {
            // An error means that the peer has closed the socket, which the next poll reports.
            let _ = send(socket, &packet, fds);
        }
    }

    /// Kills all containers: the server is gone, so they cannot be managed any more.
    fn shut_down(&mut self) {
        self.preforked = None;
        for running in &self.queue.in_flight {
            if let Call::Create { container, cgroup, .. } = &running.call {
                let _ = containers::kill(container, cgroup);
            }
            if let Some(pid) = running.pid {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        for (container, entry) in &self.containers {
            let _ = containers::kill(container, &entry.cgroup);
        }
        for pid in self.children.pids() {
            let _ = kill_process(pid, Signal::KILL);
        }
        // Reaps every child; all of them have been killed.
        while wait(WaitOptions::empty()).is_ok() {}
        containers::remove_all(&self.state);
    }
}
