//! The loop that serves all containers and waits for none.
//!
//! A call that libcontainer has to do is carried out by a copy of this process,
//! which has one thread and so may be copied at any time. The loop goes on: it
//! takes further calls, kills, and reaps.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use firstlight_sys::signals::SignalFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};

use crate::children::Children;
use crate::containers::{self, unknown};
use crate::filter::Filters;
use crate::flights::{Flight, Flights, Waiting, patience};
use crate::message::{Call, Done, Failure, FailureKind, FromRuntime, Request};
use crate::processors::{self, Processors};
use crate::socket::{MAX_MESSAGE, MAX_REQUEST, receive, send};
use crate::spare::{self, Advice, Copied, Job, Season, Spare};
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
    /// Whether hooks run when it starts or ends.
    hooks: bool,
    /// What its first process says until it becomes its program.
    words: Option<OwnedFd>,
    /// Why libcontainer could not be told that it runs.
    unnoted: Option<Failure>,
}

/// Whether a call needed no copy of this process.
enum AtOnce {
    No,
    /// It is under way, and its end will be heard of.
    Under,
    Done(Outcome),
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
    processors: Processors,
    /// Whether this process is held to one processor.
    held: bool,
    spare: Option<Spare>,
    season: Season,
}

/// Serves calls until the other end of `socket` is gone, then kills every
/// container and returns. The process must have a single thread.
///
/// # Errors
/// Signals could not be turned into something to wait for.
pub fn run(socket: OwnedFd, options: Options) -> std::io::Result<()> {
    let signals = SignalFd::block(&[SIGCHLD])?;
    // Hooks run there, and no directory is kept busy.
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
        processors: Processors::ours(),
        held: false,
        spare: None,
        season: Season::default(),
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
        // Last, because it may not be there. It says nothing; its end is heard.
        waited.extend(self.spare.iter().map(|spare| PollFd::new(&spare.socket, PollFlags::IN)));
        let timeout = [self.flights.next_look(), self.next_spare()].into_iter().flatten().min();
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut waited, timeout.as_ref()) {
            Ok(0) => {
                drop(waited);
                self.give_up_late();
                self.tend_spare();
                return Ok(true);
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let called = !waited[0].revents().is_empty();
        let mut landed: Vec<bool> = waited[2..].iter().map(|fd| !fd.revents().is_empty()).collect();
        if self.spare.is_some() && landed.pop() == Some(true) {
            self.spare = None;
        }
        while signals.next()?.is_some() {}
        self.report();
        let mut landed = landed.into_iter();
        let over: Vec<Flight> = self.flights.flying.extract_if(.., |_| landed.next().unwrap_or_default()).collect();
        for flight in over {
            match flight.pid {
                Some(_) => self.land(flight),
                None => self.listen(flight),
            }
        }
        self.give_up_late();
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
        self.season.called();
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
        match self.at_once(id, &call) {
            AtOnce::No => {}
            AtOnce::Under => return None,
            AtOnce::Done(outcome) => return Some(outcome),
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
                if let Some(failure) = self.kept.get(id).and_then(|kept| kept.unnoted.clone()) {
                    return Err(failure);
                }
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

    /// Most containers have no hooks, and then their start and their end are
    /// a few short system calls.
    fn at_once(&mut self, id: u64, call: &Call) -> AtOnce {
        let nothing = |()| (Done::default(), None);
        let container = call.container();
        let Some(kept) = self.kept.get_mut(container).filter(|kept| !kept.hooks) else { return AtOnce::No };
        match call {
            Call::Start { .. } => {
                let Some(words) = kept.words.take() else { return AtOnce::No };
                if let Err(failure) = containers::let_go(&self.state, container) {
                    kept.words = Some(words);
                    return AtOnce::Done(Err(failure));
                }
                let waiting = Waiting { request: Some(id), call: call.clone(), fds: Vec::new() };
                self.flights.begun(None, waiting, words, None);
                AtOnce::Under
            }
            Call::Delete { .. } => match containers::take_away(&self.state, container, &kept.cgroup) {
                Some(result) => {
                    if result.is_ok() {
                        self.kept.remove(container);
                    }
                    AtOnce::Done(result.map(nothing))
                }
                None => AtOnce::No,
            },
            _ => AtOnce::No,
        }
    }

    /// Takes what a container's first process says after it was let go: nothing
    /// but an end if it has become its program.
    fn listen(&mut self, mut flight: Flight) {
        if !words::more(&flight.answer, &mut flight.said) {
            self.flights.flying.push(flight);
            return;
        }
        self.season.called();
        let container = flight.call.container();
        let said = String::from_utf8_lossy(&flight.said);
        let outcome = match words::first_error(&said) {
            "" => Ok((Done::default(), None)),
            said => Err(Failure::internal(format!("cannot start container {container}: {said}"))),
        };
        let runs = outcome.is_ok();
        self.reply(flight.request, outcome);
        if runs
            && let Err(failure) = containers::runs(&self.state, container)
            && let Some(kept) = self.kept.get_mut(container)
        {
            // Those who want a further process are told.
            kept.unnoted = Some(failure);
        }
    }

    /// Has a copy of this process carry the call out.
    fn launch(&mut self, mut waiting: Waiting) {
        match self.filters.program(&waiting.call) {
            Ok(program) => waiting.fds.extend(program),
            Err(failure) => return self.reply(waiting.request, Err(failure)),
        }
        // A hook may have work for every processor.
        let alone = self.flights.none() && !matches!(waiting.call, Call::Create { hooks: true, .. });
        let Some(Waiting { request, call, fds }) = self.launch_spare(waiting, alone) else { return };
        self.hold(alone, None);
        match spare::copy() {
            Ok(Copied::There(copy)) => {
                let kept = self.kept.remove(call.container());
                let (bundle, first) = kept.map(|kept| (kept.bundle, kept.words)).unwrap_or_default();
                let free = if self.held { self.processors.home() } else { None };
                let state = self.shed();
                worker::run(call, Tools { state, bundle, fds, words: copy.words, first, free }, &copy.socket);
                std::process::exit(0)
            }
            Ok(Copied::Here(copy)) => self.begun(copy, request, call),
            Err(error) => {
                let about = worker::about(&call);
                let failure = Failure::internal(format!("{about}: cannot start a helper process: {error}"));
                self.reply(request, Err(failure));
            }
        }
    }

    /// Gives the call to the spare copy. Without one that can do it, the call comes back.
    fn launch_spare(&mut self, waiting: Waiting, alone: bool) -> Option<Waiting> {
        // Others need what only a copy of the present state has.
        let able = matches!(waiting.call, Call::Create { .. } | Call::Exec { .. });
        let Some(spare) = self.spare.take_if(|_| able) else { return Some(waiting) };
        self.hold(alone, Some(spare.pid));
        let Waiting { request, call, fds } = waiting;
        let bundle = self.kept.get(call.container()).map(|kept| kept.bundle.clone()).unwrap_or_default();
        let job = Job { call, bundle, held: self.held };
        if spare.take(&job, &fds).is_err() {
            // It has been killed.
            return Some(Waiting { request, call: job.call, fds });
        }
        self.begun(spare, request, job.call);
        None
    }

    fn begun(&mut self, copy: Spare, request: Option<u64>, call: Call) {
        let waiting = Waiting { request, call, fds: Vec::new() };
        self.flights.begun(Some(copy.pid), waiting, copy.socket, Some(copy.words));
    }

    /// A call that is alone keeps to one processor, and so does this process until it has ended.
    fn hold(&mut self, alone: bool, other: Option<Pid>) {
        if alone && self.processors.hold(other) {
            self.held = true;
        } else {
            self.let_loose();
        }
    }

    fn let_loose(&mut self) {
        if std::mem::take(&mut self.held)
            && let Some(home) = self.processors.home()
        {
            // It was allowed a moment ago.
            let _ = processors::leave(&home);
        }
    }

    /// In a copy: lets go of everything that would stay open in what it becomes
    /// the parent of, and returns the directory for states.
    fn shed(&mut self) -> PathBuf {
        drop((self.socket.take(), self.signals.take(), self.spare.take()));
        drop((std::mem::take(&mut self.kept), std::mem::take(&mut self.flights)));
        drop(std::mem::take(&mut self.filters));
        std::mem::take(&mut self.state)
    }

    /// When something has to be done about the spare copy.
    fn next_spare(&self) -> Option<Duration> {
        if !self.flights.none() {
            return None;
        }
        match self.season.advice(self.spare.is_some()) {
            Advice::Rest => None,
            Advice::Wait(left) => Some(left),
            Advice::Now => Some(Duration::ZERO),
        }
    }

    /// Makes the spare copy, or lets it go.
    fn tend_spare(&mut self) {
        if !self.flights.none() || self.season.advice(self.spare.is_some()) != Advice::Now {
            return;
        }
        if self.spare.take().is_some() {
            // Nobody has called for a while: this process needs little now. Where that cannot be done, nothing is lost.
            let _ = firstlight_sys::memory::release_unused();
            return;
        }
        match spare::copy() {
            Ok(Copied::There(copy)) => {
                let home = self.processors.home();
                let state = self.shed();
                if let Some((Job { call, bundle, held }, fds)) = copy.job() {
                    let free = home.filter(|_| held);
                    let tools = Tools { state, bundle, fds, words: copy.words, first: None, free };
                    worker::run(call, tools, &copy.socket);
                }
                std::process::exit(0)
            }
            Ok(Copied::Here(copy)) => self.spare = Some(copy),
            // A call will try again, and tell.
            Err(_) => self.season = Season::default(),
        }
    }

    fn give_up_late(&mut self) {
        for flight in self.flights.late() {
            self.give_up(flight);
        }
    }

    /// Takes a worker's answer.
    fn land(&mut self, mut flight: Flight) {
        self.season.called();
        let outcome = worker::outcome(&flight.answer, "", &worker::about(&flight.call)).map_err(|mut failure| {
            let mut said = Vec::new();
            if let Some(words) = &flight.words {
                words::more(words, &mut said);
            }
            let more = words::errors(&String::from_utf8_lossy(&said));
            if !more.is_empty() {
                failure.message = format!("{}; {more}", failure.message);
            }
            failure
        });
        let made = outcome.as_ref().ok().and_then(|(done, _)| done.pid);
        let mut ended = None;
        match &flight.call {
            Call::Create { container, bundle, cgroup, hooks, .. } => {
                if let Some(pid) = made {
                    let (bundle, cgroup, hooks) = (bundle.clone(), cgroup.clone(), *hooks);
                    self.kept.insert(
                        container.clone(),
                        Kept { bundle, cgroup, hooks, words: flight.words.take(), unnoted: None },
                    );
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
        self.let_loose();
    }

    /// Ends a call that takes too long, and what it has made so far.
    fn give_up(&mut self, flight: Flight) {
        self.let_loose();
        if let Some(pid) = flight.pid {
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
        self.spare = None;
        for flight in &self.flights.flying {
            if let Call::Create { container, cgroup, .. } = &flight.call {
                let _ = containers::kill(container, cgroup);
            }
            if let Some(pid) = flight.pid {
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
