//! Decides whether the requested GPUs are ready: a pure function of the state reported by PID 1.

use firstlight_boot_record::GpuPhase;
use firstlight_init_control::GpuState;
use firstlight_pci::Address;
use ttrpc::Code;

use super::{GpuSelector, View};
use crate::error::Error;

/// What CreateContainer does next.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// All requested GPUs are ready: these.
    Ready(Vec<GpuState>),
    /// At least one is not ready yet.
    Wait(Missing),
    /// A GPU failed, or PID 1 is unreachable.
    Fail(Error),
    /// PID 1 reports no such GPU.
    Unknown(Error),
}

/// What CreateContainer waits for.
#[derive(Debug, Clone, PartialEq)]
pub enum Missing {
    /// The PCI bus has not been scanned.
    Scan,
    /// This GPU, in its last reported state.
    Gpu(Box<GpuState>),
    /// A GPU that is on the bus and that PID 1 has not reported yet.
    Plugged(Address),
}

impl Missing {
    /// Describes it in one line.
    #[must_use]
    pub fn describe(&self, now_us: u64) -> String {
        match self {
            Self::Scan => "GPUs: the PCI bus has not been scanned yet".to_owned(),
            Self::Gpu(gpu) => describe(gpu, now_us),
            Self::Plugged(pci) => format!("GPU {pci} is on the PCI bus, and PID 1 has not started to attach it"),
        }
    }
}

/// Decides. A failed GPU fails at once the containers that request it, and no others.
#[must_use]
pub fn decide(view: &View, requested: &[GpuSelector]) -> Decision {
    if !view.scanned {
        return wait_or_fail(view, Missing::Scan);
    }
    let mut ready = Vec::<GpuState>::new();
    let mut missing = None;
    for which in requested {
        let gpus: Vec<&GpuState> = match which {
            // A name is resolved by the CDI file, which is complete when every GPU is ready or
            // failed.
            GpuSelector::Name(_) | GpuSelector::All => present(view).collect(),
            GpuSelector::Index(index) => present(view).filter(|gpu| gpu.index == *index).collect(),
            GpuSelector::Pci(address) => present(view).filter(|gpu| gpu.pci == *address).collect(),
        };
        if gpus.is_empty() {
            let error = unknown(view, which);
            return match wait_or_fail(view, Missing::Scan) {
                Decision::Wait(_) => Decision::Unknown(error),
                other => other,
            };
        }
        for gpu in gpus {
            let named = matches!(which, GpuSelector::Name(_));
            match gpu.phase {
                GpuPhase::Ready if !named && !ready.contains(gpu) => ready.push(gpu.clone()),
                GpuPhase::Ready => {}
                // The name may belong to another GPU than the failed one.
                GpuPhase::Failed | GpuPhase::TimedOut if named => {}
                GpuPhase::Failed => return Decision::Fail(failed(gpu, Code::INTERNAL)),
                GpuPhase::TimedOut => return Decision::Fail(failed(gpu, Code::DEADLINE_EXCEEDED)),
                GpuPhase::Found | GpuPhase::Attaching | GpuPhase::Removed => {
                    missing.get_or_insert_with(|| Missing::Gpu(Box::new(gpu.clone())));
                }
            }
        }
    }
    match missing {
        Some(missing) => wait_or_fail(view, missing),
        None => Decision::Ready(ready),
    }
}

/// Waits, or fails if PID 1 is disconnected.
fn wait_or_fail(view: &View, missing: Missing) -> Decision {
    match &view.disconnected {
        None => Decision::Wait(missing),
        Some(why) => {
            let what = match &missing {
                Missing::Scan => "GPUs".to_owned(),
                Missing::Gpu(gpu) => format!("GPU {}", gpu.pci),
                Missing::Plugged(pci) => format!("GPU {pci}"),
            };
            Decision::Fail(Error::internal(format!("{what}: state unknown, the connection to PID 1 failed: {why}")))
        }
    }
}

/// Returns the GPUs that have not been unplugged.
fn present(view: &View) -> impl Iterator<Item = &GpuState> {
    view.gpus.iter().filter(|gpu| gpu.phase != GpuPhase::Removed)
}

