//! Starting a program from PID 1.
//!
//! The standard library's `Command` passes on the caller's signal mask; clearing it
//! would need code between fork and exec. `posix_spawn` clears it in the C
//! library, without copying the parent's memory.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use libc::{c_char, c_int, c_short, pid_t, posix_spawn_file_actions_t, posix_spawnattr_t, sigset_t};

/// The source of a standard descriptor.
#[derive(Debug, Clone, Copy)]
pub enum Stdio<'a> {
    /// The caller's descriptor.
    Inherit,
    /// This file, opened for reading and writing.
    Open(&'a CStr),
}

/// A program to start.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// Path of its executable.
    pub path: &'a CStr,
    /// Its arguments, its own name first.
    pub arguments: &'a [&'a CStr],
    /// Its whole environment, `NAME=value` each.
    pub environment: &'a [&'a CStr],
    /// Standard input, output and error.
    pub stdio: [Stdio<'a>; 3],
}

fn check(code: c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

struct Attributes(posix_spawnattr_t);

impl Attributes {
    /// Sets a new session and an empty signal mask. `SIGPIPE` is the only signal that Rust programs ignore;
    /// exec resets handlers anyway.
    fn new() -> io::Result<Self> {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: the call initialises its argument, or reports a failure.
        check(unsafe { libc::posix_spawnattr_init(attributes.as_mut_ptr()) })?;
        // SAFETY: initialised above.
        let mut this = Self(unsafe { attributes.assume_init() });
        let (mut none, mut pipe) = (MaybeUninit::<sigset_t>::uninit(), MaybeUninit::<sigset_t>::uninit());
        let signals = libc::POSIX_SPAWN_SETSIGMASK | libc::POSIX_SPAWN_SETSIGDEF;
        let flags = c_short::try_from(signals).unwrap_or_default() | libc::POSIX_SPAWN_SETSID;
        // SAFETY: both sets are initialised before they are read, and the
        // attributes are initialised and exclusively owned.
        unsafe {
            libc::sigemptyset(none.as_mut_ptr());
            libc::sigemptyset(pipe.as_mut_ptr());
            libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE);
            check(libc::posix_spawnattr_setsigmask(&raw mut this.0, none.as_ptr()))?;
            check(libc::posix_spawnattr_setsigdefault(&raw mut this.0, pipe.as_ptr()))?;
            check(libc::posix_spawnattr_setflags(&raw mut this.0, flags))?;
        }
        Ok(this)
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: initialised by `new` and not used afterwards.
        unsafe { libc::posix_spawnattr_destroy(&raw mut self.0) };
    }
}

struct Actions(posix_spawn_file_actions_t);

impl Actions {
    fn new(stdio: &[Stdio<'_>; 3]) -> io::Result<Self> {
        let mut actions = MaybeUninit::uninit();
        // SAFETY: the call initialises its argument, or reports a failure.
        check(unsafe { libc::posix_spawn_file_actions_init(actions.as_mut_ptr()) })?;
        // SAFETY: initialised above.
        let mut this = Self(unsafe { actions.assume_init() });
        for (fd, stdio) in (0..).zip(stdio) {
            if let Stdio::Open(path) = stdio {
                // SAFETY: the actions are initialised, and the call copies the path.
                let code = unsafe {
                    libc::posix_spawn_file_actions_addopen(&raw mut this.0, fd, path.as_ptr(), libc::O_RDWR, 0)
                };
                check(code)?;
            }
        }
        // Our descriptors close on exec; those that a library or a bug left inheritable must not leak.
        // SAFETY: the actions are initialised.
        check(unsafe { libc::posix_spawn_file_actions_addclosefrom_np(&raw mut this.0, 3) })?;
        Ok(this)
    }
}

impl Drop for Actions {
    fn drop(&mut self) {
        // SAFETY: initialised by `new` and not used afterwards.
        unsafe { libc::posix_spawn_file_actions_destroy(&raw mut self.0) };
    }
}

fn pointers(texts: &[&CStr]) -> Vec<*mut c_char> {
    texts.iter().map(|text| text.as_ptr().cast_mut()).chain([ptr::null_mut()]).collect()
}

/// Starts a program in a new session, with no signal blocked or ignored and only
/// the first three descriptors. The caller must wait for the process.
///
/// # Errors
/// It could not be started, `ENOENT` and the like included.
pub fn spawn(program: &Program<'_>) -> io::Result<pid_t> {
    let attributes = Attributes::new()?;
    let actions = Actions::new(&program.stdio)?;
    let (arguments, environment) = (pointers(program.arguments), pointers(program.environment));
    let mut pid: pid_t = 0;
    // SAFETY: attributes and actions are initialised; both lists end with a null
    // pointer and point to strings that outlive the call, which only reads them.
    let code = unsafe {
        libc::posix_spawn(
            &raw mut pid,
            program.path.as_ptr(),
            &raw const actions.0,
            &raw const attributes.0,
            arguments.as_ptr(),
            environment.as_ptr(),
        )
    };
    check(code)?;
    Ok(pid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals::SignalFd;

    fn status(arguments: &[&CStr], stdio: [Stdio<'_>; 3]) -> c_int {
        let program = Program { path: c"/bin/sh", arguments, environment: &[c"FL=1"], stdio };
        let pid = spawn(&program).unwrap();
        let mut status = 0;
        // SAFETY: waits for a child of this process; the status is a live local.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        status
    }

    #[test]
    fn blocked_signals_are_not_inherited() {
        std::thread::spawn(|| {
            let _signals = SignalFd::block(&[libc::SIGTERM, libc::SIGUSR1]).unwrap();
            let code = c"exec 9</proc/self/status; while read -r k v <&9; do [ \"$k\" = SigBlk: ] && exec test $v = 0000000000000000; done; exit 9";
            assert_eq!(status(&[c"sh", c"-c", code], [Stdio::Inherit; 3]), 0);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn environment_session_and_input_are_as_requested() {
        let code = c"test \"$FL\" = 1 && test -z \"$HOME\" && ! read -r line && read -r pid n s p g sid rest </proc/self/stat && test $sid = $$";
        let input = Stdio::Open(c"/dev/null");
        assert_eq!(status(&[c"sh", c"-c", code], [input, Stdio::Inherit, Stdio::Inherit]), 0);
    }

    #[test]
    fn missing_program_is_an_error() {
        let program = Program { path: c"/none", arguments: &[], environment: &[], stdio: [Stdio::Inherit; 3] };
        assert_eq!(spawn(&program).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    }
}
