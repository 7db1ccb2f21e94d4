//! Output of a run: files, and text for the terminal.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use firstlight_boot_profile::{TableOptions, svg, table};
use firstlight_boot_record::{Assembler, BootRecord, ReadError};

use super::progress::sanitize;
use super::report::problems;
use super::{Report, RunError};

/// The output files of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outputs {
    /// Directory of `boot-record.json`, `boot.svg` and `console.log`.
    pub dir: PathBuf,
    /// Path of the report as JSON, if requested.
    pub json: Option<PathBuf>,
}

/// Held while a run writes its files; another run is refused the directory.
#[derive(Debug)]
pub struct OutputsLock(#[expect(dead_code, reason = "closing the file unlocks it")] fs::File);

/// The files in the directory.
const OUTPUT_FILES: &[&str] = &["boot-record.json", "boot.svg", "console.log"];

/// Opens the file for writing as it is, and removes it if it did not exist.
fn check_writable(path: &Path) -> std::io::Result<()> {
    let existed = path.exists();
    fs::OpenOptions::new().append(true).create(true).open(path)?;
    if existed { Ok(()) } else { fs::remove_file(path) }
}

/// Parses a boot record: `boot-record.json`, the report of `run --json`, or the console's log of a guest.
///
/// # Errors
/// The text is none of these.
pub fn parse_record(text: &str) -> Result<BootRecord, ReadError> {
    match serde_json::from_str::<serde_json::Value>(text) {
        Ok(value) => {
            let record = value.get("boot_record").unwrap_or(&value);
            BootRecord::from_json(&record.to_string())
        }
        Err(error) => {
            let mut assembler = Assembler::new();
            text.lines().for_each(|line| assembler.feed(line.trim_end()));
            assembler.record().cloned().ok_or_else(|| error.into())
        }
    }
}

impl Outputs {
    /// Returns the path of the console's log.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    /// Creates the directory and checks that every file can be written, before anything boots.
    ///
    /// # Errors
    /// The directory cannot be created or written to, another run uses it, or the report cannot be written.
    pub fn prepare(&self) -> Result<OutputsLock, RunError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| RunError::File { path, source }
        };
        fs::create_dir_all(&self.dir).map_err(failed(&self.dir))?;
        let lock = self.dir.join(".lock");
        let file = fs::File::create(&lock).map_err(failed(&lock))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(RunError::Busy { dir: self.dir.clone() }),
            Err(fs::TryLockError::Error(source)) => return Err(failed(&lock)(source)),
        }
        for path in OUTPUT_FILES.iter().map(|name| self.dir.join(name)).chain(self.json.clone()) {
            check_writable(&path).map_err(failed(&path))?;
        }
        Ok(OutputsLock(file))
    }

    /// Writes a boot record, complete or partial, and its SVG.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write_record(&self, record: &BootRecord) -> Result<(), RunError> {
        write_json(&self.dir.join("boot-record.json"), record)?;
        let path = self.dir.join("boot.svg");
        fs::write(&path, svg(record)).map_err(|source| RunError::File { path, source })
    }

    /// Writes what is known of a failed run's boot; returns the text for the terminal.
    #[must_use]
    pub fn failed(&self, error: &RunError) -> String {
        error.record().map(|record| self.partial(record)).unwrap_or_default()
    }

    /// Writes what the console has of an interrupted run's boot; returns the text for the terminal.
    #[must_use]
    pub fn interrupted(&self) -> String {
        let text = fs::read(self.console_log()).unwrap_or_default();
        let record = parse_record(&String::from_utf8_lossy(&text)).ok();
        record.map(|record| self.partial(&record)).unwrap_or_default()
    }

    fn partial(&self, record: &BootRecord) -> String {
        let written = self.write_record(record).map_or_else(|error| error.to_string(), |()| self.written());
        format!("{}\n{written}\n", table(record, TableOptions::stdout(false)))
    }

    /// Names the files.
    #[must_use]
    pub fn written(&self) -> String {
        let files: Vec<String> = OUTPUT_FILES.iter().map(|name| self.dir.join(name).display().to_string()).collect();
        format!("written: {}", files.join(" "))
    }

    /// Writes all files.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, report: &Report) -> Result<(), RunError> {
        self.write_record(&report.boot_record)?;
        self.json.as_ref().map_or(Ok(()), |path| write_json(path, report))
    }
}

fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> Result<(), RunError> {
    let file = |source| RunError::File { path: path.to_owned(), source };
    let mut text = serde_json::to_string_pretty(value).map_err(|error| file(error.into()))?;
    text.push('\n');
    fs::write(path, text).map_err(file)
}

