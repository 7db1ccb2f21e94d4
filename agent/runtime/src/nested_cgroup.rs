//! The cgroup of an exec process in a container that manages its own sub-cgroups.
//!
//! cgroup v2 allows no process in a cgroup that enables controllers for its children ("no internal processes").
//! systemd and Docker, in a container with writable cgroups, therefore move all processes one level down and then
//! enable controllers; a process that joined the container's own cgroup in between would make that fail.

use std::fs;
use std::path::Path;

/// The sub-cgroup that containers of Docker and Kata move to.
const INIT: &str = "init";

/// Returns the sub-cgroup of `group` that exec processes join; `None` if they join `group` itself. `cgroup` is
/// the same cgroup in the kernel's notation, and `first` returns `/proc/PID/cgroup` of the container's init
/// process.
pub(crate) fn exec_target(group: &Path, cgroup: &Path, first: impl FnOnce() -> Option<String>) -> Option<String> {
    if group.join(INIT).is_dir() {
        return Some(INIT.to_owned());
    }
    let enabled = fs::read_to_string(group.join("cgroup.subtree_control")).unwrap_or_default();
    if enabled.trim().is_empty() {
        return None;
    }
    let table = first()?;
    let path = table.lines().find_map(|line| line.strip_prefix("0::"))?;
    // Outside `cgroup` if the init process has exited and its pid was reused.
    let below = Path::new(path).strip_prefix(cgroup).ok()?;
    let below = below.to_str().filter(|below| !below.is_empty())?;
    group.join(below).is_dir().then(|| below.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CGROUP: &str = "/kubepods/c1";

    fn joined(group: &Path, first: &str) -> Option<String> {
        exec_target(group, Path::new(CGROUP), || Some(first.to_owned()))
    }

    #[test]
    fn container_without_enabled_controllers_is_joined_itself() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path();
        fs::write(group.join("cgroup.subtree_control"), "\n").unwrap();
        let target = exec_target(group, Path::new(CGROUP), || unreachable!("not needed"));
        assert_eq!(target, None);
        // Sub-cgroups alone do not matter, only enabled controllers.
        fs::create_dir(group.join("job")).unwrap();
        assert_eq!(joined(group, "0::/kubepods/c1/job\n"), None);
    }

    #[test]
    fn exec_joins_the_init_cgroup_or_follows_the_init_process() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path();
        fs::write(group.join("cgroup.subtree_control"), "memory pids\n").unwrap();
        fs::create_dir_all(group.join("init.scope/deep")).unwrap();
        for (first, joins) in [
            ("0::/kubepods/c1/init.scope\n", Some("init.scope")),
            ("1:name=systemd:/x\n0::/kubepods/c1/init.scope/deep\n", Some("init.scope/deep")),
            ("0::/kubepods/c1\n", None),
            ("0::/kubepods/c10/init.scope\n", None),
            ("0::/other\n", None),
            ("0::/kubepods/c1/gone (deleted)\n", None),
            ("", None),
        ] {
            assert_eq!(joined(group, first).as_deref(), joins, "{first:?}");
        }
        fs::create_dir(group.join("init")).unwrap();
        assert_eq!(joined(group, "0::/kubepods/c1/init.scope\n").as_deref(), Some("init"));
        fs::write(group.join("cgroup.subtree_control"), "\n").unwrap();
        assert_eq!(joined(group, "").as_deref(), Some("init"), "it will enable controllers");
    }
}
