//! The action of each unit. An action takes the products of earlier units and
//! returns its own; nothing is shared.

use std::fs;
use std::sync::Arc;

use firstlight_cmdline::CommandLine;
use firstlight_pci::{Address, Function, Kind};

use crate::driver_paths;
use crate::executor::End;
use crate::extensions::unit as extensions;
use crate::mode::{self, Decision, OnUnsupportedTopology};
use crate::modules::{LoadOrder, Modules, Outcome, devices, name};
use crate::mounts::{self, When};
use crate::nodes::{self, Minor, Mknod, NodesError};
use crate::params::Params;
use crate::root::{Root, leave_first_root};
use crate::state_disk;
use crate::sysctls;
use crate::units::Action;
use crate::{cdi, confidential};

/// The directory that only root in the guest's own mount namespace reaches.
const OWN_DIRECTORY: &str = "/run/firstlight";

/// Exists if the virtio transport of vsock is loaded or built in.
const VSOCK_DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";

/// Modules for vsock. Some kernels have the PCI bus driver of virtio as a
/// module that no other depends on by name.
const VSOCK_MODULES: &[&str] = &["virtio_pci", "vmw_vsock_virtio_transport"];

/// The virtio transports. They are loaded before any virtio driver, so that disks
/// are named in bus order: those on PCI first, as shims that refer to disks by
/// letter expect.
pub(crate) const TRANSPORT_MODULES: &[&str] = &["virtio_pci", "virtio_mmio"];

/// Modules for file systems and networks of containers, loaded if the image has
/// them: nothing in the guest loads modules on demand.
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

/// The module that the NVLink 5 subnet manager uses. No dependency or modalias loads
/// it; the drivers below it are loaded by modalias.
const FABRIC_MODULES: &[&str] = &["ib_umad"];

/// The GPU driver's modules in load order.
const NVIDIA_MODULES: &[&str] = &["nvidia", "nvidia-uvm"];

/// The inputs of an action: everything that is known when it starts.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// The root of all paths.
    pub root: Root,
    /// The kernel's release.
    pub release: String,
    /// The command line.
    pub params: Arc<Params>,
    /// The PCI bus.
    pub functions: Arc<Vec<Function>>,
    /// The mode's decision, once made.
    pub decision: Option<Decision>,
    /// GPUs in PCI order.
    pub gpus: Vec<Address>,
    /// How many of them are ready.
    pub ready: usize,
    /// How many units the plan has.
    pub units: usize,
}

/// What an action returns besides its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Product {
    /// Nothing.
    Nothing,
    /// The command line, as text and as parameters.
    CommandLine(String, Box<Params>),
    /// The PCI bus.
    Functions(Vec<Function>),
    /// The mode.
    Mode(Decision),
    /// GPUs' minor numbers.
    Minors(Vec<Minor>),
}

/// An action's end and product.
pub type Report = (End, Product);

fn plain(result: Result<String, String>) -> Report {
    (result.map_or_else(End::Failed, End::Ok), Product::Nothing)
}

/// Runs an action to its end, on its thread. The agent, GPUs and daemons have no thread and
/// are not run here.
#[must_use]
pub fn run(action: Action, inputs: &Inputs) -> Report {
    match action {
        Action::Mounts => plain(first_mounts()),
        Action::CommandLine => command_line(inputs),
        Action::Vsock => plain(vsock(inputs)),
        Action::Extensions => plain(extensions::mount(inputs)),
        Action::ExtensionDisks => plain(extensions::check_unrequested(inputs)),
        Action::ContainerModules => plain(container_modules(inputs)),
        Action::PciScan => pci_scan(inputs),
        Action::Mode => decide(inputs),
        Action::State => plain(state_disk::mount(&inputs.root)),
        Action::NvidiaModules => nvidia_modules(inputs),
        Action::Nodes => make_nodes(inputs),
        Action::Cdi => check_cdi(inputs),
        Action::Cgroup2 => plain(cgroup2(&inputs.root)),
        Action::Sysctl => plain(sysctls::apply(&inputs.root, sysctls::SETTINGS).sentence()),
        Action::Loopback => plain(loopback()),
        Action::LaterMounts => later_mounts(),
        Action::ReadOnlyRoot => remount_root_read_only(inputs),
        Action::Lockdown => lockdown(inputs),
        Action::BootDone => plain(Ok(format!("{} units have ended", inputs.units.saturating_sub(1)))),
        Action::Agent | Action::GpuAttach | Action::GpuSettings | Action::Daemon(_) | Action::DevLog => {
            plain(Err("it cannot be run as an action; this is a bug".to_owned()))
        }
    }
}

