//! Calls to libcontainer, each with the corrections it needs before or after it.

use std::fs::{self, File};
use std::io::BufReader;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use libcontainer::container::builder::ContainerBuilder;
use libcontainer::container::{Container, ContainerStatus};
use libcontainer::error::LibcontainerError;
use libcontainer::notify_socket::{NOTIFY_FILE, NotifySocket};
use libcontainer::syscall::syscall::SyscallType;
use oci_spec::runtime::{Capability, LinuxCapabilitiesBuilder, LinuxSeccomp, Process, Spec};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use rustix::thread::CpuSet;

use crate::cpu_affinity;
use crate::executor::{DeferredConfinement, ProcessExecutor};
use crate::helper_log::{HelperLog, explain, first_error};
use crate::hooks::{self, Point};
use crate::message::{Failure, FailureKind};
use crate::socket::receive;
use crate::{cgroup, nested_cgroup};

/// The mount point where libcontainer expects cgroup v2.
const CGROUPS: &str = "/sys/fs/cgroup";

/// The standard descriptors of a process: three pipe ends, or `None` for a terminal.
pub(crate) type Stdio = Option<[OwnedFd; 3]>;

/// A created process, with its terminal's master if it has one.
pub(crate) struct NewProcess {
    pub(crate) pid: i32,
    pub(crate) master: Option<OwnedFd>,
}

/// The context of one call in its worker. The worker exits with the call, so libcontainer's changes to its
/// process (working directory, OOM score, logger) do not affect the runtime, and the runtime does not block when
/// libcontainer does.
pub(crate) struct CallContext {
    /// libcontainer's state directory.
    pub(crate) state: PathBuf,
    pub(crate) log: HelperLog,
    /// The CPU affinity of the container's program, if this process is pinned to one CPU.
    pub(crate) allowed_cpus: Option<CpuSet>,
}

impl CallContext {
    fn dir(&self, container: &str) -> PathBuf {
        self.state.join(container)
    }

    fn fail(&self, what: &str, container: &str, error: &LibcontainerError) -> Failure {
        let kind = if matches!(error, LibcontainerError::Exist) { FailureKind::Exists } else { FailureKind::Internal };
        Failure::new(kind, format!("failed to {what} container {container}: {}", explain(error, &self.log.take())))
    }

    pub(crate) fn create(
        &self,
        container: &str,
        bundle: &Path,
        stdio: Stdio,
        no_pivot: bool,
        hooks: bool,
    ) -> Result<NewProcess, Failure> {
        let (builder, console) = self.builder(container, stdio)?;
        let hook_stderr = if hooks { HookStderr::capture() } else { None };
        let built = builder
            .with_executor(ProcessExecutor::for_init())
            .as_init(bundle)
            .with_systemd(false)
            .with_detach(true)
            .with_no_pivot(no_pivot)
            // A child of the runtime, not of this worker, which exits.
            .as_sibling(true)
            .build();
        let mut made = built.map_err(|error| {
            let mut failure = self.fail("create", container, &error);
            failure.message.push_str(&hook_stderr.map(HookStderr::quote).unwrap_or_default());
            failure
        })?;
        let Some(pid) = made.pid().map(|pid| pid.as_raw()) else {
            return Err(Failure::internal(format!("container {container}: libcontainer created no process")));
        };
        if let Some(allowed_cpus) = &self.allowed_cpus {
            // The init process blocks until start, so it has not forked. An error means that it has died, which
            // its exit reports.
            let _ = cpu_affinity::set_for_process(pid, allowed_cpus);
        }
        // Discard warnings of the successful call: they do not explain later errors.
        self.log.take();
        match console.map(Console::master).transpose() {
            Ok(master) => Ok(NewProcess { pid, master }),
            Err(failure) => {
                let _ = made.delete(true);
                Err(failure)
            }
        }
    }

