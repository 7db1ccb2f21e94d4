//! The report of a run.

use std::time::Duration;

use firstlight_boot_record::{BootRecord, GpuPhase, Outcome};
use firstlight_pci::Address;
use serde::Serialize;

/// The report of one run; `--json` writes it to a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The container.
    pub container: Container,
    /// Every GPU of the guest.
    pub gpus: Vec<GpuReport>,
    /// Milestones, µs of the guest's `CLOCK_BOOTTIME`.
    pub timeline: Timeline,
    /// Times by the host's clock.
    pub host: HostTimes,
    /// The boot record.
    pub boot_record: BootRecord,
}

/// The result of the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Container {
    /// Its exit code; absent if it was not started.
    pub exit_code: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
    /// Whether access to every GPU that was not requested was denied and every
    /// requested one opened; absent if the command did not probe.
    pub denied_open: Option<bool>,
    /// Why it failed to run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether it failed to run because its command does not exist.
    pub command_not_found: bool,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuReport {
    /// Its address.
    pub pci: Address,
    /// Duration from its first open to the driver's result, µs.
    pub attach_us: Option<u64>,
    /// `ready`, `failed`, `timed-out`, `attaching`, `found`, `removed`.
    pub outcome: &'static str,
    /// Why it is not ready.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// Milestones of a run, µs since the kernel's start; absent if not reached.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Timeline {
    /// Start of the kernel; zero by definition of the clock.
    pub kernel_start_us: u64,
    /// Start of PID 1's `main`.
    pub pid1_start_us: u64,
    /// The agent's server accepted connections.
    pub agent_listening_us: Option<u64>,
    /// The first GPU was ready.
    pub first_gpu_ready_us: Option<u64>,
    /// Every GPU was ready.
    pub all_gpus_ready_us: Option<u64>,
    /// The container's process was started.
    pub container_started_us: Option<u64>,
    /// The container exited.
    pub container_exited_us: Option<u64>,
    /// PID 1's last event, logged right before power-off.
    pub power_off_us: Option<u64>,
}

/// Times by the host's clock, µs from QEMU's start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HostTimes {
    /// The agent answered its first Check.
    pub first_check_us: u64,
    /// QEMU exited.
    pub qemu_exit_us: u64,
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl Timeline {
    fn of(record: &BootRecord, container: &str) -> Self {
        let event = |kind: &str| record.event(kind).map(|event| event.at_us);
        let of_container =
            |kind: &str| record.events.iter().find(|e| e.kind == kind && e.object == container).map(|e| e.at_us);
        let ready: Vec<_> = record.gpus.iter().filter(|g| g.phase == GpuPhase::Ready).map(|g| g.end_us).collect();
        let all_ready = !record.gpus.is_empty() && ready.len() == record.gpus.len();
        Self {
            kernel_start_us: 0,
            pid1_start_us: record.pid1_start_us,
            agent_listening_us: record.unit("agent").and_then(|unit| unit.ready_us).or(event("agent-listening")),
            first_gpu_ready_us: ready.iter().copied().flatten().min(),
            all_gpus_ready_us: if all_ready { ready.iter().copied().flatten().max() } else { None },
            container_started_us: of_container("container-started"),
            container_exited_us: of_container("container-exited"),
            power_off_us: event("power-off"),
        }
    }
}

impl Report {
    /// Builds a report from the boot record and the run's own results.
    #[must_use]
    pub fn new(record: BootRecord, container: Container, id: &str, host: HostTimes) -> Self {
        let gpus = record.gpus.iter().map(|gpu| GpuReport {
            pci: gpu.pci,
            attach_us: gpu.attach_us,
            outcome: gpu.phase.as_str(),
            detail: gpu.detail.clone(),
        });
        Self { gpus: gpus.collect(), timeline: Timeline::of(&record, id), container, host, boot_record: record }
    }

    /// Iterates over resident memory as reported by the guest: process and size, e.g. `init`, `1800 KiB`.
    pub fn resident(&self) -> impl Iterator<Item = (&str, &str)> {
        let events = self.boot_record.events.iter().filter(|event| event.kind == "resident");
        events.map(|event| (event.object.as_str(), event.detail.as_str()))
    }

    /// Returns the exit code for the shell: the container's own, 127 if its command does not exist, 125 if it was not
    /// started, 1 if it could open a GPU that it had not requested; with `fail_on_degraded` 3 instead of 0 if a unit or
    /// GPU failed.
    #[must_use]
    pub fn exit_code(&self, fail_on_degraded: bool) -> u8 {
        match (&self.container.error, self.container.exit_code) {
            _ if self.container.command_not_found => COMMAND_NOT_FOUND,
            (Some(_), _) | (None, None) => NOT_STARTED,
            (None, Some(0)) if self.container.denied_open == Some(false) => 1,
            (None, Some(0)) if fail_on_degraded && !problems(&self.boot_record).is_empty() => DEGRADED,
            (None, Some(code)) => u8::try_from(code & 0xff).unwrap_or(1),
        }
    }

    /// Returns whether the container ran, exited with 0, and was denied every GPU that it did not request.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        self.container.error.is_none()
            && self.container.exit_code == Some(0)
            && self.container.denied_open != Some(false)
    }
}

