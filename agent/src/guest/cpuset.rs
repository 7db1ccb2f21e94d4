//! Counts CPU lists, and reapplies containers' cpusets after CPU hot-plug.

use std::fs;
use std::path::Path;

use crate::container::Container;

/// Returns the number of CPUs in a list such as `0-3,7`.
#[must_use]
pub fn count(list: &str) -> u32 {
    let len = |range: &str| -> u32 {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.parse::<u32>(), last.parse::<u32>()) {
            (Ok(first), Ok(last)) if first <= last => (last - first).saturating_add(1),
            _ => 0,
        }
    };
    list.trim().split(',').map(len).fold(0, u32::saturating_add)
}

/// Reapplies a container's CPU list after CPUs were plugged in, under the lock of its limits.
/// Returns whether it has a list.
///
/// # Errors
/// The kernel rejects the list.
pub fn reapply(container: &Container) -> std::io::Result<bool> {
    let _limits = container.lock_limits();
    rewrite_cpus(&container.cgroup)
}

/// Rewrites the CPU list of a cgroup.
/// Processes that entered the cgroup while its list equalled all CPUs have an unrestricted
/// affinity, and would run on new CPUs: the kernel updates affinities only if the effective CPUs
/// change. So the cgroup gets its parent's CPUs, and then its list again. A cgroup without a list
/// follows its parent.
fn rewrite_cpus(cgroup: &Path) -> std::io::Result<bool> {
    let file = cgroup.join("cpuset.cpus");
    // Missing: the controller is disabled, or the container is being removed.
    let list = fs::read_to_string(&file).unwrap_or_default();
    let list = list.trim();
    if list.is_empty() {
        return Ok(false);
    }
    let parents = cgroup.parent().map(|parent| parent.join("cpuset.cpus.effective"));
    let all = parents.and_then(|parents| fs::read_to_string(parents).ok()).unwrap_or_default();
    let widened = if all.trim().is_empty() { Ok(()) } else { fs::write(&file, all.trim()) };
    fs::write(&file, list).and(widened).map(|()| true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Process;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn cpu_lists_are_counted() {
        for (list, cpus) in
            [("0", 1), ("0-3\n", 4), ("0-3,7", 5), ("", 0), ("3-1", 0), ("x", 0), ("0-4294967295", u32::MAX)]
        {
            assert_eq!(count(list), cpus, "{list}");
        }
    }

    #[test]
    fn only_an_existing_list_is_rewritten() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("cpuset.cpus");
        assert!(!rewrite_cpus(root.path()).unwrap(), "no controller");
        fs::write(&file, "\n").unwrap();
        assert!(!rewrite_cpus(root.path()).unwrap());
        assert_eq!(fs::read_to_string(&file).unwrap(), "\n", "an empty list follows the parent");
        fs::write(&file, "2-3\n").unwrap();
        assert!(rewrite_cpus(root.path()).unwrap());
        assert_eq!(fs::read_to_string(&file).unwrap(), "2-3");
        // The parent's CPUs are set only temporarily.
        let group = root.path().join("group");
        fs::create_dir(&group).unwrap();
        fs::write(root.path().join("cpuset.cpus.effective"), "0-3\n").unwrap();
        fs::write(group.join("cpuset.cpus"), "2-3\n").unwrap();
        assert!(rewrite_cpus(&group).unwrap());
        assert_eq!(fs::read_to_string(group.join("cpuset.cpus")).unwrap(), "2-3");
    }

    #[test]
    fn update_in_progress_is_not_overwritten() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("cpuset.cpus");
        fs::write(&file, "0\n").unwrap();
        let first = Arc::new(Process::new(false));
        let container = Container::new("c1", "/b".into(), root.path().into(), None, first);
        std::thread::scope(|scope| {
            let update = container.lock_limits();
            let reapplied = scope.spawn(|| reapply(&container).unwrap());
            std::thread::sleep(Duration::from_millis(200));
            assert!(!reapplied.is_finished(), "it does not wait for the update");
            fs::write(&file, "2-3\n").unwrap();
            drop(update);
            assert!(reapplied.join().unwrap());
        });
        assert_eq!(fs::read_to_string(&file).unwrap(), "2-3");
    }
}
