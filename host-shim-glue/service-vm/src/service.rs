//! The life of the service VM's domain.

use std::io::Write as _;
use std::time::{Duration, Instant};

use firstlight_pci::{Address, ScanError, driver};
use serde::Serialize;

use crate::definition::{Definition, DefinitionError, Passed};
use crate::members::{self, Members, VFIO, Wish};
use crate::problem::{Problem, joined};
use crate::topology::{Function, Topology};
use crate::virsh::{Virsh, VirshError};
use crate::{Host, Name, check, holder};

/// libvirt gives functions back some seconds after it says that a domain is off.
const GIVEN_BACK: Duration = Duration::from_secs(30);

/// After that long a function that nobody has open and that still is on vfio-pci was
/// there before the domain was started, and stays.
const STAYS: Duration = Duration::from_secs(10);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(100);

/// What libvirt says of a domain that it does not know.
const UNKNOWN: &str = "failed to get domain";

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// libvirt did not do it.
    #[error(transparent)]
    Virsh(#[from] VirshError),
    /// The host's PCI bus cannot be read.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// The host is not ready for it.
    #[error("domain {domain} cannot be {what}: {}", joined(problems))]
    Problems {
        /// The domain.
        domain: Name,
        /// What it cannot be.
        what: &'static str,
        /// What is in the way.
        problems: Vec<Problem>,
    },
    /// There is no such domain.
    #[error(
        "domain {domain} is not defined at {uri}: firstlight service-vm define makes it, and virsh list --all shows which there are"
    )]
    Undefined {
        /// The domain.
        domain: Name,
        /// Which libvirt.
        uri: String,
    },
    /// It neither runs nor is it off.
    #[error(
        "domain {domain} is {state}: virsh resume lets a paused one go on, and firstlight service-vm destroy ends it"
    )]
    Between {
        /// The domain.
        domain: Name,
        /// libvirt's words for what it does.
        state: String,
    },
    /// The domain is somebody else's.
    #[error(
        "domain {domain} is not ours: it has UUID {found}, and service VMs of this name have {}: choose another name \
         with --name", domain.uuid()
    )]
    Foreign {
        /// The domain.
        domain: Name,
        /// Its UUID.
        found: String,
    },
    /// libvirt's description is not understood.
    #[error("domain {domain}: {source}")]
    Definition {
        /// The domain.
        domain: Name,
        /// Why.
        source: DefinitionError,
    },
    /// The domain is off, and its functions are not free.
    #[error(
        "domain {domain} is off, and after {} s its functions are not given back: {}: look at the host's kernel log \
         for vfio and at libvirt's log", elapsed.as_secs(), functions.join(", ")
    )]
    NotGivenBack {
        /// The domain.
        domain: Name,
        /// Functions, each with what has it.
        functions: Vec<String>,
        /// Since the domain was off.
        elapsed: Duration,
    },
    /// The XML could not be handed over.
    #[error("domain {domain}: write its XML for virsh: {source}")]
    File {
        /// The domain.
        domain: Name,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// What a domain does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It runs.
    Running,
    /// It is there and does something else: it is paused, or on its way down.
    Other,
    /// It is off.
    Off,
    /// libvirt does not know it.
    Undefined,
}

/// A function that a domain has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Where it is on the host.
    pub address: Address,
    /// Vendor and device id; none if it is not on the bus.
    pub id: Option<String>,
    /// What it is.
    pub what: &'static str,
    /// Its IOMMU group.
    pub group: Option<u32>,
    /// The host's driver that is bound to it.
    pub driver: Option<String>,
}

/// How it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The domain's name.
    pub name: String,
    /// What it does.
    pub state: State,
    /// libvirt's words for it, with the reason: `shut off (destroyed)`.
    pub reason: String,
    /// Since when it runs, seconds since 1970.
    pub since: Option<u64>,
    /// The process id of its QEMU.
    pub pid: Option<u32>,
    /// The guest's vsock context id.
    pub cid: Option<u32>,
    /// What it has, or would have.
    pub devices: Vec<Device>,
    /// What is wrong.
    pub problems: Vec<Problem>,
}

