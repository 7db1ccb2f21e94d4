//! What each unit does. Actions take what earlier units produced and hand back
//! what later ones need; nothing is shared.

use std::fs;
use std::sync::Arc;

use firstlight_cmdline::CommandLine;
use firstlight_pci::{Address, Function};

use crate::executor::End;
use crate::mode::{self, Decision};
use crate::modules::{self, Loaded, Modules};
use crate::mounts::{self, When};
use crate::nodes::{self, Minor, Mknod};
use crate::params::Params;
use crate::root::{Root, leave_first_root};
use crate::sysctls;
use crate::units::Action;

/// The folder that only root in the guest's own mount namespace reaches.
const OWN_FOLDER: &str = "/run/firstlight";

/// Shows that the virtio transport of vsock is there, as module or built in.
const VSOCK_DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";

/// What vsock needs. Some kernels have the PCI bus driver of virtio as a
/// module, which nothing depends on by name.
const VSOCK_MODULES: &[&str] = &["virtio_pci", "vmw_vsock_virtio_transport"];

/// What containers' file systems and networks are made of, as far as the image
/// has it: nothing in the guest loads a module when it is first used.
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
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_scsi",
    "sd_mod",
    "nfit",
    "nd_pmem",
    "vfio_iommu_type1",
    "vfio-pci",
];

/// The GPU driver, in the order in which it is loaded.
const NVIDIA_MODULES: &[&str] = &["nvidia", "nvidia-uvm"];

/// What an action may look at: everything that is known when it starts.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Where files are.
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

/// What an action hands back besides its end.
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

/// Runs an action to its end. The agent, GPUs, and what is already known need
/// no thread and are not run here.
#[must_use]
pub fn run(action: Action, inputs: &Inputs) -> Report {
    match action {
        Action::Mounts => plain(first_mounts()),
        Action::CommandLine => command_line(inputs),
        Action::Vsock => plain(vsock(inputs)),
        Action::ContainerModules => plain(container_modules(inputs)),
        Action::PciScan => pci_scan(inputs),
        Action::Mode => decide(inputs),
        Action::NvidiaModules => nvidia_modules(inputs),
        Action::Nodes => make_nodes(inputs),
        Action::Cdi => cdi(inputs),
        Action::Cgroup2 => plain(cgroup2(&inputs.root)),
        Action::Sysctl => plain(sysctls::apply(&inputs.root, sysctls::SETTINGS).sentence()),
        Action::Loopback => plain(loopback()),
        Action::LaterMounts => later_mounts(),
        Action::Lockdown => lockdown(inputs),
        Action::BootDone => plain(Ok(format!("{} units have ended", inputs.units.saturating_sub(1)))),
        Action::Agent | Action::GpuAttach => plain(Err("it cannot be run as an action; this is a bug".to_owned())),
    }
}

/// The quick half of an action: its report if nothing has to be waited for.
#[must_use]
pub fn at_once(action: Action, inputs: &Inputs) -> Option<Report> {
    match action {
        Action::Mounts | Action::CommandLine | Action::Mode | Action::BootDone => Some(run(action, inputs)),
        Action::Vsock if inputs.root.path(VSOCK_DRIVER).exists() => Some(plain(Ok("the kernel has it".to_owned()))),
        Action::ContainerModules if !Modules::any(&inputs.root, &inputs.release) => {
            Some((End::NotNeeded("this image has no modules".to_owned()), Product::Nothing))
        }
        _ => None,
    }
}

