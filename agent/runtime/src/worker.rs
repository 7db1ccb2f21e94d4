//! The process that carries out one call.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::thread::CpuSet;

use crate::containers::{CallContext, Stdio};
use crate::filter;
use crate::helper_log::HelperLog;
use crate::message::{Call, Done, Failure, FailureKind};
use crate::namespaces;
use crate::socket::{MAX_MESSAGE, receive, send};

/// A worker's input besides the call.
pub(crate) struct WorkerInput {
    pub(crate) state: PathBuf,
    /// The container's bundle.
    pub(crate) bundle: PathBuf,
    /// The process's standard descriptors; for [`Call::Create`] the device filter comes last, if it is cached.
    pub(crate) fds: Vec<OwnedFd>,
    /// Both ends of the helper log pipe.
    pub(crate) log: (OwnedFd, OwnedFd),
    /// The helper log of the container's init process.
    pub(crate) init_log: Option<OwnedFd>,
    /// The CPU affinity of the container's program, if this process is pinned to one CPU.
    pub(crate) allowed_cpus: Option<CpuSet>,
}

/// The result of a call, with a terminal's master.
pub(crate) type Outcome = Result<(Done, Option<OwnedFd>), Failure>;

/// Carries out a call and sends the result. The calling process exits afterwards.
pub(crate) fn run(call: Call, input: WorkerInput, answer: &OwnedFd) {
    // Only for readers of the process table.
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
        // If this fails, the runtime reports what is in the helper log.
        let _ = send(answer, &packet, &fds);
        // The receiver may be pinned to this CPU, and exiting takes a while.
        rustix::thread::sched_yield();
    }
}

fn carry_out(call: Call, input: WorkerInput) -> Outcome {
    let WorkerInput { state, bundle, mut fds, log: (reader, writer), init_log, allowed_cpus } = input;
    let context = CallContext { state, log: HelperLog::install(reader, writer), allowed_cpus };
    let done = |()| (Done::default(), None);
    match call {
        Call::Namespaces { dir, hostname } => namespaces::create(&dir, &hostname, &context.log).map(done),
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
            context.start(&container, &bundle, &HelperLog::new(init_log)).map(done)
        }
        Call::Exec { container, process, terminal, .. } => {
            let made = context.exec(&container, &bundle, &process, stdio(terminal, fds)?)?;
            Ok((Done { pid: Some(made.pid) }, made.master))
        }
        Call::Delete { container } => context.delete(&container, &bundle).map(done),
        Call::Signal { .. } | Call::Kill { .. } => {
            Err(Failure::internal("a worker got a call that the runtime carries out itself; this is a bug"))
        }
    }
}

/// Checks that a container's root exists. Done in the worker, because the file system may block.
fn check_root(root: &Path) -> Result<(), Failure> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat2(CWD, root, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS);
    opened.map(drop).map_err(|error| {
        let root = root.display();
        Failure::internal(format!(
            "failed to open the root {root}: {error}; is the host's share mounted (CreateSandbox) and the image in it?"
        ))
    })
}

/// Reads a worker's result; end of file means that it has died.
pub(crate) fn outcome(answer: &OwnedFd, log: &str, what: &str) -> Outcome {
    let mut buffer = vec![0; MAX_MESSAGE];
    match receive(answer, &mut buffer) {
        Ok((len @ 1.., mut fds)) => match serde_json::from_slice::<Result<Done, Failure>>(&buffer[..len]) {
            Ok(result) => result.map(|done| (done, fds.pop())),
            Err(error) => Err(Failure::internal(format!("{what}: invalid reply of the worker: {error}"))),
        },
        _ => Err(Failure::internal(format!("{what}: the worker exited without a reply {log}"))),
    }
}

fn stdio(terminal: bool, fds: Vec<OwnedFd>) -> Result<Stdio, Failure> {
    if terminal {
        return Ok(None);
    }
    let got = fds.len();
    let fds: [OwnedFd; 3] =
        fds.try_into().map_err(|_| Failure::new(FailureKind::Invalid, format!("expected 3 descriptors, got {got}")))?;
    Ok(Some(fds))
}

/// Describes a call for error messages.
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
