//! The owner of the boot record: writes every change to the document and to the console.

use std::path::PathBuf;
use std::time::Duration;

use firstlight_boot_record::{BootRecord, Event, Failure, Gpu, Line, LogLine, Milestone, Mode, Outcome, State, Unit};

use crate::cdi::write_whole;
use crate::console::Console;
use crate::executor::Slot;
use crate::root::Root;
use crate::unit_id::UnitId;

/// Number of events that are kept from the start of the boot; beyond them only the newest are kept.
const FIRST_EVENTS: usize = 200;
const MOST_EVENTS: usize = 1000;

/// Maximum length of a client's text in an event, bytes.
const MOST_TEXT: usize = 1024;

/// Truncates a text at a character boundary.
#[must_use]
pub fn cut(mut text: String) -> String {
    if text.len() > MOST_TEXT {
        let end = (0..=MOST_TEXT).rev().find(|at| text.is_char_boundary(*at)).unwrap_or_default();
        text.truncate(end);
    }
    text
}

/// Maximum delay of console lines after PID 1's start, µs. Each line keeps a processor busy in the
/// kernel until the host has received it, so lines are queued until the agent listens; but a boot
/// that hangs before that has to be visible.
const CONSOLE_DELAY_US: u64 = 250_000;

/// The boot record, its file and the console.
#[derive(Debug)]
pub struct Recorder {
    record: BootRecord,
    /// The ids of the record's units, in the record's order.
    units: Vec<UnitId>,
    console: Console,
    file: PathBuf,
}

impl Recorder {
    /// Creates a record that starts now.
    #[must_use]
    pub fn new(root: &Root, kernel: &str, pid1_start_us: u64) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        let mut record = BootRecord::new(version, pid1_start_us);
        kernel.clone_into(&mut record.kernel.release);
        let file = root.path(firstlight_init_control::RECORD);
        let mut recorder = Self { record, units: Vec::new(), console: Console::new(), file };
        let (init_version, kernel) = (version.to_owned(), kernel.to_owned());
        recorder.print(&Line::Boot { init_version, kernel, pid1_start_us });
        recorder
    }

    /// Returns the document.
    #[must_use]
    pub fn record(&self) -> &BootRecord {
        &self.record
    }

    /// Starts writing to the console.
    pub fn start_console(&mut self) {
        self.console.start();
    }

    /// Returns the time at which the console has to be started at the latest, µs; `None` once it is
    /// started.
    #[must_use]
    pub fn console_due(&self) -> Option<u64> {
        (!self.console.is_started()).then(|| self.record.pid1_start_us.saturating_add(CONSOLE_DELAY_US))
    }

    fn print(&mut self, line: &Line) {
        // Encoding these types does not fail.
        if let Ok(text) = line.encode() {
            self.console.line(text);
        }
    }

    /// Writes a line of text to the console that is not part of the record.
    pub fn sentence(&mut self, text: &str) {
        self.console.line(format!("firstlight: {text}"));
    }

    /// Writes a log line of another source, after the queued lines of the record.
    pub fn log(&mut self, line: &LogLine) {
        self.console.log(line.encode());
    }

    /// Sets the kernel command line, known once `/proc` is mounted.
    pub fn command_line(&mut self, text: &str) {
        text.trim_end().clone_into(&mut self.record.kernel.command_line);
    }

    /// Sets the kernel's milestones.
    pub fn milestones(&mut self, milestones: &[Milestone]) {
        self.record.kernel.milestones = milestones.to_vec();
    }

    /// Sets the state of the boot.
    pub fn state(&mut self, state: State) {
        if self.record.state != state {
            self.record.state = state;
            self.print(&Line::State(state));
        }
    }

    /// Sets the guest mode.
    pub fn mode(&mut self, mode: Mode) {
        self.record.mode = Some(mode.clone());
        self.print(&Line::Mode(mode));
    }

    /// Adds or replaces a unit's row; a new row is inserted before the unit `before`. Only the end
    /// of a unit is written to the console.
    pub fn unit(&mut self, id: UnitId, unit: Unit, before: Option<UnitId>) {
        if unit.outcome.ended() {
            self.print(&Line::Unit(unit.clone()));
        }
        let place = |id| self.units.iter().position(|known| *known == id);
        if let Some(known) = place(id).and_then(|at| self.record.units.get_mut(at)) {
            *known = unit;
            return;
        }
        let at = before.and_then(place).unwrap_or(self.units.len());
        self.units.insert(at, id);
        self.record.units.insert(at, unit);
    }

    /// Adds or replaces a GPU's row and writes it to the console.
    pub fn gpu(&mut self, gpu: Gpu) {
        self.print(&Line::Gpu(gpu.clone()));
        self.gpu_step(gpu);
    }

    /// Adds or replaces a GPU's row without a console line, for a change within a phase.
    pub fn gpu_step(&mut self, gpu: Gpu) {
        match self.record.gpus.iter_mut().find(|known| known.pci == gpu.pci) {
            Some(known) => *known = gpu,
            None => self.record.gpus.push(gpu),
        }
    }

    /// Adds an event.
    pub fn event(&mut self, at_us: u64, what: &str, object: &str, detail: &str) {
        let event = Event { at_us, kind: what.to_owned(), object: object.to_owned(), detail: detail.to_owned() };
        self.print(&Line::Event(event.clone()));
        self.append_event(event);
    }

    /// Adds an event that the host waits for: its console line precedes queued lines.
    pub fn urgent_event(&mut self, at_us: u64, what: &str, object: &str, detail: &str) {
        let event = Event { at_us, kind: what.to_owned(), object: object.to_owned(), detail: detail.to_owned() };
        if let Ok(text) = Line::Event(event.clone()).encode() {
            self.console.urgent(text);
        }
        self.append_event(event);
    }

    fn append_event(&mut self, event: Event) {
        if self.record.events.len() >= MOST_EVENTS {
            self.record.events.remove(FIRST_EVENTS);
        }
        self.record.events.push(event);
    }

    /// Sets the failure of a required unit.
    pub fn failure(&mut self, failure: Failure) {
        self.state(State::Failed);
        self.print(&Line::Failure(failure.clone()));
        self.sentence(&format!("boot failed: unit {}: {}; {}", failure.unit, failure.detail, failure.action));
        self.record.failure = Some(failure);
    }

    /// Writes the document to its file.
    ///
    /// # Errors
    /// The file could not be written; the text is for an event.
    pub fn save(&self) -> Result<(), String> {
        let text = serde_json::to_vec(&self.record).map_err(|error| error.to_string())?;
        write_whole(&self.file, &text).map_err(|error| error.to_string())
    }

    /// Returns the processor time spent on writing to the console, µs.
    #[must_use]
    pub fn console_us(&self) -> u64 {
        self.console.spent_us()
    }

    /// Waits until the console has written all lines, at most for `limit`.
    pub fn flush(&mut self, limit: Duration) {
        self.console.flush(limit);
    }
}

