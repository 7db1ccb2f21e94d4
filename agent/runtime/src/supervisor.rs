//! The loop that serves all containers and waits for none.
//!
//! A call that libcontainer has to do is carried out by a copy of this process,
//! which has one thread and so may be copied at any time. The loop goes on: it
//! takes further calls, kills, and reaps.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use firstlight_sys::fork::{Side, fork};
use firstlight_sys::signals::SignalFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use crate::children::Children;
use crate::containers::{self, unknown};
use crate::filter::Filters;
use crate::flights::{Flight, Flights, Waiting, patience};
use crate::message::{Call, Done, Failure, FailureKind, FromRuntime, Request};
use crate::socket::{MAX_MESSAGE, MAX_REQUEST, receive, send};
use crate::worker::{self, Outcome, Tools};
use crate::{signal, words};

/// `SIGCHLD` has this number on every architecture of ours.
const SIGCHLD: i32 = 17;

/// How the runtime is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the state of containers is kept.
    pub state: PathBuf,
}

/// What is remembered of a container.
#[derive(Debug)]
struct Kept {
    bundle: PathBuf,
    cgroup: PathBuf,
    /// What its first process says until it becomes its program.
    words: Option<OwnedFd>,
}

struct Supervisor {
    /// The server; a copy of this process has neither.
    socket: Option<OwnedFd>,
    signals: Option<SignalFd>,
    state: PathBuf,
    kept: BTreeMap<String, Kept>,
    children: Children,
    flights: Flights,
    filters: Filters,
}

/// Serves calls until the other end of `socket` is gone, then kills every
/// container and returns. The process must have a single thread.
///
/// # Errors
/// Signals could not be turned into something to wait for.
pub fn run(socket: OwnedFd, options: Options) -> std::io::Result<()> {
    let signals = SignalFd::block(&[SIGCHLD])?;
    // Hooks run there, and no folder is kept busy.
    std::env::set_current_dir("/")?;
    containers::sweep(&options.state);
    let mut supervisor = Supervisor {
        socket: Some(socket),
        signals: Some(signals),
        state: options.state,
        kept: BTreeMap::new(),
        children: Children::default(),
        flights: Flights::default(),
        filters: Filters::default(),
    };
    let mut buffer = vec![0; MAX_REQUEST];
    while supervisor.turn(&mut buffer)? {}
    supervisor.end();
    Ok(())
}

