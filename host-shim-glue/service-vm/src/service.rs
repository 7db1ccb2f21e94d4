//! Defines, starts, inspects and destroys the service VM's domain.

use std::io::Write as _;
use std::time::{Duration, Instant};

use firstlight_devices::vfio::VFIO_PCI;
use firstlight_devices::{HostRoots, PciFunction, Problem, Topology, group_users, joined};
use firstlight_pci::{Address, ScanError, driver};
use serde::Serialize;

use crate::definition::{Definition, DefinitionError, PassedFunction};
use crate::members::{self, PassthroughSet, Selection};
use crate::virsh::{Virsh, VirshError};
use crate::{Name, check, qemu_process};

/// Timeout for the release of functions: libvirt releases them some seconds after it reports the domain as off.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);

/// After this time a function that is unused but still on vfio-pci counts as bound before the start, and stays bound.
const UNBIND_TIMEOUT: Duration = Duration::from_secs(10);

/// Polling interval.
const PAUSE: Duration = Duration::from_millis(100);

/// libvirt's message for an undefined domain.
const UNKNOWN: &str = "failed to get domain";

/// Errors of service VM operations.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// virsh failed.
    #[error(transparent)]
    Virsh(#[from] VirshError),
    /// The host's PCI bus cannot be read.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// The host does not meet the requirements.
    #[error("domain {domain} cannot be {what}: {}", joined(problems))]
    Problems {
        /// The domain.
        domain: Name,
        /// `made` or `started`.
        what: &'static str,
        /// The problems.
        problems: Vec<Problem>,
    },
    /// The domain is not defined.
    #[error(
        "domain {domain} is not defined at {uri}: firstlight service-vm define creates it; virsh list --all shows the existing ones"
    )]
    Undefined {
        /// The domain.
        domain: Name,
        /// libvirt's URI.
        uri: String,
    },
    /// The domain is neither running nor off.
    #[error("domain {domain} is {state}: virsh resume continues a paused one, firstlight service-vm destroy ends it")]
    UnexpectedState {
        /// The domain.
        domain: Name,
        /// The state as libvirt reports it.
        state: String,
    },
    /// A foreign domain has this name.
    #[error(
        "domain {domain} was not created by firstlight: it has UUID {found}, and service VMs of this name have {}: choose another name \
         with --name", domain.uuid()
    )]
    NotOwned {
        /// The domain.
        domain: Name,
        /// Its UUID.
        found: String,
    },
    /// libvirt's XML is invalid.
    #[error("domain {domain}: {source}")]
    Definition {
        /// The domain.
        domain: Name,
        /// The cause.
        source: DefinitionError,
    },
    /// The domain is off, but its functions are still in use.
    #[error(
        "domain {domain} is off, and after {} s its functions are not released: {}: look at the host's kernel log \
         for vfio and at libvirt's log", elapsed.as_secs(), functions.join(", ")
    )]
    NotReleased {
        /// The domain.
        domain: Name,
        /// The functions, each with its users.
        functions: Vec<String>,
        /// The time since the domain was off.
        elapsed: Duration,
    },
    /// The temporary XML file cannot be written.
    #[error("failed to write the XML of domain {domain}: {source}")]
    File {
        /// The domain.
        domain: Name,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The state of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It runs.
    Running,
    /// The domain exists in another state: paused or shutting down.
    Other,
    /// It is off.
    Off,
    /// libvirt does not know it.
    Undefined,
}

/// A passed function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Its address on the host.
    pub address: Address,
    /// Vendor and device id; none if it is not on the bus.
    pub id: Option<String>,
    /// The kind of function.
    pub kind: &'static str,
    /// Its IOMMU group.
    pub group: Option<u32>,
    /// The bound host driver.
    pub driver: Option<String>,
}

/// The status of the service VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The domain's name.
    pub name: String,
    /// Its state.
    pub state: State,
    /// The state and reason as libvirt reports them: `shut off (destroyed)`.
    pub reason: String,
    /// The start time, seconds since 1970.
    pub started_at: Option<u64>,
    /// The process id of its QEMU.
    pub pid: Option<u32>,
    /// The guest's vsock context id.
    pub cid: Option<u32>,
    /// The functions that it has, or will have.
    pub devices: Vec<Device>,
    /// Problems with their remedies.
    pub problems: Vec<Problem>,
}