/// Returns what went wrong in a boot that went on: units and GPUs that failed, one line each.
#[must_use]
pub fn problems(record: &BootRecord) -> Vec<String> {
    // A failed attach is in the GPU's row, with more detail.
    let units = record.units.iter().filter(|unit| unit.pci.is_none());
    let units = units.filter(|unit| matches!(unit.outcome, Outcome::Failed | Outcome::TimedOut));
    let units = units.map(|unit| format!("unit {} {}: {}", unit.name, unit.outcome.as_str(), unit.detail));
    let gpus = record.gpus.iter().filter(|gpu| matches!(gpu.phase, GpuPhase::Failed | GpuPhase::TimedOut));
    let gpus = gpus.map(|gpu| format!("GPU {} {} in {}: {}", gpu.pci, gpu.phase.as_str(), gpu.step, gpu.detail));
    units.chain(gpus).collect()
}

/// Exit code of a run whose container could not be started, as of `docker run`.
const NOT_STARTED: u8 = 125;

/// Exit code of a degraded boot, where that was requested.
const DEGRADED: u8 = 3;

/// Exit code where the container's command does not exist, as of a shell.
const COMMAND_NOT_FOUND: u8 = 127;

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::{Event, Gpu};

    fn gpu(at: &str, phase: GpuPhase, end_us: u64) -> Gpu {
        Gpu {
            pci: at.parse().unwrap(),
            index: 0,
            device_id: 0x2330,
            minor: Some(0),
            phase,
            step: "cdi".into(),
            attempts: 1,
            start_us: Some(1),
            end_us: Some(end_us),
            attach_us: Some(7),
            driver: None,
            detail: String::new(),
        }
    }

    #[test]
    fn all_gpus_ready_needs_every_gpu() {
        let mut record = BootRecord::new("1", 10);
        record.gpus = vec![gpu("0000:01:00.0", GpuPhase::Ready, 50), gpu("0000:02:00.0", GpuPhase::Ready, 40)];
        let event = |kind: &str, object: &str, at_us| Event {
            at_us,
            kind: kind.into(),
            object: object.into(),
            detail: String::new(),
        };
        record.events = vec![
            event("container-started", "other", 1),
            event("container-started", "c", 60),
            event("power-off", "", 90),
        ];
        let timeline = Timeline::of(&record, "c");
        assert_eq!((timeline.first_gpu_ready_us, timeline.all_gpus_ready_us), (Some(40), Some(50)));
        assert_eq!(
            (timeline.container_started_us, timeline.container_exited_us, timeline.power_off_us),
            (Some(60), None, Some(90))
        );
        record.gpus[0].phase = GpuPhase::Failed;
        let timeline = Timeline::of(&record, "c");
        assert_eq!((timeline.first_gpu_ready_us, timeline.all_gpus_ready_us), (Some(40), None));
    }

    #[test]
    fn success_needs_no_error_exit_code_0_and_denied_opens() {
        let record = BootRecord::new("1", 10);
        let good = Container { exit_code: Some(0), denied_open: Some(true), ..Container::default() };
        let report = |container: &Container| Report::new(record.clone(), container.clone(), "c", HostTimes::default());
        assert!(report(&good).succeeded());
        assert!(report(&Container { denied_open: None, ..good.clone() }).succeeded());
        assert!(!report(&Container { denied_open: Some(false), ..good.clone() }).succeeded());
        assert!(!report(&Container { exit_code: Some(3), ..good.clone() }).succeeded());
        assert!(!report(&Container { exit_code: None, ..good.clone() }).succeeded());
        assert!(!report(&Container { error: Some("x".into()), ..good }).succeeded());
    }

    #[test]
    fn exit_code_is_the_containers_or_says_why_there_is_none() {
        let code = |exit_code, error: Option<&str>, denied_open| {
            let error = error.map(str::to_owned);
            let container = Container { exit_code, error, denied_open, ..Container::default() };
            Report::new(BootRecord::new("1", 10), container, "c", HostTimes::default()).exit_code(false)
        };
        assert_eq!(
            (code(Some(0), None, None), code(Some(0), None, Some(true)), code(Some(42), None, None)),
            (0, 0, 42)
        );
        assert_eq!(code(Some(0), None, Some(false)), 1);
        let absent = Container { error: Some("x".into()), command_not_found: true, ..Container::default() };
        assert_eq!(Report::new(BootRecord::new("1", 10), absent, "c", HostTimes::default()).exit_code(false), 127);
        assert_eq!((code(None, Some("no GPU 7"), None), code(None, None, None)), (125, 125));
        assert_eq!(code(Some(128 + 9), None, None), 137);

        let mut record = BootRecord::new("1", 10);
        let container = |code| Container { exit_code: Some(code), ..Container::default() };
        let report =
            |record: &BootRecord, code| Report::new(record.clone(), container(code), "c", HostTimes::default());
        assert_eq!(report(&record, 0).exit_code(true), 0);
        record.gpus = vec![gpu("0000:01:00.0", GpuPhase::Failed, 50)];
        assert_eq!((report(&record, 0).exit_code(true), report(&record, 0).exit_code(false)), (3, 0));
        assert_eq!(report(&record, 42).exit_code(true), 42, "the container's own code wins");
    }
}
