//! Runs a program of the image with a clean environment, a deadline, and bounded output.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::{Error, Result};

/// The program's whole environment.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Retained bytes of standard error.
const MAX_STDERR: usize = 500;

/// A program and its limits.
pub(super) struct Tool<'a> {
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [&'a str],
    pub(super) input: &'a [u8],
    pub(super) limit: Duration,
    /// Maximum output, in bytes.
    pub(super) max_output: usize,
}

/// One end of a pipe; `None` once closed.
struct Pipe<P>(Option<P>);

impl<P: AsFd> Pipe<P> {
    fn new(end: Option<P>) -> std::io::Result<Self> {
        if let Some(end) = &end {
            fcntl_setfl(end, fcntl_getfl(end)? | OFlags::NONBLOCK)?;
        }
        Ok(Self(end))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(AsFd::as_fd)
    }

    /// Performs one read or write, so that the deadline is checked in between; closes the pipe at
    /// its end or an error.
    fn advance(&mut self, step: impl FnOnce(&mut P) -> std::io::Result<usize>) {
        use std::io::ErrorKind::{Interrupted, WouldBlock};
        match self.0.as_mut().map(step) {
            Some(Err(error)) if matches!(error.kind(), WouldBlock | Interrupted) => {}
            Some(Ok(0) | Err(_)) => self.0 = None,
            _ => {}
        }
    }
}

/// Waits until one descriptor is ready; `false` on timeout.
fn wait(all: &[(BorrowedFd<'_>, PollFlags)], end: Instant) -> bool {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut all: Vec<_> = all.iter().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        match poll(&mut all, Timespec::try_from(left).ok().as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

/// The program's standard output and standard error.
struct Captured {
    output: Vec<u8>,
    stderr: Vec<u8>,
}

/// Exchanges data with the program until it has closed its outputs.
fn communicate(child: &mut Child, tool: &Tool<'_>, end: Instant) -> std::result::Result<Captured, String> {
    let failed = |error: std::io::Error| format!("failed to set up its pipes: {error}");
    let mut input = Pipe::new(child.stdin.take()).map_err(failed)?;
    let mut output = Pipe::new(child.stdout.take()).map_err(failed)?;
    let mut stderr = Pipe::new(child.stderr.take()).map_err(failed)?;
    let mut captured = Captured { output: Vec::new(), stderr: Vec::new() };
    let mut rest = tool.input;
    let mut buffer = vec![0; 64 << 10];
    loop {
        input.advance(|end| {
            let written = end.write(rest)?;
            rest = rest.get(written..).unwrap_or_default();
            Ok(written)
        });
        output.advance(|end| {
            let read = end.read(&mut buffer)?;
            captured.output.extend(buffer.iter().take(read));
            // Stops at the limit; distinguished from EOF below.
            Ok(if captured.output.len() > tool.max_output { 0 } else { read })
        });
        stderr.advance(|end| {
            let read = end.read(&mut buffer)?;
            let room = MAX_STDERR.saturating_sub(captured.stderr.len());
            captured.stderr.extend(buffer.iter().take(read.min(room)));
            Ok(read)
        });
        if captured.output.len() > tool.max_output {
            return Err(format!("its output exceeds {} bytes", tool.max_output));
        }
        if output.0.is_none() && stderr.0.is_none() {
            return Ok(captured);
        }
        let ends = [(input.fd(), PollFlags::OUT), (output.fd(), PollFlags::IN), (stderr.fd(), PollFlags::IN)];
        let open: Vec<_> = ends.into_iter().filter_map(|(fd, flags)| Some((fd?, flags))).collect();
        if Instant::now() >= end || !wait(&open, end) {
            return Err(timeout_error(tool));
        }
    }
}

fn timeout_error(tool: &Tool<'_>) -> String {
    format!("timed out after {:?}", tool.limit)
}

fn status(child: &mut Child, tool: &Tool<'_>, end: Instant) -> std::result::Result<ExitStatus, String> {
    let fd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())
        .map_err(|error| format!("failed to wait for it: {error}"))?;
    if !wait(&[(fd.as_fd(), PollFlags::IN)], end) {
        return Err(timeout_error(tool));
    }
    child.wait().map_err(|error| format!("failed to wait for it: {error}"))
}

/// Runs the program and returns its standard output.
///
/// # Errors
/// It cannot be started, exceeds its limits, or fails; then the error has the start of its standard
/// error. It is killed in each case.
pub(super) fn run(tool: &Tool<'_>) -> Result<Vec<u8>> {
    let failed = |why: String| Error::internal(format!("{}: {why}", tool.program.display()));
    let mut command = Command::new(tool.program);
    command.args(tool.arguments).env_clear().env("PATH", PATH).current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let end = Instant::now() + tool.limit;
    let mut child = command.spawn().map_err(|error| failed(format!("failed to start: {error}")))?;
    let done = communicate(&mut child, tool, end).and_then(|captured| Ok((status(&mut child, tool, end)?, captured)));
    match done {
        Ok((status, captured)) if status.success() => Ok(captured.output),
        Ok((status, captured)) => {
            let stderr = String::from_utf8_lossy(&captured.stderr);
            Err(failed(format!("{status}: {}", stderr.trim())))
        }
        Err(why) => {
            // Errors mean that it has exited already.
            let _ = child.kill();
            let _ = child.wait();
            Err(failed(why))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, input: &[u8], limit: Duration) -> Result<Vec<u8>> {
        run(&Tool { program: "/bin/sh".as_ref(), arguments: &["-c", script], input, limit, max_output: 1000 })
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn output_is_returned_and_environment_is_clean() {
        assert_eq!(sh("cat; echo end", b"in\n", LONG).unwrap(), b"in\nend\n");
        assert_eq!(sh("echo \"$HOME$CARGO$PATH\"; pwd", b"", LONG).unwrap(), format!("{PATH}\n/\n").as_bytes());
        // A program that does not read its input is no error.
        assert_eq!(sh("exec <&-; echo x", &[0; 300_000], LONG).unwrap(), b"x\n");
    }

    #[test]
    fn failures_include_standard_error() {
        let error = sh("echo no such table >&2; exit 3", b"", LONG).unwrap_err().message;
        assert_eq!(error, "/bin/sh: exit status: 3: no such table");
        let error = sh("head -c 9999 /dev/zero", b"", LONG).unwrap_err().message;
        assert!(error.contains("exceeds 1000 bytes"), "{error}");
        let error = sh("head -c 9999 /dev/zero | tr '\\0' x >&2; exit 1", b"", LONG).unwrap_err().message;
        assert!(error.len() < 600, "{error}");
        let missing = Tool { program: "/none".as_ref(), arguments: &[], input: &[], limit: LONG, max_output: 1 };
        assert!(run(&missing).unwrap_err().message.starts_with("/none: failed to start"));
    }

    #[test]
    fn program_past_its_deadline_is_killed() {
        let begin = Instant::now();
        for script in ["exec sleep 1000", "exec >&- 2>&-; exec sleep 1000", "exec yes >&2"] {
            let error = sh(script, b"", Duration::from_millis(200)).unwrap_err().message;
            assert!(error.contains("timed out after 200ms"), "{error}");
        }
        assert!(begin.elapsed() < LONG);
    }
}
