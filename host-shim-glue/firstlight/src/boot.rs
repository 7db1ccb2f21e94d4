//! Boots a guest without a container, until PID 1 reports the end of its boot.

use std::path::Path;
use std::time::Duration;

use firstlight_boot_record::{BootRecord, State};
use firstlight_vm::{Machine, Vm, VmError};
use tokio::time::timeout;

/// How a boot ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// PID 1 reported the end of the boot; the record has its state.
    Reported,
    /// The guest exited before that.
    Exited,
    /// PID 1 did not report it within this time.
    TimedOut(Duration),
}

/// A boot.
#[derive(Debug, Clone)]
pub struct BootReport {
    /// The boot record, as far as the console has it; `None` if PID 1 printed nothing.
    pub record: Option<BootRecord>,
    /// How the boot ended.
    pub end: End,
    /// Time from QEMU's start to that end.
    pub uptime: Duration,
    /// The end of the console.
    pub console_tail: String,
}

impl BootReport {
    /// Returns whether every unit of the boot succeeded.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.end == End::Reported && self.record.as_ref().is_some_and(|record| record.state == State::Ready)
    }

    /// Returns why the boot failed; `None` if PID 1 reported its end without a fatal failure, be it degraded.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let tail = || format!("end of the console:\n{}", self.console_tail);
        match (self.end, &self.record) {
            (End::Reported, Some(record)) => {
                let failure = record.failure.as_ref();
                failure.map(|failure| format!("boot failed in {}: {}", failure.unit, failure.detail))
            }
            (End::TimedOut(limit), record) => {
                let what = if record.is_some() { "the boot did not end" } else { "PID 1 printed nothing" };
                Some(format!("{what} within {} s (--deadline boot=SECONDS); {}", limit.as_secs(), tail()))
            }
            (End::Reported | End::Exited, _) => {
                Some(format!("the guest exited {} ms after its start; {}", self.uptime.as_millis(), tail()))
            }
        }
    }
}

/// Boots the machine, and stops it when PID 1 has reported the end of its boot, or after `limit`.
///
/// # Errors
/// QEMU or a daemon that it needs did not start. A boot that fails is not an error but a report.
pub async fn boot(machine: &Machine, limit: Duration, console_log: &Path) -> Result<BootReport, VmError> {
    let dir = tempfile::Builder::new().prefix("firstlight-boot-").tempdir();
    let dir = dir.map_err(|source| VmError::File { path: std::env::temp_dir(), source })?;
    let mut vm = Vm::start(machine, dir.path(), console_log).await?;
    let end = match timeout(limit, vm.console().wait_for(is_complete)).await {
        Ok(true) => End::Reported,
        Ok(false) => End::Exited,
        Err(_) => End::TimedOut(limit),
    };
    let uptime = vm.uptime();
    if end == End::Exited {
        // QEMU's own error messages are complete when it has exited.
        vm.wait().await?;
    }
    let report = BootReport { record: vm.console().record(), end, uptime, console_tail: vm.console_tail() };
    vm.stop().await;
    Ok(report)
}

/// Returns whether PID 1 has reported the end of its boot, and why it failed, which is on a later line.
fn is_complete(record: &BootRecord) -> bool {
    match record.state {
        State::Booting => false,
        State::Failed => record.failure.is_some(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::Failure;

    fn report(end: End, state: Option<State>) -> BootReport {
        let record = state.map(|state| BootRecord { state, ..BootRecord::new("1", 1) });
        BootReport { record, end, uptime: Duration::from_millis(1234), console_tail: "  panic!".into() }
    }

    #[test]
    fn failed_boot_is_complete_only_with_its_cause() {
        let mut record = BootRecord::new("1", 1);
        assert!(!is_complete(&record));
        record.state = State::Failed;
        assert!(!is_complete(&record));
        let failure = Failure { unit: "x".into(), at_us: 1, detail: "y".into(), action: "poweroff".into() };
        record.failure = Some(failure);
        assert!(is_complete(&record));
        assert!(is_complete(&BootRecord { state: State::Degraded, ..BootRecord::new("1", 1) }));
    }

    #[test]
    fn failure_has_cause_time_and_console() {
        let ready = report(End::Reported, Some(State::Ready));
        assert!(ready.is_ready() && ready.failure().is_none());
        let degraded = report(End::Reported, Some(State::Degraded));
        assert!(!degraded.is_ready() && degraded.failure().is_none());
        let limit = Duration::from_secs(7);
        let rows = [
            (report(End::Exited, Some(State::Ready)), "exited 1234 ms"),
            (report(End::Exited, None), "panic!"),
            (report(End::Reported, None), "exited 1234 ms"),
            (report(End::TimedOut(limit), None), "PID 1 printed nothing within 7 s (--deadline boot=SECONDS)"),
            (report(End::TimedOut(limit), Some(State::Booting)), "did not end within 7 s"),
        ];
        for (report, expected) in rows {
            let text = report.failure().unwrap();
            assert!(text.contains(expected) && !report.is_ready(), "{text}");
        }
        let mut failed = report(End::Reported, Some(State::Failed));
        let failure =
            Failure { unit: "mounts".into(), at_us: 1, detail: "no /proc".into(), action: "power off".into() };
        failed.record.as_mut().unwrap().failure = Some(failure);
        assert_eq!(failed.failure().unwrap(), "boot failed in mounts: no /proc");
    }
}
