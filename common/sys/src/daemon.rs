//! Starting a daemon from PID 1: in a resource group of its own, and with no
//! more than it needs.
//!
//! `posix_spawn` knows neither resource groups nor capabilities, so this is a
//! fork of our own. The copy makes system calls and nothing else until it is
//! another program: it takes no lock and allocates nothing.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::{io, io::Read as _, mem, ptr};

use libc::{c_char, c_int, c_long, pid_t};

/// A daemon to start.
#[derive(Debug, Clone, Copy)]
pub struct Daemon<'a> {
    /// Its file.
    pub path: &'a CStr,
    /// Its arguments, its own name first.
    pub arguments: &'a [&'a CStr],
    /// Its environment, `NAME=value` each, and nothing else.
    pub environment: &'a [&'a CStr],
    /// Its standard output and error. Its standard input is empty.
    pub output: BorrowedFd<'a>,
    /// The directory of its resource group (cgroup v2).
    pub group: BorrowedFd<'a>,
    /// User and group that it runs as, without further groups; PID 1's own if none.
    pub user: Option<(u32, u32)>,
    /// What is written to its `oom_score_adj`. One that cannot be written, as without
    /// `CAP_SYS_RESOURCE`, is no reason to have no daemon.
    pub oom_score: &'a CStr,
}

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct NotStarted {
    /// What went wrong.
    pub step: &'static str,
    /// How.
    pub source: io::Error,
}

/// `CLONE_INTO_CGROUP` of the kernel (5.7).
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// `CAP_SYS_MODULE` of the kernel.
const CAP_SYS_MODULE: c_long = 16;

/// `CLOSE_RANGE_CLOEXEC` of the kernel (5.11).
const CLOSE_RANGE_CLOEXEC: c_long = 4;

/// Open files: few at first, because old daemons close each number that they may
/// have; a daemon that needs more may take as many as we have.
const FILES: libc::rlim_t = 1024;

/// What the copy does, in this order; a failed step is told by its place here.
const STEPS: &[&str] = &[
    "cannot begin a session",
    "cannot give it its signals back",
    "cannot open /dev/null for its input",
    "cannot hand it its output",
    "cannot keep our descriptors from it",
    "cannot set its oom_score_adj",
    "cannot limit its open files",
    "cannot enter /",
    "cannot take CAP_SYS_MODULE from it",
    "cannot give up the groups of PID 1",
    "cannot become its group",
    "cannot become its user",
    "cannot forbid it new privileges",
    "cannot run its program",
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

fn done(code: c_long) -> Result<c_long, ()> {
    if code < 0 { Err(()) } else { Ok(code) }
}

impl Child {
    /// One step of [`STEPS`].
    ///
    /// # Safety
    /// Only in a copy of the process that has not returned to anybody: it
    /// changes descriptors under whoever holds them. The pointers have to be
    /// those of strings and lists that end with zero.
    unsafe fn step(&self, step: usize) -> Result<c_long, ()> {
        // SAFETY: every call takes numbers, or pointers to constants, to locals
        // that outlive it, or to what the caller vouches for. All are system
        // calls or documented as safe in a signal handler, so no lock is taken
        // that another thread of the original might have held.
        unsafe {
            match step {
                0 => done(libc::setsid().into()),
                1 => {
                    let mut none: libc::sigset_t = mem::zeroed();
                    libc::sigemptyset(&raw mut none);
                    libc::signal(libc::SIGPIPE, libc::SIG_DFL);
                    done(libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()).into())
                }
                2 => {
                    let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
                    done(null.into()).and_then(|_| done(libc::dup2(null, 0).into()))
                }
                3 => done(libc::dup2(self.output, 1).into()).and_then(|_| done(libc::dup2(self.output, 2).into())),
                4 => done(libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, CLOSE_RANGE_CLOEXEC)),
                5 => {
                    let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
                    libc::write(file, self.oom_score.cast(), self.oom_length);
                    Ok(0)
                }
                6 => {
                    let mut files: libc::rlimit = mem::zeroed();
                    done(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut files).into())?;
                    files.rlim_cur = if files.rlim_max < FILES { files.rlim_max } else { FILES };
                    done(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files).into())
                }
                7 => {
                    libc::umask(0o022);
                    done(libc::chdir(c"/".as_ptr()).into())
                }
                // Root's program gets what the bounding set leaves it.
                8 => done(libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_MODULE, 0, 0, 0).into()),
                // The C library's functions would ask its other threads to follow, and the copy has none.
                9 => self.user.map_or(Ok(0), |_| done(libc::syscall(libc::SYS_setgroups, 0, ptr::null::<u32>()))),
                10 => {
                    self.user.map_or(Ok(0), |(_, group)| done(libc::syscall(libc::SYS_setresgid, group, group, group)))
                }
                11 => self.user.map_or(Ok(0), |(user, _)| done(libc::syscall(libc::SYS_setresuid, user, user, user))),
                12 => done(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into()),
                _ => done(libc::execve(self.path, self.arguments, self.environment).into()),
            }
        }
    }

    /// Becomes the daemon, or tells `complaints` which step failed, and how.
    ///
    /// # Safety
    /// As [`Child::step`].
    unsafe fn become_daemon(&self, complaints: RawFd) -> ! {
        for step in 0..STEPS.len() {
            // SAFETY: the caller vouches for it.
            if unsafe { self.step(step) }.is_err() {
                let error = io::Error::last_os_error().raw_os_error().unwrap_or_default();
                let text = [c_int::try_from(step).unwrap_or_default(), error];
                // SAFETY: the buffer is a live local of the length given; `_exit` runs nothing of ours.
                unsafe {
                    libc::write(complaints, text.as_ptr().cast(), mem::size_of_val(&text));
                    libc::_exit(127);
                }
            }
        }
        // SAFETY: as above. Not reached: the last step does not come back when it succeeds.
        unsafe { libc::_exit(127) }
    }
}