impl Supervisor {
    /// Waits for something and does what has to be done; `false` at the end.
    fn turn(&mut self, buffer: &mut [u8]) -> std::io::Result<bool> {
        while let Some(waiting) = self.flights.next() {
            self.launch(waiting);
        }
        let (Some(socket), Some(signals)) = (&self.socket, &self.signals) else { return Ok(false) };
        let mut waited = vec![PollFd::new(socket, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        waited.extend(self.flights.flying.iter().map(|flight| PollFd::new(&flight.answer, PollFlags::IN)));
        let timeout = self.flights.next_look().and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut waited, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let called = !waited[0].revents().is_empty();
        let landed: Vec<bool> = waited[2..].iter().map(|fd| !fd.revents().is_empty()).collect();
        while signals.next()?.is_some() {}
        self.report();
        let mut landed = landed.into_iter();
        let over: Vec<Flight> = self.flights.flying.extract_if(.., |_| landed.next().unwrap_or_default()).collect();
        for flight in over {
            self.land(flight);
        }
        for flight in self.flights.late() {
            self.give_up(flight);
        }
        if called {
            let received = self.socket.as_ref().map(|socket| receive(socket, buffer));
            match received {
                Some(Ok((len @ 1.., fds))) => self.serve(&buffer[..len], fds),
                Some(Err(rustix::io::Errno::AGAIN)) => {}
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    fn serve(&mut self, packet: &[u8], fds: Vec<OwnedFd>) {
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

    /// Does what can be done at once, and puts the rest into the line.
    fn begin(&mut self, id: u64, call: Call, fds: Vec<OwnedFd>) -> Option<Outcome> {
        let nothing = |()| (Done::default(), None);
        match &call {
            Call::Signal { container, exec, signal } => {
                return Some(signal::send(&self.children, container, exec, *signal).map(nothing));
            }
            Call::Kill { container } => {
                let kept = self.kept.get(container).ok_or_else(|| unknown(container));
                return Some(kept.and_then(|kept| containers::kill(container, &kept.cgroup)).map(nothing));
            }
            _ => {}
        }
        if let Err(failure) = self.check(&call) {
            return Some(Err(failure));
        }
        let refused = self.flights.queue(Waiting { request: Some(id), call, fds }).err()?;
        let message = format!("{}: thousands of calls wait already", worker::about(&refused.call));
        Some(Err(Failure::internal(message)))
    }

    /// Whether a call makes sense now.
    fn check(&self, call: &Call) -> Result<(), Failure> {
        let id = call.container();
        match call {
            Call::Create { .. } => {
                let made = |call: &Call| matches!(call, Call::Create { .. });
                if self.kept.contains_key(id) || self.flights.any(id, made) {
                    return Err(Failure::new(FailureKind::Exists, format!("container {id} exists")));
                }
            }
            Call::Exec { exec, .. } => {
                let same = |call: &Call| matches!(call, Call::Exec { exec: other, .. } if other == exec);
                if self.children.pid(id, exec).is_some() || self.flights.any(id, same) {
                    let message = format!("process {exec} of container {id} exists");
                    return Err(Failure::new(FailureKind::Exists, message));
                }
            }
            Call::Delete { .. } if self.children.any(id) || self.flights.any(id, |_| true) => {
                let message = format!("processes of container {id} still run: kill them first");
                return Err(Failure::new(FailureKind::Invalid, message));
            }
            _ => {}
        }
        let of_a_container = !matches!(call, Call::Create { .. } | Call::Namespaces { .. });
        if of_a_container && !self.kept.contains_key(id) {
            return Err(unknown(id));
        }
        Ok(())
    }

    /// Copies this process; the copy carries the call out.
    fn launch(&mut self, waiting: Waiting) {
        let Waiting { request, call, fds } = waiting;
        let failed = |error: &dyn std::fmt::Display| {
            Failure::internal(format!("{}: cannot start a helper process: {error}", worker::about(&call)))
        };
        let program = match self.filters.program(&call) {
            Ok(program) => program,
            Err(failure) => return self.reply(request, Err(failure)),
        };
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (answer, theirs) = match pair {
            Ok(pair) => pair,
            Err(error) => return self.reply(request, Err(failed(&error))),
        };
        let words = match words::pipe() {
            Ok(words) => words,
            Err(error) => return self.reply(request, Err(failed(&error))),
        };
        match fork() {
            Ok(Side::Child) => {
                let kept = self.kept.remove(call.container());
                let (bundle, first) = kept.map(|kept| (kept.bundle, kept.words)).unwrap_or_default();
                let state = std::mem::take(&mut self.state);
                // What is open here would stay open in what this becomes the parent of.
                drop((answer, self.socket.take(), self.signals.take()));
                drop((std::mem::take(&mut self.kept), std::mem::take(&mut self.flights)));
                drop(std::mem::take(&mut self.filters));
                worker::run(call, Tools { state, bundle, fds, words, first, program }, &theirs);
                std::process::exit(0)
            }
            Ok(Side::Parent(pid)) => {
                let waiting = Waiting { request, call, fds: Vec::new() };
                self.flights.begun(pid, waiting, answer, Some(words.0));
            }
            Err(error) => {
                let failure = failed(&error);
                self.reply(request, Err(failure));
            }
        }
    }

    /// Takes a worker's answer.
    fn land(&mut self, mut flight: Flight) {
        let said = flight.words.as_ref().and_then(|words| words.try_clone().ok()).map(words::LastWords::of);
        let outcome = worker::outcome(&flight.answer, "", &worker::about(&flight.call)).map_err(|mut failure| {
            let more = said.map(|words| words::errors(&words.take())).unwrap_or_default();
            if !more.is_empty() {
                failure.message = format!("{}; {more}", failure.message);
            }
            failure
        });
        let made = outcome.as_ref().ok().and_then(|(done, _)| done.pid);
        let mut ended = None;
        match &flight.call {
            Call::Create { container, bundle, cgroup, .. } => {
                if let Some(pid) = made {
                    let (bundle, cgroup) = (bundle.clone(), cgroup.clone());
                    self.kept.insert(container.clone(), Kept { bundle, cgroup, words: flight.words.take() });
                    ended = self.children.claim(pid, flight.number, container, "").map(|code| ("", code));
                }
            }
            Call::Exec { container, exec, .. } => {
                if let Some(pid) = made {
                    ended = self.children.claim(pid, flight.number, container, exec).map(|code| (exec.as_str(), code));
                }
                if !self.flights.any(container, |call| matches!(call, Call::Exec { .. })) {
                    containers::remove_sockets(&self.state, container);
                }
            }
            Call::Start { container } => {
                if let Some(kept) = self.kept.get_mut(container) {
                    kept.words = None;
                }
            }
            Call::Delete { container } => {
                // A hook that failed does not keep it.
                if !self.state.join(container).exists() {
                    self.kept.remove(container);
                }
            }
            Call::Namespaces { .. } | Call::Signal { .. } | Call::Kill { .. } => {}
        }
        let exited = ended.map(|(exec, code)| FromRuntime::Exited {
            container: flight.call.container().to_owned(),
            exec: exec.to_owned(),
            code,
        });
        self.reply(flight.request, outcome);
        if let Some(exited) = exited {
            self.tell(&exited, &[]);
        }
    }

    /// Ends a call that takes too long, and what it has made so far.
    fn give_up(&mut self, flight: Flight) {
        if let Some(pid) = Pid::from_raw(flight.pid) {
            let _ = kill_process(pid, Signal::KILL);
        }
        if let Call::Create { container, cgroup, .. } = &flight.call {
            let _ = containers::kill(container, cgroup);
            containers::discard(&self.state, container);
        }
        let seconds = patience(&flight.call).as_secs();
        let about = worker::about(&flight.call);
        let message = format!("{about} has not ended after {seconds} s; is a file system or the container stuck?");
        self.reply(flight.request, Err(Failure::internal(message)));
    }

    fn report(&mut self) {
        for (name, code) in self.children.reap(self.flights.oldest(), self.flights.next_number()) {
            self.tell(&FromRuntime::Exited { container: name.container, exec: name.exec, code }, &[]);
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
        self.tell(&FromRuntime::Reply { id, result }, &fds);
    }

    fn tell(&self, message: &FromRuntime, fds: &[BorrowedFd<'_>]) {
        if let (Some(socket), Ok(packet)) = (&self.socket, serde_json::to_vec(message)) {
            // An error means that the peer is gone, and the next poll says so.
            let _ = send(socket, &packet, fds);
        }
    }

    /// The server is gone: nobody can reach these containers any more.
    fn end(&mut self) {
        for flight in &self.flights.flying {
            if let Call::Create { container, cgroup, .. } = &flight.call {
                let _ = containers::kill(container, cgroup);
            }
            if let Some(pid) = Pid::from_raw(flight.pid) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        for (container, kept) in &self.kept {
            let _ = containers::kill(container, &kept.cgroup);
        }
        for pid in self.children.pids() {
            let _ = kill_process(pid, Signal::KILL);
        }
        // Blocks for each child, all of which have been killed.
        while wait(WaitOptions::empty()).is_ok() {}
        containers::sweep(&self.state);
    }
}