    /// Starts the program, waits for its exec, then runs the `poststart` hooks. `init_log` is the helper log of
    /// the container's init process.
    pub(crate) fn start(&self, container: &str, bundle: &Path, init_log: &HelperLog) -> Result<(), Failure> {
        let mut loaded = self.load(container)?;
        loaded.start().map_err(|error| self.fail("start", container, &error))?;
        let log_text = init_log.read_to_end();
        let log_text = first_error(&log_text);
        if !log_text.is_empty() {
            return Err(Failure::internal(format!("failed to start container {container}: {log_text}")));
        }
        self.hooks(container, bundle, Point::Poststart)
    }

    pub(crate) fn exec(
        &self,
        container: &str,
        bundle: &Path,
        process: &Path,
        stdio: Stdio,
    ) -> Result<NewProcess, Failure> {
        let spec = Spec::load(bundle.join("config.json")).map_err(|error| {
            Failure::internal(format!("container {container}: failed to load its configuration: {error}"))
        })?;
        let seccomp = spec.linux().as_ref().and_then(|linux| linux.seccomp().clone());
        let confinement = seccomp.map(|seccomp| grant_setup_capabilities(process, &seccomp)).transpose()?;
        let (builder, console) = self.builder(container, stdio)?;
        let built = builder
            .with_executor(ProcessExecutor::for_exec(confinement, self.allowed_cpus))
            .as_tenant()
            .with_detach(true)
            .as_sibling(true)
            .with_process(Some(process))
            .with_sub_cgroup(self.exec_cgroup(container, &spec))
            .build();
        let pid = built.map_err(|error| self.fail("run a process in", container, &error))?;
        Ok(NewProcess { pid: pid.as_raw(), master: console.map(Console::master).transpose()? })
    }

    /// Returns the sub-cgroup of the container's cgroup that an exec process joins, if the container has
    /// delegated controllers.
    fn exec_cgroup(&self, container: &str, spec: &Spec) -> Option<String> {
        let named = spec.linux().as_ref().and_then(|linux| linux.cgroups_path().as_deref())?;
        let first = || {
            let pid = Container::load(self.dir(container)).ok()?.pid()?;
            fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()
        };
        nested_cgroup::exec_target(&cgroup_directory(named), named, first)
    }

    pub(crate) fn delete(&self, container: &str, bundle: &Path) -> Result<(), Failure> {
        let mut loaded = self.load(container)?;
        remove_sub_cgroups(&loaded);
        loaded.delete(true).map_err(|error| self.fail("delete", container, &error))?;
        self.hooks(container, bundle, Point::Poststop)
    }

    fn hooks(&self, container: &str, bundle: &Path, point: Point) -> Result<(), Failure> {
        let state = || {
            let pid = Container::load(self.dir(container)).ok().and_then(|loaded| loaded.pid());
            hooks::state(container, bundle, point, pid.map(|pid| pid.as_raw()))
        };
        hooks::run_all(bundle, point, state).map_err(|text| Failure::internal(format!("container {container}: {text}")))
    }

    fn load(&self, container: &str) -> Result<Container, Failure> {
        Container::load(self.dir(container)).map_err(|error| self.fail("load", container, &error))
    }

    fn builder(&self, container: &str, stdio: Stdio) -> Result<(ContainerBuilder, Option<Console>), Failure> {
        let invalid = |error: LibcontainerError| {
            Failure::new(FailureKind::Invalid, format!("container {container}: {}", explain(&error, "")))
        };
        let builder = ContainerBuilder::new(container.to_owned(), SyscallType::Linux)
            .validate_id()
            .and_then(|builder| builder.with_root_path(&self.state))
            .map_err(invalid)?;
        Ok(match stdio {
            Some([stdin, stdout, stderr]) => (builder.with_stdin(stdin).with_stdout(stdout).with_stderr(stderr), None),
            None => {
                let console = Console::listen(&self.state)?;
                (builder.with_console_socket(Some(&console.path)), Some(console))
            }
        })
    }
}

