//! Forking, signal state of children, namespaces, and `kill`.

use std::{fs, io, ptr};

/// The side of a [`fork`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The child.
    Child,
    /// The parent, with the child's process id.
    Parent(i32),
}

/// Forks this process.
///
/// # Errors
/// The process has more than one thread (a lock held by another thread would
/// stay locked in the child forever), its threads cannot be counted because
/// `/proc` is not mounted, or the process limit is reached.
pub fn fork() -> io::Result<Side> {
    let threads = fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!(
            "failed to fork: this process has {threads} threads; fork is only safe with one"
        )));
    }
    // SAFETY: with a single thread no other thread can hold a lock or be in the
    // middle of a change, so the child may do whatever the parent may do.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Side::Child),
        pid => Ok(Side::Parent(pid)),
    }
}

/// Resets the calling thread to the signal state that a program expects at its
/// start: nothing blocked, and the default action for `SIGPIPE`, which the
/// Rust runtime ignores and which would stay ignored across an `execve`.
///
/// # Errors
/// Never for the arguments used here; the calls are fallible by type.
pub fn default_signals() -> io::Result<()> {
    // SAFETY: SIG_DFL installs no handler, so no code can run in signal context.
    if unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    unblock_signals()
}

/// Unblocks all signals in the calling thread.
///
/// # Errors
/// Never for the arguments used here; the call is fallible by type.
pub fn unblock_signals() -> io::Result<()> {
    // SAFETY: `sigset_t` is plain data; sigemptyset initialises it before it is
    // read, and a null third argument means that the old mask is not returned.
    let rc = unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut())
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(rc)) }
}

/// Moves the calling process into new IPC and UTS namespaces.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`; `ENOSPC` above the kernel's limit.
pub fn unshare_ipc_and_uts() -> io::Result<()> {
    // SAFETY: neither flag takes anything away that safe code relies on, as
    // unsharing the descriptor table would.
    if unsafe { libc::unshare(libc::CLONE_NEWIPC | libc::CLONE_NEWUTS) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Moves the calling process into a new mount namespace. Mounts still propagate to
/// the previous namespace until their propagation is changed.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`; `ENOSPC` above the kernel's limit.
pub fn unshare_mounts() -> io::Result<()> {
    // SAFETY: the flag takes nothing away that safe code relies on; of what a
    // thread shares only its working directory and root become its own.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends any signal, real-time signals included, to one process.
///
/// # Errors
/// `EINVAL` for an invalid signal and for a process id below 1, which would
/// address several processes; `ESRCH` if the process does not exist.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    if pid < 1 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: takes two numbers; nothing in this process depends on what the target does.
    if unsafe { libc::kill(pid, signal) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_with_several_threads_does_not_fork() {
        // The test harness runs each test in its own thread.
        let error = fork().unwrap_err().to_string();
        assert!(error.contains("threads"), "{error}");
    }

    #[test]
    fn kill_reaches_one_process_only() {
        assert_eq!(kill(-1, 0).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(kill(0, 0).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(kill(i32::MAX, 0).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        let me = i32::try_from(std::process::id()).unwrap();
        kill(me, 0).unwrap();
        assert_eq!(kill(me, 4711).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn default_signals_unblocks_and_resets_sigpipe() {
        std::thread::spawn(|| {
            default_signals().unwrap();
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            let field = |name: &str| {
                let line = status.lines().find(|line| line.starts_with(name)).unwrap();
                u64::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap()
            };
            assert_eq!(field("SigBlk:"), 0);
            assert_eq!(field("SigIgn:") & (1 << (libc::SIGPIPE - 1)), 0);
        })
        .join()
        .unwrap();
    }
}
