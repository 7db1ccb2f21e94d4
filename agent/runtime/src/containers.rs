//! libcontainer's calls, each with what has to be put right after it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufReader;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use libcontainer::container::Container;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::error::LibcontainerError;
use libcontainer::syscall::syscall::SyscallType;
use oci_spec::runtime::{Capability, LinuxCapabilitiesBuilder, LinuxSeccomp, Process, Spec};

use crate::entry::{Confine, Entry};
use crate::message::{Failure, FailureKind};
use crate::socket::receive;
use crate::words::{LastWords, explain};

/// Where the kernel shows cgroups. libcontainer looks there too.
const CGROUPS: &str = "/sys/fs/cgroup";

const OOM_SCORE: &str = "/proc/self/oom_score_adj";

/// The standard descriptors of a process: three pipe ends, or none for a terminal.
pub(crate) type Stdio = Option<[OwnedFd; 3]>;

/// A process that was made, with its terminal's master if it has one.
pub(crate) struct Made {
    pub(crate) pid: i32,
    pub(crate) master: Option<OwnedFd>,
}

/// What is remembered of a container.
struct Kept {
    cgroup: PathBuf,
    seccomp: Option<LinuxSeccomp>,
}

/// All containers.
pub(crate) struct Containers {
    state: PathBuf,
    words: LastWords,
    kept: BTreeMap<String, Kept>,
    swept: bool,
}

impl Containers {
    pub(crate) fn new(state: PathBuf, words: LastWords) -> Self {
        Self { state, words, kept: BTreeMap::new(), swept: false }
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.kept.keys().cloned().collect()
    }

    pub(crate) fn words(&self) -> &LastWords {
        &self.words
    }

    fn folder(&self, container: &str) -> PathBuf {
        self.state.join(container)
    }

    fn fail(&self, what: &str, container: &str, error: &LibcontainerError) -> Failure {
        let kind = if matches!(error, LibcontainerError::Exist) { FailureKind::Exists } else { FailureKind::Internal };
        Failure::new(kind, format!("cannot {what} container {container}: {}", explain(error, &self.words.take())))
    }

    pub(crate) fn create(
        &mut self,
        container: &str,
        bundle: &Path,
        stdio: Stdio,
        no_pivot: bool,
    ) -> Result<Made, Failure> {
        self.sweep();
        if self.kept.contains_key(container) {
            return Err(Failure::new(FailureKind::Exists, format!("container {container} exists")));
        }
        let config = bundle.join("config.json");
        let spec = Spec::load(&config).map_err(|error| {
            Failure::new(FailureKind::Invalid, format!("container {container}: {}: {error}", config.display()))
        })?;
        let linux = spec.linux().as_ref();
        let cgroup = linux.and_then(|linux| linux.cgroups_path().clone()).unwrap_or_default();
        let kept =
            Kept { cgroup: below(Path::new(CGROUPS), &cgroup), seccomp: linux.and_then(|l| l.seccomp().clone()) };

        let (builder, console) = self.builder(container, stdio)?;
        let score = Score::read();
        let built = builder
            .with_executor(Entry::first())
            .as_init(bundle)
            .with_systemd(false)
            .with_detach(true)
            .with_no_pivot(no_pivot)
            .build();
        score.restore();
        let mut made = built.map_err(|error| self.fail("create", container, &error))?;
        let Some(pid) = made.pid().map(|pid| pid.as_raw()) else {
            return Err(Failure::internal(format!("container {container}: libcontainer made no process")));
        };
        match console.map(Console::master).transpose() {
            Ok(master) => {
                self.kept.insert(container.to_owned(), kept);
                Ok(Made { pid, master })
            }
            Err(failure) => {
                let _ = made.delete(true);
                Err(failure)
            }
        }
    }

    pub(crate) fn start(&mut self, container: &str) -> Result<(), Failure> {
        let mut loaded = self.load(container)?;
        let result = loaded.start();
        result.map_err(|error| self.fail("start", container, &error))
    }

    pub(crate) fn exec(&mut self, container: &str, process: &Path, stdio: Stdio) -> Result<Made, Failure> {
        let kept = self.kept.get(container).ok_or_else(|| unknown(container))?;
        let confine = match &kept.seccomp {
            Some(seccomp) => Some(widen(process, seccomp)?),
            None => None,
        };
        let (builder, console) = self.builder(container, stdio)?;
        let score = Score::read();
        let built = builder
            .with_executor(Entry::further(confine))
            .as_tenant()
            .with_detach(true)
            .with_process(Some(process))
            .build();
        score.restore();
        self.remove_sockets(container);
        let pid = built.map_err(|error| self.fail("run a process in", container, &error))?;
        Ok(Made { pid: pid.as_raw(), master: console.map(Console::master).transpose()? })
    }

