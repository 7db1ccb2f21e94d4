//! CPU lists, and containers that are bound to some.

use std::fs;
use std::path::Path;

use crate::container::Container;

/// How many numbers a list such as `0-3,7` has.
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

/// Binds a container's processes to its CPU list again after CPUs have come.
/// The list may be about to change, so this takes the right to change it.
/// Returns whether there is a list.
///
/// # Errors
/// The kernel refuses the list.
pub fn renew(container: &Container) -> std::io::Result<bool> {
    let _alone = container.updating();
    bind_again(&container.cgroup)
}

/// Does so with a resource group.
/// The kernel does so by itself only where the CPUs that the list leaves have
/// changed: a process that entered a group with all CPUs of that time was never
/// bound, and runs on the new ones as well. So the group gets all its parent has,
/// then its list again. A group without a list has what its parent has, by itself.
fn bind_again(cgroup: &Path) -> std::io::Result<bool> {
    let file = cgroup.join("cpuset.cpus");
    // Not there: the controller is off, or the container is on its way out.
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
    fn only_a_list_is_written_again() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("cpuset.cpus");
        assert!(!bind_again(root.path()).unwrap(), "no controller");
        fs::write(&file, "\n").unwrap();
        assert!(!bind_again(root.path()).unwrap());
        assert_eq!(fs::read_to_string(&file).unwrap(), "\n", "an empty list stays the parent's business");
        fs::write(&file, "2-3\n").unwrap();
        assert!(bind_again(root.path()).unwrap());
        assert_eq!(fs::read_to_string(&file).unwrap(), "2-3");
        // What the parent has is there for a moment only.
        let group = root.path().join("group");
        fs::create_dir(&group).unwrap();
        fs::write(root.path().join("cpuset.cpus.effective"), "0-3\n").unwrap();
        fs::write(group.join("cpuset.cpus"), "2-3\n").unwrap();
        assert!(bind_again(&group).unwrap());
        assert_eq!(fs::read_to_string(group.join("cpuset.cpus")).unwrap(), "2-3");
    }

    #[test]
    fn an_update_that_is_under_way_is_not_undone() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("cpuset.cpus");
        fs::write(&file, "0\n").unwrap();
        let first = Arc::new(Process::new(false));
        let container = Container::new("c1", "/b".into(), root.path().into(), None, first);
        std::thread::scope(|scope| {
            let update = container.updating();
            let renewed = scope.spawn(|| renew(&container).unwrap());
            std::thread::sleep(Duration::from_millis(200));
            assert!(!renewed.is_finished(), "it does not wait for the update");
            fs::write(&file, "2-3\n").unwrap();
            drop(update);
            assert!(renewed.join().unwrap());
        });
        assert_eq!(fs::read_to_string(&file).unwrap(), "2-3");
    }
}
