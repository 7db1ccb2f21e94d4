//! Units and requests that load kernel modules, except the GPU driver's.

use std::fs;

use super::driver::NVIDIA_MODULE;
use super::{Inputs, Report, plain};
use crate::modules::{LoadOrder, Modules, Outcome, devices, name};
use crate::root::Root;

/// The sysfs directory that exists if the virtio transport of vsock is loaded or built in.
pub(super) const VSOCK_DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";

/// Modules for vsock. Some kernels have virtio's PCI bus driver as a module on which no other
/// module depends.
const VSOCK_MODULES: &[&str] = &["virtio_pci", "vmw_vsock_virtio_transport"];

/// The virtio transports. They are loaded before any virtio driver, so that disks are named in bus
/// order: disks on PCI first, as expected by shims that refer to disks by letter.
pub(super) const TRANSPORT_MODULES: &[&str] = &["virtio_pci", "virtio_mmio"];

/// Modules for file systems and networks of containers, loaded if the image has them: no program in
/// the guest loads modules on demand.
const CONTAINER_MODULES: &[&str] = &[
    "overlay",
    "erofs",
    "squashfs",
    "ext4",
    "xfs",
    "btrfs",
    "f2fs",
    "isofs",
    "vfat",
    "nfsv4",
    "virtiofs",
    "virtio_blk",
    "virtio_net",
    "virtio_scsi",
    "sd_mod",
    "nfit",
    "nd_pmem",
    "vfio_iommu_type1",
    "vfio-pci",
];

/// Modules for SetIPTables, loaded if the image has them: nft compatibility for
/// `iptables-nft`, NAT tables, and the common matches and targets. The kernel's
/// own `request_module` fails, as there is no modprobe.
const FILTER_MODULES: &[&str] = &[
    "nf_tables",
    "nft_compat",
    "nft_chain_nat",
    "nft_limit",
    "nf_log_syslog",
    "nft_log",
    "nft_ct",
    "xt_tcpudp",
    "xt_conntrack",
    "xt_state",
    "xt_comment",
    "xt_multiport",
    "xt_addrtype",
    "xt_owner",
    "xt_limit",
    "xt_mark",
    "xt_connmark",
    "xt_LOG",
    "xt_CT",
    "xt_TCPMSS",
    "xt_TPROXY",
    "xt_nat",
    "xt_REDIRECT",
    "xt_MASQUERADE",
    "ipt_REJECT",
    "ip6t_REJECT",
];

/// The module that the NVLink 5 subnet manager uses. No dependency or modalias loads ib_umad; the
/// drivers that it uses are loaded by modalias.
const FABRIC_MODULES: &[&str] = &["ib_umad"];

/// The parameter that keeps the driver from waiting for NVLinks of a GPU that has none.
const NO_LINKS: &str = "NVreg_NvLinkDisable";

pub(super) fn load(modules: &Modules, names: &[&str], order: LoadOrder, inputs: &Inputs) -> Outcome {
    modules.load(names, order, &|module| settings(modules, inputs, module))
}

/// Loads a module, or the modules of an alias, on request of a client; returns the outcome.
///
/// # Errors
/// A module is not in the image, or the kernel rejected a module.
pub fn load_requested(inputs: &Inputs, asked: &str, parameters: &str) -> Result<String, String> {
    let modules = Modules::read(&inputs.root, &inputs.release);
    let meant = modules.resolve(asked, &|module| name::has(&inputs.params.blacklist, module));
    let names: Vec<&str> = meant.iter().map(String::as_str).collect();
    let outcome = modules.load(&names, LoadOrder::Free, &|module| {
        let own = settings(&modules, inputs, module);
        if name::has(&meant, module) { format!("{own} {parameters}").trim().to_owned() } else { own }
    });
    outcome.to_result().map_err(|error| {
        if locked(&inputs.root) {
            format!(
                "kernel module {asked}: the guest has locked module loading, as it does when it has booted; have the \
                 image load it, or boot with firstlight.lockdown=off"
            )
        } else {
            error
        }
    })
}

/// Returns whether module loading is locked.
pub(super) fn locked(root: &Root) -> bool {
    fs::read_to_string(root.path("/proc/sys/kernel/modules_disabled")).is_ok_and(|text| text.trim() == "1")
}

/// Returns the report of the unit `vsock` if the transport is already present.
pub(super) fn vsock_is_present(inputs: &Inputs) -> Option<Report> {
    inputs.root.path(VSOCK_DRIVER).exists().then(|| plain(Ok("the kernel has it".to_owned())))
}

pub(super) fn vsock(inputs: &Inputs) -> Report {
    plain(load_vsock(inputs))
}

fn load_vsock(inputs: &Inputs) -> Result<String, String> {
    let modules = Modules::read(&inputs.root, &inputs.release);
    let mut outcome = load(&modules, VSOCK_MODULES, LoadOrder::Free, inputs);
    // Only the last module is required: virtio_pci may be built in without being listed.
    if inputs.root.path(VSOCK_DRIVER).exists() {
        return Ok(outcome.detail());
    }
    let missing = outcome.errors.pop().map(|error| error.to_string());
    Err(missing
        .unwrap_or_else(|| "the modules are loaded, but the virtio transport of vsock is not registered".to_owned()))
}

pub(super) fn container_modules(inputs: &Inputs) -> Report {
    let modules = Modules::read(&inputs.root, &inputs.release);
    let params = &inputs.params;
    let mut outcome = Outcome::default();
    for (lists, turn) in [
        (&[TRANSPORT_MODULES][..], LoadOrder::InOrder),
        (&[CONTAINER_MODULES, FILTER_MODULES, FABRIC_MODULES], LoadOrder::Free),
    ] {
        let wanted = lists.iter().copied().flatten().copied();
        let (held, names): (Vec<&str>, Vec<&str>) =
            wanted.filter(|name| modules.has(name)).partition(|name| name::has(&params.forbidden, name));
        outcome.add(load(&modules, &names, turn, inputs));
        outcome.remarks.extend(held.iter().map(|name| format!("left out: {name}, named by module_blacklist=")));
    }
    let blocked = |module: &str| {
        devices::is_gpu_driver(module) || name::has(&params.blacklist, module) || name::has(&params.forbidden, module)
    };
    for bus in devices::BUSES {
        let modaliases = devices::modaliases_without_driver(&inputs.root, bus);
        if modaliases.is_empty() {
            continue;
        }
        let drivers = modules.drivers(&modaliases, &blocked);
        let drivers: Vec<&str> = drivers.iter().map(String::as_str).filter(|name| modules.has(name)).collect();
        outcome.add(load(&modules, &drivers, LoadOrder::Free, inputs));
    }
    outcome.remarks.extend(modules.config.complaints.iter().cloned());
    plain(outcome.to_result())
}

/// Returns the parameters of a module: the image's options, then the command line's, which override
/// them, then a parameter that follows from the mode.
pub(super) fn settings(modules: &Modules, inputs: &Inputs, module: &str) -> String {
    let (image, line) = (modules.config.options(module), inputs.params.for_module(module));
    let given = format!("{image} {line}").trim().to_owned();
    let lone = inputs.decision.as_ref().is_some_and(|decision| decision.single_gpu);
    if lone && module == NVIDIA_MODULE && !given.contains(NO_LINKS) {
        return format!("{given} {NO_LINKS}=1").trim().to_owned();
    }
    given
}
