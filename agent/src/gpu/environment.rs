//! What a container's environment says about devices.
//!
//! The environment is an image's and a tenant's to write, so NVIDIA's variables
//! are never a grant: they choose among the GPUs that the container was granted.

use firstlight_cdi::DeviceName;

use super::Which;
use crate::error::{Error, Result};

/// Grants devices of any kind where the kernel command line has `agent.visible_cdi_devices`.
pub(super) const CDI_DEVICES: &str = "VISIBLE_CDI_DEVICES";

/// Narrows the GPUs.
pub(super) const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// Chooses the driver's files.
pub(super) const CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// More names than any machine has GPUs and instances of GPUs.
const MAX_NAMES: usize = 256;

/// The value of a variable; of several the last, which is what most programs see.
pub(super) fn value<'a>(environment: &'a [String], name: &str) -> Option<&'a str> {
    environment.iter().rev().find_map(|entry| entry.strip_prefix(name)?.strip_prefix('='))
}

/// Devices by the syntax `KIND=all|0,1[:KIND=...]`. What stands between colons
/// and has no `=` belongs to the name before, so PCI addresses can be written.
///
/// # Errors
/// A part is no qualified CDI name.
pub fn cdi_devices(text: &str) -> Result<Vec<DeviceName>> {
    let wrong = |error: &dyn std::fmt::Display| Error::invalid(format!("variable {CDI_DEVICES}: {error}"));
    let text = text.trim();
    if matches!(text, "" | "none" | "void") {
        return Ok(Vec::new());
    }
    let mut parts: Vec<String> = Vec::new();
    for part in text.split(':') {
        match parts.last_mut() {
            Some(last) if !part.contains('=') => {
                last.push(':');
                last.push_str(part);
            }
            _ => parts.push(part.to_owned()),
        }
    }
    let mut names = Vec::new();
    for part in parts {
        let (kind, devices) = part.split_once('=').unwrap_or((&part, ""));
        for device in devices.split(',').map(str::trim) {
            let name = format!("{}={device}", kind.trim()).parse().map_err(|error| wrong(&error))?;
            if names.len() == MAX_NAMES {
                return Err(wrong(&format!("more than {MAX_NAMES} devices")));
            }
            names.push(name);
        }
    }
    Ok(names)
}

/// Which of the granted GPUs a container is to have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Visible {
    /// All of them.
    #[default]
    All,
    /// None of them.
    None,
    /// Those that are named here, as far as they were granted.
    Only(Vec<Which>),
}

impl Visible {
    /// Reads `NVIDIA_VISIBLE_DEVICES`.
    ///
    /// `void` is what CDI specifications set so that nobody else adds devices:
    /// a host that uses one leaves it behind in every container, so it chooses nothing.
    #[must_use]
    pub fn of(environment: &[String]) -> Self {
        match value(environment, VISIBLE).map(str::trim) {
            None | Some("" | "all" | "void") => Self::All,
            Some("none") => Self::None,
            Some(text) => {
                let mut only = Vec::new();
                for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
                    let which = named(word);
                    if which == Which::All {
                        return Self::All;
                    }
                    if only.len() < MAX_NAMES && !only.contains(&which) {
                        only.push(which);
                    }
                }
                Self::Only(only)
            }
        }
    }

    /// Those of the granted GPUs that have to be waited for. What is not sure
    /// before a GPU is attached (its UUID) leaves all of them.
    #[must_use]
    pub fn before_waiting(&self, granted: &[Which], gpus: &[firstlight_boot_record::Gpu]) -> Vec<Which> {
        let only = match self {
            Self::All => return granted.to_vec(),
            Self::None => return Vec::new(),
            Self::Only(only) => only,
        };
        if only.iter().any(|which| matches!(which, Which::Name(_))) {
            return granted.to_vec();
        }
        let is = |which: &Which, gpu: &firstlight_boot_record::Gpu| match which {
            Which::All => true,
            Which::Index(index) => gpu.index == *index,
            Which::Pci(address) => gpu.pci == *address,
            Which::Name(_) => false,
        };
        let mut left = Vec::new();
        for grant in granted {
            let mut rows = gpus.iter().filter(|gpu| is(grant, gpu)).peekable();
            if rows.peek().is_none() {
                // A grant that this guest does not have is an error; it is made where all others are.
                left.push(grant.clone());
            }
            let kept = rows.filter(|gpu| only.iter().any(|which| is(which, gpu)));
            left.extend(kept.map(|gpu| Which::Pci(gpu.pci)));
        }
        left
    }
}