/// Whether something had to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// It was.
    Now,
    /// It was so already.
    Before,
}

/// The service VM's domain at a libvirt.
#[derive(Debug, Clone)]
pub struct Service {
    /// Its name.
    pub name: Name,
    /// libvirt.
    pub virsh: Virsh,
    /// What the host shows.
    pub host: Host,
}

/// What the host would give a service VM.
///
/// # Errors
/// The bus cannot be read, or what is in the way.
pub fn members(name: &Name, host: &Host, wish: &Wish) -> Result<Members, ServiceError> {
    let topology = Topology::read(&host.sysfs)?;
    let chosen = members::choose(&topology, wish);
    chosen.map_err(|problems| ServiceError::Problems { domain: name.clone(), what: "made", problems })
}

impl Service {
    /// Hands the domain's XML to libvirt, which checks it. A domain that runs has it from its next start on.
    ///
    /// # Errors
    /// libvirt refuses it, or the name is another domain's.
    pub fn define(&self, xml: &str) -> Result<(), ServiceError> {
        let failed = |source| ServiceError::File { domain: self.name.clone(), source };
        if let Some(found) = self.uuid()? {
            self.own(&found)?;
        }
        let mut file = tempfile::Builder::new().prefix("firstlight-").suffix(".xml").tempfile().map_err(failed)?;
        file.write_all(xml.as_bytes()).map_err(failed)?;
        let path = file.path().display().to_string();
        self.virsh.run(&self.name, "define it", &["define", "--validate", &path])?;
        Ok(())
    }

    /// Starts it, if nothing is in the way. One that runs is left as it is.
    ///
    /// # Errors
    /// What is in the way, or libvirt's.
    pub fn start(&self) -> Result<Done, ServiceError> {
        let (state, words) = self.state()?;
        let undefined = || ServiceError::Undefined { domain: self.name.clone(), uri: self.virsh.uri.clone() };
        let definition = self.definition(false)?.ok_or_else(undefined)?;
        match state {
            State::Running => return Ok(Done::Before),
            State::Other => return Err(ServiceError::Between { domain: self.name.clone(), state: words }),
            State::Off | State::Undefined => {}
        }
        // The devices of a lab are none of the host's.
        let topology = if definition.lab { Topology::default() } else { Topology::read(&self.host.sysfs)? };
        let problems = check::before_start(&self.host, &topology, &definition);
        if !problems.is_empty() {
            return Err(ServiceError::Problems { domain: self.name.clone(), what: "started", problems });
        }
        match self.virsh.run(&self.name, "start it", &["start", self.name.as_str()]) {
            // Somebody else did it meanwhile.
            Err(error) if error.says("already active") => Ok(Done::Before),
            other => Ok(other.map(|_| Done::Now)?),
        }
    }

    /// How it is, and what is wrong.
    ///
    /// # Errors
    /// libvirt does not answer, or the PCI bus cannot be read.
    pub fn status(&self) -> Result<Status, ServiceError> {
        let (state, reason) = self.state()?;
        let mut status = Status {
            name: self.name.to_string(),
            state,
            reason,
            since: None,
            pid: None,
            cid: None,
            devices: Vec::new(),
            problems: Vec::new(),
        };
        let up = matches!(state, State::Running | State::Other);
        let Some(definition) = self.definition(up)? else { return Ok(status) };
        let running = holder::qemu(&self.host.proc, &definition.uuid).filter(|_| up);
        status.since = running.map(|running| running.since);
        status.pid = running.map(|running| running.pid);
        status.cid = definition.cid;
        let topology = Topology::read(&self.host.sysfs)?;
        status.devices = definition.passed.iter().map(|passed| device(&topology, *passed)).collect();
        let check = if up { check::running } else { check::before_start };
        status.problems = check(&self.host, &topology, &definition);
        Ok(status)
    }

