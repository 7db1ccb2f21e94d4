//! Whether the GPUs that are wanted are there: a function of what PID 1 has said.

use firstlight_boot_record::{Gpu, GpuPhase};
use firstlight_pci::Address;
use ttrpc::Code;

use super::{View, Which};
use crate::error::Error;

/// What to do now.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// All are there: these.
    Ready(Vec<Gpu>),
    /// Not yet.
    Wait(Missing),
    /// Never.
    Fail(Error),
    /// PID 1 knows no such GPU.
    Unknown(Error),
}

/// What is waited for.
#[derive(Debug, Clone, PartialEq)]
pub enum Missing {
    /// The PCI bus has not been scanned.
    Scan,
    /// This GPU, as it was told last.
    Gpu(Box<Gpu>),
    /// A GPU that is on the bus and that PID 1 has not told of yet.
    Plugged(Address),
}

impl Missing {
    /// One line about it.
    #[must_use]
    pub fn describe(&self, now_us: u64) -> String {
        match self {
            Self::Scan => "GPUs: the PCI bus has not been scanned yet".to_owned(),
            Self::Gpu(gpu) => describe(gpu, now_us),
            Self::Plugged(pci) => format!("GPU {pci} is on the PCI bus, and PID 1 has not begun with it"),
        }
    }
}

