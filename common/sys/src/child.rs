//! Child processes that die with their parent.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, set_parent_process_death_signal};

/// Makes the kernel send `command`'s process `SIGKILL` when the thread that starts
/// it ends, so that a killed program leaves no daemons running.
pub fn die_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    let hook = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the call above.
        if rustix::process::getppid() == Some(parent) {
            return Ok(());
        }
        Err(io::Error::other("the parent exited first"))
    };
    // SAFETY: between fork and exec the hook makes two system calls; the error
    // path, taken only when the parent is dead, is the one that allocates, and
    // no process waits for it then.
    unsafe {
        command.pre_exec(hook);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn child_with_the_death_signal_runs() {
        let mut command = Command::new("/bin/true");
        die_with_parent(&mut command);
        assert!(command.status().is_ok_and(|status| status.success()));
    }
}
