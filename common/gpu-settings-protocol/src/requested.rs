//! Requested settings, per GPU or for all GPUs.

use std::str::FromStr;

use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

use crate::messages::{Gpu, SettingsRequest};
use crate::value::{Clocks, ComputeMode, Power};
use crate::{Mig, number};

/// Highest GPU index accepted, above the number of GPUs in any guest.
const MOST_INDEX: u32 = 999;

/// The value that leaves a GPU unchanged.
const KEEP: &str = "keep";

/// Selects the GPUs that a value applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GpuSelector {
    All,
    Between(u32, u32),
    One(Address),
}

impl GpuSelector {
    fn parse(text: &str) -> Option<Self> {
        if text == "all" {
            return Some(Self::All);
        }
        if let Ok(address) = text.parse() {
            return Some(Self::One(address));
        }
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        match (number(low, MOST_INDEX), number(high, MOST_INDEX)) {
            (Some(low), Some(high)) if low <= high => Some(Self::Between(low, high)),
            _ => None,
        }
    }

    fn has(self, index: u32, pci: Address) -> bool {
        match self {
            Self::All => true,
            Self::Between(low, high) => (low..=high).contains(&index),
            Self::One(one) => one == pci,
        }
    }
}

/// The values of one setting by GPU; `None` leaves a GPU unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerGpu<T> {
    rows: Vec<(GpuSelector, Option<T>)>,
}

impl<T> Default for PerGpu<T> {
    fn default() -> Self {
        Self { rows: Vec::new() }
    }
}

/// Splits a setting into its parts: selector and value.
fn parts(text: &str) -> Option<Vec<(GpuSelector, &str)>> {
    let part = |part| match str::rsplit_once(part, ':') {
        Some((selector, value)) => Some((GpuSelector::parse(selector)?, value)),
        None => Some((GpuSelector::All, part)),
    };
    text.split(';').map(part).collect()
}

impl<T: FromStr> PerGpu<T> {
    /// Parses a setting; `None` if it is malformed.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut rows = Vec::new();
        for (selector, value) in parts(text)? {
            let value = if value == KEEP { None } else { Some(value.parse().ok()?) };
            if selector == GpuSelector::All {
                rows.clear();
            }
            if selector != GpuSelector::All || value.is_some() {
                rows.push((selector, value));
            }
        }
        Some(Self { rows })
    }
}

impl<T> PerGpu<T> {
    /// Returns the value requested for this GPU.
    #[must_use]
    pub fn of(&self, index: u32, pci: Address) -> Option<&T> {
        self.rows.iter().rev().find(|(selector, _)| selector.has(index, pci)).and_then(|(_, value)| value.as_ref())
    }

    /// Returns whether the setting selects a GPU that is not in `gpus`.
    fn names_unknown_gpu(&self, gpus: &[(u32, Address)]) -> bool {
        let known = |selector: GpuSelector| gpus.iter().any(|(index, pci)| selector.has(*index, *pci));
        self.rows.iter().any(|(selector, _)| match *selector {
            GpuSelector::All => false,
            // Every index of the range must exist.
            GpuSelector::Between(low, high) => (low..=high).any(|index| !known(GpuSelector::Between(index, index))),
            one => !known(one),
        })
    }
}

/// Whether to set the GPU ready state under confidential computing; until then
/// GPUs accept no work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ready {
    /// Set it if confidential computing is on.
    #[default]
    Auto,
    /// Always set it.
    Yes,
    /// Never set it: another program does, for example after attestation.
    No,
}

/// All requested GPU settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestedSettings {
    /// MIG mode and instances.
    pub mig: PerGpu<Mig>,
    /// Compute mode.
    pub compute_mode: PerGpu<ComputeMode>,
    /// Power limit.
    pub power_limit: PerGpu<Power>,
    /// Memory clock.
    pub memory_clock: PerGpu<Clocks>,
    /// Graphics clocks.
    pub clocks: PerGpu<Clocks>,
    /// GPU ready state under confidential computing.
    pub ready: Ready,
}

impl RequestedSettings {
    /// Returns the settings requested for one GPU.
    #[must_use]
    pub fn of(&self, index: u32, pci: Address) -> Gpu {
        Gpu {
            pci,
            mig: self.mig.of(index, pci).cloned(),
            compute_mode: self.compute_mode.of(index, pci).copied(),
            power_limit: self.power_limit.of(index, pci).copied(),
            memory_clock: self.memory_clock.of(index, pci).copied(),
            clocks: self.clocks.of(index, pci).copied(),
        }
    }

    /// Returns the request for these GPUs, by index and address; `None` if no
    /// setting is requested for them. `confidential` is whether this is a
    /// confidential guest: only those need the GPU ready state.
    #[must_use]
    pub fn request_for(&self, gpus: &[(u32, Address)], confidential: bool) -> Option<SettingsRequest> {
        let changed: Vec<Gpu> =
            gpus.iter().map(|(index, pci)| self.of(*index, *pci)).filter(|gpu| !gpu.is_empty()).collect();
        let ready = match self.ready {
            Ready::No => None,
            Ready::Auto if !confidential => None,
            other => Some(other).filter(|_| !gpus.is_empty()),
        };
        (!changed.is_empty() || ready.is_some()).then_some(SettingsRequest { gpus: changed, ready })
    }