fn unknown(view: &View, which: &GpuSelector) -> Error {
    let gone = view.gpus.iter().find(|gpu| match which {
        GpuSelector::Index(index) => gpu.index == *index,
        GpuSelector::Pci(address) => gpu.pci == *address,
        GpuSelector::Name(_) | GpuSelector::All => false,
    });
    if let Some(gpu) = gone.filter(|gpu| gpu.phase == GpuPhase::Removed) {
        return Error::invalid(format!("GPU {which}: {}", gpu.detail));
    }
    let known: Vec<String> = present(view).map(|gpu| format!("{} = {}", gpu.index, gpu.pci)).collect();
    let known = if known.is_empty() { "no GPUs".to_owned() } else { format!("GPUs {}", known.join(", ")) };
    Error::invalid(format!("no GPU {which}: this guest has {known}"))
}

fn failed(gpu: &GpuState, code: Code) -> Error {
    let end = gpu.end_us.or(gpu.start_us).unwrap_or(0);
    Error::new(code, describe(gpu, end))
}

/// Describes a GPU's state in one line: address, step, time, attempts, the driver's status code and
/// last message.
fn describe(gpu: &GpuState, now_us: u64) -> String {
    // PID 1's own message about a failed GPU contains all of that.
    if gpu.phase != GpuPhase::Attaching && gpu.detail.contains(&gpu.pci.to_string()) {
        return format!("GPU {}: {}", gpu.index, gpu.detail);
    }
    let step = if gpu.step.is_empty() { "-" } else { &gpu.step };
    let mut text = format!("GPU {} (index {}) is {} in step {step}", gpu.pci, gpu.index, gpu.phase.as_str());
    if let Some(start) = gpu.start_us {
        let micros = gpu.end_us.unwrap_or(now_us).saturating_sub(start);
        text.push_str(&format!(" after {:.1} s", std::time::Duration::from_micros(micros).as_secs_f64()));
    }
    if gpu.attempts > 1 {
        text.push_str(&format!(", attempt {}", gpu.attempts));
    }
    if let Some(driver) = gpu.driver {
        text.push_str(&format!(", driver rc {} adapter status {:#x}", driver.rc, driver.adapter_status));
    }
    if !gpu.detail.is_empty() {
        text.push_str(": ");
        text.push_str(&gpu.detail);
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use firstlight_boot_record::DriverCode;
    use proptest::prelude::*;

    pub(in crate::gpu) fn gpu(index: u32, phase: GpuPhase) -> GpuState {
        GpuState {
            pci: format!("0000:{:02x}:00.0", index + 1).parse().unwrap(),
            index,
            phase,
            step: "wait-open-complete".into(),
            attempts: 1,
            start_us: Some(1_000_000),
            end_us: None,
            attach_us: None,
            driver: None,
            detail: String::new(),
        }
    }

    fn view(phases: &[GpuPhase]) -> View {
        let gpus = (0..).zip(phases).map(|(index, phase)| gpu(index, *phase)).collect();
        View { scanned: true, gpus, disconnected: None }
    }

    use GpuPhase::{Attaching, Failed, Found, Ready, Removed, TimedOut};

    #[test]
    fn unplugged_gpu_is_reported_and_not_waited_for() {
        let mut view = view(&[Ready, Removed]);
        view.gpus[1].detail = "0000:02:00.0: it was taken out".into();
        assert_eq!(decide(&view, &[GpuSelector::All]), Decision::Ready(vec![gpu(0, Ready)]));
        let Decision::Unknown(error) = decide(&view, &[GpuSelector::Index(1)]) else { panic!() };
        assert!(error.message.contains("GPU 1: 0000:02:00.0: it was taken out"), "{error}");
        let Decision::Unknown(error) = decide(&view, &[GpuSelector::Index(7)]) else { panic!() };
        assert!(error.message.ends_with("this guest has GPUs 0 = 0000:01:00.0"), "{error}");
    }

    #[test]
    fn failed_gpu_does_not_affect_requests_for_others() {
        let view = view(&[Failed, Ready, Found]);
        assert_eq!(decide(&view, &[GpuSelector::Index(1)]), Decision::Ready(vec![gpu(1, Ready)]));
        let Decision::Wait(Missing::Gpu(missing)) = decide(&view, &[GpuSelector::Index(1), GpuSelector::Index(2)])
        else {
            panic!()
        };
        assert_eq!(missing.index, 2);
        assert!(matches!(decide(&view, &[GpuSelector::All]), Decision::Fail(_)));
    }

    #[test]
    fn error_contains_all_known_details() {
        let mut broken = gpu(0, Failed);
        broken.end_us = Some(4_500_000);
        broken.attempts = 2;
        broken.driver = Some(DriverCode { rc: -5, adapter_status: 0x62 });
        broken.detail = "RmInitAdapter failed! (0x62:0xffff:2477)".into();
        let view = View { scanned: true, gpus: vec![broken], disconnected: None };
        let Decision::Fail(error) = decide(&view, &[GpuSelector::Pci("0000:01:00.0".parse().unwrap())]) else {
            panic!()
        };
        assert_eq!(error.code, Code::INTERNAL);
        for part in ["0000:01:00.0", "wait-open-complete", "3.5 s", "attempt 2", "rc -5", "0x62", "RmInitAdapter"] {
            assert!(error.message.contains(part), "{error}");
        }
    }

    #[test]
    fn error_codes_distinguish_failure_timeout_and_unknown_gpu() {
        let code = |view: &View, which| match decide(view, &[which]) {
            Decision::Fail(error) | Decision::Unknown(error) => Some(error.code),
            _ => None,
        };
        assert_eq!(code(&view(&[TimedOut]), GpuSelector::Index(0)), Some(Code::DEADLINE_EXCEEDED));
        assert_eq!(code(&view(&[Ready]), GpuSelector::Index(1)), Some(Code::INVALID_ARGUMENT));
        assert_eq!(code(&view(&[]), GpuSelector::All), Some(Code::INVALID_ARGUMENT));
        let mut gone = view(&[Attaching]);
        gone.disconnected = Some("gone".into());
        assert_eq!(code(&gone, GpuSelector::Index(0)), Some(Code::INTERNAL));
        assert_eq!(code(&View::default(), GpuSelector::Index(0)), None, "before the scan nothing is unknown");
    }

    #[test]
    fn name_waits_for_all_gpus_and_ignores_failed_ones() {
        let name = [GpuSelector::Name("GPU-1".into())];
        assert!(matches!(decide(&view(&[Ready, Attaching]), &name), Decision::Wait(_)));
        assert_eq!(decide(&view(&[Ready, Failed]), &name), Decision::Ready(vec![]));
    }

    #[test]
    fn message_of_pid_1_is_not_repeated() {
        let mut gpu = gpu(0, GpuPhase::Failed);
        gpu.detail = format!("{}: attach failed in wait-open-complete after 3 ms", gpu.pci);
        assert_eq!(describe(&gpu, 0), format!("GPU 0: {}", gpu.detail));
    }

    proptest! {
        #[test]
        fn ready_means_that_each_requested_gpu_is_ready(
            phases in proptest::collection::vec(0usize..5, 0..5), requested in proptest::collection::vec(0u32..6, 1..4)
        ) {
            let all = [Found, Attaching, Ready, Failed, TimedOut];
            let phases: Vec<GpuPhase> = phases.into_iter().map(|at| all[at]).collect();
            let requested: Vec<GpuSelector> = requested.into_iter().map(GpuSelector::Index).collect();
            let phase = |which: &GpuSelector| match which {
                GpuSelector::Index(index) => phases.get(usize::try_from(*index).unwrap()),
                _ => None,
            };
            match decide(&view(&phases), &requested) {
                Decision::Ready(gpus) => {
                    prop_assert!(requested.iter().all(|which| phase(which) == Some(&Ready)));
                    prop_assert!(gpus.iter().all(|gpu| requested.contains(&GpuSelector::Index(gpu.index))));
                }
                Decision::Wait(_) => {
                    prop_assert!(requested.iter().any(|which| matches!(phase(which), Some(Found | Attaching))));
                }
                Decision::Fail(_) => {
                    prop_assert!(requested.iter().any(|which| matches!(phase(which), Some(Failed | TimedOut))));
                }
                Decision::Unknown(_) => prop_assert!(requested.iter().any(|which| phase(which).is_none())),
            }
        }
    }
}
