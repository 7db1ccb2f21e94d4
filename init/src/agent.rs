//! Starts the agent, and describes its exit.

use std::ffi::{CStr, CString};
use std::io;

use firstlight_sys::spawn::{Program, Stdio, spawn};
use rustix::process::{Pid, Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

use crate::root::Root;

/// Path of the agent's program.
pub const PROGRAM: &CStr = c"/usr/bin/firstlight-agent";

/// Path of the shell that `firstlight.on-failure=debug` opens.
const SHELL: &CStr = c"/bin/sh";

/// Environment of both.
const PATH: &CStr = c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Limit of the agent's file descriptors: containers need many.
const FILES: u64 = 1 << 20;

/// The agent's OOM score adjustment: other processes are killed first.
const OOM_SCORE: &str = "-997";

/// Sets limits that the agent inherits. PID 1 sets them for itself, which needs no code between
/// fork and exec.
///
/// # Errors
/// A limit could not be set; the error names it.
pub fn prepare(root: &Root) -> Result<(), String> {
    // The bounding set limits programs that are executed. PID 1's own threads are not affected and
    // go on loading modules, while the agent, its containers and a debug shell cannot.
    remove_capability_from_bounding_set(CapabilitySet::SYS_MODULE)
        .map_err(|error| format!("cannot keep CAP_SYS_MODULE from the agent: {error}"))?;
    let limit = Rlimit { current: Some(FILES), maximum: Some(FILES) };
    setrlimit(Resource::Nofile, limit).map_err(|error| format!("cannot allow {FILES} open files: {error}"))?;
    let path = root.path("/proc/self/oom_score_adj");
    std::fs::write(&path, OOM_SCORE).map_err(|error| format!("cannot write {OOM_SCORE} to {}: {error}", path.display()))
}

/// Starts the agent with a minimal environment.
///
/// # Errors
/// The agent could not be started; the error says what to check.
pub fn start() -> Result<Pid, String> {
    let control = CString::new(format!("FIRSTLIGHT_CONTROL={}", firstlight_init_control::SOCKET)).unwrap_or_default();
    let program = Program {
        path: PROGRAM,
        arguments: &[PROGRAM],
        environment: &[PATH, &control],
        stdio: [Stdio::Open(c"/dev/null"), Stdio::Inherit, Stdio::Inherit],
    };
    let name = PROGRAM.to_string_lossy();
    let pid = spawn(&program).map_err(|error| format!("cannot start {name}: {error}{}", hint(&error)))?;
    Pid::from_raw(pid).ok_or_else(|| format!("{name} has no process id"))
}

/// Opens a shell on the console.
///
/// # Errors
/// The image has no shell, or there is no console.
pub fn start_shell() -> Result<Pid, String> {
    let console = Stdio::Open(c"/dev/console");
    let program =
        Program { path: SHELL, arguments: &[SHELL, c"-i"], environment: &[PATH, c"TERM=linux"], stdio: [console; 3] };
    let name = SHELL.to_string_lossy();
    let pid = spawn(&program).map_err(|error| format!("cannot start {name}: {error}"))?;
    Pid::from_raw(pid).ok_or_else(|| format!("{name} has no process id"))
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOENT) => "; it, or the loader it names, is not in the image: add a static build",
        Some(libc::EACCES) => "; it is not executable",
        Some(libc::ENOEXEC) => "; it was built for another machine",
        Some(libc::EIO) => {
            "; its disk cannot be read or is not what its hash tree says (verity lines in the kernel log): \
             image-builder verify on the host tells which block"
        }
        _ => "",
    }
}

/// Describes how a process ended: its exit status, or the signal that killed it.
#[must_use]
pub fn describe_exit(status: Option<i32>, signal: Option<i32>) -> String {
    match (status, signal) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// Returns a process's resident memory in KiB.
#[must_use]
pub fn resident_kib(root: &Root, pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(root.path(&format!("/proc/{pid}/status"))).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches("kB").trim_end().parse().ok()
}

/// Returns a process's children.
#[must_use]
pub fn children(root: &Root, pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(root.path(&format!("/proc/{pid}/task/{pid}/children"))).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn memory_and_children_are_read_from_proc() {
        let dir = tempfile::tempdir().unwrap();
        let process = dir.path().join("proc/7/task/7");
        std::fs::create_dir_all(&process).unwrap();
        std::fs::write(dir.path().join("proc/7/status"), "Name:\tx\nVmRSS:\t    1234 kB\n").unwrap();
        std::fs::write(process.join("children"), "8 9 ").unwrap();
        let root = Root::at(dir.path());
        assert_eq!(resident_kib(&root, 7), Some(1234));
        assert_eq!(children(&root, 7), [8, 9]);
        assert_eq!(resident_kib(&root, 8), None);
    }

    #[test]
    fn exits_are_described() {
        use std::os::unix::process::ExitStatusExt as _;
        let end = |code: &str| {
            let status = Command::new("/bin/sh").args(["-c", code]).status().unwrap();
            describe_exit(status.code(), status.signal())
        };
        assert_eq!(end("exit 3"), "exit status 3");
        assert_eq!(end("kill -9 $$"), "killed by signal 9");
    }
}