/// Formats the report as text: exit code, boot table, resident memory. The container's output was reported as
/// [`Progress`](super::Progress).
#[must_use]
pub fn print(report: &Report, options: TableOptions) -> String {
    let mut text = String::new();
    let container = &report.container;
    match (container.exit_code, &container.error) {
        (_, Some(error)) => drop(writeln!(text, "container: failed to run: {error}")),
        (Some(code), None) => drop(writeln!(text, "container: exit code {code}")),
        (None, None) => text.push_str("container: no exit code\n"),
    }
    match container.denied_open {
        Some(true) => text.push_str("device cgroup: access to every GPU that was not requested was denied\n"),
        Some(false) => text.push_str("device cgroup: FAILED: opened and requested GPUs differ, see above\n"),
        None => {}
    }
    let _ = writeln!(text, "\n{}", table(&report.boot_record, options));
    let resident: Vec<_> = report.resident().map(|(process, size)| format!("{process} {size}")).collect();
    if !resident.is_empty() {
        let _ = writeln!(text, "resident: {}", resident.join(", "));
    }
    let host = &report.host;
    let _ = writeln!(
        text,
        "host: first Check reply {} ms, QEMU's exit {} ms after QEMU's start",
        host.first_check_us / 1000,
        host.qemu_exit_us / 1000
    );
    let problems = problems(&report.boot_record);
    if !problems.is_empty() {
        let _ = writeln!(text, "degraded: {} problems", problems.len());
        for problem in &problems {
            let _ = writeln!(text, "  - {}", sanitize(problem));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use firstlight_boot_record::{Line, Outcome, Unit};

    use super::*;
    use crate::run::report::{Container, HostTimes};

    fn unit(name: &str, outcome: Outcome, detail: &str) -> Unit {
        let text = format!(
            r#"{{"name":"{name}","need":[],"severity":"optional","deadline_us":1,"outcome":"{}","detail":"{detail}"}}"#,
            outcome.as_str()
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn files_and_text_contain_the_report() {
        let dir = tempfile::tempdir().unwrap();
        let outputs = Outputs { dir: dir.path().join("a/b"), json: Some(dir.path().join("r.json")) };
        let lock = outputs.prepare().unwrap();
        assert!(matches!(outputs.prepare(), Err(RunError::Busy { .. })));
        drop(lock);
        let container = Container { exit_code: Some(0), denied_open: Some(true), ..Container::default() };
        let report = Report::new(BootRecord::new("1", 7), container, "c", HostTimes::default());
        outputs.write(&report).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&fs::read(dir.path().join("r.json")).unwrap()).unwrap();
        assert_eq!(json["container"]["denied_open"], true);
        assert_eq!(json["timeline"]["pid1_start_us"], 7);
        assert_eq!(json["timeline"]["all_gpus_ready_us"], serde_json::Value::Null);
        assert_eq!(json["boot_record"]["schema"], firstlight_boot_record::SCHEMA);
        let record = fs::read_to_string(outputs.dir.join("boot-record.json")).unwrap();
        assert!(BootRecord::from_json(&record).is_ok());
        assert!(fs::read_to_string(outputs.dir.join("boot.svg")).unwrap().starts_with("<svg"));
        let text = print(&report, TableOptions::default());
        assert!(text.contains("exit code 0"), "{text}");
    }

    #[test]
    fn file_that_cannot_be_written_is_found_before_the_boot() {
        let dir = tempfile::tempdir().unwrap();
        let json = dir.path().join("report.json");
        let outputs = Outputs { dir: dir.path().join("out"), json: Some(json.clone()) };
        drop(outputs.prepare().unwrap());
        assert!(!json.exists(), "nothing is left of the check");
        fs::create_dir(&json).unwrap();
        let error = outputs.prepare().unwrap_err().to_string();
        assert!(error.contains("report.json") && error.contains("directory"), "{error}");
        let nowhere = Outputs { dir: dir.path().join("out"), json: Some(dir.path().join("none/report.json")) };
        assert!(nowhere.prepare().unwrap_err().to_string().contains("none/report.json"));
    }

    #[test]
    fn record_is_parsed_from_record_report_and_console() {
        let mut record = BootRecord::new("1", 7);
        record.kernel.release = "6.12".into();
        let json = serde_json::to_string(&record).unwrap();
        assert_eq!(parse_record(&json).unwrap(), record);
        assert_eq!(parse_record(&format!("{{\"boot_record\":{json},\"container\":{{}}}}")).unwrap(), record);
        let line = Line::Boot { init_version: "1".into(), kernel: "6.12".into(), pid1_start_us: 7 }.encode().unwrap();
        assert_eq!(parse_record(&format!("SeaBIOS\r\n{line}\r\n[ 1.0] Kernel panic\r\n")).unwrap(), record);
        assert!(parse_record("SeaBIOS\n").is_err());
    }

    #[test]
    fn degraded_boot_is_reported_after_everything_else() {
        let mut record = BootRecord::new("1", 7);
        assert!(
            !print(
                &Report::new(record.clone(), Container::default(), "c", HostTimes::default()),
                TableOptions::default()
            )
            .contains("degraded")
        );
        record.units.push(unit("cmdline", Outcome::Failed, "unknown parameter firstlight.atach"));
        record.units.push(unit("late", Outcome::TimedOut, "deadline of 2000 ms"));
        record.units.push(unit("fine", Outcome::Ok, ""));
        let report = Report::new(record, Container::default(), "c", HostTimes::default());
        let text = print(&report, TableOptions::default());
        let end = "degraded: 2 problems\n  - unit cmdline failed: unknown parameter firstlight.atach\n  - unit late timed-out: deadline of 2000 ms\n";
        assert!(text.ends_with(end), "{text}");
    }
}