/// Returns an action's report if it needs no thread.
#[must_use]
pub fn at_once(action: Action, inputs: &Inputs) -> Option<Report> {
    match action {
        Action::Mounts | Action::CommandLine | Action::Mode | Action::BootDone => Some(run(action, inputs)),
        Action::Vsock if inputs.root.path(VSOCK_DRIVER).exists() => Some(plain(Ok("the kernel has it".to_owned()))),
        Action::Extensions => extensions::nothing_requested(inputs).map(|why| (End::NotNeeded(why), Product::Nothing)),
        Action::ExtensionDisks => {
            extensions::no_disk_to_check(inputs).map(|why| (End::NotNeeded(why), Product::Nothing))
        }
        Action::State if !inputs.decision.as_ref().is_some_and(Decision::is_service) => {
            Some((End::NotNeeded("only a service VM has a state disk".to_owned()), Product::Nothing))
        }
        Action::ContainerModules if !Modules::any(&inputs.root, &inputs.release) => {
            Some((End::NotNeeded("this image has no modules".to_owned()), Product::Nothing))
        }
        _ => None,
    }
}

fn join<E: ToString>(errors: &[E]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Lists the skipped nodes, at most four.
fn skipped_nodes(errors: &[NodesError]) -> String {
    let more = errors.len().saturating_sub(4);
    let text = join(&errors[..errors.len() - more]);
    if more == 0 { format!("; left out: {text}") } else { format!("; left out: {text}; and {more} more") }
}

fn first_mounts() -> Result<String, String> {
    let moved = leave_first_root().map_err(|error| error.to_string())?;
    let count = mounts::mount_all(When::First).map_err(|errors| join(&errors))?;
    mounts::make_links();
    match rustix::fs::mkdir(OWN_DIRECTORY, rustix::fs::Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(format!("failed to create {OWN_DIRECTORY}: {error}")),
    }
    let root = if moved { "; the root has a parent mount now" } else { "" };
    Ok(format!("{count} file systems{root}"))
}

fn later_mounts() -> Report {
    let mut detail = match mounts::mount_all(When::Later) {
        Ok(count) => format!("{count} file systems"),
        // A kernel without them is a smaller kernel, not a broken one.
        Err(errors) => format!("left out: {}", join(&errors)),
    };
    match mounts::mount_all(When::Scratch) {
        Ok(0) => {}
        Ok(count) => detail.push_str(&format!("; scratch space for {count} directories")),
        Err(errors) => return plain(Err(format!("{detail}; {}", join(&errors)))),
    }
    plain(Ok(detail))
}

fn remount_root_read_only(inputs: &Inputs) -> Report {
    if inputs.params.root_writable {
        return (End::NotNeeded("firstlight.root=rw".to_owned()), Product::Nothing);
    }
    plain(mounts::remount_root_read_only().map(|()| "read-only".to_owned()).map_err(|error| {
        format!(
            "cannot make / read-only: {error}; is a file on it open for writing? firstlight.root=rw keeps it writable"
        )
    }))
}

fn command_line(inputs: &Inputs) -> Report {
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

pub(crate) fn load(modules: &Modules, names: &[&str], order: LoadOrder, inputs: &Inputs) -> Outcome {
    modules.load(names, order, &|module| settings(modules, inputs, module))
}

/// Loads a module or the modules of an alias on request of a client; returns the outcome.
///
/// # Errors
/// The module is not in the image, or the kernel did not take it.
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
fn locked(root: &Root) -> bool {
    fs::read_to_string(root.path("/proc/sys/kernel/modules_disabled")).is_ok_and(|text| text.trim() == "1")
}

/// Loads the driver for the first hotplugged GPU, then applies the locks that were deferred for it.
///
/// # Errors
/// A module is not in the image, the kernel rejected it, or module loading is locked.
pub fn load_driver(inputs: &Inputs) -> Result<String, String> {
    match nvidia_modules(inputs).0 {
        End::Ok(text) | End::NotNeeded(text) => {
            if inputs.params.lockdown {
                lock_all(inputs)?;
            }
            cdi::publish_driver(&inputs.root).map_err(|error| error.to_string())?;
            Ok(text)
        }
        End::Failed(_) | End::TimedOut(_) if locked(&inputs.root) => Err(
            "the driver is not loaded, and the guest has locked module loading, as it does when it has booted; boot \
             with firstlight.gpu-hotplug=on where the first GPU comes later"
                .to_owned(),
        ),
        End::Failed(text) | End::TimedOut(text) => Err(text),
    }
}

fn vsock(inputs: &Inputs) -> Result<String, String> {
    let modules = Modules::read(&inputs.root, &inputs.release);
    let mut outcome = load(&modules, VSOCK_MODULES, LoadOrder::Free, inputs);
    // Only the last is required: the first may be built in without being listed.
    if inputs.root.path(VSOCK_DRIVER).exists() {
        return Ok(outcome.detail());
    }
    let missing = outcome.errors.pop().map(|error| error.to_string());
    Err(missing.unwrap_or_else(|| "the modules are loaded but the virtio driver of vsock is not there".to_owned()))
}

fn container_modules(inputs: &Inputs) -> Result<String, String> {
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
        devices::is_the_modes(module) || name::has(&params.blacklist, module) || name::has(&params.forbidden, module)
    };
    for bus in devices::BUSES {
        let undriven = devices::undriven(&inputs.root, bus);
        if undriven.is_empty() {
            continue;
        }
        let drivers = modules.drivers(&undriven, &blocked);
        let drivers: Vec<&str> = drivers.iter().map(String::as_str).filter(|name| modules.has(name)).collect();
        outcome.add(load(&modules, &drivers, LoadOrder::Free, inputs));
    }
    outcome.remarks.extend(modules.config.complaints.iter().cloned());
    outcome.to_result()
}

fn pci_scan(inputs: &Inputs) -> Report {
    match firstlight_pci::scan(&inputs.root.path("/sys")) {
        Ok(functions) => (End::Ok(format!("{} functions", functions.len())), Product::Functions(functions)),
        Err(error) => plain(Err(error.to_string())),
    }
}

fn decide(inputs: &Inputs) -> Report {
    let decision = mode::decide(&inputs.functions, inputs.params.mode);
    let decision = if decision.attach { decision.with_confidential(confidential(inputs)) } else { decision };
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

fn nvidia_modules(inputs: &Inputs) -> Report {
    if let Some(decision) = inputs.decision.as_ref().filter(|decision| !decision.driver) {
        let why = format!("mode {}: {}", decision.mode.name, decision.mode.reason);
        return (End::NotNeeded(why), Product::Nothing);
    }
    if driver_waits_for_gpu(inputs) {
        let why = "no GPU is on the PCI bus yet; the driver is loaded for the first one (firstlight.gpu-hotplug=on)";
        return (End::NotNeeded(why.to_owned()), Product::Nothing);
    }
    let place = match driver_paths::modules(&inputs.root, &inputs.release) {
        Ok(place) => place,
        Err(error) => return plain(Err(error)),
    };
    if let Err(error) = driver_paths::offer_firmware(&inputs.root) {
        return plain(Err(error));
    }
    let modules = Modules::read_at(&inputs.root, place, &inputs.release);
    // A service VM computes nothing.
    let attach = inputs.decision.as_ref().is_none_or(|decision| decision.attach);
    let names = &NVIDIA_MODULES[..if attach { NVIDIA_MODULES.len() } else { 1 }];
    plain(load(&modules, names, LoadOrder::InOrder, inputs).to_result())
}

/// Keeps the driver from waiting for links of a GPU that has none.
const NO_LINKS: &str = "NVreg_NvLinkDisable";

/// What a module is loaded with: what the image says, then what the command line
/// says, so that it wins, and what follows from the mode.
fn settings(modules: &Modules, inputs: &Inputs, module: &str) -> String {
    let (image, line) = (modules.config.options(module), inputs.params.for_module(module));
    let given = format!("{image} {line}").trim().to_owned();
    let lone = inputs.decision.as_ref().is_some_and(|decision| decision.single_gpu);
    if lone && module == NVIDIA_MODULES[0] && !given.contains(NO_LINKS) {
        return format!("{given} {NO_LINKS}=1").trim().to_owned();
    }
    given
}

fn make_nodes(inputs: &Inputs) -> Report {
    match nodes::make(&inputs.root, &inputs.gpus, inputs.params.imex_channels, &mut Mknod) {
        Ok(made) => {
            let known = made.minors.iter().filter(|(_, minor)| minor.is_ok()).count();
            let mut detail = format!("nodes for {known} of {} GPUs", inputs.gpus.len());
            // GPUs can be attached and used without these.
            if !made.left_out.is_empty() {
                detail.push_str(&skipped_nodes(&made.left_out));
            }
            // Before the first GPU is published. The unit `cdi` tries again, and fails if that fails.
            match cdi::publish_driver(&inputs.root) {
                Ok(None) => {}
                Ok(Some(path)) => detail.push_str(&format!("; the driver's files as {path} has them")),
                Err(error) => detail.push_str(&format!("; {error}")),
            }
            (End::Ok(detail), Product::Minors(made.minors))
        }
        Err(error) => plain(Err(error.to_string())),
    }
}

fn check_cdi(inputs: &Inputs) -> Report {
    let total = inputs.gpus.len();
    if inputs.ready == 0 {
        let why = if total == 0 { "there is no GPU" } else { "no GPU is ready, so no file was written" };
        return (End::NotNeeded(why.to_owned()), Product::Nothing);
    }
    if let Err(error) = cdi::ensure_driver(&inputs.root) {
        return plain(Err(error.to_string()));
    }
    // A GPU is ready only when the file that names it has been written.
    let detail = format!("names for {} of {total} GPUs", inputs.ready);
    // An attach can create MIG instances; those whose capabilities cannot be read have no CDI name.
    match nodes::make_capabilities(&inputs.root, &mut Mknod) {
        Ok(errors) if errors.is_empty() => plain(Ok(detail)),
        Ok(errors) => plain(Err(format!("{detail}{}", skipped_nodes(&errors)))),
        Err(error) => plain(Err(error.to_string())),
    }
}

fn cgroup2(root: &Root) -> Result<String, String> {
    let dir = root.path("/sys/fs/cgroup");
    let list = dir.join("cgroup.controllers");
    let controllers = fs::read_to_string(&list).map_err(|error| format!("cannot read {}: {error}", list.display()))?;
    let enable: Vec<String> = controllers.split_ascii_whitespace().map(|name| format!("+{name}")).collect();
    let control = dir.join("cgroup.subtree_control");
    fs::write(&control, enable.join(" "))
        .map_err(|error| format!("failed to write {enable:?} to {}: {error}", control.display()))?;
    Ok(controllers.trim().to_owned())
}

fn loopback() -> Result<String, String> {
    firstlight_sys::net::set_up("lo").map_err(|error| format!("failed to bring lo up: {error}"))?;
    Ok(String::new())
}

fn lockdown(inputs: &Inputs) -> Report {
    if !inputs.params.lockdown {
        return (End::NotNeeded("firstlight.lockdown=off".to_owned()), Product::Nothing);
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
fn lock_all(inputs: &Inputs) -> Result<String, String> {
    let settings = sysctls::apply(&inputs.root, sysctls::LOCKS).sentence();
    let kernel = sysctls::lock_kernel(&inputs.root, inputs.params.kernel_lockdown);
    match (settings, kernel) {
        (Ok(settings), Ok(kernel)) => Ok(format!("{settings}; {kernel}")),
        (Err(settings), Err(kernel)) => Err(format!("{settings}; {kernel}")),
        (Err(text), Ok(_)) | (Ok(_), Err(text)) => Err(text),
    }
}

/// Returns whether the driver has to wait for a hotplugged GPU. Without a GPU or an
/// NVSwitch its module does not load.
fn driver_waits_for_gpu(inputs: &Inputs) -> bool {
    let some = |function: &Function| matches!(function.kind(), Some(Kind::Gpu | Kind::NvSwitch));
    inputs.params.gpu_hotplug && !inputs.functions.iter().any(some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(dir: &tempfile::TempDir) -> Inputs {
        Inputs {
            root: Root::at(dir.path()),
            release: "6.12".into(),
            params: Arc::default(),
            functions: Arc::default(),
            decision: None,
            gpus: Vec::new(),
            ready: 0,
            units: 1,
        }
    }

    fn write(dir: &tempfile::TempDir, path: &str, text: &str) {
        let path = Root::at(dir.path()).path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn unknown_parameter_fails_unit_and_others_apply() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir, "proc/cmdline", "quiet firstlight.mod=gpu firstlight.on-failure=hold\n");
        let (end, product) = run(Action::CommandLine, &inputs(&dir));
        let End::Failed(text) = end else { panic!("{end:?}") };
        assert!(text.contains("firstlight.mod: there is no such parameter; did you mean firstlight.mode?"), "{text}");
        let Product::CommandLine(line, params) = product else { panic!() };
        assert!(line.starts_with("quiet"));
        assert_eq!(params.on_failure, crate::params::OnFailure::Hold);
    }

    #[test]
    fn all_controllers_are_enabled() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir, "sys/fs/cgroup/cgroup.controllers", "cpu io memory\n");
        assert_eq!(run(Action::Cgroup2, &inputs(&dir)).0, End::Ok("cpu io memory".into()));
        let path = dir.path().join("sys/fs/cgroup/cgroup.subtree_control");
        assert_eq!(fs::read_to_string(path).unwrap(), "+cpu +io +memory");
    }

    #[test]
    fn vsock_already_present_needs_no_thread() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(at_once(Action::Vsock, &inputs(&dir)), None);
        let (end, _) = run(Action::Vsock, &inputs(&dir));
        assert!(matches!(&end, End::Failed(text) if text.contains("vmw_vsock_virtio_transport")), "{end:?}");
        write(&dir, &format!("{VSOCK_DRIVER}/bind"), "");
        assert!(matches!(at_once(Action::Vsock, &inputs(&dir)), Some((End::Ok(_), _))));
    }

    #[test]
    fn cpu_guest_needs_no_driver_and_gpu_guest_without_driver_fails() {
        let dir = tempfile::tempdir().unwrap();
        let mut inputs = inputs(&dir);
        inputs.decision = Some(mode::decide(&[], mode::ModeChoice::Auto));
        assert!(matches!(run(Action::NvidiaModules, &inputs).0, End::NotNeeded(_)));
        inputs.decision = Some(mode::decide(&[], mode::ModeChoice::Chosen(&mode::GUEST_MODES[1])));
        let (end, _) = run(Action::NvidiaModules, &inputs);
        assert!(matches!(&end, End::Failed(text) if text.contains("module nvidia is neither in")), "{end:?}");
    }

    /// No file is behind the list's lines, so what is tried is what fails.
    #[test]
    fn extension_driver_is_loaded_by_extension_modules_dep() {
        let dir = tempfile::tempdir().unwrap();
        let mut inputs = inputs(&dir);
        inputs.decision = Some(mode::decide(&[], mode::ModeChoice::Chosen(&mode::GUEST_MODES[1])));
        write(&dir, "lib/modules/6.12/modules.dep", "base.ko:\n");
        let list = "run/kata-extensions/gpu/lib/modules/6.12/modules.dep";
        write(
            &dir,
            list,
            "updates/nvidia.ko: kernel/ecc.ko\nkernel/ecc.ko:\nupdates/nvidia-uvm.ko: updates/nvidia.ko\n",
        );
        let End::Failed(text) = run(Action::NvidiaModules, &inputs).0 else { panic!() };
        let file = "run/kata-extensions/gpu/lib/modules/6.12/kernel/ecc.ko";
        assert!(text.contains(file) && !text.contains("neither in"), "{text}");
        inputs.release = "6.13".to_owned();
        let End::Failed(text) = run(Action::NvidiaModules, &inputs).0 else { panic!() };
        assert!(text.contains("modules for 6.12, and this kernel is 6.13"), "{text}");
    }

    #[test]
    fn single_gpu_disables_nvlink_unless_overridden() {
        let dir = tempfile::tempdir().unwrap();
        let mut inputs = inputs(&dir);
        let gpu = |number: u8| Function {
            address: format!("0000:{number:02x}:00.0").parse().unwrap(),
            vendor: 0x10de,
            device: 0x2335,
            class: 0x03_0200,
            driver: None,
            nvlink_bridge: false,
        };
        for (gpus, line, expected) in [
            (1, "", "NVreg_NvLinkDisable=1"),
            (1, "firstlight.nvidia.NVreg_X=2", "NVreg_X=2 NVreg_NvLinkDisable=1"),
            (1, "nvidia.NVreg_NvLinkDisable=0", "NVreg_NvLinkDisable=0"),
            (2, "", ""),
        ] {
            inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse(line)));
            let functions: Vec<_> = (0..gpus).map(gpu).collect();
            inputs.decision = Some(mode::decide(&functions, mode::ModeChoice::Auto));
            let modules = Modules::read(&inputs.root, &inputs.release);
            assert_eq!(settings(&modules, &inputs, "nvidia"), expected, "{gpus} {line}");
            assert_eq!(settings(&modules, &inputs, "nvidia-uvm"), "");
        }
        // The command line comes after the image's options; the mode's default applies only if neither sets it.
        write(&dir, "etc/modprobe.d/x.conf", "options nvidia NVreg_A=1 NVreg_NvLinkDisable=0\n");
        inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse("nvidia.NVreg_A=2")));
        inputs.decision = Some(mode::decide(&[gpu(0)], mode::ModeChoice::Auto));
        let modules = Modules::read(&inputs.root, &inputs.release);
        assert_eq!(settings(&modules, &inputs, "nvidia"), "NVreg_A=1 NVreg_NvLinkDisable=0 NVreg_A=2");
    }

    #[test]
    fn confidential_mode_is_set_by_cpu_flags_or_command_line() {
        let dir = tempfile::tempdir().unwrap();
        let mut inputs = inputs(&dir);
        write(&dir, "proc/cpuinfo", "flags : fpu tdx_guest\n");
        for (line, expected) in [
            ("firstlight.mode=gpu", Some("tdx_guest (Intel TDX)")),
            ("firstlight.mode=gpu firstlight.confidential=off", None),
            ("firstlight.mode=gpu firstlight.confidential=on", Some("firstlight.confidential=on")),
            ("firstlight.mode=cpu firstlight.confidential=on", None),
        ] {
            inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse(line)));
            let (End::Ok(detail), Product::Mode(decision)) = run(Action::Mode, &inputs) else { panic!("{line}") };
            assert_eq!(decision.confidential.as_deref(), expected, "{line}");
            assert_eq!(detail.contains("confidential: "), expected.is_some(), "{detail}");
        }
    }

    #[test]
    fn unsupported_topology_fails_mode_only_if_requested() {
        let dir = tempfile::tempdir().unwrap();
        let mut inputs = inputs(&dir);
        for (line, fails) in
            [("firstlight.mode=service-vm-nvl4", false), ("firstlight.on-unsupported-topology=fail", false)]
        {
            inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse(line)));
            assert_eq!(matches!(run(Action::Mode, &inputs).0, End::Failed(_)), fails, "{line}");
        }
        let line = "firstlight.mode=service-vm-nvl4 firstlight.on-unsupported-topology=fail";
        inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse(line)));
        let (end, product) = run(Action::Mode, &inputs);
        assert!(matches!(&end, End::Failed(text) if text.contains("no NVSwitch is on the PCI bus")), "{end:?}");
        assert!(matches!(product, Product::Mode(decision) if decision.unsupported.is_some()));
    }

    #[test]
    fn container_modules_missing_in_image_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(at_once(Action::ContainerModules, &inputs(&dir)), Some((End::NotNeeded(_), _))));
        write(&dir, "lib/modules/6.12/modules.dep", "kernel/other.ko:\n");
        assert_eq!(at_once(Action::ContainerModules, &inputs(&dir)), None);
        assert_eq!(run(Action::ContainerModules, &inputs(&dir)).0, End::Ok(String::new()));
    }

    /// No file is behind the list's lines, so what is tried is what fails.
    #[test]
    fn drivers_are_loaded_for_devices_except_gpus_and_blacklisted() {
        let dir = tempfile::tempdir().unwrap();
        let mut inputs = inputs(&dir);
        let list = |name: &str, text: &str| write(&dir, &format!("lib/modules/6.12/modules.{name}"), text);
        list("dep", "i6300esb.ko:\nnvidia.ko:\nnouveau.ko:\nmlx5_ib.ko:\nnvme.ko:\next4.ko:\nib_umad.ko:\n");
        list(
            "alias",
            "alias pci:v00008086d000025ABsv* i6300esb\nalias pci:v000010DEd* nvidia\nalias pci:v000010DEd* nouveau\n\
             alias auxiliary:mlx5_core.rdma mlx5_ib\nalias pci:v*bc01sc08i02* nvme\nalias pci:v00008086d000025ABsv* notinimage\n",
        );
        for (bus, device, text) in [
            ("pci", "0000:00:01.0", "pci:v00008086d000025ABsv0bc08"),
            ("pci", "0000:00:02.0", "pci:v000010DEd00002335sv0"),
            ("pci", "0000:00:03.0", "pci:v00001B36bc01sc08i02"),
            ("auxiliary", "mlx5_core.rdma.0", "auxiliary:mlx5_core.rdma"),
        ] {
            write(&dir, &format!("sys/bus/{bus}/devices/{device}/modalias"), text);
        }
        let tried = |inputs: &Inputs| {
            let End::Failed(text) = run(Action::ContainerModules, inputs).0 else { panic!() };
            let all = ["i6300esb", "nvidia", "nouveau", "mlx5_ib", "nvme", "ext4", "ib_umad", "notinimage"];
            all.into_iter().filter(|name| text.contains(&format!("module {name}:"))).collect::<Vec<_>>()
        };
        assert_eq!(tried(&inputs), ["i6300esb", "mlx5_ib", "nvme", "ext4", "ib_umad"]);
        write(&dir, "usr/lib/modprobe.d/x.conf", "blacklist nvme\nblacklist ext4\n");
        let line = "modprobe.blacklist=mlx5-ib module_blacklist=ib_umad,i6300esb";
        inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse(line)));
        assert_eq!(tried(&inputs), ["ext4"], "a blacklist in modprobe.d does not apply to modules loaded by name");
        let End::Failed(text) = run(Action::ContainerModules, &inputs).0 else { panic!() };
        assert!(text.contains("left out: ib_umad, named by module_blacklist="), "{text}");
    }

    #[test]
    fn locked_module_loading_is_reported_as_cause() {
        let dir = tempfile::tempdir().unwrap();
        assert!(load_requested(&inputs(&dir), "dm-mod", "").unwrap_err().contains("modules.dep"));
        write(&dir, "lib/modules/6.12/modules.builtin", "kernel/fs/fuse/virtiofs.ko\n");
        assert_eq!(load_requested(&inputs(&dir), "virtiofs", "").unwrap(), "virtiofs built in");
        write(&dir, "proc/sys/kernel/modules_disabled", "1\n");
        let text = load_requested(&inputs(&dir), "dm-mod", "").unwrap_err();
        assert!(text.contains("dm-mod") && text.contains("firstlight.lockdown=off"), "{text}");
    }

    #[test]
    fn lockdown_can_be_disabled() {
        let dir = tempfile::tempdir().unwrap();
        let mut inputs = inputs(&dir);
        inputs.params = Arc::new(Params { lockdown: false, ..Params::default() });
        assert!(matches!(run(Action::Lockdown, &inputs).0, End::NotNeeded(_)));
    }
}
