//! Units that set up the kernel: cgroups, sysctls, the loopback interface, lockdown.

use std::fs;

use super::{Inputs, Report, not_needed, plain};
use crate::root::Root;
use crate::{nodes, sysctls};

pub(super) fn cgroup2(inputs: &Inputs) -> Report {
    plain(enable_controllers(&inputs.root))
}

fn enable_controllers(root: &Root) -> Result<String, String> {
    let dir = root.path("/sys/fs/cgroup");
    let list = dir.join("cgroup.controllers");
    let controllers = fs::read_to_string(&list).map_err(|error| format!("cannot read {}: {error}", list.display()))?;
    let enable: Vec<String> = controllers.split_ascii_whitespace().map(|name| format!("+{name}")).collect();
    let control = dir.join("cgroup.subtree_control");
    fs::write(&control, enable.join(" "))
        .map_err(|error| format!("failed to write {enable:?} to {}: {error}", control.display()))?;
    Ok(controllers.trim().to_owned())
}

pub(super) fn loopback(_: &Inputs) -> Report {
    let up = firstlight_sys::net::set_up("lo");
    plain(up.map(|()| String::new()).map_err(|error| format!("failed to bring lo up: {error}")))
}

pub(super) fn sysctl(inputs: &Inputs) -> Report {
    plain(sysctls::apply(&inputs.root, sysctls::SETTINGS).sentence())
}

pub(super) fn lockdown(inputs: &Inputs) -> Report {
    if !inputs.params.lockdown {
        return not_needed("firstlight.lockdown=off".to_owned());
    }
    // The driver is not loaded yet, and lockdown would reject its unsigned module.
    if inputs.params.gpu_hotplug && nodes::driver_major(&inputs.root).is_none() {
        let now: Vec<_> =
            sysctls::LOCKS.iter().filter(|(name, _)| *name != sysctls::MODULES_DISABLED).copied().collect();
        let sentence = sysctls::apply(&inputs.root, &now).sentence();
        let later = sysctls::MODULES_DISABLED;
        return plain(
            sentence.map(|text| format!("{text}; {later} and kernel lockdown are deferred to the first GPU")),
        );
    }
    plain(lock_all(inputs))
}

/// Applies the sysctl locks and kernel lockdown.
pub(super) fn lock_all(inputs: &Inputs) -> Result<String, String> {
    let settings = sysctls::apply(&inputs.root, sysctls::LOCKS).sentence();
    let kernel = sysctls::lock_kernel(&inputs.root, inputs.params.kernel_lockdown);
    match (settings, kernel) {
        (Ok(settings), Ok(kernel)) => Ok(format!("{settings}; {kernel}")),
        (Err(settings), Err(kernel)) => Err(format!("{settings}; {kernel}")),
        (Err(text), Ok(_)) | (Ok(_), Err(text)) => Err(text),
    }
}