/// Whether an operation changed anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The change was made.
    Applied,
    /// It was in that state already.
    AlreadyDone,
}

/// The service VM's domain at a libvirt.
#[derive(Debug, Clone)]
pub struct Service {
    /// The domain's name.
    pub name: Name,
    /// libvirt.
    pub virsh: Virsh,
    /// The host's kernel interfaces.
    pub host: HostRoots,
}

/// Selects the functions that the host would pass to a service VM.
///
/// # Errors
/// The PCI bus cannot be read, or the problems that prevent it.
pub fn passthrough(name: &Name, host: &HostRoots, selection: &Selection) -> Result<PassthroughSet, ServiceError> {
    let topology = Topology::read(&host.sysfs)?;
    let selected = members::select(&topology, selection);
    selected.map_err(|problems| ServiceError::Problems { domain: name.clone(), what: "made", problems })
}

impl Service {
    /// Defines the domain with validation. A running domain uses it from its next start on.
    ///
    /// # Errors
    /// libvirt rejects it, or a foreign domain has the name.
    pub fn define(&self, xml: &str) -> Result<(), ServiceError> {
        let failed = |source| ServiceError::File { domain: self.name.clone(), source };
        if let Some(found) = self.uuid()? {
            self.check_owner(&found)?;
        }
        let mut file = tempfile::Builder::new().prefix("firstlight-").suffix(".xml").tempfile().map_err(failed)?;
        file.write_all(xml.as_bytes()).map_err(failed)?;
        let path = file.path().display().to_string();
        self.virsh.run(&self.name, "define", &["define", "--validate", &path])?;
        Ok(())
    }

    /// Starts the domain after checking the host. A running domain is left unchanged.
    ///
    /// # Errors
    /// The host's problems, or an error of libvirt.
    pub fn start(&self) -> Result<Change, ServiceError> {
        let (state, message) = self.state()?;
        let undefined = || ServiceError::Undefined { domain: self.name.clone(), uri: self.virsh.uri.clone() };
        let definition = self.definition(false)?.ok_or_else(undefined)?;
        match state {
            State::Running => return Ok(Change::AlreadyDone),
            State::Other => return Err(ServiceError::UnexpectedState { domain: self.name.clone(), state: message }),
            State::Off | State::Undefined => {}
        }
        // A domain with external devices has none of the host.
        let topology =
            if definition.external_devices { Topology::default() } else { Topology::read(&self.host.sysfs)? };
        let problems = check::before_start(&self.host, &topology, &definition);
        if !problems.is_empty() {
            return Err(ServiceError::Problems { domain: self.name.clone(), what: "started", problems });
        }
        match self.virsh.run(&self.name, "start", &["start", self.name.as_str()]) {
            // A concurrent start has succeeded.
            Err(error) if error.message_contains("already active") => Ok(Change::AlreadyDone),
            other => Ok(other.map(|_| Change::Applied)?),
        }
    }

    /// Returns state, functions and problems.
    ///
    /// # Errors
    /// libvirt does not answer, or the PCI bus cannot be read.
    pub fn status(&self) -> Result<Status, ServiceError> {
        let (state, reason) = self.state()?;
        let mut status = Status {
            name: self.name.to_string(),
            state,
            reason,
            started_at: None,
            pid: None,
            cid: None,
            devices: Vec::new(),
            problems: Vec::new(),
        };
        let up = matches!(state, State::Running | State::Other);
        let Some(definition) = self.definition(up)? else { return Ok(status) };
        let running = qemu_process::find(&self.host.proc, &definition.uuid).filter(|_| up);
        status.started_at = running.map(|running| running.started_at);
        status.pid = running.map(|running| running.pid);
        status.cid = definition.cid;
        let topology = Topology::read(&self.host.sysfs)?;
        status.devices = definition.passed.iter().map(|passed| device(&topology, *passed)).collect();
        let check = if up { check::running } else { check::before_start };
        status.problems = check(&self.host, &topology, &definition);
        Ok(status)
    }

