//! The request of PID 1 to `firstlight-gpu-settings`, and that program's reports.

use firstlight_pci::Address;
use serde::{Deserialize, Serialize};

use crate::Mig;
use crate::requested::Ready;
use crate::value::{Clocks, ComputeMode, Power};

/// The object of reports about all GPUs.
pub const SYSTEM: &str = "system";

/// The request, passed as one command-line argument of JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettingsRequest {
    /// GPUs with requested settings.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// GPU ready state under confidential computing; unchanged if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<Ready>,
}

/// The settings requested for one GPU, in the order in which they are applied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Gpu {
    /// PCI address.
    pub pci: Address,
    /// MIG mode and instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// Compute mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
    /// Power limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit: Option<Power>,
    /// Memory clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_clock: Option<Clocks>,
    /// Graphics clocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clocks: Option<Clocks>,
}

impl Gpu {
    /// Returns whether no setting is requested.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let numbers = self.power_limit.is_none() && self.memory_clock.is_none() && self.clocks.is_none();
        self.mig.is_none() && self.compute_mode.is_none() && numbers
    }
}

/// The state of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The step has started.
    Started,
    /// The setting was applied: it differed before, or its previous value is unknown.
    Done,
    /// The setting already had the requested value.
    Unchanged,
    /// The setting would be changed; this run only checks.
    WouldChange,
    /// The setting could not be applied.
    Failed,
}

/// A report of `firstlight-gpu-settings` about one step: a line of JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepReport {
    /// A GPU's address, or [`SYSTEM`].
    pub object: String,
    /// The setting: `mig`, `power-limit`.
    pub step: String,
    /// State of the step.
    pub result: Outcome,
    /// Duration, µs.
    #[serde(default)]
    pub elapsed_us: u64,
    /// One sentence: values, and for a failure the cause and the next step.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_uses_the_same_text_as_the_kernel_parameters() {
        let text = r#"{"gpus":[{"pci":"0000:01:00.0","mig":"3g.71gb,4g.71gb","power-limit":"500"}],"ready":"auto"}"#;
        let request: SettingsRequest = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&request).unwrap(), text);
        assert_eq!(request.gpus[0].power_limit, Some(Power::Watts(500)));
        for text in
            [r#"{"gpus":[{"pci":"x"}]}"#, r#"{"gpus":[{"pci":"0000:01:00.0","power-limit":"0"}]}"#, r#"{"gpu":1}"#]
        {
            assert!(serde_json::from_str::<SettingsRequest>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn report_is_one_json_line_with_optional_fields() {
        let report: StepReport =
            serde_json::from_str(r#"{"object":"system","step":"ready","result":"started"}"#).unwrap();
        assert_eq!((report.result, report.elapsed_us, report.detail.as_str()), (Outcome::Started, 0, ""));
    }
}
