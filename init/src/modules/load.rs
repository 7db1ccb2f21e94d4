//! Loads a set of modules, independent ones concurrently.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Builder};

use super::ModuleError;
use super::order::{Next, Node, State, next, width};
use crate::clock::now_us;
use crate::root::Root;

/// `MODULE_INIT_COMPRESSED_FILE`: the kernel decompresses the file.
const COMPRESSED: i32 = 4;

/// Maximum number of threads; more would wait for each other in the kernel.
const MOST: usize = 4;

/// Stack size of a helper thread in bytes (address space, not memory).
const STACK: usize = 128 << 10;

/// The result of loading a set.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// Loaded modules in order of completion, with the duration in microseconds.
    pub(super) loaded: Vec<(String, u64)>,
    /// Errors, with the module's index in the set.
    pub(super) failed: Vec<(usize, ModuleError)>,
}

struct Shared {
    nodes: Vec<Node>,
    done: Done,
}

/// Returns the useful number of threads for this set.
pub(super) fn threads() -> usize {
    let processors = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count());
    usize::try_from(processors).unwrap_or(1).clamp(1, MOST)
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Loads all modules on at most that many threads, including the calling one. `insert` returns
/// `false` if the module was already loaded.
pub(super) fn run(
    nodes: Vec<Node>,
    threads: usize,
    insert: &(dyn Fn(&Node) -> Result<bool, ModuleError> + Sync),
) -> (Vec<Node>, Done) {
    let helpers = threads.min(width(&nodes)).saturating_sub(1);
    let shared = Mutex::new(Shared { nodes, done: Done::default() });
    let changed = Condvar::new();
    thread::scope(|scope| {
        for _ in 0..helpers {
            // If a helper thread cannot be created, the remaining threads load its share.
            let work = || work(&shared, &changed, insert);
            drop(Builder::new().name("modules".to_owned()).stack_size(STACK).spawn_scoped(scope, work));
        }
        work(&shared, &changed, insert);
    });
    let Shared { nodes, done } = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    (nodes, done)
}

fn work(shared: &Mutex<Shared>, changed: &Condvar, insert: &(dyn Fn(&Node) -> Result<bool, ModuleError> + Sync)) {
    let mut all = lock(shared);
    loop {
        let (at, result) = match next(&all.nodes) {
            Next::Finished => return,
            Next::Wait => {
                all = changed.wait(all).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            Next::DependencyFailed(at, need) => {
                let name = |at: usize| all.nodes.get(at).map(|node| node.name.clone()).unwrap_or_default();
                (at, Err(ModuleError::Needs { name: name(at), need: name(need) }))
            }
            Next::Load(at) => {
                all.nodes[at].state = State::Running;
                let node = all.nodes[at].clone();
                drop(all);
                let begin = now_us();
                let result = insert(&node).map(|new| new.then(|| (node.name, now_us() - begin)));
                all = lock(shared);
                (at, result)
            }
        };
        all.nodes[at].state = if result.is_ok() { State::Loaded } else { State::Failed };
        match result {
            Ok(loaded) => all.done.loaded.extend(loaded),
            Err(error) => all.done.failed.push((at, error)),
        }
        changed.notify_all();
    }
}

/// Asks the kernel to load a file; returns `false` if the module is already loaded.
pub(super) fn insert(root: &Root, name: &str, file: &Path, params: &str) -> Result<bool, ModuleError> {
    // Built-in modules have a directory in `/sys/module` too, but no `initstate`.
    let state = root.path("/sys/module").join(name.replace('-', "_")).join("initstate");
    if fs::read(state).is_ok_and(|state| state.starts_with(b"live")) {
        return Ok(false);
    }
    let opened = File::open(file).map_err(|source| ModuleError::Open {
        name: name.to_owned(),
        file: file.to_owned(),
        source,
    })?;
    let compressed = file.extension().is_some_and(|end| end != "ko");
    let failed =
        |source: io::Error| ModuleError::Load { name: name.to_owned(), file: file.to_owned(), source, compressed };
    let params = CString::new(params).map_err(|_| failed(io::Error::from_raw_os_error(libc::EINVAL)))?;
    match rustix::system::finit_module(&opened, &params, if compressed { COMPRESSED } else { 0 }) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::EXIST) => Ok(false),
        Err(error) => Err(failed(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    fn node(name: &str, needs: &[usize], after: &[usize]) -> Node {
        Node { name: name.to_owned(), needs: needs.to_vec(), after: after.to_vec(), ..Node::default() }
    }

    fn names(done: &Done) -> Vec<&str> {
        done.loaded.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn independent_modules_are_loaded_concurrently() {
        let nodes: Vec<Node> = ["a", "b", "c", "d"].map(|name| node(name, &[], &[])).into();
        let there = AtomicUsize::new(0);
        let meet = |_: &Node| {
            // Each waits for the three others.
            there.fetch_add(1, Ordering::SeqCst);
            let begin = Instant::now();
            while there.load(Ordering::SeqCst) < 4 && begin.elapsed() < Duration::from_secs(60) {
                thread::yield_now();
            }
            Ok(there.load(Ordering::SeqCst) == 4)
        };
        let (_, done) = run(nodes, 4, &meet);
        assert_eq!(done.loaded.len(), 4);
    }

    #[test]
    fn dependent_modules_or_one_processor_load_serially() {
        let running = AtomicUsize::new(0);
        let alone = |_: &Node| {
            assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0);
            thread::yield_now();
            running.fetch_sub(1, Ordering::SeqCst);
            Ok(true)
        };
        let chain = vec![node("c", &[1], &[]), node("b", &[], &[2]), node("a", &[], &[])];
        let (_, done) = run(chain, 4, &alone);
        assert_eq!(names(&done), ["a", "b", "c"]);
        let (_, done) = run(["a", "b", "c"].map(|name| node(name, &[], &[])).into(), 1, &alone);
        assert_eq!(names(&done), ["a", "b", "c"]);
    }

    #[test]
    fn failure_affects_only_dependent_modules() {
        let nodes = vec![
            node("top", &[1, 2], &[]),
            node("bad", &[], &[]),
            node("good", &[], &[]),
            node("apex", &[0], &[]),
            node("wish", &[], &[1]),
        ];
        let fails = |node: &Node| match node.name.as_str() {
            "bad" => Err(ModuleError::Unknown { name: "bad".into(), index: "list".into() }),
            "top" | "apex" => panic!("it needs what is not there"),
            _ => Ok(true),
        };
        for threads in [1, 4] {
            let (nodes, done) = run(nodes.clone(), threads, &fails);
            let mut loaded = names(&done);
            loaded.sort_unstable();
            assert_eq!(loaded, ["good", "wish"]);
            let errors: Vec<String> = done.failed.iter().map(|(_, error)| error.to_string()).collect();
            assert_eq!(errors.len(), 3);
            assert!(errors[1].contains("top") && errors[1].contains("bad"), "{errors:?}");
            assert!(errors[2].contains("apex") && errors[2].contains("top"), "{errors:?}");
            assert!(nodes.iter().all(|node| matches!(node.state, State::Loaded | State::Failed)));
        }
    }

    #[test]
    fn loaded_module_is_not_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let state = root.path("/sys/module/a_b/initstate");
        fs::create_dir_all(state.parent().unwrap()).unwrap();
        fs::write(&state, "live\n").unwrap();
        assert!(!insert(&root, "a-b", Path::new("/none.ko"), "").unwrap());
        fs::write(&state, "going\n").unwrap();
        assert!(insert(&root, "a-b", Path::new("/none.ko"), "").unwrap_err().to_string().contains("/none.ko"));
    }
}