/// One word of `NVIDIA_VISIBLE_DEVICES`. The driver's tools write PCI addresses
/// with eight digits of domain and in capitals.
fn named(word: &str) -> Which {
    let mut word: String = word.chars().take(80).collect();
    if word.bytes().filter(|byte| *byte == b':').count() == 2 {
        word.make_ascii_lowercase();
        if let Some(short) = word.strip_prefix("0000").filter(|short| short.find(':') == Some(4)) {
            word = short.to_owned();
        }
    }
    Which::from(word.as_str())
}

#[cfg(test)]
mod tests {
    use super::super::decide::tests::gpu;
    use super::*;
    use firstlight_boot_record::GpuPhase;
    use proptest::prelude::*;

    fn visible(text: &str) -> Visible {
        Visible::of(&[format!("{VISIBLE}={text}")])
    }

    fn texts(names: &[DeviceName]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn devices_of_several_kinds() {
        let names = cdi_devices("nvidia.com/gpu=0,1:a.b/c=all").unwrap();
        assert_eq!(texts(&names), ["nvidia.com/gpu=0", "nvidia.com/gpu=1", "a.b/c=all"]);
        let names = cdi_devices("nvidia.com/gpu=0000:01:00.0,0000:02:00.0:a.b/c=d").unwrap();
        assert_eq!(texts(&names), ["nvidia.com/gpu=0000:01:00.0", "nvidia.com/gpu=0000:02:00.0", "a.b/c=d"]);
        for nothing in ["", "none", "void", " "] {
            assert_eq!(cdi_devices(nothing).unwrap(), []);
        }
        for wrong in ["0", "nvidia.com/gpu", "nvidia.com/gpu=", "=0", "nvidia.com/gpu=../x", ":", "nvidia.com/gpu=0,"] {
            let error = cdi_devices(wrong).unwrap_err();
            assert!(error.message.contains(CDI_DEVICES), "{error}");
        }
        let many = format!("a.b/c={}", vec!["0"; MAX_NAMES + 1].join(","));
        assert!(cdi_devices(&many).unwrap_err().message.contains("256"));
    }

    #[test]
    fn words_of_nvidias_variable() {
        assert_eq!(Visible::of(&[]), Visible::All);
        for all in ["", "all", "void", "0,all"] {
            assert_eq!(visible(all), Visible::All, "{all}");
        }
        assert_eq!(visible("none"), Visible::None);
        assert_eq!(visible(","), Visible::Only(vec![]));
        let address = Which::Pci("0000:0a:00.0".parse().unwrap());
        assert_eq!(visible("00000000:0A:00.0"), Visible::Only(vec![address.clone()]));
        assert_eq!(
            visible("1, GPU-5,1,0000:0a:00.0"),
            Visible::Only(vec![Which::Index(1), Which::Name("GPU-5".into()), address])
        );
        let twice = [format!("{VISIBLE}=0"), format!("{VISIBLE}=none"), format!("{VISIBLE}_X=all")];
        assert_eq!(Visible::of(&twice), Visible::None, "the last one counts");
    }

    #[test]
    fn only_what_is_left_is_waited_for() {
        let gpus = [gpu(0, GpuPhase::Ready), gpu(1, GpuPhase::Attaching), gpu(2, GpuPhase::Failed)];
        let pci = |index: usize| Which::Pci(gpus[index].pci);
        assert_eq!(visible("0").before_waiting(&[Which::All], &gpus), [pci(0)]);
        assert_eq!(visible("0,0000:02:00.0").before_waiting(&[Which::Index(1)], &gpus), [pci(1)]);
        assert_eq!(visible("2").before_waiting(&[Which::Index(1)], &gpus), []);
        assert_eq!(visible("none").before_waiting(&[Which::All], &gpus), []);
        assert_eq!(visible("GPU-1").before_waiting(&[Which::Index(1)], &gpus), [Which::Index(1)]);
        assert_eq!(visible("0").before_waiting(&[Which::Index(7)], &gpus), [Which::Index(7)], "an error, later");
    }

    proptest! {
        #[test]
        fn any_text_is_something(text in "\\PC{0,80}") {
            let _ = (visible(&text), cdi_devices(&text));
        }

        #[test]
        fn nothing_is_waited_for_that_was_not_granted(
            granted in proptest::collection::vec(0u32..4, 0..4), words in "((0|1|2|3|all|none|void|GPU-1|0000:0[1-4]:00\\.0),?){0,5}"
        ) {
            let gpus: Vec<_> = (0..4).map(|index| gpu(index, GpuPhase::Ready)).collect();
            let grants: Vec<Which> = granted.iter().copied().map(Which::Index).collect();
            for which in visible(&words).before_waiting(&grants, &gpus) {
                let index = match which {
                    Which::Index(index) => index,
                    Which::Pci(address) => gpus.iter().find(|gpu| gpu.pci == address).unwrap().index,
                    other => return Err(TestCaseError::fail(format!("{other:?}"))),
                };
                prop_assert!(granted.contains(&index));
            }
        }
    }
}
