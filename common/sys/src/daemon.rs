//! Starting a daemon from PID 1 in its own cgroup, with minimal privileges.
//!
//! `posix_spawn` supports neither cgroups nor capabilities, so this uses `clone3`.
//! Until `execve` the child only makes system calls: it takes no lock and
//! allocates nothing.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::{io, io::Read as _, mem, ptr};

use libc::{c_char, c_int, c_long, pid_t};

/// A daemon to start.
#[derive(Debug, Clone, Copy)]
pub struct Daemon<'a> {
    /// Path of its program.
    pub path: &'a CStr,
    /// Its arguments, its own name first.
    pub arguments: &'a [&'a CStr],
    /// Its whole environment, `NAME=value` each.
    pub environment: &'a [&'a CStr],
    /// Its standard output and error. Its standard input is empty.
    pub output: BorrowedFd<'a>,
    /// The directory of its cgroup (v2).
    pub cgroup: BorrowedFd<'a>,
    /// User and group that it runs as, without supplementary groups; PID 1's if `None`.
    pub user: Option<(u32, u32)>,
    /// Its `oom_score_adj`. A failure to write it, as without `CAP_SYS_RESOURCE`, is
    /// ignored.
    pub oom_score: &'a CStr,
}

/// Why a daemon could not be started.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct StartError {
    /// The failed step.
    pub step: &'static str,
    /// Its error.
    pub source: io::Error,
}

/// `CLONE_INTO_CGROUP` of the kernel (5.7).
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// `CAP_SYS_MODULE` of the kernel.
const CAP_SYS_MODULE: c_long = 16;

/// `CLOSE_RANGE_CLOEXEC` of the kernel (5.11).
const CLOSE_RANGE_CLOEXEC: c_long = 4;

/// Soft limit of open files: low, because old daemons close every possible
/// descriptor; a daemon that needs more can raise it to the hard limit.
const FILES: libc::rlim_t = 1024;

/// The child's steps in order; a failed step is reported by its index.
const STEPS: &[&str] = &[
    "cannot create a session",
    "cannot reset its signal mask",
    "cannot open /dev/null for its input",
    "cannot set its standard output",
    "cannot set its other descriptors to close on exec",
    "cannot set its oom_score_adj",
    "cannot limit its open files",
    "cannot change to /",
    "cannot drop CAP_SYS_MODULE",
    "cannot drop supplementary groups",
    "cannot set its group",
    "cannot set its user",
    "cannot set no_new_privs",
    "cannot execute its program",
];

struct Child {
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    output: RawFd,
    user: Option<(u32, u32)>,
    oom_score: *const c_char,
    oom_length: usize,
}

fn check(code: c_long) -> Result<c_long, ()> {
    if code < 0 { Err(()) } else { Ok(code) }
}

