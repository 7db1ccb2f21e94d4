//! OnlineCPUMem: brings hot-plugged CPUs and memory online.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use firstlight_agent_api::agent::OnlineCPUMemRequest;
use tokio::time::{Instant, sleep, timeout_at};

use super::cpuset::{self, count};
use crate::background;
use crate::error::{Error, Result};
use crate::hotplug::Uevents;
use crate::paths::Paths;
use crate::sandbox::Sandbox;

/// Timeout for CPUs to appear and to come online.
const CPU_TIMEOUT: Duration = Duration::from_secs(5);

/// Poll interval: the VMM plugs CPUs in one by one.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// State of the CPUs at the last poll.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct CpuState {
    online: u32,
    /// CPUs that could not be brought online, with the error.
    refused: Vec<String>,
}

/// Returns the directories `PREFIX` + number below a directory, by number.
fn numbered(dir: &Path, prefix: &str) -> Vec<(u32, PathBuf)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let number = |path: &Path| path.file_name()?.to_str()?.strip_prefix(prefix)?.parse().ok();
    let mut all: Vec<(u32, PathBuf)> =
        entries.filter_map(|entry| Some((number(&entry.path())?, entry.path()))).collect();
    all.sort_unstable();
    all
}

/// Returns whether a CPU or memory block is offline. CPU 0 often has no `online` file.
fn is_off(part: &Path) -> bool {
    fs::read_to_string(part.join("online")).is_ok_and(|text| text.trim() == "0")
}

fn set_online(part: &Path) -> std::io::Result<()> {
    match fs::write(part.join("online"), "1") {
        // Already online by another writer.
        Err(_) if !is_off(part) => Ok(()),
        result => result,
    }
}

/// Brings CPUs online until `requested` are, and returns the state.
fn cpus(sysfs: &Path, requested: u32) -> CpuState {
    let dir = sysfs.join("devices/system/cpu");
    let online = || count(&fs::read_to_string(dir.join("online")).unwrap_or_default());
    let mut state = CpuState { online: online(), refused: Vec::new() };
    for (number, cpu) in numbered(&dir, "cpu") {
        if state.online >= requested {
            break;
        }
        if is_off(&cpu) {
            match set_online(&cpu) {
                Ok(()) => state.online = online(),
                Err(error) => state.refused.push(format!("cpu{number}: {error}")),
            }
        }
    }
    state
}

/// Brings every memory block online.
fn memory(sysfs: &Path) -> Result<()> {
    let mut refused = Vec::new();
    let blocks = numbered(&sysfs.join("devices/system/memory"), "memory");
    for (number, block) in blocks.iter().filter(|(_, block)| is_off(block)) {
        if let Err(error) = set_online(block) {
            refused.push(format!("memory{number}: {error}"));
        }
    }
    match refused.first() {
        None => Ok(()),
        Some(first) => Err(Error::internal(format!(
            "OnlineCPUMem: {} of {} memory blocks failed to come online, the first {first}",
            refused.len(),
            blocks.len()
        ))),
    }
}

/// Brings newly plugged memory online automatically. Started by the first request for memory: the
/// VMM replies to a shim before the guest has detected what was plugged in, and a request that
/// finds nothing does not know what to wait for.
#[derive(Debug, Default, Clone)]
struct MemoryWatcher(Arc<AtomicBool>);

impl MemoryWatcher {
    /// Starts the watcher, once.
    fn start(&self, sysfs: &Path) {
        let running = Arc::clone(&self.0);
        if running.swap(true, Ordering::Relaxed) {
            return;
        }
        let (opened, sysfs) = (Uevents::open(), sysfs.to_owned());
        tokio::spawn(async move {
            let error = match opened {
                Ok(events) => watch_memory(events, &sysfs).await,
                Err(error) => error,
            };
            log::warn!(
                "hot-plugged memory stays offline until the next OnlineCPUMem: uevents cannot be received: {error}"
            );
            running.store(false, Ordering::Relaxed);
        });
    }
}