fn join<E: ToString>(errors: &[E]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn first_mounts() -> Result<String, String> {
    let moved = leave_first_root().map_err(|error| error.to_string())?;
    let count = mounts::mount_all(When::First).map_err(|errors| join(&errors))?;
    mounts::make_links();
    match rustix::fs::mkdir(OWN_FOLDER, rustix::fs::Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(format!("cannot make {OWN_FOLDER}: {error}")),
    }
    let root = if moved { "; the root has a parent mount now" } else { "" };
    Ok(format!("{count} file systems{root}"))
}

fn later_mounts() -> Report {
    match mounts::mount_all(When::Later) {
        Ok(count) => plain(Ok(format!("{count} file systems"))),
        // A kernel without them is a smaller kernel, not a broken one.
        Err(errors) => plain(Ok(format!("left out: {}", join(&errors)))),
    }
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

fn load(modules: &Modules, name: &str, inputs: &Inputs) -> Result<String, String> {
    let loaded = modules.load(name, |module| inputs.params.for_module(module)).map_err(|error| error.to_string())?;
    Ok(match loaded {
        Loaded::Module(took) => {
            let parts: Vec<String> =
                took.iter().map(|(name, us)| format!("{name} {}.{} ms", us / 1000, us % 1000 / 100)).collect();
            format!("loaded {}", parts.join(", "))
        }
        Loaded::BuiltIn => format!("{name} built in"),
    })
}

/// Loads a module that somebody asked for after the boot plan was made.
///
/// # Errors
/// The module is not in the image, or the kernel did not take it.
pub fn load_asked(inputs: &Inputs, name: &str, parameters: &str) -> Result<(), String> {
    let modules = Modules::read(&inputs.root, &inputs.release);
    let own = |module: &str| inputs.params.for_module(module);
    let asked = |module: &str| {
        if modules::same(module, name) {
            format!("{} {parameters}", own(module)).trim().to_owned()
        } else {
            own(module)
        }
    };
    modules.load(name, asked).map(drop).map_err(|error| {
        let locked = fs::read_to_string(inputs.root.path("/proc/sys/kernel/modules_disabled"));
        if locked.is_ok_and(|text| text.trim() == "1") {
            format!(
                "kernel module {name}: the guest has locked module loading, as it does when it has booted; have the \
                 image load it, or boot with firstlight.lockdown=off"
            )
        } else {
            error.to_string()
        }
    })
}

fn vsock(inputs: &Inputs) -> Result<String, String> {
    let modules = Modules::read(&inputs.root, &inputs.release);
    let mut done = Vec::new();
    let mut missing = None;
    for name in VSOCK_MODULES {
        match load(&modules, name, inputs) {
            Ok(text) => done.push(text),
            Err(error) => missing = Some(error),
        }
    }
    // The last one is what counts; without the first, a kernel may have it built in and not say so.
    if inputs.root.path(VSOCK_DRIVER).exists() {
        return Ok(done.join(", "));
    }
    Err(missing.unwrap_or_else(|| "the modules are loaded but the virtio driver of vsock is not there".to_owned()))
}

fn container_modules(inputs: &Inputs) -> Result<String, String> {
    let modules = Modules::read(&inputs.root, &inputs.release);
    let (mut done, mut errors) = (Vec::new(), Vec::new());
    for name in CONTAINER_MODULES {
        if modules.files(name).is_none() {
            continue;
        }
        match load(&modules, name, inputs) {
            Ok(text) => done.push(text),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() { Ok(done.join(", ")) } else { Err(errors.join("; ")) }
}

fn pci_scan(inputs: &Inputs) -> Report {
    match firstlight_pci::scan(&inputs.root.path("/sys")) {
        Ok(functions) => (End::Ok(format!("{} functions", functions.len())), Product::Functions(functions)),
        Err(error) => plain(Err(error.to_string())),
    }
}

fn decide(inputs: &Inputs) -> Report {
    let decision = mode::decide(&inputs.functions, inputs.params.mode);
    let detail = format!("{}: {}", decision.mode.name, decision.mode.reason);
    (End::Ok(detail), Product::Mode(decision))
}

fn nvidia_modules(inputs: &Inputs) -> Report {
    if let Some(decision) = inputs.decision.as_ref().filter(|decision| !decision.attach) {
        let why = format!("mode {}: {}", decision.mode.name, decision.mode.reason);
        return (End::NotNeeded(why), Product::Nothing);
    }
    let modules = Modules::read(&inputs.root, &inputs.release);
    let mut done = Vec::new();
    for name in NVIDIA_MODULES {
        match load(&modules, name, inputs) {
            Ok(text) => done.push(text),
            Err(error) => return plain(Err(error)),
        }
    }
    plain(Ok(done.join(", ")))
}

fn make_nodes(inputs: &Inputs) -> Report {
    match nodes::make(&inputs.root, &inputs.gpus, &mut Mknod) {
        Ok(minors) => {
            let known = minors.iter().filter(|(_, minor)| minor.is_ok()).count();
            let detail = format!("nodes for {known} of {} GPUs", inputs.gpus.len());
            (End::Ok(detail), Product::Minors(minors))
        }
        Err(error) => plain(Err(error.to_string())),
    }
}

fn cdi(inputs: &Inputs) -> Report {
    let total = inputs.gpus.len();
    if inputs.ready == 0 {
        let why = if total == 0 { "there is no GPU" } else { "no GPU is ready, so no file was written" };
        return (End::NotNeeded(why.to_owned()), Product::Nothing);
    }
    let path = inputs.root.path(firstlight_cdi::SPEC_DIR).join("nvidia.json");
    let read = fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()));
    let checked =
        read.and_then(|text| firstlight_cdi::Spec::from_json(&text, &path).map_err(|error| error.to_string()));
    plain(checked.map(|spec| format!("{} names for {} of {total} GPUs", spec.devices.len(), inputs.ready)))
}

fn cgroup2(root: &Root) -> Result<String, String> {
    let folder = root.path("/sys/fs/cgroup");
    let list = folder.join("cgroup.controllers");
    let controllers = fs::read_to_string(&list).map_err(|error| format!("cannot read {}: {error}", list.display()))?;
    let wish: Vec<String> = controllers.split_ascii_whitespace().map(|name| format!("+{name}")).collect();
    let control = folder.join("cgroup.subtree_control");
    fs::write(&control, wish.join(" "))
        .map_err(|error| format!("cannot write {wish:?} to {}: {error}", control.display()))?;
    Ok(controllers.trim().to_owned())
}

fn loopback() -> Result<String, String> {
    firstlight_sys::net::set_up("lo").map_err(|error| format!("cannot bring lo up: {error}"))?;
    Ok(String::new())
}

fn lockdown(inputs: &Inputs) -> Report {
    if !inputs.params.lockdown {
        return (End::NotNeeded("firstlight.lockdown=off".to_owned()), Product::Nothing);
    }
    plain(sysctls::apply(&inputs.root, sysctls::LOCKS).sentence())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(folder: &tempfile::TempDir) -> Inputs {
        Inputs {
            root: Root::at(folder.path()),
            release: "6.12".into(),
            params: Arc::default(),
            functions: Arc::default(),
            decision: None,
            gpus: Vec::new(),
            ready: 0,
            units: 1,
        }
    }

    fn write(folder: &tempfile::TempDir, path: &str, text: &str) {
        let path = Root::at(folder.path()).path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn an_unknown_parameter_fails_its_unit_and_the_others_still_count() {
        let folder = tempfile::tempdir().unwrap();
        write(&folder, "proc/cmdline", "quiet firstlight.mod=gpu firstlight.on-failure=hold\n");
        let (end, product) = run(Action::CommandLine, &inputs(&folder));
        let End::Failed(text) = end else { panic!("{end:?}") };
        assert!(text.contains("firstlight.mod: there is no such parameter; did you mean firstlight.mode?"), "{text}");
        let Product::CommandLine(line, params) = product else { panic!() };
        assert!(line.starts_with("quiet"));
        assert_eq!(params.on_failure, crate::params::OnFailure::Hold);
    }

    #[test]
    fn all_controllers_are_enabled() {
        let folder = tempfile::tempdir().unwrap();
        write(&folder, "sys/fs/cgroup/cgroup.controllers", "cpu io memory\n");
        assert_eq!(run(Action::Cgroup2, &inputs(&folder)).0, End::Ok("cpu io memory".into()));
        let path = folder.path().join("sys/fs/cgroup/cgroup.subtree_control");
        assert_eq!(fs::read_to_string(path).unwrap(), "+cpu +io +memory");
    }

    #[test]
    fn vsock_that_is_there_costs_one_look() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(at_once(Action::Vsock, &inputs(&folder)), None);
        let (end, _) = run(Action::Vsock, &inputs(&folder));
        assert!(matches!(&end, End::Failed(text) if text.contains("vmw_vsock_virtio_transport")), "{end:?}");
        write(&folder, &format!("{VSOCK_DRIVER}/bind"), "");
        assert!(matches!(at_once(Action::Vsock, &inputs(&folder)), Some((End::Ok(_), _))));
    }

    #[test]
    fn a_cpu_guest_needs_no_driver_and_a_gpu_guest_without_one_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let mut inputs = inputs(&folder);
        inputs.decision = Some(mode::decide(&[], crate::params::ModeChoice::Auto));
        assert!(matches!(run(Action::NvidiaModules, &inputs).0, End::NotNeeded(_)));
        inputs.decision = Some(mode::decide(&[], crate::params::ModeChoice::Gpu));
        let (end, _) = run(Action::NvidiaModules, &inputs);
        assert!(matches!(&end, End::Failed(text) if text.contains("module nvidia is neither in")), "{end:?}");
    }

    #[test]
    fn container_modules_are_those_the_image_has() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(at_once(Action::ContainerModules, &inputs(&folder)), Some((End::NotNeeded(_), _))));
        write(&folder, "lib/modules/6.12/modules.dep", "kernel/other.ko:\n");
        assert_eq!(at_once(Action::ContainerModules, &inputs(&folder)), None);
        assert_eq!(run(Action::ContainerModules, &inputs(&folder)).0, End::Ok(String::new()));
    }

    #[test]
    fn a_locked_kernel_is_named_as_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        assert!(load_asked(&inputs(&folder), "dm-mod", "").unwrap_err().contains("modules.dep"));
        write(&folder, "lib/modules/6.12/modules.builtin", "kernel/fs/fuse/virtiofs.ko\n");
        load_asked(&inputs(&folder), "virtiofs", "").unwrap();
        write(&folder, "proc/sys/kernel/modules_disabled", "1\n");
        let text = load_asked(&inputs(&folder), "dm-mod", "").unwrap_err();
        assert!(text.contains("dm-mod") && text.contains("firstlight.lockdown=off"), "{text}");
    }

    #[test]
    fn lockdown_can_be_switched_off() {
        let folder = tempfile::tempdir().unwrap();
        let mut inputs = inputs(&folder);
        inputs.params = Arc::new(Params { lockdown: false, ..Params::default() });
        assert!(matches!(run(Action::Lockdown, &inputs).0, End::NotNeeded(_)));
    }
}
