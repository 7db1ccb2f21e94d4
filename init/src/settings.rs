//! Runs `firstlight-gpu-settings`, parses its output and evaluates the result.

use std::ffi::{CStr, CString};
use std::io::{PipeReader, Read as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use firstlight_gpu_settings_protocol::{Outcome, SettingsRequest, StepReport};
use firstlight_sys::daemon::{Daemon as Program, start};
use rustix::process::Pid;

use crate::daemons::cgroup::Cgroup;
use crate::daemons::launch::{ENVIRONMENT, OOM_SCORE};
use crate::daemons::output::Lines;
use crate::driver_paths::{command, find_first};
use crate::root::Root;

/// Search paths of the program.
const PROGRAMS: &[&str] = &["/usr/bin/firstlight-gpu-settings"];

/// The step that creates MIG instances. Without it a GPU is not given to containers: a container
/// that requests an instance must not get more.
const DIVISION: &str = "mig";

/// Maximum length of a step report in bytes; the rest of a longer line is dropped.
const MOST_LINE: usize = 8 << 10;

/// Maximum number of bytes read per loop iteration.
const TURN: usize = 64 << 10;

/// A line of the program's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputLine {
    /// A step report.
    Step(StepReport),
    /// Any other text, such as an error of the loader or of NVML.
    Text(String),
}

/// A parser of the program's output.
#[derive(Debug, Default)]
pub struct OutputParser {
    line: Vec<u8>,
    words: Lines,
}

impl OutputParser {
    /// Parses bytes and appends the complete lines to `out`.
    pub fn feed(&mut self, bytes: &[u8], out: &mut Vec<OutputLine>) {
        for byte in bytes {
            if *byte == b'\n' {
                self.end(out);
            } else if self.line.len() < MOST_LINE {
                self.line.push(*byte);
            }
        }
    }

    /// Parses the bytes after the last newline as a line.
    pub fn end(&mut self, out: &mut Vec<OutputLine>) {
        let line = std::mem::take(&mut self.line);
        if line.first() == Some(&b'{')
            && let Ok(step) = serde_json::from_slice(&line)
        {
            out.push(OutputLine::Step(step));
            return;
        }
        let mut words = Vec::new();
        self.words.feed(&line, &mut words);
        self.words.end(&mut words);
        out.extend(words.into_iter().map(OutputLine::Text));
    }
}

/// The state of a run's steps.
#[derive(Debug, Default)]
pub struct Tally {
    open: Vec<(String, String)>,
    /// Objects whose MIG step succeeded.
    divided: Vec<String>,
    done: u32,
    unchanged: u32,
    failed: Vec<StepReport>,
}

impl Tally {
    /// Updates the state with a step report.
    pub fn take(&mut self, line: &StepReport) {
        let of = (line.object.clone(), line.step.clone());
        match line.result {
            Outcome::Started => return self.open.push(of),
            Outcome::Done => self.done += 1,
            Outcome::Unchanged | Outcome::WouldChange => self.unchanged += 1,
            Outcome::Failed => self.failed.push(line.clone()),
        }
        self.open.retain(|other| *other != of);
        if line.result != Outcome::Failed && line.step == DIVISION {
            self.divided.push(of.0);
        }
    }

    /// Returns whether the MIG step of an object (a GPU's PCI address) succeeded.
    #[must_use]
    pub fn is_divided(&self, object: &str) -> bool {
        self.divided.iter().any(|other| other == object)
    }

    /// Returns the error of the first failed step of an object.
    #[must_use]
    pub fn failure_of(&self, object: &str) -> Option<&str> {
        self.failed.iter().find(|line| line.object == object).map(|line| line.detail.as_str())
    }

    /// Returns the errors of failed steps, and of steps that started and did not end.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let failed = self.failed.iter().map(|line| format!("{}: {}: {}", line.object, line.step, line.detail));
        let open = self.open.iter().map(|(object, step)| format!("{object}: {step} has begun and not ended"));
        failed.chain(open).collect()
    }

    /// Returns the summary of a successful run.
    #[must_use]
    pub fn words(&self) -> String {
        format!("{} done, {} as they were", self.done, self.unchanged)
    }
}

/// Returns an error if the image lacks the program.
#[must_use]
pub fn missing(root: &Root) -> Option<String> {
    find_first(root, PROGRAMS).err()
}

/// A run of the program.
#[derive(Debug)]
pub struct Run {
    pid: Option<Pid>,
    group: Cgroup,
    output: Option<PipeReader>,
    parser: OutputParser,
    /// The state of the steps reported so far.
    pub tally: Tally,
}

