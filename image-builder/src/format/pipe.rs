//! Runs a program that reads an archive from a pipe.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, Write};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};

use super::Error;
use super::archive::Files;
use firstlight_progress::megabytes;

/// Limit of the stderr output in an error message, in bytes.
const MAX_STDERR: u64 = 4096;

/// The stdin pipe of a program; counts written bytes and records a broken pipe.
struct Pipe {
    stdin: ChildStdin,
    written: u64,
    broken: bool,
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.stdin.write(bytes);
        self.written += written.as_ref().map_or(0, |count| *count as u64);
        self.broken |= written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe);
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stdin.flush()
    }
}

/// Runs `command` until it exits, with the bytes that `write` writes as its
/// stdin and `output` as its stdout. `file` is the file that it creates.
pub(super) fn run_with_input(
    program: &'static str,
    command: &mut Command,
    file: &Path,
    output: Stdio,
    write: impl FnOnce(&mut dyn Write) -> Result<Files, Error>,
) -> Result<Files, Error> {
    let start = |source| Error::Start { program, source };
    // Stderr goes to a file: a pipe would fill up, as it is not read while the archive is written.
    let mut log = tempfile::tempfile().map_err(start)?;
    let stderr = log.try_clone().map_err(start)?;
    let mut child = command.stdin(Stdio::piped()).stdout(output).stderr(Stdio::from(stderr)).spawn().map_err(start)?;
    let (result, broken, written) = match child.stdin.take() {
        Some(stdin) => {
            let mut pipe = BufWriter::with_capacity(1 << 16, Pipe { stdin, written: 0, broken: false });
            let result = write(&mut pipe);
            let Pipe { broken, written, .. } = *pipe.get_ref();
            // After an error the rest of the buffer is discarded instead of flushed.
            drop(pipe.into_parts());
            (result, broken, written)
        }
        None => (Err(start(io::Error::other("no stdin pipe"))), false, 0),
    };
    if result.is_err() && !broken {
        // Otherwise it would wait for more input, or create an image of an incomplete archive.
        let _ = child.kill();
    }
    let status = child.wait().map_err(start)?;
    match result {
        Err(error) if !broken => Err(error),
        _ if !status.success() => {
            let mut stderr = last_lines(&mut log);
            if !stderr.contains(DISK_FULL) {
                stderr.push_str(&disk_full_hint(file, written));
            }
            let file = file.to_owned();
            Err(Error::Program { program, file, status: status.to_string(), stderr })
        }
        result => result,
    }
}

/// The text of `ENOSPC`.
const DISK_FULL: &str = "No space left on device";

/// Returns a hint if the disk of `file` is too small for `written` bytes. Not every
/// program reports `ENOSPC`: some report that their files are corrupt.
fn disk_full_hint(file: &Path, written: u64) -> String {
    let disk = file.parent().and_then(|dir| rustix::fs::statvfs(dir).ok());
    let free = disk.map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    // The input may be on the disk twice: in temporary files, and in the image.
    match free.filter(|free| free / 2 < written) {
        Some(free) => {
            let (free, written) = (megabytes(free), megabytes(written));
            format!("; {DISK_FULL}: {free} free for an image of {written}")
        }
        None => String::new(),
    }
}

/// Returns the last lines of a log, joined, without duplicates and empty lines.
fn last_lines(log: &mut File) -> String {
    let mut text = String::new();
    let length = log.stream_position().unwrap_or_default();
    let start = length.saturating_sub(MAX_STDERR);
    let mut bytes = Vec::new();
    if log.seek(io::SeekFrom::Start(start)).is_ok() && log.take(MAX_STDERR).read_to_end(&mut bytes).is_ok() {
        let tail = String::from_utf8_lossy(&bytes);
        // A truncated first line is skipped.
        let mut lines: Vec<&str> = tail.lines().skip(usize::from(start > 0)).map(str::trim).collect();
        lines.retain(|line| !line.is_empty());
        lines.dedup();
        text = lines.join(" / ");
    }
    if text.is_empty() { "no error message".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn run_shell(script: &str, bytes: usize) -> Result<Files, Error> {
        run_with_input("sh", &mut shell(script), Path::new("x"), Stdio::null(), |pipe| {
            let failed = |source| Error::Entry { path: "x".into(), source };
            pipe.write_all(&vec![b'a'; bytes]).and_then(|()| pipe.flush()).map_err(failed)?;
            Ok(Files::new())
        })
    }

    #[test]
    fn program_fails_then_error_contains_its_stderr() {
        run_shell("test $(wc -c) = 300000", 300_000).unwrap();
        for bytes in [0, 3_000_000] {
            let error = run_shell("echo one >&2; echo two >&2; exit 7", bytes).unwrap_err().to_string();
            assert!(error.contains("one / two") && error.contains("7"), "{error}");
        }
        let silent = run_shell("exit 1", 0).unwrap_err().to_string();
        assert!(silent.contains("no error message"), "{silent}");
    }

    #[test]
    fn repeated_lines_then_shown_once() {
        let error = run_shell("yes full | head -n 3000 >&2; echo end >&2; exit 1", 0).unwrap_err().to_string();
        assert!(error.ends_with(": full / end"), "{error}");
    }

    #[test]
    fn disk_is_full_then_hint() {
        assert_eq!(disk_full_hint(Path::new("/proc/x"), 0), "");
        // procfs has no free space.
        let hint = disk_full_hint(Path::new("/proc/x"), 5_000_000);
        assert!(hint.contains("No space left on device: 0 kB free for an image of 5.0 MB"), "{hint}");
    }

    #[test]
    fn write_error_then_program_is_killed() {
        // On its own it would exit after an hour.
        let failed = run_with_input("sh", &mut shell("exec sleep 3600"), Path::new("x"), Stdio::null(), |_| {
            Err(Error::Changed { path: "a".into(), expected: 1, found: 2 })
        });
        assert!(matches!(failed, Err(Error::Changed { .. })), "{failed:?}");
    }
}
