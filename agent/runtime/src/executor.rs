//! The last steps of a container process before its program runs.

use std::collections::HashMap;
use std::path::Path;

use firstlight_sys::fork::default_signals;
use libcontainer::capabilities::drop_privileges;
use libcontainer::seccomp::initialize_seccomp;
use libcontainer::syscall::syscall::SyscallType;
use libcontainer::workload::default::DefaultExecutor;
use libcontainer::workload::{Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError};
use oci_spec::runtime::{LinuxCapabilities, LinuxSeccomp, Process, Spec};
use rustix::termios::Winsize;
use rustix::thread::CpuSet;

use crate::{cpu_affinity, home};

/// libcontainer's own executor with five things added: `HOME` is looked up where
/// that was asked for; the processor to which a call was held, and the runtime's
/// blocked and ignored signals, are not handed on; a further process's terminal
/// has its size before the program looks; and it gets the container's seccomp
/// filter, which libcontainer gives to the first process only.
#[derive(Clone)]
pub(crate) struct ProcessExecutor {
    inner: DefaultExecutor,
    exec: Option<ExecSettings>,
}

/// What is done for a further process, which nobody can look after from
/// outside: it runs before its number is known. All of it comes before the
/// seccomp filter, which may forbid it.
#[derive(Clone)]
struct ExecSettings {
    confinement: Option<DeferredConfinement>,
    /// Where the program may run, if its maker was held to one processor.
    allowed_cpus: Option<CpuSet>,
}

/// What is left to do for a further process. Loading a filter needs
/// `CAP_SYS_ADMIN` (or no_new_privileges), so libcontainer is told to keep all
/// capabilities, and the wanted ones are set here, after the filter.
#[derive(Clone)]
pub(crate) struct DeferredConfinement {
    pub(crate) seccomp: LinuxSeccomp,
    pub(crate) capabilities: LinuxCapabilities,
}

impl ProcessExecutor {
    /// For the first process. Its filter is loaded by now; it waits to be let
    /// go, and whoever made it frees its processor and sets its terminal's size.
    pub(crate) fn for_init() -> Self {
        Self { inner: DefaultExecutor {}, exec: None }
    }

    pub(crate) fn for_exec(confinement: Option<DeferredConfinement>, allowed_cpus: Option<CpuSet>) -> Self {
        Self { inner: DefaultExecutor {}, exec: Some(ExecSettings { confinement, allowed_cpus }) }
    }
}

impl ExecSettings {
    fn apply(&self, process: Option<&Process>) -> Result<(), ExecutorError> {
        let failed = |what: &str, error: &dyn std::fmt::Display| ExecutorError::Other(format!("{what}: {error}"));
        if let Some(size) = process.and_then(terminal_size) {
            // A program that is told nothing takes the size that it likes.
            let _ = rustix::termios::tcsetwinsize(rustix::stdio::stdin(), size);
        }
        if let Some(allowed_cpus) = &self.allowed_cpus {
            cpu_affinity::set(allowed_cpus).map_err(|error| failed("processors", &error))?;
        }
        default_signals().map_err(|error| failed("signals", &error))?;
        if let Some(confinement) = &self.confinement {
            initialize_seccomp(&confinement.seccomp).map_err(|error| failed("seccomp", &error))?;
            let syscall = SyscallType::Linux.create_syscall();
            drop_privileges(&confinement.capabilities, syscall.as_ref()).map_err(|error| failed("capabilities", &error))?;
        }
        Ok(())
    }
}

/// The size that a process's terminal is to have, if it is one.
fn terminal_size(process: &Process) -> Option<Winsize> {
    let size = process.console_size().filter(|_| process.terminal() == Some(true))?;
    let number = |number: u64| u16::try_from(number).ok().filter(|number| *number > 0);
    let (ws_row, ws_col) = (number(size.height())?, number(size.width())?);
    Some(Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 })
}

impl Executor for ProcessExecutor {
    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        match &self.exec {
            Some(settings) => settings.apply(spec.process().as_ref())?,
            None => default_signals().map_err(|error| ExecutorError::Other(format!("signals: {error}")))?,
        }
        self.inner.exec(spec)
    }

    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        self.inner.validate(spec)
    }

    fn setup_envs(&self, mut envs: HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        // This process is the user by now, and the root is the container's.
        home::resolve(&mut envs, Path::new("/etc/passwd"), rustix::process::geteuid().as_raw());
        self.inner.setup_envs(envs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::runtime::BoxBuilder;

    #[test]
    fn only_a_terminal_has_a_size_and_only_one_that_makes_sense() {
        let size = |terminal, height, width| {
            let mut process = Process::default();
            let size = BoxBuilder::default().height(height).width(width).build().unwrap();
            process.set_terminal(Some(terminal)).set_console_size(Some(size));
            terminal_size(&process).map(|size| (size.ws_row, size.ws_col))
        };
        assert_eq!(size(true, 24_u64, 80_u64), Some((24, 80)));
        assert_eq!(size(false, 24, 80), None);
        assert_eq!((size(true, 0, 80), size(true, 24, 65_536)), (None, None));
        assert!(terminal_size(&Process::default()).is_none());
    }
}
