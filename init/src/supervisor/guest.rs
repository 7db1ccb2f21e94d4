//! The data about the guest on which decisions are based.

use std::sync::Arc;

use firstlight_gpu_settings_protocol::SettingsRequest;
use firstlight_pci::{Address, Function, Kind};

use crate::actions::Inputs;
use crate::attach::Policy;
use crate::daemons::table::DaemonContext;
use crate::mode::Decision;
use crate::params::Params;
use crate::root::Root;

/// The guest's root, kernel, parameters, PCI functions and mode.
#[derive(Debug)]
pub(super) struct Guest {
    root: Root,
    release: String,
    params: Arc<Params>,
    functions: Arc<Vec<Function>>,
    decision: Option<Decision>,
}

impl Guest {
    /// Creates a guest of which only the root and the kernel release are known.
    pub(super) fn new(root: Root, release: String) -> Self {
        Self { root, release, params: Arc::default(), functions: Arc::default(), decision: None }
    }

    /// Returns the root of all paths.
    pub(super) fn root(&self) -> &Root {
        &self.root
    }

    /// Returns the kernel parameters.
    pub(super) fn params(&self) -> &Params {
        &self.params
    }

    /// Sets the kernel parameters.
    pub(super) fn set_params(&mut self, params: Box<Params>) {
        self.params = Arc::from(params);
    }

    /// Sets the functions on the PCI bus.
    pub(super) fn set_functions(&mut self, functions: Vec<Function>) {
        self.functions = Arc::new(functions);
    }

    /// Returns the GPUs among the functions on the PCI bus.
    pub(super) fn gpus(&self) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(|function| function.kind() == Some(Kind::Gpu))
    }

    /// Returns the mode's decision, once made.
    pub(super) fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref()
    }

    /// Sets the mode's decision.
    pub(super) fn set_decision(&mut self, decision: Decision) {
        self.decision = Some(decision);
    }

    /// Returns whether GPUs are attached in the decided mode.
    pub(super) fn attaches_gpus(&self) -> bool {
        self.decision.as_ref().is_some_and(|decision| decision.attach)
    }

    /// Returns the decided mode and its reason.
    pub(super) fn mode_reason(&self) -> String {
        self.decision.as_ref().map_or_else(
            || "no mode was decided".to_owned(),
            |decision| format!("mode {}: {}", decision.mode.name, decision.mode.reason),
        )
    }

    /// Returns whether this is a guest under confidential computing.
    pub(super) fn is_confidential(&self) -> bool {
        self.decision.as_ref().is_some_and(|decision| decision.confidential.is_some())
    }

    /// Returns the attach policy of this guest.
    pub(super) fn attach_policy(&self) -> Policy {
        self.params.attach.resolve(self.is_confidential())
    }

    /// Returns the settings that are requested for these GPUs, if any.
    pub(super) fn settings_for(&self, gpus: &[(u32, Address)]) -> Option<SettingsRequest> {
        self.params.settings.request_for(gpus, self.is_confidential())
    }

    /// Returns the properties that decide which daemons run and how.
    pub(super) fn daemon_context(&self) -> DaemonContext {
        DaemonContext { fabric: self.decision.as_ref().and_then(|decision| decision.fabric) }
    }

    /// Returns the inputs of an action; GPUs and units are those of other components.
    pub(super) fn inputs(&self, gpus: Vec<Address>, ready: usize, units: usize) -> Inputs {
        Inputs {
            root: self.root.clone(),
            release: self.release.clone(),
            params: Arc::clone(&self.params),
            functions: Arc::clone(&self.functions),
            decision: self.decision.clone(),
            gpus,
            ready,
            units,
        }
    }
}

#[cfg(test)]
pub(super) mod testing {
    use firstlight_cmdline::CommandLine;

    use super::*;
    use crate::mode::{ModeChoice, decide};

    /// Returns a GPU function on the bus.
    pub(in crate::supervisor) fn gpu(bus: u8) -> Function {
        Function {
            address: format!("0000:{bus:02x}:00.0").parse().unwrap(),
            vendor: 0x10de,
            device: 0x2330,
            class: 0x03_0200,
            driver: Some("nvidia".to_owned()),
            nvlink_bridge: false,
        }
    }

    /// Returns a guest with this command line and GPUs on these buses.
    pub(in crate::supervisor) fn guest(root: &std::path::Path, line: &str, buses: &[u8]) -> Guest {
        let mut guest = Guest::new(Root::at(root), "6.12".to_owned());
        guest.set_params(Box::new(Params::from_command_line(&CommandLine::parse(line))));
        guest.set_functions(buses.iter().copied().map(gpu).collect());
        guest.set_decision(decide(&guest.functions, ModeChoice::Auto));
        guest
    }

    #[test]
    fn mode_decides_whether_gpus_are_attached() {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = Guest::new(Root::at(dir.path()), "6.12".to_owned());
        assert!(!guest.attaches_gpus() && guest.mode_reason() == "no mode was decided");
        guest.set_decision(decide(&[gpu(1)], ModeChoice::Auto));
        assert!(guest.attaches_gpus() && guest.mode_reason().starts_with("mode gpu: GPUs on the PCI bus: 1"));
        assert!(!guest.daemon_context().is_service());
    }

    #[test]
    fn confidential_guest_attaches_one_gpu_after_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = guest(dir.path(), "", &[1, 2]);
        assert_eq!((guest.attach_policy(), guest.gpus().count()), (Policy::Auto, 2));
        guest.set_decision(guest.decision().unwrap().clone().with_confidential(Some("tdx".to_owned())));
        assert!(guest.is_confidential());
        assert_eq!(guest.attach_policy(), Policy::Serial);
    }
}
