//! The loop: a call, then the children, then the next call.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use firstlight_sys::signals::SignalFd;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{WaitOptions, kill_process, wait};

use crate::children::Children;
use crate::containers::{Containers, Stdio};
use crate::message::{Call, Done, Failure, FailureKind, FromRuntime, Request};
use crate::socket::{MAX_MESSAGE, receive, send};
use crate::words::{LastWords, errors};
use crate::{namespaces, signal};

/// `SIGCHLD` has this number on every architecture of ours.
const SIGCHLD: i32 = 17;

/// How the runtime is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the state of containers is kept.
    pub state: PathBuf,
}

/// The exit status of a process of libcontainer's that could not become its program.
const CANNOT_START: i32 = 255;

/// What of its reason is told, characters.
const LONGEST_DETAIL: usize = 1000;

struct Supervisor {
    socket: OwnedFd,
    containers: Containers,
    children: Children,
}

/// Serves calls until the other end of `socket` is gone, then kills every
/// container and returns. The process must have a single thread.
///
/// # Errors
/// Signals could not be turned into something to wait for.
pub fn run(socket: OwnedFd, options: Options) -> std::io::Result<()> {
    let signals = SignalFd::block(&[SIGCHLD])?;
    let containers = Containers::new(options.state, LastWords::listen());
    let mut supervisor = Supervisor { socket, containers, children: Children::default() };
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        let mut waited = [PollFd::new(&supervisor.socket, PollFlags::IN), PollFd::new(&signals, PollFlags::IN)];
        match poll(&mut waited, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let called = !waited[0].revents().is_empty();
        while signals.next()?.is_some() {}
        // Exits that happened before a call are told before its reply.
        supervisor.report();
        if called {
            match receive(&supervisor.socket, &mut buffer) {
                Ok((0, _)) => break,
                Ok((len, fds)) => supervisor.serve(&buffer[..len], fds),
                Err(rustix::io::Errno::AGAIN) => {}
                Err(error) => {
                    log::error!("runtime socket: {error}");
                    break;
                }
            }
            supervisor.report();
        }
    }
    supervisor.end();
    Ok(())
}

impl Supervisor {
    fn serve(&mut self, packet: &[u8], fds: Vec<OwnedFd>) {
        let (id, outcome) = match serde_json::from_slice::<Request>(packet) {
            Ok(request) => (request.id, self.call(request.call, fds)),
            Err(error) => (0, Err(Failure::new(FailureKind::Invalid, format!("not a request: {error}")))),
        };
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

    fn call(&mut self, call: Call, fds: Vec<OwnedFd>) -> Result<(Done, Option<OwnedFd>), Failure> {
        let nothing = |()| (Done::default(), None);
        // What an earlier call has left unread explains no error of this one.
        self.containers.words().take();
        match call {
            Call::Namespaces { folder, hostname } => {
                namespaces::keep(&folder, &hostname, self.containers.words()).map(nothing)
            }
            Call::Create { container, bundle, terminal, no_pivot } => {
                let made = self.containers.create(&container, &bundle, stdio(terminal, fds)?, no_pivot)?;
                self.children.insert(made.pid, &container, "");
                Ok((Done { pid: Some(made.pid) }, made.master))
            }
            Call::Start { container } => self.containers.start(&container).map(nothing),
            Call::Exec { container, exec, process, terminal } => {
                if self.children.pid(&container, &exec).is_some() {
                    let message = format!("process {exec} of container {container} exists");
                    return Err(Failure::new(FailureKind::Exists, message));
                }
                let made = self.containers.exec(&container, &process, stdio(terminal, fds)?)?;
                self.children.insert(made.pid, &container, &exec);
                Ok((Done { pid: Some(made.pid) }, made.master))
            }
            Call::Signal { container, exec, signal } => {
                signal::send(&self.children, &container, &exec, signal).map(nothing)
            }
            Call::Kill { container } => self.containers.kill(&container).map(nothing),
            Call::Delete { container } => {
                if self.children.any(&container) {
                    let message = format!("processes of container {container} still run: kill them first");
                    return Err(Failure::new(FailureKind::Invalid, message));
                }
                self.containers.delete(&container).map(nothing)
            }
        }
    }

    fn report(&mut self) {
        let ended = self.children.reap();
        if ended.is_empty() {
            return;
        }
        // A first process that cannot become its program says so after its call was answered.
        let mut detail: String = errors(&self.containers.words().take()).chars().take(LONGEST_DETAIL).collect();
        for (name, code) in ended {
            let detail = if code == CANNOT_START { std::mem::take(&mut detail) } else { String::new() };
            self.tell(&FromRuntime::Exited { container: name.container, exec: name.exec, code, detail }, &[]);
        }
    }

    fn tell(&self, message: &FromRuntime, fds: &[BorrowedFd<'_>]) {
        let sent = serde_json::to_vec(message).map(|packet| send(&self.socket, &packet, fds));
        if let Ok(Err(error)) = sent {
            // The peer is gone, and the next poll says so.
            log::error!("runtime socket: {error}");
        }
    }

    /// The server is gone: nobody can reach these containers any more.
    fn end(&mut self) {
        for container in self.containers.names() {
            let _ = self.containers.kill(&container);
        }
        for pid in self.children.pids() {
            let _ = kill_process(pid, rustix::process::Signal::KILL);
        }
        // Blocks for each child, all of which have been killed.
        while wait(WaitOptions::empty()).is_ok() {}
        for container in self.containers.names() {
            let _ = self.containers.delete(&container);
        }
    }
}

fn stdio(terminal: bool, fds: Vec<OwnedFd>) -> Result<Stdio, Failure> {
    if terminal {
        return Ok(None);
    }
    let got = fds.len();
    let fds: [OwnedFd; 3] = fds
        .try_into()
        .map_err(|_| Failure::new(FailureKind::Invalid, format!("{got} descriptors came, 3 are needed")))?;
    Ok(Some(fds))
}
