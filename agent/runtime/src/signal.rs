//! Signals to container processes.

use std::{fs, io};

use firstlight_sys::fork::kill;

use crate::children::Children;
use crate::message::{Failure, FailureKind};

const SIGTERM: i32 = 15;
const SIGKILL: i32 = 9;
const ESRCH: i32 = 3;

/// Sends `signal` to one process that has not been reaped.
pub(crate) fn send(children: &Children, container: &str, exec: &str, signal: i32) -> Result<(), Failure> {
    let pid = children
        .pid(container, exec)
        .ok_or_else(|| Failure::new(FailureKind::NotFound, format!("{} has exited", name(container, exec))))?;
    let number = effective(exec.is_empty(), signal, || unhandled(pid, SIGTERM));
    match kill(pid, number) {
        Ok(()) => Ok(()),
        // Exited but not reaped yet, which is the desired state.
        Err(error) if error.raw_os_error() == Some(ESRCH) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            Err(Failure::new(FailureKind::Invalid, format!("invalid signal number {signal}")))
        }
        Err(error) => {
            Err(Failure::internal(format!("failed to send signal {signal} to {}: {error}", name(container, exec))))
        }
    }
}

fn name(container: &str, exec: &str) -> String {
    if exec.is_empty() { format!("container {container}") } else { format!("process {exec} of container {container}") }
}

/// Returns the signal to send. The kernel drops a `SIGTERM` that the init process of a pid namespace does not
/// handle; users expect it to stop the container, so it becomes `SIGKILL`.
fn effective(first: bool, signal: i32, unhandled: impl FnOnce() -> bool) -> i32 {
    if first && signal == SIGTERM && unhandled() { SIGKILL } else { signal }
}

fn unhandled(pid: i32, signal: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| has_default_action(&status, signal))
}

/// Whether, by `/proc/PID/status`, the signal is neither caught, blocked nor ignored.
fn has_default_action(status: &str, signal: i32) -> bool {
    let mask = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|value| u64::from_str_radix(value.trim(), 16).ok())
    };
    let bit = 1u64 << (signal - 1);
    ["SigBlk:", "SigIgn:", "SigCgt:"].iter().all(|name| mask(name).is_some_and(|mask| mask & bit == 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str =
        "Name:\tsleep\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000006\nSigCgt:\t0000000000004000\n";

    #[test]
    fn unhandled_sigterm_to_init_becomes_sigkill() {
        assert!(!has_default_action(STATUS, SIGTERM), "bit 14 is in SigCgt");
        assert!(has_default_action(&STATUS.replace("4000", "0000"), SIGTERM));
        assert!(!has_default_action("Name:\tx\n", SIGTERM), "no masks: not assumed");
        assert_eq!(effective(true, SIGTERM, || true), SIGKILL);
        assert_eq!(effective(true, SIGTERM, || false), SIGTERM);
        assert_eq!(effective(false, SIGTERM, || true), SIGTERM);
        assert_eq!(effective(true, 1, || true), 1);
    }

    #[test]
    fn exited_process_and_invalid_signal_number_are_distinct_errors() {
        let mut children = Children::default();
        assert_eq!(send(&children, "c", "", 9).unwrap_err().kind, FailureKind::NotFound);
        children.claim(i32::MAX, 1, "c", "e");
        children.claim(i32::try_from(std::process::id()).unwrap(), 1, "c", "me");
        assert_eq!(send(&children, "c", "me", 4711).unwrap_err().kind, FailureKind::Invalid);
        assert_eq!(send(&children, "c", "e", 9), Ok(()));
    }
}