/// Brings plugged memory online; returns the error that ended it.
async fn watch_memory(mut events: Uevents, sysfs: &Path) -> std::io::Error {
    loop {
        if let Err(error) = events.changed_in("memory").await {
            return error;
        }
        let sysfs = sysfs.to_owned();
        if let Err(error) = background::blocking(move || memory(&sysfs)).await {
            log::warn!("hot-plugged memory: {error}");
        }
    }
}

fn cpu_timeout_error(requested: u32, state: &CpuState, elapsed: Duration) -> Error {
    let CpuState { online, refused } = state;
    let why = match refused.first() {
        Some(first) => format!("{} could not be brought online, the first {first}", refused.len()),
        None => "no further one has been plugged in; check that the VMM was asked to".to_owned(),
    };
    Error::internal(format!(
        "OnlineCPUMem: {online} of {requested} CPUs are online after {:.1} s: {why}",
        elapsed.as_secs_f64()
    ))
}

/// Waits until `requested` CPUs are online. A write to sysfs may block for long, so it runs in the
/// blocking pool, and the wait ends at the deadline.
async fn wait_for_cpus(sysfs: &Path, requested: u32) -> Result<()> {
    let begin = Instant::now();
    let last = Arc::new(Mutex::new(CpuState::default()));
    let done = async {
        loop {
            let (sysfs, seen) = (sysfs.to_owned(), Arc::clone(&last));
            let state = background::blocking(move || {
                let state = cpus(&sysfs, requested);
                seen.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&state);
                Ok(state)
            });
            if state.await?.online >= requested {
                return Ok(());
            }
            sleep(POLL_INTERVAL).await;
        }
    };
    timeout_at(begin + CPU_TIMEOUT, done).await.unwrap_or_else(|_| {
        let last = last.lock().unwrap_or_else(PoisonError::into_inner);
        Err(cpu_timeout_error(requested, &last, begin.elapsed()))
    })
}

/// Brings hot-plugged CPUs and memory online.
#[derive(Debug, Clone)]
pub struct CpusAndMemory {
    sysfs: PathBuf,
    sandbox: Arc<Sandbox>,
    watcher: MemoryWatcher,
}

impl CpusAndMemory {
    /// Creates the component.
    #[must_use]
    pub fn new(paths: &Paths, sandbox: &Arc<Sandbox>) -> Self {
        Self { sysfs: paths.sysfs.clone(), sandbox: Arc::clone(sandbox), watcher: MemoryWatcher::default() }
    }

