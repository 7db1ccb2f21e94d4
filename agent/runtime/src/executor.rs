//! The last steps of a container process before it execs its program.

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

/// libcontainer's default executor with five additions: `HOME` is looked up in `/etc/passwd` if requested; the
/// CPU pinning of the call and the runtime's blocked and ignored signals are reset; an exec process's terminal
/// gets its size before the program reads it; and an exec process gets the container's seccomp filter, which
/// libcontainer loads for the init process only.
#[derive(Clone)]
pub(crate) struct ProcessExecutor {
    inner: DefaultExecutor,
    exec: Option<ExecSettings>,
}

/// Settings that an exec process applies to itself, because it runs before its maker knows its pid. They are
/// applied before the seccomp filter, which may forbid the system calls.
#[derive(Clone)]
struct ExecSettings {
    confinement: Option<DeferredConfinement>,
    /// The program's CPU affinity, if its maker was pinned to one CPU.
    allowed_cpus: Option<CpuSet>,
}

/// Confinement that an exec process applies after libcontainer's setup. Loading a seccomp filter needs
/// `CAP_SYS_ADMIN` (or no_new_privileges), so libcontainer keeps all capabilities, and the requested ones are set
/// here, after the filter.
#[derive(Clone)]
pub(crate) struct DeferredConfinement {
    pub(crate) seccomp: LinuxSeccomp,
    pub(crate) capabilities: LinuxCapabilities,
}

impl ProcessExecutor {
    /// Returns the executor of a container's init process. libcontainer has loaded its filter; it blocks until
    /// start, and its maker resets its CPU affinity and sets its terminal's size.
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
            // Not fatal: the program then uses its default size.
            let _ = rustix::termios::tcsetwinsize(rustix::stdio::stdin(), size);
        }
        if let Some(allowed_cpus) = &self.allowed_cpus {
            cpu_affinity::set(allowed_cpus).map_err(|error| failed("CPU affinity", &error))?;
        }
        default_signals().map_err(|error| failed("signals", &error))?;
        if let Some(confinement) = &self.confinement {
            initialize_seccomp(&confinement.seccomp).map_err(|error| failed("seccomp", &error))?;
            let syscall = SyscallType::Linux.create_syscall();
            drop_privileges(&confinement.capabilities, syscall.as_ref())
                .map_err(|error| failed("capabilities", &error))?;
        }
        Ok(())
    }
}

/// Returns the requested size of a process's terminal.
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
        // This process already has the container's user and root.
        home::resolve(&mut envs, Path::new("/etc/passwd"), rustix::process::geteuid().as_raw());
        self.inner.setup_envs(envs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::runtime::BoxBuilder;

    #[test]
    fn terminal_size_is_set_only_for_terminals_and_valid_sizes() {
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
