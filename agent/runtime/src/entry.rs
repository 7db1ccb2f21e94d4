//! The last steps of a container process before its program runs.

use std::collections::HashMap;
use std::path::Path;

use firstlight_sys::fork::default_signals;
use libcontainer::capabilities::drop_privileges;
use libcontainer::seccomp::initialize_seccomp;
use libcontainer::syscall::syscall::SyscallType;
use libcontainer::workload::default::DefaultExecutor;
use libcontainer::workload::{Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError};
use oci_spec::runtime::{LinuxCapabilities, LinuxSeccomp, Spec};
use rustix::thread::CpuSet;

use crate::{home, processors};

/// libcontainer's own executor with four things added: `HOME` is looked up where
/// that was asked for; the processor to which a call was held, and the
/// runtime's blocked and ignored signals, are not handed on; and a further
/// process of a container gets the container's seccomp filter, which
/// libcontainer gives to the first process only.
#[derive(Clone)]
pub(crate) struct Entry {
    inner: DefaultExecutor,
    confine: Option<Confine>,
    /// Where the program may run, if its maker was held to one processor.
    free: Option<CpuSet>,
}

/// What is left to do for a further process. Loading a filter needs
/// `CAP_SYS_ADMIN` (or no_new_privileges), so libcontainer is told to keep all
/// capabilities, and the wanted ones are set here, after the filter.
#[derive(Clone)]
pub(crate) struct Confine {
    pub(crate) seccomp: LinuxSeccomp,
    pub(crate) capabilities: LinuxCapabilities,
}

impl Entry {
    pub(crate) fn first(free: Option<CpuSet>) -> Self {
        Self { inner: DefaultExecutor {}, confine: None, free }
    }

    pub(crate) fn further(confine: Option<Confine>, free: Option<CpuSet>) -> Self {
        Self { inner: DefaultExecutor {}, confine, free }
    }
}

impl Executor for Entry {
    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        if let Some(free) = &self.free {
            processors::free(free).map_err(|error| ExecutorError::Other(format!("processors: {error}")))?;
        }
        default_signals().map_err(|error| ExecutorError::Other(format!("signals: {error}")))?;
        if let Some(confine) = &self.confine {
            initialize_seccomp(&confine.seccomp).map_err(|error| ExecutorError::Other(format!("seccomp: {error}")))?;
            let syscall = SyscallType::Linux.create_syscall();
            drop_privileges(&confine.capabilities, syscall.as_ref())
                .map_err(|error| ExecutorError::Other(format!("capabilities: {error}")))?;
        }
        self.inner.exec(spec)
    }

    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        self.inner.validate(spec)
    }

    fn setup_envs(&self, mut envs: HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        // This process is the user by now, and the root is the container's.
        home::settle(&mut envs, Path::new("/etc/passwd"), rustix::process::geteuid().as_raw());
        self.inner.setup_envs(envs)
    }
}
