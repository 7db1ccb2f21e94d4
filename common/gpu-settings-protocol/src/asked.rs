//! What is asked for, for some GPUs or for all.

use std::str::FromStr;

use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

use crate::value::{Clocks, ComputeMode, Power};
use crate::work::{Gpu, Work};
use crate::{Mig, number};

/// More GPUs than a guest has.
const MOST_INDEX: u32 = 999;

/// Leaves a GPU as it was found.
const KEEP: &str = "keep";

/// Whom a value is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whom {
    All,
    Between(u32, u32),
    One(Address),
}

impl Whom {
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

/// One setting's values, by GPU; none where a GPU stays as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerGpu<T> {
    rows: Vec<(Whom, Option<T>)>,
}

impl<T> Default for PerGpu<T> {
    fn default() -> Self {
        Self { rows: Vec::new() }
    }
}

/// The parts of a setting: for whom, and the value's text.
fn parts(text: &str) -> Option<Vec<(Whom, &str)>> {
    let part = |part| match str::rsplit_once(part, ':') {
        Some((whom, value)) => Some((Whom::parse(whom)?, value)),
        None => Some((Whom::All, part)),
    };
    text.split(';').map(part).collect()
}

impl<T: FromStr> PerGpu<T> {
    /// Reads a setting; `None` if it is malformed.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut rows = Vec::new();
        for (whom, value) in parts(text)? {
            let value = if value == KEEP { None } else { Some(value.parse().ok()?) };
            if whom == Whom::All {
                rows.clear();
            }
            if whom != Whom::All || value.is_some() {
                rows.push((whom, value));
            }
        }
        Some(Self { rows })
    }
}

impl<T> PerGpu<T> {
    /// What is asked of this GPU.
    #[must_use]
    pub fn of(&self, index: u32, pci: Address) -> Option<&T> {
        self.rows.iter().rev().find(|(whom, _)| whom.has(index, pci)).and_then(|(_, value)| value.as_ref())
    }

    /// Whether something is asked of a GPU that is none of these.
    fn strange(&self, gpus: &[(u32, Address)]) -> bool {
        let known = |whom: Whom| gpus.iter().any(|(index, pci)| whom.has(*index, *pci));
        self.rows.iter().any(|(whom, _)| match *whom {
            Whom::All => false,
            // Each of them has to be there.
            Whom::Between(low, high) => (low..=high).any(|index| !known(Whom::Between(index, index))),
            one => !known(one),
        })
    }
}

/// Whether GPUs are told to accept work under confidential computing. Until
/// then nothing computes on them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ready {
    /// If confidential computing is on.
    #[default]
    Auto,
    /// In any case.
    Yes,
    /// Somebody else does it, for example after an attestation.
    No,
}

/// Everything that is asked of GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Asked {
    /// How they are divided.
    pub mig: PerGpu<Mig>,
    /// Who may compute on them.
    pub compute_mode: PerGpu<ComputeMode>,
    /// What they may take.
    pub power_limit: PerGpu<Power>,
    /// Their memory's clock.
    pub memory_clock: PerGpu<Clocks>,
    /// Their processors' clocks.
    pub clocks: PerGpu<Clocks>,
    /// Whether they are told to accept work.
    pub ready: Ready,
}

impl Asked {
    /// What is asked of one GPU.
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

    /// What has to be done for these GPUs, by index and address; nothing if
    /// nothing was asked of them. `confidential` is whether this guest is: no
    /// other has GPUs that have to be told that they are ready.
    #[must_use]
    pub fn work(&self, gpus: &[(u32, Address)], confidential: bool) -> Option<Work> {
        let wanted: Vec<Gpu> =
            gpus.iter().map(|(index, pci)| self.of(*index, *pci)).filter(|gpu| !gpu.is_empty()).collect();
        let ready = match self.ready {
            Ready::No => None,
            Ready::Auto if !confidential => None,
            other => Some(other).filter(|_| !gpus.is_empty()),
        };
        (!wanted.is_empty() || ready.is_some()).then_some(Work { gpus: wanted, ready })
    }

    /// Names of the settings that speak of GPUs that this guest does not have.
    #[must_use]
    pub fn strange(&self, gpus: &[(u32, Address)]) -> Vec<&'static str> {
        let settings = [
            ("firstlight.mig", self.mig.strange(gpus)),
            ("firstlight.gpu-compute-mode", self.compute_mode.strange(gpus)),
            ("firstlight.gpu-power-limit", self.power_limit.strange(gpus)),
            ("firstlight.gpu-memory-clock", self.memory_clock.strange(gpus)),
            ("firstlight.gpu-clocks", self.clocks.strange(gpus)),
        ];
        settings.into_iter().filter(|(_, strange)| *strange).map(|(name, _)| name).collect()
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
    fn the_last_part_that_names_a_gpu_counts() {
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
    fn layouts_go_by_gpu() {
        let setting = PerGpu::<Mig>::parse("0:3g.71gb,4g.71gb;1:off;0000:03:00.0:19*7").unwrap();
        let texts: Vec<String> =
            gpus().iter().map(|(index, pci)| setting.of(*index, *pci).unwrap().to_string()).collect();
        assert_eq!(texts, ["3g.71gb,4g.71gb", "off", "19*7"]);
    }

    #[test]
    fn nothing_asked_is_no_work() {
        let mut asked = Asked::default();
        assert_eq!(asked.work(&gpus(), false), None);
        assert_eq!(asked.work(&gpus(), true), Some(Work { gpus: Vec::new(), ready: Some(Ready::Auto) }));
        assert_eq!(asked.work(&[], true), None);
        asked.ready = Ready::No;
        asked.clocks = PerGpu::parse("1:1980").unwrap();
        let work = asked.work(&gpus(), true).unwrap();
        assert_eq!((work.gpus.len(), work.gpus[0].pci.to_string().as_str(), work.ready), (1, "0000:02:00.0", None));
        asked.clocks = PerGpu::parse("1:keep").unwrap();
        assert_eq!(asked.work(&gpus(), true), None);
    }

    #[test]
    fn gpus_that_are_not_there_are_told() {
        for (text, strange) in
            [("3:500", true), ("0-3:500", true), ("0-2:500", false), ("0000:09:00.0:1", true), ("500", false)]
        {
            let asked = Asked { power_limit: PerGpu::parse(text).unwrap(), ..Asked::default() };
            let expected: &[&str] = if strange { &["firstlight.gpu-power-limit"] } else { &[] };
            assert_eq!(asked.strange(&gpus()), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_setting_or_not(text in "\\PC{0,40}|[0-9a-z:;,.*+-]{0,40}") {
            let _ = PerGpu::<Mig>::parse(&text);
            let _ = PerGpu::<Clocks>::parse(&text);
            let _ = PerGpu::<ComputeMode>::parse(&text);
        }

        #[test]
        fn every_gpu_has_the_value_of_the_last_part_with_it(
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