    /// Kills everything in the container's cgroup and in the groups below it.
    pub(crate) fn kill(&self, container: &str) -> Result<(), Failure> {
        let kept = self.kept.get(container).ok_or_else(|| unknown(container))?;
        let file = kept.cgroup.join("cgroup.kill");
        match fs::write(&file, "1") {
            Ok(()) => Ok(()),
            // Nothing has run in it, or everything is gone.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Failure::internal(format!("container {container}: {}: {error}", file.display()))),
        }
    }

    pub(crate) fn delete(&mut self, container: &str) -> Result<(), Failure> {
        let mut loaded = self.load(container)?;
        let result = loaded.delete(true);
        result.map_err(|error| self.fail("delete", container, &error))?;
        self.kept.remove(container);
        Ok(())
    }

    fn load(&self, container: &str) -> Result<Container, Failure> {
        if !self.kept.contains_key(container) {
            return Err(unknown(container));
        }
        Container::load(self.folder(container)).map_err(|error| self.fail("load", container, &error))
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

    /// Every further process leaves a socket behind: one inode per probe for
    /// the life of the container.
    fn remove_sockets(&self, container: &str) {
        let Ok(entries) = fs::read_dir(self.folder(container)) else { return };
        for entry in entries.flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(b"tenant-") {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Removes what a runtime that was killed has left, before the first container.
    fn sweep(&mut self) {
        if std::mem::replace(&mut self.swept, true) {
            return;
        }
        let Ok(entries) = fs::read_dir(&self.state) else { return };
        for entry in entries.flatten().filter(|entry| entry.path().is_dir()) {
            log::warn!("removing container {} of an earlier runtime", entry.path().display());
            if Container::load(entry.path()).and_then(|mut left| left.delete(true)).is_err() {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

fn unknown(container: &str) -> Failure {
    Failure::new(FailureKind::NotFound, format!("no container {container}"))
}

/// A path that the specification gives, below a folder of ours.
fn below(root: &Path, path: &Path) -> PathBuf {
    let mut all = root.to_owned();
    all.extend(path.components().filter(|part| matches!(part, std::path::Component::Normal(_))));
    all
}

/// Asks libcontainer for every capability, in the process's file, and returns
/// what was asked for: see [`Confine`].
fn widen(file: &Path, seccomp: &LinuxSeccomp) -> Result<Confine, Failure> {
    let wrong = |error: &dyn std::fmt::Display| Failure::internal(format!("{}: {error}", file.display()));
    let reader = BufReader::new(File::open(file).map_err(|error| wrong(&error))?);
    let mut process: Process = serde_json::from_reader(reader).map_err(|error| wrong(&error))?;
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
        .map_err(|error| wrong(&error))?;
    process.set_capabilities(Some(wide));
    let text = serde_json::to_vec(&process).map_err(|error| wrong(&error))?;
    fs::write(file, text).map_err(|error| wrong(&error))?;
    Ok(Confine { seccomp: seccomp.clone(), capabilities })
}

/// The socket through which a container's own process hands over its terminal.
struct Console {
    path: PathBuf,
    listener: UnixListener,
}

impl Console {
    fn listen(state: &Path) -> Result<Self, Failure> {
        let path = state.join("console.sock");
        let wrong = |error: std::io::Error| Failure::internal(format!("{}: {error}", path.display()));
        fs::create_dir_all(state).map_err(wrong)?;
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(wrong)?;
        Ok(Self { path, listener })
    }

    /// libcontainer has returned, so the descriptor is in the queue or will never come.
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

/// The runtime's own OOM score, which libcontainer overwrites with each container's.
struct Score(Option<String>);

impl Score {
    fn read() -> Self {
        Self(fs::read_to_string(OOM_SCORE).ok())
    }

    fn restore(self) {
        if let Some(score) = self.0 {
            let _ = fs::write(OOM_SCORE, score.trim());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_paths_stay_below_the_root() {
        let root = Path::new("/sys/fs/cgroup");
        assert_eq!(below(root, Path::new("/kubepods/c1")), Path::new("/sys/fs/cgroup/kubepods/c1"));
        assert_eq!(below(root, Path::new("../../etc")), Path::new("/sys/fs/cgroup/etc"));
    }

    #[test]
    fn a_process_under_a_filter_is_widened_and_remembers_what_it_wanted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("p.json");
        let mut process = Process::default();
        let wanted = LinuxCapabilitiesBuilder::default()
            .bounding([Capability::Chown])
            .effective([Capability::Chown])
            .permitted([Capability::Chown])
            .build()
            .unwrap();
        process.set_capabilities(Some(wanted.clone()));
        fs::write(&file, serde_json::to_vec(&process).unwrap()).unwrap();
        let confine = widen(&file, &LinuxSeccomp::default()).unwrap();
        assert_eq!(confine.capabilities, wanted);
        let wide: Process = serde_json::from_reader(File::open(&file).unwrap()).unwrap();
        let effective = wide.capabilities().as_ref().unwrap().effective().clone().unwrap();
        assert!(effective.contains(&Capability::SysAdmin) && effective.contains(&Capability::Chown));
    }
}
