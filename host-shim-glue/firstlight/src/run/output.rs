//! Output of a run: files, and text for the terminal.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use firstlight_boot_profile::{svg, table};
use firstlight_boot_record::BootRecord;

use super::{Report, RunError};

/// The output files of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outputs {
    /// Directory of `boot-record.json`, `boot.svg` and `console.log`.
    pub dir: PathBuf,
    /// Path of the report as JSON, if requested.
    pub json: Option<PathBuf>,
}

impl Outputs {
    /// Returns the path of the console's log.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    /// Creates the directory.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn prepare(&self) -> Result<(), RunError> {
        fs::create_dir_all(&self.dir).map_err(|source| RunError::File { path: self.dir.clone(), source })
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

/// Formats the report as text: container, boot table, resident memory.
#[must_use]
pub fn print(report: &Report) -> String {
    let mut text = String::new();
    let container = &report.container;
    for line in container.stdout.lines() {
        let _ = writeln!(text, "  | {}", sanitize(line));
    }
    for line in container.stderr.lines() {
        let _ = writeln!(text, "  ! {}", sanitize(line));
    }
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
    let _ = writeln!(text, "\n{}", table(&report.boot_record));
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
    text
}

/// Removes control characters: container output is untrusted input to the terminal.
fn sanitize(line: &str) -> String {
    line.chars().filter(|c| !c.is_control() || *c == '\t').collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::report::{Container, HostTimes};

    #[test]
    fn files_and_text_contain_the_report() {
        let dir = tempfile::tempdir().unwrap();
        let outputs = Outputs { dir: dir.path().join("a/b"), json: Some(dir.path().join("r.json")) };
        outputs.prepare().unwrap();
        let container = Container {
            exit_code: Some(0),
            stdout: "hi \x1b[31mred\n".into(),
            denied_open: Some(true),
            ..Container::default()
        };
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
        let text = print(&report);
        assert!(text.contains("  | hi [31mred\n") && text.contains("exit code 0"), "{text}");
    }
}