impl Child {
    /// Executes one step of [`STEPS`].
    ///
    /// # Safety
    /// Only in a child that has not returned to its caller: it changes
    /// descriptors under their owners. The pointers must be those of
    /// NUL-terminated strings and lists.
    unsafe fn step(&self, step: usize) -> Result<c_long, ()> {
        // SAFETY: every call takes numbers, or pointers to constants, to locals
        // that outlive it, or to what the caller guarantees. All are system
        // calls or documented as safe in a signal handler, so no lock is taken
        // that another thread of the original might have held.
        unsafe {
            match step {
                0 => check(libc::setsid().into()),
                1 => {
                    let mut none: libc::sigset_t = mem::zeroed();
                    libc::sigemptyset(&raw mut none);
                    libc::signal(libc::SIGPIPE, libc::SIG_DFL);
                    check(libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()).into())
                }
                2 => {
                    let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
                    check(null.into()).and_then(|_| check(libc::dup2(null, 0).into()))
                }
                3 => check(libc::dup2(self.output, 1).into()).and_then(|_| check(libc::dup2(self.output, 2).into())),
                4 => check(libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, CLOSE_RANGE_CLOEXEC)),
                5 => {
                    let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
                    libc::write(file, self.oom_score.cast(), self.oom_length);
                    Ok(0)
                }
                6 => {
                    let mut files: libc::rlimit = mem::zeroed();
                    check(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut files).into())?;
                    files.rlim_cur = if files.rlim_max < FILES { files.rlim_max } else { FILES };
                    check(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files).into())
                }
                7 => {
                    libc::umask(0o022);
                    check(libc::chdir(c"/".as_ptr()).into())
                }
                // Root's program gets the capabilities of the bounding set.
                8 => check(libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_MODULE, 0, 0, 0).into()),
                // The C library's functions would signal the other threads, which the child does not have.
                9 => self.user.map_or(Ok(0), |_| check(libc::syscall(libc::SYS_setgroups, 0, ptr::null::<u32>()))),
                10 => {
                    self.user.map_or(Ok(0), |(_, group)| check(libc::syscall(libc::SYS_setresgid, group, group, group)))
                }
                11 => self.user.map_or(Ok(0), |(user, _)| check(libc::syscall(libc::SYS_setresuid, user, user, user))),
                12 => check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into()),
                _ => check(libc::execve(self.path, self.arguments, self.environment).into()),
            }
        }
    }

    /// Becomes the daemon, or writes the failed step and its errno to `error_pipe`.
    ///
    /// # Safety
    /// As [`Child::step`].
    unsafe fn become_daemon(&self, error_pipe: RawFd) -> ! {
        for step in 0..STEPS.len() {
            // SAFETY: the caller guarantees it.
            if unsafe { self.step(step) }.is_err() {
                let error = io::Error::last_os_error().raw_os_error().unwrap_or_default();
                let text = [c_int::try_from(step).unwrap_or_default(), error];
                // SAFETY: the buffer is a live local of the length given; `_exit` runs no destructors.
                unsafe {
                    libc::write(error_pipe, text.as_ptr().cast(), mem::size_of_val(&text));
                    libc::_exit(127);
                }
            }
        }
        // SAFETY: as above. Not reached: the last step does not return when it succeeds.
        unsafe { libc::_exit(127) }
    }
}

fn pointers(texts: &[&CStr]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

/// Starts a daemon in its own session and cgroup: no signal blocked, only the
/// first three descriptors, working directory `/`, no `CAP_SYS_MODULE`,
/// `no_new_privs`. The caller must wait for the process.
///
/// # Errors
/// The step that failed; then no process exists.
pub fn start(daemon: &Daemon<'_>) -> Result<pid_t, StartError> {
    let failed = |step| move |source: io::Error| StartError { step, source };
    let (mut errors, child_errors) = io::pipe().map_err(failed("cannot create a pipe"))?;
    let (arguments, environment) = (pointers(daemon.arguments), pointers(daemon.environment));
    let child = Child {
        path: daemon.path.as_ptr(),
        arguments: arguments.as_ptr(),
        environment: environment.as_ptr(),
        output: daemon.output.as_raw_fd(),
        user: daemon.user,
        oom_score: daemon.oom_score.as_ptr(),
        oom_length: daemon.oom_score.count_bytes(),
    };
    let group = u64::try_from(daemon.cgroup.as_raw_fd()).unwrap_or_default();
    // SAFETY: plain data for which all zero is a value.
    let mut how: libc::clone_args = unsafe { mem::zeroed() };
    // With VFORK the caller continues when the child has executed its program or exited.
    how.flags = CLONE_INTO_CGROUP | u64::try_from(libc::CLONE_VFORK).unwrap_or_default();
    how.exit_signal = u64::try_from(libc::SIGCHLD).unwrap_or_default();
    how.cgroup = group;
    // SAFETY: without CLONE_VM this is a fork: the child has its own memory,
    // the same stack, and never returns from here. The structure has the size given.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const how, mem::size_of_val(&how)) };
    if pid == 0 {
        // SAFETY: this is the child, and all pointers were made from live strings above.
        unsafe { child.become_daemon(child_errors.as_fd().as_raw_fd()) }
    }
    let pid = pid_t::try_from(pid).unwrap_or(-1);
    if pid < 0 {
        return Err(failed("cannot create a process in its cgroup")(io::Error::last_os_error()));
    }
    drop(child_errors);
    let mut text = [0; 8];
    if errors.read_exact(&mut text).is_err() {
        // End of file: its program runs.
        return Ok(pid);
    }
    let word = |at: usize| text.get(at..at + 4).and_then(|part| part.try_into().ok()).map_or(0, c_int::from_ne_bytes);
    let step = usize::try_from(word(0)).ok().and_then(|step| STEPS.get(step)).copied().unwrap_or("cannot start it");
    // SAFETY: waits for a child of this process, which has exited or is about to; its status is not needed.
    unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
    Err(failed(step)(io::Error::from_raw_os_error(word(4))))
}