/// Decides. A failed GPU fails those who want it at once, and nobody else.
#[must_use]
pub fn decide(view: &View, wanted: &[Which]) -> Decision {
    if !view.scanned {
        return lost(view, Missing::Scan);
    }
    let mut ready = Vec::<Gpu>::new();
    let mut missing = None;
    for which in wanted {
        let gpus: Vec<&Gpu> = match which {
            // What a name means is in a file that is complete when every GPU has ended.
            Which::Name(_) | Which::All => here(view).collect(),
            Which::Index(index) => here(view).filter(|gpu| gpu.index == *index).collect(),
            Which::Pci(address) => here(view).filter(|gpu| gpu.pci == *address).collect(),
        };
        if gpus.is_empty() {
            let error = unknown(view, which);
            return match lost(view, Missing::Scan) {
                Decision::Wait(_) => Decision::Unknown(error),
                other => other,
            };
        }
        for gpu in gpus {
            let named = matches!(which, Which::Name(_));
            match gpu.phase {
                GpuPhase::Ready if !named && !ready.contains(gpu) => ready.push(gpu.clone()),
                GpuPhase::Ready => {}
                // Of those whose names are not known here, a failed one need not be the one.
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
        Some(missing) => lost(view, missing),
        None => Decision::Ready(ready),
    }
}

/// Waits, unless nothing more will come.
fn lost(view: &View, missing: Missing) -> Decision {
    match &view.lost {
        None => Decision::Wait(missing),
        Some(why) => {
            let what = match &missing {
                Missing::Scan => "GPUs".to_owned(),
                Missing::Gpu(gpu) => format!("GPU {}", gpu.pci),
                Missing::Plugged(pci) => format!("GPU {pci}"),
            };
            Decision::Fail(Error::internal(format!("{what}: PID 1, which attaches GPUs, cannot be asked: {why}")))
        }
    }
}

/// The GPUs that have not been taken out of the guest.
fn here(view: &View) -> impl Iterator<Item = &Gpu> {
    view.gpus.iter().filter(|gpu| gpu.phase != GpuPhase::Removed)
}

fn unknown(view: &View, which: &Which) -> Error {
    let gone = view.gpus.iter().find(|gpu| match which {
        Which::Index(index) => gpu.index == *index,
        Which::Pci(address) => gpu.pci == *address,
        Which::Name(_) | Which::All => false,
    });
    if let Some(gpu) = gone.filter(|gpu| gpu.phase == GpuPhase::Removed) {
        return Error::invalid(format!("GPU {which}: {}", gpu.detail));
    }
    let known: Vec<String> = here(view).map(|gpu| format!("{} = {}", gpu.index, gpu.pci)).collect();
    let known = if known.is_empty() { "no GPUs".to_owned() } else { format!("GPUs {}", known.join(", ")) };
    Error::invalid(format!("no GPU {which}: this guest has {known}"))
}

fn failed(gpu: &Gpu, code: Code) -> Error {
    let end = gpu.end_us.or(gpu.start_us).unwrap_or(0);
    Error::new(code, describe(gpu, end))
}

/// A GPU's state in one line: address, step, time, attempts, the driver's code and last words.
fn describe(gpu: &Gpu, now_us: u64) -> String {
    // PID 1's own sentence about a GPU that it gave up has all of that.
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

    pub(in crate::gpu) fn gpu(index: u32, phase: GpuPhase) -> Gpu {
        Gpu {
            pci: format!("0000:{:02x}:00.0", index + 1).parse().unwrap(),
            index,
            device_id: 0x2330,
            minor: Some(index),
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
        View { scanned: true, gpus, lost: None }
    }

    use GpuPhase::{Attaching, Failed, Found, Ready, Removed, TimedOut};

    #[test]
    fn one_that_was_taken_out_is_told_as_that_and_counts_no_more() {
        let mut view = view(&[Ready, Removed]);
        view.gpus[1].detail = "0000:02:00.0: it was taken out".into();
        assert_eq!(decide(&view, &[Which::All]), Decision::Ready(vec![gpu(0, Ready)]));
        let Decision::Unknown(error) = decide(&view, &[Which::Index(1)]) else { panic!() };
        assert!(error.message.contains("GPU 1: 0000:02:00.0: it was taken out"), "{error}");
        let Decision::Unknown(error) = decide(&view, &[Which::Index(7)]) else { panic!() };
        assert!(error.message.ends_with("this guest has GPUs 0 = 0000:01:00.0"), "{error}");
    }

    #[test]
    fn a_failed_neighbour_does_not_matter() {
        let view = view(&[Failed, Ready, Found]);
        assert_eq!(decide(&view, &[Which::Index(1)]), Decision::Ready(vec![gpu(1, Ready)]));
        let Decision::Wait(Missing::Gpu(missing)) = decide(&view, &[Which::Index(1), Which::Index(2)]) else {
            panic!()
        };
        assert_eq!(missing.index, 2);
        assert!(matches!(decide(&view, &[Which::All]), Decision::Fail(_)));
    }

    #[test]
    fn an_error_says_everything_that_is_known() {
        let mut broken = gpu(0, Failed);
        broken.end_us = Some(4_500_000);
        broken.attempts = 2;
        broken.driver = Some(DriverCode { rc: -5, adapter_status: 0x62 });
        broken.detail = "RmInitAdapter failed! (0x62:0xffff:2477)".into();
        let view = View { scanned: true, gpus: vec![broken], lost: None };
        let Decision::Fail(error) = decide(&view, &[Which::Pci("0000:01:00.0".parse().unwrap())]) else { panic!() };
        assert_eq!(error.code, Code::INTERNAL);
        for part in ["0000:01:00.0", "wait-open-complete", "3.5 s", "attempt 2", "rc -5", "0x62", "RmInitAdapter"] {
            assert!(error.message.contains(part), "{error}");
        }
    }

    #[test]
    fn codes_tell_a_failure_from_a_deadline_and_from_nonsense() {
        let code = |view: &View, which| match decide(view, &[which]) {
            Decision::Fail(error) | Decision::Unknown(error) => Some(error.code),
            _ => None,
        };
        assert_eq!(code(&view(&[TimedOut]), Which::Index(0)), Some(Code::DEADLINE_EXCEEDED));
        assert_eq!(code(&view(&[Ready]), Which::Index(1)), Some(Code::INVALID_ARGUMENT));
        assert_eq!(code(&view(&[]), Which::All), Some(Code::INVALID_ARGUMENT));
        let mut gone = view(&[Attaching]);
        gone.lost = Some("gone".into());
        assert_eq!(code(&gone, Which::Index(0)), Some(Code::INTERNAL));
        assert_eq!(code(&View::default(), Which::Index(0)), None, "before the scan nothing is unknown");
    }

    #[test]
    fn a_name_waits_for_all_and_survives_the_failed_ones() {
        let name = [Which::Name("GPU-1".into())];
        assert!(matches!(decide(&view(&[Ready, Attaching]), &name), Decision::Wait(_)));
        assert_eq!(decide(&view(&[Ready, Failed]), &name), Decision::Ready(vec![]));
    }

    #[test]
    fn a_sentence_of_pid_1_is_not_said_twice() {
        let mut gpu = gpu(0, GpuPhase::Failed);
        gpu.detail = format!("{}: attach failed in wait-open-complete after 3 ms", gpu.pci);
        assert_eq!(describe(&gpu, 0), format!("GPU 0: {}", gpu.detail));
    }

    proptest! {
        #[test]
        fn ready_means_that_each_wanted_gpu_is_ready(
            phases in proptest::collection::vec(0usize..5, 0..5), wanted in proptest::collection::vec(0u32..6, 1..4)
        ) {
            let all = [Found, Attaching, Ready, Failed, TimedOut];
            let phases: Vec<GpuPhase> = phases.into_iter().map(|at| all[at]).collect();
            let wanted: Vec<Which> = wanted.into_iter().map(Which::Index).collect();
            let phase = |which: &Which| match which {
                Which::Index(index) => phases.get(usize::try_from(*index).unwrap()),
                _ => None,
            };
            match decide(&view(&phases), &wanted) {
                Decision::Ready(gpus) => {
                    prop_assert!(wanted.iter().all(|which| phase(which) == Some(&Ready)));
                    prop_assert!(gpus.iter().all(|gpu| wanted.contains(&Which::Index(gpu.index))));
                }
                Decision::Wait(_) => {
                    prop_assert!(wanted.iter().any(|which| matches!(phase(which), Some(Found | Attaching))));
                }
                Decision::Fail(_) => {
                    prop_assert!(wanted.iter().any(|which| matches!(phase(which), Some(Failed | TimedOut))));
                }
                Decision::Unknown(_) => prop_assert!(wanted.iter().any(|which| phase(which).is_none())),
            }
        }
    }
}