/// Removes the sockets that libcontainer leaves for every exec process: one inode per probe for the life of the
/// container. Call it only while no exec is in flight.
pub(crate) fn remove_sockets(state: &Path, container: &str) {
    let Ok(entries) = fs::read_dir(state.join(container)) else { return };
    for entry in entries.flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b"tenant-") {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Removes the sub-cgroups that a container created, which libcontainer does not.
fn remove_sub_cgroups(container: &Container) {
    if let Ok(config) = container.spec() {
        cgroup::clear(&cgroup_directory(&config.cgroup_path));
    }
}

/// Returns the directory of the cgroup that a configuration names.
fn cgroup_directory(named: &Path) -> PathBuf {
    Path::new(CGROUPS).join(named.strip_prefix("/").unwrap_or(named))
}

/// Removes the remains of a container, running or not.
pub(crate) fn discard(state: &Path, container: &str) {
    let dir = state.join(container);
    let left = Container::load(dir.clone()).inspect(remove_sub_cgroups);
    if left.and_then(|mut left| left.delete(true)).is_err() {
        let _ = fs::remove_dir_all(dir);
    }
}

/// Removes all containers, e.g. of a runtime that was killed.
pub(crate) fn remove_all(state: &Path) {
    let Ok(entries) = fs::read_dir(state) else { return };
    for entry in entries.flatten() {
        match entry.file_name().to_str() {
            Some(name) if entry.path().is_dir() => discard(state, name),
            _ => drop(fs::remove_file(entry.path())),
        }
    }
}

/// Starts a container's program without waiting for its exec.
pub(crate) fn start_program(state: &Path, container: &str) -> Result<(), Failure> {
    NotifySocket::new(state.join(container).join(NOTIFY_FILE))
        .notify_container_start()
        .map_err(|error| Failure::internal(format!("failed to start container {container}: {}", explain(&error, ""))))
}

/// Sets libcontainer's state of a container to running; it refuses exec otherwise.
pub(crate) fn mark_running(state: &Path, container: &str) -> Result<(), Failure> {
    let noted = Container::load(state.join(container))
        .and_then(|mut loaded| loaded.set_status(ContainerStatus::Running).save());
    noted.map_err(|error| {
        Failure::internal(format!("container {container}: failed to save its state: {}", explain(&error, "")))
    })
}

/// Removes the cgroup and the state of a container without processes. `None`: the cgroup is in use, so
/// libcontainer has to delete it.
pub(crate) fn remove_idle(state: &Path, container: &str, cgroup: &Path) -> Option<Result<(), Failure>> {
    match fs::remove_dir(cgroup) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return None,
        _ => {}
    }
    let dir = state.join(container);
    Some(match fs::remove_dir_all(&dir) {
        // Not found: an earlier attempt removed it.
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Failure::internal(format!(
            "container {container}: failed to remove its state {}: {error}",
            dir.display()
        ))),
        _ => Ok(()),
    })
}

/// Kills all processes in a cgroup and its descendants.
pub(crate) fn kill(container: &str, cgroup: &Path) -> Result<(), Failure> {
    let file = cgroup.join("cgroup.kill");
    match fs::write(&file, "1") {
        Ok(()) => Ok(()),
        // No cgroup, so no processes.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => {
            Err(Failure::internal(format!("container {container}: failed to write {}: {error}", file.display())))
        }
    }
}

pub(crate) fn unknown(container: &str) -> Failure {
    Failure::new(FailureKind::NotFound, format!("no container {container}"))
}

/// Adds the capabilities that loading a seccomp filter needs to the process's file, and returns the requested
/// ones: see [`DeferredConfinement`].
fn grant_setup_capabilities(file: &Path, seccomp: &LinuxSeccomp) -> Result<DeferredConfinement, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::internal(format!("{}: {error}", file.display()));
    let reader = BufReader::new(File::open(file).map_err(|error| failed(&error))?);
    let mut process: Process = serde_json::from_reader(reader).map_err(|error| failed(&error))?;
    let capabilities = process.capabilities().clone().unwrap_or_default();
    let all: std::collections::HashSet<Capability> =
        capabilities.bounding().iter().flatten().copied().chain([Capability::SysAdmin, Capability::Setpcap]).collect();
    let wide = LinuxCapabilitiesBuilder::default()
        .bounding(all.clone())
        .effective(all.clone())
        .permitted(all.clone())
        .inheritable(all)
        .ambient(std::collections::HashSet::new())
        .build()
        .map_err(|error| failed(&error))?;
    process.set_capabilities(Some(wide));
    let text = serde_json::to_vec(&process).map_err(|error| failed(&error))?;
    fs::write(file, text).map_err(|error| failed(&error))?;
    Ok(DeferredConfinement { seccomp: seccomp.clone(), capabilities })
}

