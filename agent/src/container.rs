//! One container and its processes.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oci_spec::runtime::LinuxCapabilities;

use crate::devices::Functions;
use crate::error::{Error, Result};
use crate::process::Process;

/// How far a container is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Being made; nobody but its maker may touch it.
    Creating,
    /// Made; its program waits to be let go.
    Created,
    /// Let go. Whether the program still runs is the process's business.
    Started,
    /// On its way out.
    Removing,
}

/// Whether a container's processes may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freezer {
    /// They run.
    Off,
    /// They are being stopped or let go.
    Changing,
    /// They are stopped.
    On,
}

/// A container. Its locks are held for moments, never across a wait.
#[derive(Debug)]
pub struct Container {
    /// Its name.
    pub id: String,
    /// Its directory: configuration and root.
    pub bundle: PathBuf,
    /// Its resource group's directory.
    pub cgroup: PathBuf,
    /// What a further process may do unless it says so itself.
    pub capabilities: Option<LinuxCapabilities>,
    /// Its PCI functions, on the host and here.
    pub functions: Functions,
    inner: Mutex<Inner>,
    /// Held while its limits are changed, by a thread that may block.
    updating: Mutex<()>,
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    freezer: Freezer,
    pid: Option<i32>,
    storages: Vec<String>,
    /// By the runtime's names: the empty one is the first process.
    processes: HashMap<String, Entry>,
    execs: u64,
}

impl Inner {
    /// Whether the first process is alive and the container in one of these phases.
    fn running(&self, id: &str, phases: &[Phase]) -> Result<()> {
        let alive = self.processes.get("").is_some_and(|first| first.process.code().is_none());
        if alive && phases.contains(&self.phase) {
            return Ok(());
        }
        let ended = if alive { "" } else { ", its first process has ended" };
        let message = format!("container {id} does not run ({:?}{ended})", self.phase);
        Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, message))
    }
}

#[derive(Debug, Clone)]
struct Entry {
    process: Arc<Process>,
    /// Whether its code has been fetched. From then on the process is unknown,
    /// except to those who still read what it wrote.
    fetched: bool,
}

impl Container {
    /// A container that is about to be made, with its first process.
    #[must_use]
    pub fn new(
        id: &str,
        bundle: PathBuf,
        cgroup: PathBuf,
        capabilities: Option<LinuxCapabilities>,
        first: Arc<Process>,
    ) -> Self {
        let first = Entry { process: first, fetched: false };
        let processes = HashMap::from([(String::new(), first)]);
        let inner = Inner {
            phase: Phase::Creating,
            freezer: Freezer::Off,
            pid: None,
            storages: Vec::new(),
            processes,
            execs: 0,
        };
        Self {
            id: id.to_owned(),
            bundle,
            cgroup,
            capabilities,
            functions: Functions::default(),
            inner: Mutex::new(inner),
            updating: Mutex::new(()),
        }
    }

    /// The same with these PCI functions.
    #[must_use]
    pub fn with(mut self, functions: Functions) -> Self {
        self.functions = functions;
        self
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far it is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.inner().phase
    }