    /// Ends it, and waits until its functions are the host's again. One that is off is as it should be.
    ///
    /// # Errors
    /// There is no such domain, libvirt does not do it, or the functions do not come back.
    pub fn destroy(&self) -> Result<Done, ServiceError> {
        let undefined = || ServiceError::Undefined { domain: self.name.clone(), uri: self.virsh.uri.clone() };
        let live = self.definition(true)?.ok_or_else(undefined)?;
        let done = match self.virsh.run(&self.name, "end it", &["destroy", self.name.as_str()]) {
            Err(error) if error.says("not running") => Done::Before,
            other => other.map(|_| Done::Now)?,
        };
        self.given_back(&live.passed)?;
        Ok(done)
    }

    /// Waits until nobody has the functions' groups open, and what libvirt has bound is unbound.
    fn given_back(&self, passed: &[Passed]) -> Result<(), ServiceError> {
        let begin = Instant::now();
        let topology = Topology::read(&self.host.sysfs)?;
        let groups: Vec<u32> = passed.iter().filter_map(|it| topology.at(it.address)?.group).collect();
        loop {
            let holders = holder::of_groups(&self.host.proc, groups.iter().copied());
            let bound = |it: &&Passed| driver(&self.host.sysfs, it.address).is_some_and(|driver| driver == VFIO);
            let pending = passed.iter().filter(|it| it.managed).filter(bound).count();
            if holders.is_empty() && (pending == 0 || begin.elapsed() > STAYS) {
                return Ok(());
            }
            if begin.elapsed() > GIVEN_BACK {
                let had = holders.iter().map(|holder| format!("{} (process {})", holder.name, holder.pid));
                let by = had.collect::<Vec<_>>().join(", ");
                let functions = passed.iter().map(|it| format!("{} is held by {by}", it.address)).collect();
                let (domain, elapsed) = (self.name.clone(), begin.elapsed());
                return Err(ServiceError::NotGivenBack { domain, functions, elapsed });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn uuid(&self) -> Result<Option<String>, ServiceError> {
        match self.virsh.run(&self.name, "find it", &["domuuid", self.name.as_str()]) {
            Ok(uuid) => Ok(Some(uuid.trim().to_ascii_lowercase())),
            Err(error) if error.says(UNKNOWN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn own(&self, uuid: &str) -> Result<(), ServiceError> {
        if uuid == self.name.uuid() {
            return Ok(());
        }
        Err(ServiceError::Foreign { domain: self.name.clone(), found: uuid.chars().take(40).collect() })
    }

    /// What libvirt has of it, as it runs or as it will; none if it is not defined.
    fn definition(&self, live: bool) -> Result<Option<Definition>, ServiceError> {
        let which: &[&str] = if live { &[] } else { &["--inactive"] };
        let arguments = [&["dumpxml"], which, &[self.name.as_str()]].concat();
        let xml = match self.virsh.run(&self.name, "read its description", &arguments) {
            Err(error) if error.says(UNKNOWN) => return Ok(None),
            other => other?,
        };
        let domain = || self.name.clone();
        let read = Definition::read(&xml).map_err(|source| ServiceError::Definition { domain: domain(), source })?;
        self.own(&read.uuid)?;
        Ok(Some(read))
    }

    fn state(&self) -> Result<(State, String), ServiceError> {
        let words = match self.virsh.run(&self.name, "ask for its state", &["domstate", "--reason", self.name.as_str()])
        {
            Err(error) if error.says(UNKNOWN) => return Ok((State::Undefined, "undefined".to_owned())),
            other => other?,
        };
        let words = words.trim();
        let state = match words.split(" (").next().unwrap_or_default() {
            "running" | "idle" => State::Running,
            "shut off" | "crashed" => State::Off,
            _ => State::Other,
        };
        Ok((state, words.to_owned()))
    }
}

fn device(topology: &Topology, passed: Passed) -> Device {
    let function = topology.at(passed.address);
    Device {
        address: passed.address,
        id: function.map(Function::id),
        what: function.map_or("not on the bus", Function::what),
        group: function.and_then(|function| function.group),
        driver: function.and_then(|function| function.driver.clone()),
    }
}
