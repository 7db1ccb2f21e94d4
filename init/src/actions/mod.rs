//! The actions of units. An action takes the products of earlier units and returns its own product;
//! actions share no state. Only [`dispatch`] maps a unit to its action.

mod driver;
mod extensions;
mod file_systems;
mod guest;
mod kernel;
mod modules;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use firstlight_pci::{Address, Function};

pub use self::driver::load_driver;
pub use self::guest::decide;
pub use self::modules::load_requested;
use crate::executor::End;
use crate::mode::Decision;
use crate::modules::Modules;
use crate::nodes::Minor;
use crate::params::Params;
use crate::root::Root;
use crate::state_disk;
use crate::unit_id::{DaemonId, UnitId};

/// The inputs of an action: the state of the guest when the action starts.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// The root of all paths.
    pub root: Root,
    /// The kernel release.
    pub release: String,
    /// The kernel parameters.
    pub params: Arc<Params>,
    /// The functions on the PCI bus.
    pub functions: Arc<Vec<Function>>,
    /// The mode's decision, once made.
    pub decision: Option<Decision>,
    /// GPUs in PCI order.
    pub gpus: Vec<Address>,
    /// Number of GPUs that are ready.
    pub ready: usize,
    /// Number of units of the plan.
    pub units: usize,
}

/// The data that an action returns besides its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Product {
    /// Nothing.
    Nothing,
    /// The command line, as text and as parameters.
    CommandLine(String, Box<Params>),
    /// The functions on the PCI bus.
    Functions(Vec<Function>),
    /// The mode.
    Mode(Decision),
    /// The minor numbers of the GPUs.
    Minors(Vec<Minor>),
}

/// An action's end and product.
pub type Report = (End, Product);

/// The way in which a unit is carried out.
#[derive(Debug)]
pub enum Dispatch {
    /// The action needed no thread and has ended.
    Ended(Report),
    /// The function that a thread runs.
    Thread(fn(&Inputs) -> Report),
    /// The component of the supervisor that carries out the unit.
    Component(Component),
}

/// The components of the supervisor that carry out units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Component {
    /// Starts the agent.
    Agent,
    /// Attaches this GPU.
    GpuAttach(Address),
    /// Applies GPU settings.
    GpuSettings,
    /// Opens `/dev/log`.
    DevLog,
    /// Starts this daemon.
    Daemon(DaemonId),
}

fn plain(result: Result<String, String>) -> Report {
    (result.map_or_else(End::Failed, End::Ok), Product::Nothing)
}

fn not_needed(why: impl Into<String>) -> Report {
    (End::NotNeeded(why.into()), Product::Nothing)
}

/// Selects the action of a unit that starts now.
#[must_use]
pub fn dispatch(unit: UnitId, inputs: &Inputs) -> Dispatch {
    match unit {
        UnitId::Mounts => Dispatch::Ended(file_systems::first_mounts(inputs)),
        UnitId::CommandLine => Dispatch::Ended(guest::command_line(inputs)),
        UnitId::Vsock => unless(modules::vsock_is_present(inputs), modules::vsock),
        UnitId::Extensions => unless(extensions::nothing_requested(inputs).map(not_needed), extensions::mount),
        UnitId::ExtensionDisks => {
            unless(extensions::no_disk_to_check(inputs).map(not_needed), extensions::check_unrequested)
        }
        UnitId::ContainerModules => unless(no_modules(inputs), modules::container_modules),
        UnitId::Agent => Dispatch::Component(Component::Agent),
        UnitId::PciScan => Dispatch::Thread(guest::pci_scan),
        UnitId::Mode => Dispatch::Ended(guest::mode(inputs)),
        UnitId::State => unless(no_state_disk(inputs), |inputs| plain(state_disk::mount(&inputs.root))),
        UnitId::NvidiaModules => Dispatch::Thread(driver::nvidia_modules),
        UnitId::Nodes => Dispatch::Thread(driver::make_nodes),
        UnitId::GpuAttachTemplate => {
            Dispatch::Ended(plain(Err("a template cannot be run as a unit; this is a bug".to_owned())))
        }
        UnitId::GpuAttach(pci) => Dispatch::Component(Component::GpuAttach(pci)),
        UnitId::GpuSettings => Dispatch::Component(Component::GpuSettings),
        UnitId::Cdi => Dispatch::Thread(driver::check_cdi),
        UnitId::Cgroup2 => Dispatch::Thread(kernel::cgroup2),
        UnitId::Sysctl => Dispatch::Thread(kernel::sysctl),
        UnitId::Loopback => Dispatch::Thread(kernel::loopback),
        UnitId::LaterMounts => Dispatch::Thread(file_systems::later_mounts),
        UnitId::ReadOnlyRoot => Dispatch::Thread(file_systems::remount_root_read_only),
        UnitId::Lockdown => Dispatch::Thread(kernel::lockdown),
        UnitId::DevLog => Dispatch::Component(Component::DevLog),
        UnitId::Daemon(daemon) => Dispatch::Component(Component::Daemon(daemon)),
        UnitId::BootDone => Dispatch::Ended(plain(Ok(format!("{} units have ended", inputs.units.saturating_sub(1))))),
    }
}

/// Returns the report if it is already known, else the function for a thread.
fn unless(known: Option<Report>, run: fn(&Inputs) -> Report) -> Dispatch {
    known.map_or(Dispatch::Thread(run), Dispatch::Ended)
}

fn no_state_disk(inputs: &Inputs) -> Option<Report> {
    let service = inputs.decision.as_ref().is_some_and(Decision::is_service);
    (!service).then(|| not_needed("only a service VM has a state disk"))
}

fn no_modules(inputs: &Inputs) -> Option<Report> {
    (!Modules::any(&inputs.root, &inputs.release)).then(|| not_needed("this image has no modules"))
}

fn joined<E: ToString>(errors: &[E]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
