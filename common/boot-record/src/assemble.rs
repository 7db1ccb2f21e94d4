//! Reassembles a boot record from console lines.

use crate::{BootRecord, Line};

/// Reassembles a boot record from console lines, which survive a guest that
/// died. Units that never ended are missing from it.
#[derive(Debug, Clone, Default)]
pub struct Assembler {
    record: Option<BootRecord>,
    malformed: usize,
}

impl Assembler {
    /// Returns an assembler without a record.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Processes one console line. A second `Boot` line (a reboot) starts a new record.
    pub fn feed(&mut self, text: &str) {
        match Line::decode(text) {
            None => {}
            Some(Ok(line)) => self.apply(line),
            Some(Err(_)) => self.malformed += 1,
        }
    }

    fn apply(&mut self, line: Line) {
        if let Line::Boot { init_version, kernel, pid1_start_us } = line {
            let mut record = BootRecord::new(&init_version, pid1_start_us);
            record.kernel.release = kernel;
            self.record = Some(record);
            return;
        }
        let Some(record) = self.record.as_mut() else {
            self.malformed += 1;
            return;
        };
        match line {
            Line::Boot { .. } => {}
            Line::State(state) => record.state = state,
            Line::Mode(mode) => record.mode = Some(mode),
            Line::Event(event) => record.events.push(event),
            Line::Failure(failure) => record.failure = Some(failure),
            Line::Unit(unit) => match record.units.iter_mut().find(|known| known.name == unit.name) {
                Some(known) => *known = unit,
                None => record.units.push(unit),
            },
            Line::Gpu(gpu) => match record.gpus.iter_mut().find(|known| known.pci == gpu.pci) {
                Some(known) => *known = gpu,
                None => record.gpus.push(gpu),
            },
        }
    }

    /// Returns the record so far; `None` before PID 1's first line.
    #[must_use]
    pub fn record(&self) -> Option<&BootRecord> {
        self.record.as_ref()
    }

    /// Returns the number of lines that have the prefix and could not be parsed.
    #[must_use]
    pub fn malformed_lines(&self) -> usize {
        self.malformed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Event, Outcome, Severity, State, Unit};

    fn unit(outcome: Outcome) -> Unit {
        Unit {
            name: "mounts".into(),
            need: vec![],
            severity: Severity::Required,
            deadline_us: 1,
            start_us: Some(1),
            ready_us: None,
            end_us: None,
            processor_us: None,
            outcome,
            detail: String::new(),
            pci: None,
        }
    }

    #[test]
    fn last_line_of_a_unit_wins() {
        let mut assembler = Assembler::new();
        let lines = [
            Line::Boot { init_version: "1".into(), kernel: "6.12".into(), pid1_start_us: 9 },
            Line::Unit(unit(Outcome::Running)),
            Line::Unit(unit(Outcome::Ok)),
            Line::State(State::Ready),
            Line::Event(Event { at_us: 7, kind: "power-off".into(), object: String::new(), detail: String::new() }),
        ];
        assembler.feed("Linux version ...");
        for line in lines {
            assembler.feed(&line.encode().unwrap());
        }
        assembler.feed("firstlight/1 {\"unit\":{");
        let record = assembler.record().unwrap();
        assert_eq!(record.units, [unit(Outcome::Ok)]);
        assert_eq!(record.state, State::Ready);
        assert_eq!(record.event("power-off").unwrap().at_us, 7);
        assert_eq!(assembler.malformed_lines(), 1);
    }

    #[test]
    fn lines_before_the_boot_line_are_malformed() {
        let mut assembler = Assembler::new();
        assembler.feed(&Line::State(State::Ready).encode().unwrap());
        assert!(assembler.record().is_none());
        assert_eq!(assembler.malformed_lines(), 1);
    }
}
