//! A record put together from console lines.

use crate::{BootRecord, Line};

/// Collects lines into a record. The console of a machine that died is enough
/// to know how far it came; units that never ended are simply not in it.
#[derive(Debug, Clone, Default)]
pub struct Assembler {
    record: Option<BootRecord>,
    broken: usize,
}

impl Assembler {
    /// Nothing seen yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes one console line. A second `Boot` line (a reboot) starts over.
    pub fn feed(&mut self, text: &str) {
        match Line::decode(text) {
            None => {}
            Some(Ok(line)) => self.take(line),
            Some(Err(_)) => self.broken += 1,
        }
    }

    fn take(&mut self, line: Line) {
        if let Line::Boot { init_version, kernel, pid1_start_us } = line {
            let mut record = BootRecord::new(&init_version, pid1_start_us);
            record.kernel.release = kernel;
            self.record = Some(record);
            return;
        }
        let Some(record) = self.record.as_mut() else {
            self.broken += 1;
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

    /// The record so far; `None` before PID 1's first line.
    #[must_use]
    pub fn record(&self) -> Option<&BootRecord> {
        self.record.as_ref()
    }

    /// Lines that carried the prefix and could not be used.
    #[must_use]
    pub fn broken(&self) -> usize {
        self.broken
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
    fn the_last_line_about_a_unit_counts() {
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
        assert_eq!(assembler.broken(), 1);
    }

    #[test]
    fn nothing_before_the_boot_line() {
        let mut assembler = Assembler::new();
        assembler.feed(&Line::State(State::Ready).encode().unwrap());
        assert!(assembler.record().is_none());
        assert_eq!(assembler.broken(), 1);
    }
}
