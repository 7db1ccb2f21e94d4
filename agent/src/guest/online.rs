//! OnlineCPUMem: CPUs and memory that the host has plugged in are taken into use.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use firstlight_agent_api::agent::OnlineCPUMemRequest;
use tokio::time::{Instant, sleep, timeout_at};

use crate::agent::Agent;
use crate::error::{Error, Result};
use crate::guest::cpuset::{self, count};
use crate::hotplug::Uevents;
use crate::work;

/// How long the CPUs may take to appear and to come online.
const PATIENCE: Duration = Duration::from_secs(5);

/// Between two looks: the host plugs CPUs in one after the other.
const PAUSE: Duration = Duration::from_millis(20);

/// What was seen last, for the error.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Look {
    online: u32,
    /// What is there and off, with why it could not be switched on.
    refused: Vec<String>,
}

/// The directories `PREFIX` + number below a directory, by number.
fn numbered(dir: &Path, prefix: &str) -> Vec<(u32, PathBuf)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let number = |path: &Path| path.file_name()?.to_str()?.strip_prefix(prefix)?.parse().ok();
    let mut all: Vec<(u32, PathBuf)> =
        entries.filter_map(|entry| Some((number(&entry.path())?, entry.path()))).collect();
    all.sort_unstable();
    all
}

/// Whether this can be switched on and is off. CPU 0 often has no switch.
fn is_off(part: &Path) -> bool {
    fs::read_to_string(part.join("online")).is_ok_and(|text| text.trim() == "0")
}

fn switch_on(part: &Path) -> std::io::Result<()> {
    match fs::write(part.join("online"), "1") {
        // Somebody else was faster.
        Err(_) if !is_off(part) => Ok(()),
        result => result,
    }
}

/// Switches CPUs on until `wanted` are, and tells how many are.
fn cpus(sysfs: &Path, wanted: u32) -> Look {
    let dir = sysfs.join("devices/system/cpu");
    let online = || count(&fs::read_to_string(dir.join("online")).unwrap_or_default());
    let mut look = Look { online: online(), refused: Vec::new() };
    for (number, cpu) in numbered(&dir, "cpu") {
        if look.online >= wanted {
            break;
        }
        if is_off(&cpu) {
            match switch_on(&cpu) {
                Ok(()) => look.online = online(),
                Err(error) => look.refused.push(format!("cpu{number}: {error}")),
            }
        }
    }
    look
}

/// Switches every block of memory on.
fn memory(sysfs: &Path) -> Result<()> {
    let mut refused = Vec::new();
    let blocks = numbered(&sysfs.join("devices/system/memory"), "memory");
    for (number, block) in blocks.iter().filter(|(_, block)| is_off(block)) {
        if let Err(error) = switch_on(block) {
            refused.push(format!("memory{number}: {error}"));
        }
    }
    match refused.first() {
        None => Ok(()),
        Some(first) => Err(Error::internal(format!(
            "OnlineCPUMem: {} of {} blocks of memory do not come online, the first {first}",
            refused.len(),
            blocks.len()
        ))),
    }
}

/// Whether memory that comes is switched on at once: from the first call for
/// memory on, as the VMM answers a shim before the guest has found what was
/// plugged in, and a call that finds nothing has nothing to wait for.
#[derive(Debug, Default)]
pub struct Follows(Arc<AtomicBool>);

impl Follows {
    /// Hears of memory from now on.
    fn start(&self, sysfs: &Path) {
        let follows = Arc::clone(&self.0);
        if follows.swap(true, Ordering::Relaxed) {
            return;
        }
        let (opened, sysfs) = (Uevents::open(), sysfs.to_owned());
        tokio::spawn(async move {
            let error = match opened {
                Ok(events) => follow(events, &sysfs).await,
                Err(error) => error,
            };
            log::warn!("memory that is plugged in waits for the next OnlineCPUMem: the kernel is not heard: {error}");
            follows.store(false, Ordering::Relaxed);
        });
    }
}

/// Switches on what comes; why it ended.
async fn follow(mut events: Uevents, sysfs: &Path) -> std::io::Error {
    loop {
        if let Err(error) = events.news_of("memory").await {
            return error;
        }
        let sysfs = sysfs.to_owned();
        if let Err(error) = work::blocking(move || memory(&sysfs)).await {
            log::warn!("memory that was plugged in: {error}");
        }
    }
}

fn late(wanted: u32, look: &Look, elapsed: Duration) -> Error {
    let Look { online, refused } = look;
    let why = match refused.first() {
        Some(first) => format!("{} could not be switched on, the first {first}", refused.len()),
        None => "no further one has been plugged in; has the VMM been asked for it?".to_owned(),
    };
    Error::internal(format!(
        "OnlineCPUMem: {online} of {wanted} CPUs are online after {:.1} s: {why}",
        elapsed.as_secs_f64()
    ))
}