impl Run {
    /// Starts the program in a new cgroup below `groups`.
    ///
    /// # Errors
    /// The image lacks the program, or the cgroup, the pipe or the process could not be created.
    pub fn start(root: &Root, groups: &Path, name: &str, work: &SettingsRequest) -> Result<Self, String> {
        let words = command(root, &find_first(root, PROGRAMS)?);
        let program = words.first().cloned().unwrap_or_default();
        let work = serde_json::to_string(work).map_err(|error| format!("the work cannot be written: {error}"))?;
        let word = |text: String| CString::new(text).map_err(|error| error.to_string());
        let words = words.into_iter().chain(["apply".to_owned(), work]).map(word).collect::<Result<Vec<_>, _>>()?;
        let words: Vec<&CStr> = words.iter().map(CString::as_c_str).collect();
        let group = Cgroup::make(groups, name)?;
        let pipe = || {
            let (reader, writer) = std::io::pipe()?;
            rustix::fs::fcntl_setfl(&reader, rustix::fs::OFlags::NONBLOCK)?;
            Ok((reader, writer))
        };
        let (reader, writer) =
            pipe().map_err(|error: std::io::Error| format!("cannot make a pipe for its output: {error}"))?;
        let pid = start(&Program {
            path: words.first().copied().unwrap_or_default(),
            arguments: &words,
            environment: ENVIRONMENT,
            output: writer.as_fd(),
            cgroup: group.as_fd(),
            user: None,
            oom_score: OOM_SCORE,
        })
        .map_err(|error| format!("cannot start {program}: {error}"))?;
        Ok(Self {
            pid: Pid::from_raw(pid),
            group,
            output: Some(reader),
            parser: OutputParser::default(),
            tally: Tally::default(),
        })
    }

    /// Returns whether `pid` is the process of this run.
    #[must_use]
    pub fn is(&self, pid: Pid) -> bool {
        self.pid == Some(pid)
    }

    /// Returns the descriptor to poll: the program's output.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.output.as_ref().map(AsFd::as_fd)
    }

    /// Reads and parses the available output, at most `TURN` bytes unless `all` is set.
    pub fn listen(&mut self, all: bool) -> Vec<OutputLine> {
        let mut said = Vec::new();
        let mut buffer = [0; 4096];
        let mut left = TURN;
        while let Some(output) = self.output.as_mut().filter(|_| all || left > 0) {
            match output.read(&mut buffer) {
                Ok(0) => self.output = None,
                Ok(count) => {
                    self.parser.feed(&buffer[..count], &mut said);
                    left = left.saturating_sub(count);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => self.output = None,
            }
        }
        if self.output.is_none() {
            self.parser.end(&mut said);
        }
        for line in &said {
            if let OutputLine::Step(line) = line {
                self.tally.take(line);
            }
        }
        said
    }

    /// Returns the last line that is not a step report: possibly an error of the loader or of NVML.
    #[must_use]
    pub fn last_line(&self) -> &str {
        self.parser.words.last()
    }

    /// Kills all processes of the run without waiting; a process blocked in the kernel may remain.
    pub fn kill(&self) {
        let _ = self.group.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(object: &str, step: &str, result: Outcome, detail: &str) -> StepReport {
        StepReport { object: object.into(), step: step.into(), result, elapsed_us: 0, detail: detail.into() }
    }

    #[test]
    fn steps_and_text_lines_are_distinguished() {
        let (mut ear, mut out) = (OutputParser::default(), Vec::new());
        for piece in ["{\"object\":\"a\",\"step\":\"mig\",\"res", "ult\":\"done\"}\nwarn\x1bing\n\n{\"x\":1}\n", "rest"]
        {
            ear.feed(piece.as_bytes(), &mut out);
        }
        ear.end(&mut out);
        let words = |text: &str| OutputLine::Text(text.to_owned());
        assert_eq!(
            out,
            [
                OutputLine::Step(line("a", "mig", Outcome::Done, "")),
                words("warn\\x1bing"),
                words("{\"x\":1}"),
                words("rest")
            ]
        );
    }

    #[test]
    fn failed_and_unfinished_steps_are_reported() {
        let mut tally = Tally::default();
        for (object, step, result, detail) in [
            ("a", "mig", Outcome::Started, ""),
            ("a", "mig", Outcome::Failed, "no such profile"),
            ("a", "clocks", Outcome::Started, ""),
            ("b", "mig", Outcome::Started, ""),
            ("b", "mig", Outcome::Done, "on"),
            ("b", "power-limit", Outcome::Started, ""),
            ("b", "power-limit", Outcome::Unchanged, "700 W"),
        ] {
            tally.take(&line(object, step, result, detail));
        }
        assert_eq!(tally.complaints(), ["a: mig: no such profile", "a: clocks has begun and not ended"]);
        assert_eq!((tally.failure_of("a"), tally.failure_of("b")), (Some("no such profile"), None));
        assert_eq!((tally.is_divided("a"), tally.is_divided("b")), (false, true));
        assert_eq!(tally.words(), "1 done, 1 as they were");
    }

    #[test]
    fn missing_program_is_reported_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let text = missing(&Root::at(dir.path())).unwrap();
        assert_eq!(text, "/usr/bin/firstlight-gpu-settings is not in the image; add it");
        std::fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        std::fs::write(dir.path().join("usr/bin/firstlight-gpu-settings"), "").unwrap();
        assert_eq!(missing(&Root::at(dir.path())), None);
    }

    proptest! {
        #[test]
        fn arbitrary_output_does_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..20_000)) {
            let (mut ear, mut out) = (OutputParser::default(), Vec::new());
            ear.feed(&bytes, &mut out);
            ear.end(&mut out);
            for said in out {
                let OutputLine::Text(words) = said else { continue };
                prop_assert!(!words.chars().any(char::is_control));
            }
        }
    }
}