/// The console socket, through which a container's process sends its terminal's master.
struct Console {
    path: PathBuf,
    listener: UnixListener,
}

impl Console {
    fn listen(state: &Path) -> Result<Self, Failure> {
        // The worker's pid makes the name unique among concurrent calls.
        let path = state.join(format!("console-{}.sock", std::process::id()));
        let failed = |error: std::io::Error| Failure::internal(format!("{}: {error}", path.display()));
        fs::create_dir_all(state).map_err(failed)?;
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(failed)?;
        Ok(Self { path, listener })
    }

    /// Receives the terminal's master. libcontainer has returned, so the descriptor is queued or will never come.
    fn master(self) -> Result<OwnedFd, Failure> {
        let none = |why: String| Failure::internal(format!("the container sent no terminal: {why}"));
        self.listener.set_nonblocking(true).map_err(|error| none(error.to_string()))?;
        let (stream, _) = self.listener.accept().map_err(|error| none(error.to_string()))?;
        stream.set_nonblocking(true).map_err(|error| none(error.to_string()))?;
        let (_, mut fds) = receive(&stream, &mut [0; 256]).map_err(|error| none(error.to_string()))?;
        fds.pop().ok_or_else(|| none("no descriptor in its message".to_owned()))
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Captures the standard error of hooks that libcontainer runs: the `createRuntime` hook of this program reports
/// failed hooks there.
struct HookStderr(OwnedFd);

impl HookStderr {
    /// Hooks that write more than this block until their deadline, bytes.
    const PIPE_SIZE: usize = 1 << 20;
    /// The most that is quoted, bytes: more than the `createRuntime` hook itself quotes of a hook.
    const QUOTED: usize = 4096;

    fn capture() -> Option<Self> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).ok()?;
        let _ = fcntl_setpipe_size(&writer, Self::PIPE_SIZE);
        rustix::io::ioctl_fionbio(&reader, true).ok()?;
        rustix::stdio::dup2_stderr(&writer).ok()?;
        Some(Self(reader))
    }

    fn quote(self) -> String {
        let mut text = vec![0; Self::QUOTED];
        let len = rustix::io::read(&self.0, &mut text).unwrap_or(0);
        let text: String =
            String::from_utf8_lossy(&text[..len]).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        if text.trim().is_empty() { String::new() } else { format!("; output: {}", text.trim()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_after_a_partial_removal_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = dir.path().join("group");
        fs::create_dir_all(dir.path().join("c1/sub")).unwrap();
        fs::create_dir(&cgroup).unwrap();
        for _ in 0..2 {
            assert!(remove_idle(dir.path(), "c1", &cgroup).unwrap().is_ok());
            assert!(!dir.path().join("c1").exists() && !cgroup.exists());
        }
        // A file stands in for a process: rmdir of the cgroup fails.
        fs::create_dir(&cgroup).unwrap();
        fs::write(cgroup.join("busy"), "").unwrap();
        assert!(remove_idle(dir.path(), "c1", &cgroup).is_none());
    }

    #[test]
    fn process_under_a_seccomp_filter_gets_setup_capabilities_and_the_requested_ones_are_returned() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.json");
        let mut process = Process::default();
        let requested = LinuxCapabilitiesBuilder::default()
            .bounding([Capability::Chown])
            .effective([Capability::Chown])
            .permitted([Capability::Chown])
            .build()
            .unwrap();
        process.set_capabilities(Some(requested.clone()));
        fs::write(&file, serde_json::to_vec(&process).unwrap()).unwrap();
        let confinement = grant_setup_capabilities(&file, &LinuxSeccomp::default()).unwrap();
        assert_eq!(confinement.capabilities, requested);
        let wide: Process = serde_json::from_reader(File::open(&file).unwrap()).unwrap();
        let effective = wide.capabilities().as_ref().unwrap().effective().clone().unwrap();
        assert!(effective.contains(&Capability::SysAdmin) && effective.contains(&Capability::Chown));
    }
}
