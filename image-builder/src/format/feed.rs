//! A program that reads an archive from a pipe.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, Write};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};

use firstlight_progress::megabytes;

use super::Error;
use super::archive::Files;

/// What a program says is kept up to this many bytes.
const MOST_SAID: u64 = 4096;

/// A pipe that remembers what went through, and that its reader went away.
struct Pipe {
    end: ChildStdin,
    written: u64,
    broken: bool,
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.end.write(bytes);
        self.written += written.as_ref().map_or(0, |count| *count as u64);
        self.broken |= written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe);
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.end.flush()
    }
}

/// Runs `command` to its end with what `write` writes as its input; its
/// output goes to `output`, and `file` is what it makes.
pub(super) fn feed(
    program: &'static str,
    command: &mut Command,
    file: &Path,
    output: Stdio,
    write: impl FnOnce(&mut dyn Write) -> Result<Files, Error>,
) -> Result<Files, Error> {
    let start = |source| Error::Start { program, source };
    // A file, not a pipe: nobody reads while the archive is written.
    let mut words = tempfile::tempfile().map_err(start)?;
    let said = words.try_clone().map_err(start)?;
    let mut child = command.stdin(Stdio::piped()).stdout(output).stderr(Stdio::from(said)).spawn().map_err(start)?;
    let (result, broken, written) = match child.stdin.take() {
        Some(end) => {
            let mut pipe = BufWriter::with_capacity(1 << 16, Pipe { end, written: 0, broken: false });
            let result = write(&mut pipe);
            let Pipe { broken, written, .. } = *pipe.get_ref();
            // What is left in the buffer after an error is not worth writing.
            drop(pipe.into_parts());
            (result, broken, written)
        }
        None => (Err(start(io::Error::other("it has no input"))), false, 0),
    };
    if result.is_err() && !broken {
        // It would wait for the rest, or make an image of a half archive.
        let _ = child.kill();
    }
    let status = child.wait().map_err(start)?;
    match result {
        Err(error) if !broken => Err(error),
        _ if !status.success() => {
            let mut said = last_words(&mut words);
            if !said.contains(FULL) {
                said.push_str(&room(file, written));
            }
            let file = file.to_owned();
            Err(Error::Program { program, file, status: status.to_string(), said })
        }
        result => result,
    }
}

/// The system's words for a full disk.
const FULL: &str = "No space left on device";

/// Not every program has them: some find their own files damaged.
fn room(file: &Path, written: u64) -> String {
    let disk = file.parent().and_then(|dir| rustix::fs::statvfs(dir).ok());
    let left = disk.map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    // What it was given may be on the disk twice: as it came, and in the image.
    match left.filter(|left| left / 2 < written) {
        Some(left) => {
            let (left, written) = (megabytes(left), megabytes(written));
            format!("; {FULL}: {left} for an image of {written}")
        }
        None => String::new(),
    }
}

fn last_words(words: &mut File) -> String {
    let mut text = String::new();
    let length = words.stream_position().unwrap_or_default();
    let start = length.saturating_sub(MOST_SAID);
    let mut bytes = Vec::new();
    if words.seek(io::SeekFrom::Start(start)).is_ok() && words.take(MOST_SAID).read_to_end(&mut bytes).is_ok() {
        let said = String::from_utf8_lossy(&bytes);
        // The first is cut where there are more.
        let mut lines: Vec<&str> = said.lines().skip(usize::from(start > 0)).map(str::trim).collect();
        lines.retain(|line| !line.is_empty());
        lines.dedup();
        text = lines.join(" / ");
    }
    if text.is_empty() { "it printed no message".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn fed(script: &str, bytes: usize) -> Result<Files, Error> {
        feed("sh", &mut shell(script), Path::new("x"), Stdio::null(), |pipe| {
            let failed = |source| Error::Feed { path: "x".into(), source };
            pipe.write_all(&vec![b'a'; bytes]).and_then(|()| pipe.flush()).map_err(failed)?;
            Ok(Files::new())
        })
    }

    #[test]
    fn a_program_that_dies_is_quoted() {
        fed("test $(wc -c) = 300000", 300_000).unwrap();
        for bytes in [0, 3_000_000] {
            let error = fed("echo one >&2; echo two >&2; exit 7", bytes).unwrap_err().to_string();
            assert!(error.contains("one / two") && error.contains("7"), "{error}");
        }
        let silent = fed("exit 1", 0).unwrap_err().to_string();
        assert!(silent.contains("no message"), "{silent}");
    }

    #[test]
    fn what_is_said_again_and_again_is_told_once() {
        let error = fed("yes full | head -n 3000 >&2; echo end >&2; exit 1", 0).unwrap_err().to_string();
        assert!(error.ends_with(": full / end"), "{error}");
    }

    #[test]
    fn a_disk_without_room_is_told() {
        assert_eq!(room(Path::new("/proc/x"), 0), "");
        // Nothing has room there.
        let told = room(Path::new("/proc/x"), 5_000_000);
        assert!(told.contains("No space left on device: 0 kB for an image of 5.0 MB"), "{told}");
    }

    #[test]
    fn an_error_of_ours_ends_the_program() {
        // It ends itself only after an hour.
        let failed = feed("sh", &mut shell("exec sleep 3600"), Path::new("x"), Stdio::null(), |_| {
            Err(Error::Changed { path: "a".into(), expected: 1, found: 2 })
        });
        assert!(matches!(failed, Err(Error::Changed { .. })), "{failed:?}");
    }
}
