//! Parses the variables of a container's environment that select devices.
//!
//! The environment is written by image and tenant, so NVIDIA's variables never grant a GPU: they
//! select among the granted ones.

use firstlight_cdi::DeviceName;
use firstlight_init_control::GpuState;

use super::GpuSelector;
use crate::error::{Error, Result};

/// Grants devices of any kind if the kernel command line has `agent.visible_cdi_devices`.
pub(super) const CDI_DEVICES: &str = "VISIBLE_CDI_DEVICES";

/// Selects among the granted GPUs.
pub(super) const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// Selects the driver's files.
pub(super) const CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// Upper bound; no machine has as many GPUs and MIG instances.
const MAX_NAMES: usize = 256;

/// Returns the value of a variable; the last one if it is set several times, as most programs do.
pub(super) fn value<'a>(environment: &'a [String], name: &str) -> Option<&'a str> {
    environment.iter().rev().find_map(|entry| entry.strip_prefix(name)?.strip_prefix('='))
}

/// Parses devices by the syntax `KIND=all|0,1[:KIND=...]`. A part between colons without `=`
/// belongs to the name before it, so PCI addresses can be written.
///
/// # Errors
/// A part is not a qualified CDI name.
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

/// The subset of the granted GPUs that a container gets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Visible {
    /// All of them.
    #[default]
    All,
    /// None of them.
    None,
    /// The listed ones, if granted.
    Only(Vec<GpuSelector>),
}

impl Visible {
    /// Parses `NVIDIA_VISIBLE_DEVICES`.
    ///
    /// CDI specifications set `void` to stop NVIDIA's container runtime from adding devices: a host
    /// that uses one sets it in every container, so it is ignored here.
    #[must_use]
    pub fn of(environment: &[String]) -> Self {
        match value(environment, VISIBLE).map(str::trim) {
            None | Some("" | "all" | "void") => Self::All,
            Some("none") => Self::None,
            Some(text) => {
                let mut only = Vec::new();
                for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
                    let which = named(entry);
                    if which == GpuSelector::All {
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

    /// Returns the granted GPUs that must be ready. All of them if the variable has a name that is
    /// known only after the attach (a UUID).
    #[must_use]
    pub fn before_waiting(&self, granted: &[GpuSelector], gpus: &[GpuState]) -> Vec<GpuSelector> {
        let only = match self {
            Self::All => return granted.to_vec(),
            Self::None => return Vec::new(),
            Self::Only(only) => only,
        };
        if only.iter().any(|which| matches!(which, GpuSelector::Name(_))) {
            return granted.to_vec();
        }
        let is = |which: &GpuSelector, gpu: &GpuState| match which {
            GpuSelector::All => true,
            GpuSelector::Index(index) => gpu.index == *index,
            GpuSelector::Pci(address) => gpu.pci == *address,
            GpuSelector::Name(_) => false,
        };
        let mut left = Vec::new();
        for grant in granted {
            let mut rows = gpus.iter().filter(|gpu| is(grant, gpu)).peekable();
            if rows.peek().is_none() {
                // A granted GPU that does not exist is an error, which `decide` reports.
                left.push(grant.clone());
            }
            let visible = rows.filter(|gpu| only.iter().any(|which| is(which, gpu)));
            left.extend(visible.map(|gpu| GpuSelector::Pci(gpu.pci)));
        }
        left
    }
}

/// Parses one entry of `NVIDIA_VISIBLE_DEVICES`. The driver's tools write PCI addresses in
/// capitals, with eight digits of domain.
fn named(entry: &str) -> GpuSelector {
    let mut entry: String = entry.chars().take(80).collect();
    if entry.bytes().filter(|byte| *byte == b':').count() == 2 {
        entry.make_ascii_lowercase();
        if let Some(short) = entry.strip_prefix("0000").filter(|short| short.find(':') == Some(4)) {
            entry = short.to_owned();
        }
    }
    GpuSelector::from(entry.as_str())
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
    fn cdi_devices_of_several_kinds_are_parsed() {
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
    fn values_of_nvidia_visible_devices_are_parsed() {
        assert_eq!(Visible::of(&[]), Visible::All);
        for all in ["", "all", "void", "0,all"] {
            assert_eq!(visible(all), Visible::All, "{all}");
        }
        assert_eq!(visible("none"), Visible::None);
        assert_eq!(visible(","), Visible::Only(vec![]));
        let address = GpuSelector::Pci("0000:0a:00.0".parse().unwrap());
        assert_eq!(visible("00000000:0A:00.0"), Visible::Only(vec![address.clone()]));
        assert_eq!(
            visible("1, GPU-5,1,0000:0a:00.0"),
            Visible::Only(vec![GpuSelector::Index(1), GpuSelector::Name("GPU-5".into()), address])
        );
        let twice = [format!("{VISIBLE}=0"), format!("{VISIBLE}=none"), format!("{VISIBLE}_X=all")];
        assert_eq!(Visible::of(&twice), Visible::None, "the last one counts");
    }

    #[test]
    fn only_visible_gpus_are_waited_for() {
        let gpus = [gpu(0, GpuPhase::Ready), gpu(1, GpuPhase::Attaching), gpu(2, GpuPhase::Failed)];
        let pci = |index: usize| GpuSelector::Pci(gpus[index].pci);
        assert_eq!(visible("0").before_waiting(&[GpuSelector::All], &gpus), [pci(0)]);
        assert_eq!(visible("0,0000:02:00.0").before_waiting(&[GpuSelector::Index(1)], &gpus), [pci(1)]);
        assert_eq!(visible("2").before_waiting(&[GpuSelector::Index(1)], &gpus), []);
        assert_eq!(visible("none").before_waiting(&[GpuSelector::All], &gpus), []);
        assert_eq!(visible("GPU-1").before_waiting(&[GpuSelector::Index(1)], &gpus), [GpuSelector::Index(1)]);
        assert_eq!(
            visible("0").before_waiting(&[GpuSelector::Index(7)], &gpus),
            [GpuSelector::Index(7)],
            "an error, later"
        );
    }

    proptest! {
        #[test]
        fn any_value_is_parsed_without_panic(text in "\\PC{0,80}") {
            let _ = (visible(&text), cdi_devices(&text));
        }

        #[test]
        fn only_granted_gpus_are_waited_for(
            granted in proptest::collection::vec(0u32..4, 0..4), words in "((0|1|2|3|all|none|void|GPU-1|0000:0[1-4]:00\\.0),?){0,5}"
        ) {
            let gpus: Vec<_> = (0..4).map(|index| gpu(index, GpuPhase::Ready)).collect();
            let grants: Vec<GpuSelector> = granted.iter().copied().map(GpuSelector::Index).collect();
            for which in visible(&words).before_waiting(&grants, &gpus) {
                let index = match which {
                    GpuSelector::Index(index) => index,
                    GpuSelector::Pci(address) => gpus.iter().find(|gpu| gpu.pci == address).unwrap().index,
                    other => return Err(TestCaseError::fail(format!("{other:?}"))),
                };
                prop_assert!(granted.contains(&index));
            }
        }
    }
}
