//! One container and its processes.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oci_spec::runtime::LinuxCapabilities;

use crate::devices::Functions;
use crate::error::{Error, Result};
use crate::process::Process;

/// Lifecycle phase of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Being created; only CreateContainer may change it.
    Creating,
    /// Created; its program has not started.
    Created,
    /// Started. Whether the program still runs is a property of the process.
    Started,
    /// Being removed.
    Removing,
}

/// State of a container's cgroup freezer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freezer {
    /// Running.
    Off,
    /// Being frozen or thawed.
    Changing,
    /// Frozen.
    On,
}

/// A container. Its locks are held briefly, never across an await.
#[derive(Debug)]
pub struct Container {
    /// Container id.
    pub id: String,
    /// Bundle directory: configuration and root.
    pub bundle: PathBuf,
    /// Cgroup directory.
    pub cgroup: PathBuf,
    /// Capabilities of an exec process whose request has none.
    pub capabilities: Option<LinuxCapabilities>,
    /// Passed-through PCI functions: host address and guest address.
    pub functions: Functions,
    inner: Mutex<Inner>,
    /// Held while limits are changed, by a thread that may block.
    updating: Mutex<()>,
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    freezer: Freezer,
    pid: Option<i32>,
    storages: Vec<String>,
    /// By the runtime's names: the empty name is the first process.
    processes: HashMap<String, Entry>,
    execs: u64,
}

impl Inner {
    /// Checks that the first process is alive and the container in one of these phases.
    fn running(&self, id: &str, phases: &[Phase]) -> Result<()> {
        let alive = self.processes.get("").is_some_and(|first| first.process.code().is_none());
        if alive && phases.contains(&self.phase) {
            return Ok(());
        }
        let ended = if alive { "" } else { ", its first process has exited" };
        let message = format!("container {id} does not run ({:?}{ended})", self.phase);
        Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, message))
    }
}

#[derive(Debug, Clone)]
struct Entry {
    process: Arc<Process>,
    /// Whether the exit code has been fetched. From then on the process is unknown, except to
    /// readers of its remaining output.
    fetched: bool,
}

impl Container {
    /// Creates the entry of a container that is about to be created, with its first process.
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

    /// Sets the PCI functions.
    #[must_use]
    pub fn with_functions(mut self, functions: Functions) -> Self {
        self.functions = functions;
        self
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lifecycle phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.inner().phase
    }