/// Returns the record's row of a unit. A service that succeeded is ready instead of ended.
#[must_use]
pub fn unit_of(slot: &Slot<UnitId>, slots: &[Slot<UnitId>]) -> Unit {
    let name = |index: &usize| slots.get(*index).map(|slot| slot.node.id.to_string()).unwrap_or_default();
    let ready = slot.node.id.is_service() && slot.outcome == Outcome::Ok;
    Unit {
        name: slot.node.id.to_string(),
        need: slot.node.needs.iter().map(name).collect(),
        severity: slot.node.severity,
        deadline_us: slot.node.deadline_us.unwrap_or_default(),
        start_us: slot.start_us,
        ready_us: slot.end_us.filter(|_| ready),
        end_us: slot.end_us.filter(|_| !ready),
        processor_us: None,
        outcome: slot.outcome,
        detail: slot.detail.clone(),
        pci: slot.node.id.gpu(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder() -> (tempfile::TempDir, Recorder) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("run/firstlight")).unwrap();
        let recorder = Recorder::new(&Root::at(dir.path()), "6.12", 7);
        (dir, recorder)
    }

    #[test]
    fn file_contains_the_record() {
        let (dir, mut recorder) = recorder();
        recorder.event(8, "x", "y", "z");
        recorder.command_line("quiet\n");
        recorder.save().unwrap();
        let text = std::fs::read_to_string(dir.path().join("run/firstlight/boot-record.json")).unwrap();
        let read = BootRecord::from_json(&text).unwrap();
        assert_eq!(&read, recorder.record());
        assert_eq!((read.kernel.command_line.as_str(), read.kernel.release.as_str()), ("quiet", "6.12"));
    }

    #[test]
    fn old_events_are_dropped_but_those_of_the_boot_are_kept() {
        let (_directory, mut recorder) = recorder();
        for n in 0..5000 {
            recorder.event(n, "container-started", "", "");
        }
        let events = &recorder.record().events;
        assert_eq!(events.len(), MOST_EVENTS);
        assert_eq!((events[FIRST_EVENTS - 1].at_us, events[MOST_EVENTS - 1].at_us), (199, 4999));
    }

    #[test]
    fn long_texts_are_truncated_at_character_boundaries() {
        assert_eq!(cut("ö".repeat(2000)).len(), MOST_TEXT);
        assert_eq!(cut(format!("a{}", "ö".repeat(2000))).len(), MOST_TEXT - 1);
        assert_eq!(cut("short".into()), "short");
    }
}
