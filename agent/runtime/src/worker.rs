//! The process that carries out one call.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::thread::CpuSet;

use crate::containers::{Stdio, CallContext};
use crate::filter;
use crate::message::{Call, Done, Failure, FailureKind};
use crate::namespaces;
use crate::socket::{MAX_MESSAGE, receive, send};
use crate::helper_log::HelperLog;

/// What a worker needs besides the call.
pub(crate) struct WorkerInput {
    pub(crate) state: PathBuf,
    /// The container's bundle.
    pub(crate) bundle: PathBuf,
    /// The process's standard descriptors; for a container that is to be made its device filter comes last,
    /// if it is kept.
    pub(crate) fds: Vec<OwnedFd>,
    /// Both ends of the pipe for last words.
    pub(crate) log: (OwnedFd, OwnedFd),
    /// What the container's first process says.
    pub(crate) init_log: Option<OwnedFd>,
    /// Where the container's program may run, if this process is held to one processor.
    pub(crate) allowed_cpus: Option<CpuSet>,
}

/// How a call ended.
pub(crate) type Outcome = Result<(Done, Option<OwnedFd>), Failure>;

/// Carries out a call and tells how it went. For a process that ends then.
pub(crate) fn run(call: Call, input: WorkerInput, answer: &OwnedFd) {
    // Only for people who look at the process table.
    let _ = rustix::thread::set_name(c"fl-call");
    let _ = firstlight_sys::fork::unblock_signals();
    let (result, master) = match carry_out(call, input) {
        Ok((done, master)) => (Ok(done), master),
        Err(mut failure) => {
            failure.message = failure.message.chars().take(MAX_MESSAGE / 8).collect();
            (Err(failure), None)
        }
    };
    let fds: Vec<BorrowedFd<'_>> = master.iter().map(AsFd::as_fd).collect();
    if let Ok(packet) = serde_json::to_vec::<Result<Done, Failure>>(&result) {
        // Without an answer the runtime tells what is left of the last words.
        let _ = send(answer, &packet, &fds);
        // Who waits for it may be held to this processor; ending takes a while.
        rustix::thread::sched_yield();
    }
}

fn carry_out(call: Call, input: WorkerInput) -> Outcome {
    let WorkerInput { state, bundle, mut fds, log: (reader, writer), init_log, allowed_cpus } = input;
    let context = CallContext { state, log: HelperLog::install(reader, writer), allowed_cpus };
    let nothing = |()| (Done::default(), None);
    match call {
        Call::Namespaces { dir, hostname } => namespaces::create(&dir, &hostname, &context.log).map(nothing),
        Call::Create { container, bundle, cgroup, devices, root, terminal, no_pivot, hooks, .. } => {
            let program = if filter::is_cached(&devices) { fds.pop() } else { None };
            let stdio = stdio(terminal, fds)?;
            check_root(&root)?;
            let group = filter::make_filtered_cgroup(&container, &cgroup, &devices, program)?;
            let made = context.create(&container, &bundle, stdio, no_pivot, hooks).inspect_err(|_| group.discard())?;
            Ok((Done { pid: Some(made.pid) }, made.master))
        }
        Call::Start { container } => {
            let init_log = init_log.ok_or_else(|| {
                Failure::new(FailureKind::Invalid, format!("container {container} has been started already"))
            })?;
            context.start(&container, &bundle, &HelperLog::new(init_log)).map(nothing)
        }
        Call::Exec { container, process, terminal, .. } => {
            let made = context.exec(&container, &bundle, &process, stdio(terminal, fds)?)?;
            Ok((Done { pid: Some(made.pid) }, made.master))
        }
        Call::Delete { container } => context.delete(&container, &bundle).map(nothing),
        Call::Signal { .. } | Call::Kill { .. } => Err(Failure::internal("a call without work; this is a bug")),
    }
}

/// Whether a container's root is there. Looking may take as long as the file
/// system likes, which is why it is done here.
fn check_root(root: &Path) -> Result<(), Failure> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat2(CWD, root, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS);
    opened.map(drop).map_err(|error| {
        let root = root.display();
        Failure::internal(format!(
            "cannot open the root {root}: {error}; is the host's share mounted (CreateSandbox) and the image in it?"
        ))
    })
}

/// Reads a worker's answer; without one it has died.
pub(crate) fn outcome(answer: &OwnedFd, log: &str, what: &str) -> Outcome {
    let mut buffer = vec![0; MAX_MESSAGE];
    match receive(answer, &mut buffer) {
        Ok((len @ 1.., mut fds)) => match serde_json::from_slice::<Result<Done, Failure>>(&buffer[..len]) {
            Ok(result) => result.map(|done| (done, fds.pop())),
            Err(error) => Err(Failure::internal(format!("{what}: not an answer: {error}"))),
        },
        _ => Err(Failure::internal(format!("{what}: the helper process ended without an answer {log}"))),
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

/// What a call is about, for errors.
pub(crate) fn describe(call: &Call) -> String {
    match call {
        Call::Namespaces { dir, .. } => format!("namespaces in {}", Path::display(dir)),
        Call::Create { container, .. } => format!("creating container {container}"),
        Call::Start { container } => format!("starting container {container}"),
        Call::Exec { container, exec, .. } => format!("running process {exec} in container {container}"),
        Call::Signal { container, .. } | Call::Kill { container } => format!("container {container}"),
        Call::Delete { container } => format!("deleting container {container}"),
    }
}