    /// Changes the phase, and returns the previous one.
    ///
    /// # Errors
    /// The current phase is not in `from`; the error names both.
    pub fn advance(&self, from: &[Phase], to: Phase) -> Result<Phase> {
        let mut inner = self.inner();
        if !from.contains(&inner.phase) {
            let message = format!("container {} is in phase {:?}; expected one of {from:?}", self.id, inner.phase);
            return Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, message));
        }
        if to == Phase::Started && inner.freezer != Freezer::Off {
            let message = format!("container {} is paused; resume it first", self.id);
            return Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, message));
        }
        Ok(std::mem::replace(&mut inner.phase, to))
    }

    /// Locks the limits for a change.
    pub fn lock_limits(&self) -> MutexGuard<'_, ()> {
        self.updating.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the freezer state.
    ///
    /// # Errors
    /// The current state is not `from`, or no process is running.
    pub fn set_freezer(&self, from: Freezer, to: Freezer) -> Result<()> {
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

    /// Returns the first process's PID in the guest, once it exists.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.inner().pid
    }

    /// Sets the first process's PID.
    pub fn set_pid(&self, pid: Option<i32>) {
        self.inner().pid = pid;
    }

    /// Sets the storages that it uses.
    pub fn set_storages(&self, mount_points: Vec<String>) {
        self.inner().storages = mount_points;
    }

    /// Returns the storages that it uses, and clears the list.
    #[must_use]
    pub fn take_storages(&self) -> Vec<String> {
        std::mem::take(&mut self.inner().storages)
    }

    /// Returns the runtime's name of a process: callers name the first process by the empty string
    /// or by the container id.
    #[must_use]
    pub fn name<'a>(&self, exec: &'a str) -> &'a str {
        if exec == self.id { "" } else { exec }
    }

    /// Returns a process whose exit code has not been fetched.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub fn process(&self, exec: &str) -> Result<Arc<Process>> {
        let inner = self.inner();
        let entry = inner.processes.get(self.name(exec)).filter(|entry| !entry.fetched);
        entry.map(|entry| Arc::clone(&entry.process)).ok_or_else(|| Error::no_process(&self.id, self.name(exec)))
    }

    /// Returns a process to read from, also one whose exit code has been fetched.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub fn readable(&self, exec: &str) -> Result<Arc<Process>> {
        let inner = self.inner();
        let entry = inner.processes.get(self.name(exec)).filter(|entry| !entry.fetched || entry.process.has_output());
        entry.map(|entry| Arc::clone(&entry.process)).ok_or_else(|| Error::no_process(&self.id, self.name(exec)))
    }

    /// Registers an exec process that is about to be created, and returns a number for its files.
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

    /// Unregisters an exec process, if the entry is still this one.
    pub fn forget(&self, exec: &str, process: &Arc<Process>) {
        let name = self.name(exec);
        let mut inner = self.inner();
        if !name.is_empty() && inner.processes.get(name).is_some_and(|entry| Arc::ptr_eq(&entry.process, process)) {
            inner.processes.remove(name);
        }
    }

    /// Marks a process's exit code as fetched.
    pub fn mark_fetched(&self, exec: &str, process: &Arc<Process>) {
        let name = self.name(exec);
        if let Some(entry) = self.inner().processes.get_mut(name).filter(|entry| Arc::ptr_eq(&entry.process, process)) {
            entry.fetched = true;
        }
    }

    /// Records a process's exit, by the runtime's name.
    pub fn ended(&self, name: &str, code: i32) {
        if let Some(entry) = self.inner().processes.get(name) {
            entry.process.ended(code);
        }
    }

    /// Returns all processes.
    #[must_use]
    pub fn processes(&self) -> Vec<Arc<Process>> {
        self.inner().processes.values().map(|entry| Arc::clone(&entry.process)).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ttrpc::Code;

    pub(crate) fn container(id: &str) -> Arc<Container> {
        Arc::new(Container::new(id, "/b".into(), "/g".into(), None, Arc::new(Process::new(false))))
    }

    fn process() -> Arc<Process> {
        Arc::new(Process::new(false))
    }

    #[test]
    fn phases_change_only_in_order() {
        let container = container("c1");
        assert!(container.advance(&[Phase::Created], Phase::Started).unwrap_err().message.contains("Creating"));
        container.advance(&[Phase::Creating], Phase::Created).unwrap();
        assert_eq!(container.add("e", &process()).unwrap_err().code, Code::FAILED_PRECONDITION);
        container.advance(&[Phase::Created], Phase::Started).unwrap();
        assert_eq!(container.add("e", &process()).unwrap(), 1);
        container.ended("", 0);
        assert_eq!(container.add("f", &process()).unwrap_err().code, Code::FAILED_PRECONDITION);
    }

    #[test]
    fn paused_container_rejects_exec_and_second_pause() {
        let container = container("c1");
        assert!(container.set_freezer(Freezer::Off, Freezer::Changing).is_err(), "it is being created");
        container.advance(&[Phase::Creating], Phase::Created).unwrap();
        container.set_freezer(Freezer::Off, Freezer::Changing).unwrap();
        container.set_freezer(Freezer::Changing, Freezer::On).unwrap();
        assert!(container.set_freezer(Freezer::Off, Freezer::Changing).unwrap_err().message.contains("is paused"));
        assert!(container.advance(&[Phase::Created], Phase::Started).unwrap_err().message.contains("resume"));
        container.set_freezer(Freezer::On, Freezer::Off).unwrap();
        container.advance(&[Phase::Created], Phase::Started).unwrap();
        container.set_freezer(Freezer::Off, Freezer::On).unwrap();
        assert!(container.add("e", &process()).unwrap_err().message.contains("resume"));
        container.set_freezer(Freezer::On, Freezer::Off).unwrap();
        container.ended("", 0);
        assert!(container.set_freezer(Freezer::Off, Freezer::Changing).unwrap_err().message.contains("exited"));
    }

    #[test]
    fn both_names_of_the_first_process_are_reserved() {
        let container = container("c1");
        container.advance(&[Phase::Creating], Phase::Started).unwrap();
        assert!(Arc::ptr_eq(&container.process("").unwrap(), &container.process("c1").unwrap()));
        for name in ["", "c1"] {
            assert_eq!(container.add(name, &process()).unwrap_err().code, Code::ALREADY_EXISTS);
        }
    }

    #[test]
    fn fetched_process_is_unknown_and_its_name_reusable() {
        let container = container("c1");
        container.advance(&[Phase::Creating], Phase::Started).unwrap();
        let first = process();
        container.add("e", &first).unwrap();
        assert_eq!(container.add("e", &first).unwrap_err().code, Code::ALREADY_EXISTS);
        container.ended("e", 3);
        assert_eq!(container.process("e").unwrap().code(), Some(3));
        container.mark_fetched("e", &first);
        assert_eq!(container.process("e").unwrap_err().code, Code::NOT_FOUND);
        assert_eq!(container.readable("e").unwrap_err().code, Code::NOT_FOUND, "nothing left to read");
        let second = process();
        container.add("e", &second).unwrap();
        container.forget("e", &first);
        assert!(container.process("e").is_ok(), "removal of the old process does not affect the new one");
        container.forget("e", &second);
        assert!(container.process("e").is_err());
    }
}
