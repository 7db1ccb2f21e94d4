//! Units that determine the kind of guest: the command line, the PCI bus, the mode.

use std::fs;

use firstlight_cmdline::CommandLine;

use super::{Inputs, Product, Report, plain};
use crate::confidential;
use crate::executor::End;
use crate::mode::{self, Decision, OnUnsupportedTopology};
use crate::params::Params;

pub(super) fn command_line(inputs: &Inputs) -> Report {
    let path = inputs.root.path("/proc/cmdline");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => return plain(Err(format!("cannot read {}: {error}; defaults are used", path.display()))),
    };
    let params = Params::from_command_line(&CommandLine::parse(&text));
    let complaints: Vec<String> =
        params.complaints.iter().map(|complaint| format!("{}: {}", complaint.param, complaint.text)).collect();
    let end = if complaints.is_empty() { End::Ok(String::new()) } else { End::Failed(complaints.join("; ")) };
    (end, Product::CommandLine(text, Box::new(params)))
}

pub(super) fn pci_scan(inputs: &Inputs) -> Report {
    match firstlight_pci::scan(&inputs.root.path("/sys")) {
        Ok(functions) => (End::Ok(format!("{} functions", functions.len())), Product::Functions(functions)),
        Err(error) => plain(Err(error.to_string())),
    }
}

/// Decides the mode from the functions on the PCI bus, the command line and the processor.
#[must_use]
pub fn decide(inputs: &Inputs) -> Decision {
    let decision = mode::decide(&inputs.functions, inputs.params.mode);
    if decision.attach { decision.with_confidential(confidential(inputs)) } else { decision }
}

pub(super) fn mode(inputs: &Inputs) -> Report {
    let decision = decide(inputs);
    let detail = format!("{}: {}", decision.mode.name, decision.mode.reason);
    let end = match inputs.params.on_unsupported_topology {
        OnUnsupportedTopology::Fail if decision.unsupported.is_some() => {
            End::Failed(format!("{detail}; firstlight.on-unsupported-topology=degrade uses what can be used"))
        }
        _ => End::Ok(detail),
    };
    (end, Product::Mode(decision))
}

fn confidential(inputs: &Inputs) -> Option<String> {
    match inputs.params.confidential {
        Some(true) => Some("firstlight.confidential=on".to_owned()),
        Some(false) => None,
        None => confidential::detect(&inputs.root),
    }
}