    /// Goes from one phase to the next.
    ///
    /// # Errors
    /// It is in none of `from`: the error says in which.
    pub fn advance(&self, from: &[Phase], to: Phase) -> Result<Phase> {
        let mut inner = self.inner();
        if !from.contains(&inner.phase) {
            let message = format!("container {} is {:?}, which has to be one of {from:?}", self.id, inner.phase);
            return Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, message));
        }
        if to == Phase::Started && inner.freezer != Freezer::Off {
            let message = format!("container {} is paused; resume it first", self.id);
            return Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, message));
        }
        Ok(std::mem::replace(&mut inner.phase, to))
    }

    /// Takes the right to change the limits.
    pub fn updating(&self) -> MutexGuard<'_, ()> {
        self.updating.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes whether its processes may run.
    ///
    /// # Errors
    /// It is not as it has to be before, or has no process that could be stopped.
    pub fn switch(&self, from: Freezer, to: Freezer) -> Result<()> {
        let mut inner = self.inner();
        if from == Freezer::Off && to == Freezer::Changing {
            inner.running(&self.id, &[Phase::Created, Phase::Started])?;
        }
        if inner.freezer != from {
            let is = match inner.freezer {
                Freezer::Off => "is not paused",
                Freezer::Changing => "is being paused or resumed",
                Freezer::On => "is paused",
            };
            return Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, format!("container {} {is}", self.id)));
        }
        inner.freezer = to;
        Ok(())
    }

    /// The first process's number in the guest, once it exists.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.inner().pid
    }

    /// Notes the first process's number.
    pub fn set_pid(&self, pid: Option<i32>) {
        self.inner().pid = pid;
    }

    /// Notes the storages that it uses.
    pub fn set_storages(&self, mount_points: Vec<String>) {
        self.inner().storages = mount_points;
    }

    /// The storages that it uses; they are no longer its own.
    #[must_use]
    pub fn take_storages(&self) -> Vec<String> {
        std::mem::take(&mut self.inner().storages)
    }

    /// The runtime's name of a process: callers call the first one by the
    /// empty name or by the container's.
    #[must_use]
    pub fn name<'a>(&self, exec: &'a str) -> &'a str {
        if exec == self.id { "" } else { exec }
    }

    /// A process whose code has not been fetched.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub fn process(&self, exec: &str) -> Result<Arc<Process>> {
        let inner = self.inner();
        let entry = inner.processes.get(self.name(exec)).filter(|entry| !entry.fetched);
        entry.map(|entry| Arc::clone(&entry.process)).ok_or_else(|| Error::no_process(&self.id, self.name(exec)))
    }

    /// A process to read from: also one that is known only for that.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub fn readable(&self, exec: &str) -> Result<Arc<Process>> {
        let inner = self.inner();
        let entry = inner.processes.get(self.name(exec)).filter(|entry| !entry.fetched || entry.process.has_output());
        entry.map(|entry| Arc::clone(&entry.process)).ok_or_else(|| Error::no_process(&self.id, self.name(exec)))
    }

    /// Adds a further process that is about to be made, and returns a number for its files.
    ///
    /// # Errors
    /// `ALREADY_EXISTS`, or the container does not run.
    pub fn add(&self, exec: &str, process: &Arc<Process>) -> Result<u64> {
        let name = self.name(exec);
        let mut inner = self.inner();
        if name.is_empty() || inner.processes.get(name).is_some_and(|entry| !entry.fetched) {
            return Err(Error::exists(format!("exec_id '{exec}' already exists in container {}", self.id)));
        }
        inner.running(&self.id, &[Phase::Started])?;
        if inner.freezer != Freezer::Off {
            let message = format!("container {} is paused; resume it first", self.id);
            return Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, message));
        }
        inner.processes.insert(name.to_owned(), Entry { process: Arc::clone(process), fetched: false });
        inner.execs += 1;
        Ok(inner.execs)
    }

    /// Forgets a further process if it is this one.
    pub fn forget(&self, exec: &str, process: &Arc<Process>) {
        let name = self.name(exec);
        let mut inner = self.inner();
        if !name.is_empty() && inner.processes.get(name).is_some_and(|entry| Arc::ptr_eq(&entry.process, process)) {
            inner.processes.remove(name);
        }
    }

    /// Notes that a process's code has been fetched.
    pub fn fetched(&self, exec: &str, process: &Arc<Process>) {
        let name = self.name(exec);
        if let Some(entry) = self.inner().processes.get_mut(name).filter(|entry| Arc::ptr_eq(&entry.process, process)) {
            entry.fetched = true;
        }
    }

    /// Notes that a process has ended; the runtime's name.
    pub fn ended(&self, name: &str, code: i32) {
        if let Some(entry) = self.inner().processes.get(name) {
            entry.process.ended(code);
        }
    }

    /// Every process.
    #[must_use]
    pub fn processes(&self) -> Vec<Arc<Process>> {
        self.inner().processes.values().map(|entry| Arc::clone(&entry.process)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ttrpc::Code;

    fn container() -> Container {
        Container::new("c1", "/b".into(), "/g".into(), None, Arc::new(Process::new(false)))
    }

    fn process() -> Arc<Process> {
        Arc::new(Process::new(false))
    }

    #[test]
    fn phases_follow_each_other() {
        let container = container();
        assert!(container.advance(&[Phase::Created], Phase::Started).unwrap_err().message.contains("Creating"));
        container.advance(&[Phase::Creating], Phase::Created).unwrap();
        assert_eq!(container.add("e", &process()).unwrap_err().code, Code::FAILED_PRECONDITION);
        container.advance(&[Phase::Created], Phase::Started).unwrap();
        assert_eq!(container.add("e", &process()).unwrap(), 1);
        container.ended("", 0);
        assert_eq!(container.add("f", &process()).unwrap_err().code, Code::FAILED_PRECONDITION);
    }

    #[test]
    fn a_paused_container_takes_no_process_and_no_second_pause() {
        let container = container();
        assert!(container.switch(Freezer::Off, Freezer::Changing).is_err(), "it is being made");
        container.advance(&[Phase::Creating], Phase::Created).unwrap();
        container.switch(Freezer::Off, Freezer::Changing).unwrap();
        container.switch(Freezer::Changing, Freezer::On).unwrap();
        assert!(container.switch(Freezer::Off, Freezer::Changing).unwrap_err().message.contains("is paused"));
        assert!(container.advance(&[Phase::Created], Phase::Started).unwrap_err().message.contains("resume"));
        container.switch(Freezer::On, Freezer::Off).unwrap();
        container.advance(&[Phase::Created], Phase::Started).unwrap();
        container.switch(Freezer::Off, Freezer::On).unwrap();
        assert!(container.add("e", &process()).unwrap_err().message.contains("resume"));
        container.switch(Freezer::On, Freezer::Off).unwrap();
        container.ended("", 0);
        assert!(container.switch(Freezer::Off, Freezer::Changing).unwrap_err().message.contains("ended"));
    }

    #[test]
    fn the_first_process_has_two_names_and_neither_can_be_taken() {
        let container = container();
        container.advance(&[Phase::Creating], Phase::Started).unwrap();
        assert!(Arc::ptr_eq(&container.process("").unwrap(), &container.process("c1").unwrap()));
        for name in ["", "c1"] {
            assert_eq!(container.add(name, &process()).unwrap_err().code, Code::ALREADY_EXISTS);
        }
    }

    #[test]
    fn a_fetched_process_is_unknown_and_its_name_free() {
        let container = container();
        container.advance(&[Phase::Creating], Phase::Started).unwrap();
        let first = process();
        container.add("e", &first).unwrap();
        assert_eq!(container.add("e", &first).unwrap_err().code, Code::ALREADY_EXISTS);
        container.ended("e", 3);
        assert_eq!(container.process("e").unwrap().code(), Some(3));
        container.fetched("e", &first);
        assert_eq!(container.process("e").unwrap_err().code, Code::NOT_FOUND);
        assert_eq!(container.readable("e").unwrap_err().code, Code::NOT_FOUND, "nothing left to read");
        let second = process();
        container.add("e", &second).unwrap();
        container.forget("e", &first);
        assert!(container.process("e").is_ok(), "the old one's end is not the new one's");
        container.forget("e", &second);
        assert!(container.process("e").is_err());
    }
}