    /// Brings CPUs online until `nb_cpus` are (0: none), all memory unless only CPUs are requested,
    /// including memory that appears later, and reapplies the cpusets of containers.
    ///
    /// # Errors
    /// `INTERNAL` after 5 s with too few CPUs, with their number and the failing one; or for memory
    /// that fails to come online.
    pub async fn online(&self, request: OnlineCPUMemRequest) -> Result<()> {
        let Self { sysfs, sandbox, watcher } = self.clone();
        background::to_completion(async move {
            if request.nb_cpus > 0 {
                wait_for_cpus(&sysfs, request.nb_cpus).await?;
            }
            if !request.cpu_only {
                // Started before the scan, so no block is missed in between.
                watcher.start(&sysfs);
            }
            let containers = sandbox.containers();
            background::blocking(move || {
                let memory = if request.cpu_only { Ok(()) } else { memory(&sysfs) };
                for container in containers.iter().filter(|_| request.nb_cpus > 0) {
                    if let Err(error) = cpuset::reapply(container) {
                        log::warn!("container {}: failed to reapply its CPU list: {error}", container.id);
                    }
                }
                memory
            })
            .await
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    fn plant(root: &Path, files: &[(&str, &str)]) {
        for (file, text) in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    fn text(root: &Path, file: &str) -> String {
        fs::read_to_string(root.join("devices/system").join(file)).unwrap()
    }

    #[test]
    fn cpus_come_online_in_order_until_there_are_enough() {
        let root = tempfile::tempdir().unwrap();
        let cpu = |file: &str| format!("devices/system/cpu/{file}");
        for number in [1, 2, 10] {
            plant(root.path(), &[(&cpu(&format!("cpu{number}/online")), "0\n")]);
        }
        plant(root.path(), &[(&cpu("cpufreq/online"), "0\n"), (&cpu("online"), "0-1\n")]);
        let state = cpus(root.path(), 2);
        assert_eq!(
            (state, text(root.path(), "cpu/cpu1/online")),
            (CpuState { online: 2, refused: vec![] }, "0\n".into())
        );
        let state = cpus(root.path(), 3);
        assert_eq!(state, CpuState { online: 2, refused: vec![] });
        for number in [1, 2, 10] {
            assert_eq!(text(root.path(), &format!("cpu/cpu{number}/online")), "1");
        }
        assert_eq!(text(root.path(), "cpu/cpufreq/online"), "0\n");
    }

    #[test]
    fn wait_for_a_late_cpu_does_not_block_the_server() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            plant(root.path(), &[("devices/system/cpu/online", "0\n")]);
            let plug = async {
                for _ in 0..5 {
                    // Progresses only if the call does not block the thread.
                    sleep(Duration::from_millis(20)).await;
                }
                fs::write(root.path().join("devices/system/cpu/online"), "0-1\n").unwrap();
            };
            let (online, ()) = tokio::join!(wait_for_cpus(root.path(), 2), plug);
            online.unwrap();
        });
    }

    #[test]
    fn timeout_error_has_counts_names_and_time() {
        let state = CpuState { online: 1, refused: vec!["cpu1: Device or resource busy".into(), "cpu2: x".into()] };
        let message = cpu_timeout_error(3, &state, Duration::from_millis(5040)).message;
        for part in ["1 of 3 CPUs", "5.0 s", "2 could not", "cpu1: Device or resource busy"] {
            assert!(message.contains(part), "{message}");
        }
        let message = cpu_timeout_error(3, &CpuState { online: 1, refused: vec![] }, CPU_TIMEOUT).message;
        assert!(message.contains("plugged in"), "{message}");
    }

    #[test]
    fn every_memory_block_comes_online() {
        let root = tempfile::tempdir().unwrap();
        let memory_of = |file: &str| format!("devices/system/memory/{file}");
        plant(root.path(), &[(&memory_of("memory1/online"), "1\n"), (&memory_of("memory32/online"), "0\n")]);
        plant(root.path(), &[(&memory_of("power/online"), "0\n")]);
        memory(root.path()).unwrap();
        assert_eq!(text(root.path(), "memory/memory32/online"), "1");
        assert_eq!(text(root.path(), "memory/power/online"), "0\n");
    }

    #[test]
    fn missing_sysfs_files_are_ignored() {
        memory(Path::new("/nonexistent")).unwrap();
        assert_eq!(cpus(Path::new("/nonexistent"), 1), CpuState::default());
    }

    #[test]
    fn memory_is_left_offline_if_only_cpus_are_requested() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let (paths, sandbox) = (Paths::below(root.path()), Arc::new(Sandbox::default()));
            let block = "devices/system/memory/memory1/online";
            plant(&paths.sysfs, &[(block, "0"), ("devices/system/cpu/online", "0-1\n")]);
            let parts = CpusAndMemory::new(&paths, &sandbox);
            let request = |cpu_only| OnlineCPUMemRequest { nb_cpus: 2, cpu_only, ..Default::default() };
            parts.online(request(true)).await.unwrap();
            assert_eq!(text(&paths.sysfs, "memory/memory1/online"), "0");
            assert!(!parts.watcher.0.load(Ordering::Relaxed));
            parts.online(request(false)).await.unwrap();
            assert_eq!(text(&paths.sysfs, "memory/memory1/online"), "1");
        });
    }
}