fn pointers(texts: &[&CStr]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

/// Starts a daemon in a session and a resource group of its own: no signal
/// blocked, no descriptor but the first three, working directory `/`, no
/// `CAP_SYS_MODULE` and no way to new privileges. Whoever calls has to wait for it.
///
/// # Errors
/// What could not be done; then there is no process.
pub fn start(daemon: &Daemon<'_>) -> Result<pid_t, NotStarted> {
    let failed = |step| move |source: io::Error| NotStarted { step, source };
    let (mut complaints, theirs) = io::pipe().map_err(failed("cannot make a pipe"))?;
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
    let group = u64::try_from(daemon.group.as_raw_fd()).unwrap_or_default();
    // SAFETY: plain data for which all zero is a value.
    let mut how: libc::clone_args = unsafe { mem::zeroed() };
    // With VFORK the caller goes on when the copy is another program or has ended.
    how.flags = CLONE_INTO_CGROUP | u64::try_from(libc::CLONE_VFORK).unwrap_or_default();
    how.exit_signal = u64::try_from(libc::SIGCHLD).unwrap_or_default();
    how.cgroup = group;
    // SAFETY: without CLONE_VM this is a fork: the copy has memory of its own,
    // the same stack, and never returns from here. The structure has the size given.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const how, mem::size_of_val(&how)) };
    if pid == 0 {
        // SAFETY: this is the copy, and all pointers were made from live strings above.
        unsafe { child.become_daemon(theirs.as_fd().as_raw_fd()) }
    }
    let pid = pid_t::try_from(pid).unwrap_or(-1);
    if pid < 0 {
        return Err(failed("cannot make a process in its resource group")(io::Error::last_os_error()));
    }
    drop(theirs);
    let mut text = [0; 8];
    if complaints.read_exact(&mut text).is_err() {
        // The end of the pipe: its program runs.
        return Ok(pid);
    }
    let word = |at: usize| text.get(at..at + 4).and_then(|part| part.try_into().ok()).map_or(0, c_int::from_ne_bytes);
    let step = usize::try_from(word(0)).ok().and_then(|step| STEPS.get(step)).copied().unwrap_or("cannot start it");
    // SAFETY: waits for a child of ours, which has ended or is about to; its status is not wanted.
    unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
    Err(failed(step)(io::Error::from_raw_os_error(word(4))))
}