    /// Returns the names of the settings that select GPUs which this guest does not have.
    #[must_use]
    pub fn settings_for_unknown_gpus(&self, gpus: &[(u32, Address)]) -> Vec<&'static str> {
        let settings = [
            ("firstlight.mig", self.mig.names_unknown_gpu(gpus)),
            ("firstlight.gpu-compute-mode", self.compute_mode.names_unknown_gpu(gpus)),
            ("firstlight.gpu-power-limit", self.power_limit.names_unknown_gpu(gpus)),
            ("firstlight.gpu-memory-clock", self.memory_clock.names_unknown_gpu(gpus)),
            ("firstlight.gpu-clocks", self.clocks.names_unknown_gpu(gpus)),
        ];
        settings.into_iter().filter(|(_, unknown)| *unknown).map(|(name, _)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gpus() -> [(u32, Address); 3] {
        [1, 2, 3].map(|bus| (bus - 1, format!("0000:{bus:02x}:00.0").parse().unwrap()))
    }

    fn watts(text: &str) -> Option<Vec<Option<String>>> {
        let setting = PerGpu::<Power>::parse(text)?;
        Some(gpus().iter().map(|(index, pci)| setting.of(*index, *pci).map(ToString::to_string)).collect())
    }

    #[test]
    fn last_part_that_selects_a_gpu_wins() {
        let list = |texts: [&str; 3]| Some(texts.map(|text| (text != "-").then(|| text.to_owned())).to_vec());
        for (text, expected) in [
            ("500", ["500", "500", "500"]),
            ("all:500;1:400", ["500", "400", "500"]),
            ("1:400;all:500", ["500", "500", "500"]),
            ("0-1:300;1:keep", ["300", "-", "-"]),
            ("0000:03:00.0:200;0:default", ["default", "-", "200"]),
            ("500;2:keep", ["500", "500", "-"]),
            ("keep", ["-", "-", "-"]),
        ] {
            assert_eq!(watts(text), list(expected), "{text}");
        }
        assert_eq!(PerGpu::<Power>::parse("keep"), Some(PerGpu::default()));
        for text in ["", ";", "500;", "1:", ":500", "x:500", "2-1:500", "1-:500", "1000:500", "0:0:500", "all:500:600"]
        {
            assert_eq!(watts(text), None, "{text}");
        }
    }

    #[test]
    fn mig_layouts_are_per_gpu() {
        let setting = PerGpu::<Mig>::parse("0:3g.71gb,4g.71gb;1:off;0000:03:00.0:19*7").unwrap();
        let texts: Vec<String> =
            gpus().iter().map(|(index, pci)| setting.of(*index, *pci).unwrap().to_string()).collect();
        assert_eq!(texts, ["3g.71gb,4g.71gb", "off", "19*7"]);
    }

    #[test]
    fn no_requested_setting_makes_no_request() {
        let mut requested = RequestedSettings::default();
        assert_eq!(requested.request_for(&gpus(), false), None);
        assert_eq!(
            requested.request_for(&gpus(), true),
            Some(SettingsRequest { gpus: Vec::new(), ready: Some(Ready::Auto) })
        );
        assert_eq!(requested.request_for(&[], true), None);
        requested.ready = Ready::No;
        requested.clocks = PerGpu::parse("1:1980").unwrap();
        let request = requested.request_for(&gpus(), true).unwrap();
        assert_eq!(
            (request.gpus.len(), request.gpus[0].pci.to_string().as_str(), request.ready),
            (1, "0000:02:00.0", None)
        );
        requested.clocks = PerGpu::parse("1:keep").unwrap();
        assert_eq!(requested.request_for(&gpus(), true), None);
    }

    #[test]
    fn settings_for_missing_gpus_are_named() {
        for (text, unknown) in
            [("3:500", true), ("0-3:500", true), ("0-2:500", false), ("0000:09:00.0:1", true), ("500", false)]
        {
            let requested =
                RequestedSettings { power_limit: PerGpu::parse(text).unwrap(), ..RequestedSettings::default() };
            let expected: &[&str] = if unknown { &["firstlight.gpu-power-limit"] } else { &[] };
            assert_eq!(requested.settings_for_unknown_gpus(&gpus()), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "\\PC{0,40}|[0-9a-z:;,.*+-]{0,40}") {
            let _ = PerGpu::<Mig>::parse(&text);
            let _ = PerGpu::<Clocks>::parse(&text);
            let _ = PerGpu::<ComputeMode>::parse(&text);
        }

        #[test]
        fn every_gpu_has_the_value_of_the_last_part_that_selects_it(
            rows in proptest::collection::vec((0..3u32, 0..3u32, proptest::option::of(1..900u32)), 1..6)
        ) {
            let word = |value: &Option<u32>| value.map_or("keep".to_owned(), |value| value.to_string());
            let text: Vec<String> = rows.iter()
                .map(|(a, b, value)| format!("{}-{}:{}", a.min(b), a.max(b), word(value)))
                .collect();
            let setting = PerGpu::<Power>::parse(&text.join(";")).unwrap();
            for (index, pci) in gpus() {
                let mut expected = None;
                for (a, b, value) in &rows {
                    if (*a.min(b)..=*a.max(b)).contains(&index) {
                        expected = value.map(Power::Watts);
                    }
                }
                prop_assert_eq!(setting.of(index, pci).copied(), expected);
            }
        }
    }
}