    /// Destroys the domain, and waits until its functions are released. Succeeds if it is off already.
    ///
    /// # Errors
    /// The domain is not defined, libvirt failed, or the functions are not released.
    pub fn destroy(&self) -> Result<Change, ServiceError> {
        let undefined = || ServiceError::Undefined { domain: self.name.clone(), uri: self.virsh.uri.clone() };
        let live = self.definition(true)?.ok_or_else(undefined)?;
        let done = match self.virsh.run(&self.name, "destroy", &["destroy", self.name.as_str()]) {
            Err(error) if error.message_contains("not running") => Change::AlreadyDone,
            other => other.map(|_| Change::Applied)?,
        };
        self.wait_for_release(&live.passed)?;
        Ok(done)
    }

    /// Waits until the functions' groups are closed, and libvirt has unbound what it had bound.
    fn wait_for_release(&self, passed: &[PassedFunction]) -> Result<(), ServiceError> {
        let begin = Instant::now();
        let topology = Topology::read(&self.host.sysfs)?;
        let groups: Vec<u32> = passed.iter().filter_map(|it| topology.at(it.address)?.group).collect();
        loop {
            let users = group_users::of_groups(&self.host.proc, groups.iter().copied());
            let bound =
                |it: &&PassedFunction| driver(&self.host.sysfs, it.address).is_some_and(|driver| driver == VFIO_PCI);
            let pending = passed.iter().filter(|it| it.managed).filter(bound).count();
            if users.is_empty() && (pending == 0 || begin.elapsed() > UNBIND_TIMEOUT) {
                return Ok(());
            }
            if begin.elapsed() > RELEASE_TIMEOUT {
                let had = users.iter().map(|user| format!("{} (process {})", user.name, user.pid));
                let by = had.collect::<Vec<_>>().join(", ");
                let functions = passed.iter().map(|it| format!("{} is held by {by}", it.address)).collect();
                let (domain, elapsed) = (self.name.clone(), begin.elapsed());
                return Err(ServiceError::NotReleased { domain, functions, elapsed });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn uuid(&self) -> Result<Option<String>, ServiceError> {
        match self.virsh.run(&self.name, "look up", &["domuuid", self.name.as_str()]) {
            Ok(uuid) => Ok(Some(uuid.trim().to_ascii_lowercase())),
            Err(error) if error.message_contains(UNKNOWN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn check_owner(&self, uuid: &str) -> Result<(), ServiceError> {
        if uuid == self.name.uuid() {
            return Ok(());
        }
        Err(ServiceError::NotOwned { domain: self.name.clone(), found: uuid.chars().take(40).collect() })
    }

    /// Returns libvirt's definition, live or persistent; `None` if the domain is not defined.
    fn definition(&self, live: bool) -> Result<Option<Definition>, ServiceError> {
        let which: &[&str] = if live { &[] } else { &["--inactive"] };
        let arguments = [&["dumpxml"], which, &[self.name.as_str()]].concat();
        let xml = match self.virsh.run(&self.name, "read the XML of", &arguments) {
            Err(error) if error.message_contains(UNKNOWN) => return Ok(None),
            other => other?,
        };
        let domain = || self.name.clone();
        let read = Definition::read(&xml).map_err(|source| ServiceError::Definition { domain: domain(), source })?;
        self.check_owner(&read.uuid)?;
        Ok(Some(read))
    }

    fn state(&self) -> Result<(State, String), ServiceError> {
        let message =
            match self.virsh.run(&self.name, "query the state of", &["domstate", "--reason", self.name.as_str()]) {
                Err(error) if error.message_contains(UNKNOWN) => return Ok((State::Undefined, "undefined".to_owned())),
                other => other?,
            };
        let message = message.trim();
        let state = match message.split(" (").next().unwrap_or_default() {
            "running" | "idle" => State::Running,
            "shut off" | "crashed" => State::Off,
            _ => State::Other,
        };
        Ok((state, message.to_owned()))
    }
}

fn device(topology: &Topology, passed: PassedFunction) -> Device {
    let function = topology.at(passed.address);
    Device {
        address: passed.address,
        id: function.map(PciFunction::id),
        kind: function.map_or("not on the bus", PciFunction::kind_name),
        group: function.and_then(|function| function.group),
        driver: function.and_then(|function| function.driver.clone()),
    }
}