/// Waits until `wanted` CPUs are online. A write may take long in the kernel,
/// so none is made on the server's thread, and none is waited for past the deadline.
async fn await_cpus(sysfs: &Path, wanted: u32) -> Result<()> {
    let begin = Instant::now();
    let last = Arc::new(Mutex::new(Look::default()));
    let done = async {
        loop {
            let (sysfs, seen) = (sysfs.to_owned(), Arc::clone(&last));
            let look = work::blocking(move || {
                let look = cpus(&sysfs, wanted);
                seen.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&look);
                Ok(look)
            });
            if look.await?.online >= wanted {
                return Ok(());
            }
            sleep(PAUSE).await;
        }
    };
    timeout_at(begin + PATIENCE, done).await.unwrap_or_else(|_| {
        let last = last.lock().unwrap_or_else(PoisonError::into_inner);
        Err(late(wanted, &last, begin.elapsed()))
    })
}

impl Agent {
    /// Takes CPUs until `nb_cpus` are online (0: leaves them), all memory unless
    /// only CPUs are asked for, also what comes later, and has containers that are bound to CPUs see
    /// the new ones of theirs.
    ///
    /// # Errors
    /// `INTERNAL` after 5 s with too few CPUs, with how many there are and which
    /// one does not come; or for memory that does not.
    pub async fn online(self: &Arc<Self>, request: OnlineCPUMemRequest) -> Result<()> {
        let agent = Arc::clone(self);
        work::whole(async move {
            if request.nb_cpus > 0 {
                await_cpus(&agent.paths.sysfs, request.nb_cpus).await?;
            }
            if !request.cpu_only {
                // Before the look, so that nothing slips through between the two.
                agent.memory.start(&agent.paths.sysfs);
            }
            let containers = agent.containers();
            let sysfs = agent.paths.sysfs.clone();
            work::blocking(move || {
                let memory = if request.cpu_only { Ok(()) } else { memory(&sysfs) };
                for container in containers.iter().filter(|_| request.nb_cpus > 0) {
                    if let Err(error) = cpuset::renew(container) {
                        log::warn!("container {}: its CPU list cannot be renewed: {error}", container.id);
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
    fn cpus_are_switched_on_in_order_until_there_are_enough() {
        let root = tempfile::tempdir().unwrap();
        let cpu = |file: &str| format!("devices/system/cpu/{file}");
        for number in [1, 2, 10] {
            plant(root.path(), &[(&cpu(&format!("cpu{number}/online")), "0\n")]);
        }
        plant(root.path(), &[(&cpu("cpufreq/online"), "0\n"), (&cpu("online"), "0-1\n")]);
        let look = cpus(root.path(), 2);
        assert_eq!((look, text(root.path(), "cpu/cpu1/online")), (Look { online: 2, refused: vec![] }, "0\n".into()));
        let look = cpus(root.path(), 3);
        assert_eq!(look, Look { online: 2, refused: vec![] });
        for number in [1, 2, 10] {
            assert_eq!(text(root.path(), &format!("cpu/cpu{number}/online")), "1");
        }
        assert_eq!(text(root.path(), "cpu/cpufreq/online"), "0\n");
    }

    #[test]
    fn a_cpu_that_comes_late_is_waited_for_beside_the_server() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            plant(root.path(), &[("devices/system/cpu/online", "0\n")]);
            let plug = async {
                for _ in 0..5 {
                    // Turns only while the call does not block the thread.
                    sleep(Duration::from_millis(20)).await;
                }
                fs::write(root.path().join("devices/system/cpu/online"), "0-1\n").unwrap();
            };
            let (online, ()) = tokio::join!(await_cpus(root.path(), 2), plug);
            online.unwrap();
        });
    }

    #[test]
    fn the_error_counts_names_and_tells_the_time() {
        let look = Look { online: 1, refused: vec!["cpu1: Device or resource busy".into(), "cpu2: x".into()] };
        let message = late(3, &look, Duration::from_millis(5040)).message;
        for part in ["1 of 3 CPUs", "5.0 s", "2 could not", "cpu1: Device or resource busy"] {
            assert!(message.contains(part), "{message}");
        }
        let message = late(3, &Look { online: 1, refused: vec![] }, PATIENCE).message;
        assert!(message.contains("plugged in"), "{message}");
    }

    #[test]
    fn every_block_of_memory_comes_online() {
        let root = tempfile::tempdir().unwrap();
        let memory_of = |file: &str| format!("devices/system/memory/{file}");
        plant(root.path(), &[(&memory_of("memory1/online"), "1\n"), (&memory_of("memory32/online"), "0\n")]);
        plant(root.path(), &[(&memory_of("power/online"), "0\n")]);
        memory(root.path()).unwrap();
        assert_eq!(text(root.path(), "memory/memory32/online"), "1");
        assert_eq!(text(root.path(), "memory/power/online"), "0\n");
    }

    #[test]
    fn nothing_there_is_nothing_to_do() {
        memory(Path::new("/nonexistent")).unwrap();
        assert_eq!(cpus(Path::new("/nonexistent"), 1), Look::default());
    }
}
