//! A program of the image, run with a clean environment, a deadline, and an
//! end to what is read of it.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::{Error, Result};

/// What a program is started with and nothing else.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// What is kept of a program's complaint, in bytes.
const COMPLAINT: usize = 500;

/// A program and what it may have.
pub(super) struct Tool<'a> {
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [&'a str],
    pub(super) input: &'a [u8],
    pub(super) limit: Duration,
    /// The most that it may write, in bytes.
    pub(super) most: usize,
}

/// One end of a pipe, until its other end is closed.
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

    /// Does one step, so that a program that never stops writing meets its
    /// deadline; at the end, or at an error, the pipe is closed.
    fn turn(&mut self, step: impl FnOnce(&mut P) -> std::io::Result<usize>) {
        use std::io::ErrorKind::{Interrupted, WouldBlock};
        match self.0.as_mut().map(step) {
            Some(Err(error)) if matches!(error.kind(), WouldBlock | Interrupted) => {}
            Some(Ok(0) | Err(_)) => self.0 = None,
            _ => {}
        }
    }
}

/// Waits until one of them can be used; false when the time is up.
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

/// What the program wrote; `complaint` is the other thing it wrote.
struct Said {
    output: Vec<u8>,
    complaint: Vec<u8>,
}

/// Talks with the program until it has closed its outputs.
fn talk(child: &mut Child, tool: &Tool<'_>, end: Instant) -> std::result::Result<Said, String> {
    let failed = |error: std::io::Error| format!("its pipes: {error}");
    let mut input = Pipe::new(child.stdin.take()).map_err(failed)?;
    let mut output = Pipe::new(child.stdout.take()).map_err(failed)?;
    let mut complaint = Pipe::new(child.stderr.take()).map_err(failed)?;
    let mut said = Said { output: Vec::new(), complaint: Vec::new() };
    let mut rest = tool.input;
    let mut buffer = vec![0; 64 << 10];
    loop {
        input.turn(|end| {
            let written = end.write(rest)?;
            rest = rest.get(written..).unwrap_or_default();
            Ok(written)
        });
        output.turn(|end| {
            let read = end.read(&mut buffer)?;
            said.output.extend(buffer.iter().take(read));
            // Enough is an end too; it is told from the real one below.
            Ok(if said.output.len() > tool.most { 0 } else { read })
        });
        complaint.turn(|end| {
            let read = end.read(&mut buffer)?;
            let room = COMPLAINT.saturating_sub(said.complaint.len());
            said.complaint.extend(buffer.iter().take(read.min(room)));
            Ok(read)
        });
        if said.output.len() > tool.most {
            return Err(format!("it wrote more than {} bytes", tool.most));
        }
        if output.0.is_none() && complaint.0.is_none() {
            return Ok(said);
        }
        let ends = [(input.fd(), PollFlags::OUT), (output.fd(), PollFlags::IN), (complaint.fd(), PollFlags::IN)];
        let open: Vec<_> = ends.into_iter().filter_map(|(fd, flags)| Some((fd?, flags))).collect();
        if Instant::now() >= end || !wait(&open, end) {
            return Err(late(tool));
        }
    }
}

fn late(tool: &Tool<'_>) -> String {
    format!("it has not ended in {:?}", tool.limit)
}

fn status(child: &mut Child, tool: &Tool<'_>, end: Instant) -> std::result::Result<ExitStatus, String> {
    let fd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())
        .map_err(|error| format!("cannot wait for it: {error}"))?;
    if !wait(&[(fd.as_fd(), PollFlags::IN)], end) {
        return Err(late(tool));
    }
    child.wait().map_err(|error| format!("cannot wait for it: {error}"))
}

/// Runs it and returns what it wrote.
///
/// # Errors
/// It cannot be started, writes too much, takes too long, or fails; then the
/// error has the first words of its complaint. It does not run any more.
pub(super) fn run(tool: &Tool<'_>) -> Result<Vec<u8>> {
    let failed = |why: String| Error::internal(format!("{}: {why}", tool.program.display()));
    let mut command = Command::new(tool.program);
    command.args(tool.arguments).env_clear().env("PATH", PATH).current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let end = Instant::now() + tool.limit;
    let mut child = command.spawn().map_err(|error| failed(format!("cannot be started: {error}")))?;
    let done = talk(&mut child, tool, end).and_then(|said| Ok((status(&mut child, tool, end)?, said)));
    match done {
        Ok((status, said)) if status.success() => Ok(said.output),
        Ok((status, said)) => {
            let words = String::from_utf8_lossy(&said.complaint);
            Err(failed(format!("{status}: {}", words.trim())))
        }
        Err(why) => {
            // Neither can fail in a way that matters: it is gone, or going.
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
        run(&Tool { program: "/bin/sh".as_ref(), arguments: &["-c", script], input, limit, most: 1000 })
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn output_and_environment() {
        assert_eq!(sh("cat; echo end", b"in\n", LONG).unwrap(), b"in\nend\n");
        assert_eq!(sh("echo \"$HOME$CARGO$PATH\"; pwd", b"", LONG).unwrap(), format!("{PATH}\n/\n").as_bytes());
        // One that does not read is no error by that.
        assert_eq!(sh("exec <&-; echo x", &[0; 300_000], LONG).unwrap(), b"x\n");
    }

    #[test]
    fn failures_have_their_words() {
        let error = sh("echo no such table >&2; exit 3", b"", LONG).unwrap_err().message;
        assert_eq!(error, "/bin/sh: exit status: 3: no such table");
        let error = sh("head -c 9999 /dev/zero", b"", LONG).unwrap_err().message;
        assert!(error.contains("more than 1000 bytes"), "{error}");
        let error = sh("head -c 9999 /dev/zero | tr '\\0' x >&2; exit 1", b"", LONG).unwrap_err().message;
        assert!(error.len() < 600, "{error}");
        let missing = Tool { program: "/none".as_ref(), arguments: &[], input: &[], limit: LONG, most: 1 };
        assert!(run(&missing).unwrap_err().message.starts_with("/none: cannot be started"));
    }

    #[test]
    fn one_that_does_not_end_is_ended() {
        let begin = Instant::now();
        for script in ["exec sleep 1000", "exec >&- 2>&-; exec sleep 1000", "exec yes >&2"] {
            let error = sh(script, b"", Duration::from_millis(200)).unwrap_err().message;
            assert!(error.contains("has not ended in 200ms"), "{error}");
        }
        assert!(begin.elapsed() < LONG);
    }
}
