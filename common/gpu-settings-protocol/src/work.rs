//! What PID 1 hands to the helper, and what that answers.

use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

use crate::Mig;
use crate::asked::Ready;
use crate::value::{Clocks, ComputeMode, Power};

/// The object of what is about all GPUs.
pub const SYSTEM: &str = "system";

/// The helper's task, one argument of JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Work {
    /// GPUs of which something is asked.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// Whether they are told to accept work; nothing is said to them if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<Ready>,
}

/// What is asked of one GPU, in the order in which it is done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Gpu {
    /// Which.
    pub pci: Address,
    /// How it is divided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// Who may compute on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
    /// What it may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit: Option<Power>,
    /// Its memory's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_clock: Option<Clocks>,
    /// Its processors' clocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clocks: Option<Clocks>,
}

impl Gpu {
    /// Whether nothing is asked of it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let numbers = self.power_limit.is_none() && self.memory_clock.is_none() && self.clocks.is_none();
        self.mig.is_none() && self.compute_mode.is_none() && numbers
    }
}

/// How a step stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It begins now.
    Begun,
    /// It is as asked now, and was not before, or that cannot be known.
    Done,
    /// It was as asked.
    Unchanged,
    /// It would be done, if this were no check.
    Would,
    /// It is not as asked.
    Failed,
}

/// What the helper says about one step: a line of JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// A GPU's address, or [`SYSTEM`].
    pub object: String,
    /// What it is about: `mig`, `power-limit`.
    pub step: String,
    /// How it stands.
    pub result: Outcome,
    /// How long it took, µs.
    #[serde(default)]
    pub us: u64,
    /// One sentence: values, and for a failure the cause and the next thing to try.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_written_as_people_would() {
        let text = r#"{"gpus":[{"pci":"0000:01:00.0","mig":"3g.71gb,4g.71gb","power-limit":"500"}],"ready":"auto"}"#;
        let work: Work = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&work).unwrap(), text);
        assert_eq!(work.gpus[0].power_limit, Some(Power::Watts(500)));
        for text in
            [r#"{"gpus":[{"pci":"x"}]}"#, r#"{"gpus":[{"pci":"0000:01:00.0","power-limit":"0"}]}"#, r#"{"gpu":1}"#]
        {
            assert!(serde_json::from_str::<Work>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_line_says_how_a_step_stands() {
        let line: Line = serde_json::from_str(r#"{"object":"system","step":"ready","result":"begun"}"#).unwrap();
        assert_eq!((line.result, line.us, line.detail.as_str()), (Outcome::Begun, 0, ""));
    }
}
