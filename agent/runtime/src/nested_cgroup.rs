//! Where a further process goes in a container that has resource groups of its own.
//!
//! cgroup v2 takes no process into a group that hands controllers on to groups
//! with processes. systemd and Docker, in a container that may write to its
//! cgroups, therefore move everything one step down and then hand on; a process
//! that came into the container's own group in between would be in their way.

use std::fs;
use std::path::Path;

/// Where Docker's and Kata's containers move to.
const INIT: &str = "init";

/// The group below `group` that further processes join, if it is not `group`
/// itself. `cgroup` is the same group as the kernel names it, and `first` says
/// in which the container's first process is (`/proc/PID/cgroup`).
pub(crate) fn exec_target(group: &Path, cgroup: &Path, first: impl FnOnce() -> Option<String>) -> Option<String> {
    if group.join(INIT).is_dir() {
        return Some(INIT.to_owned());
    }
    let handed_on = fs::read_to_string(group.join("cgroup.subtree_control")).unwrap_or_default();
    if handed_on.trim().is_empty() {
        return None;
    }
    let table = first()?;
    let path = table.lines().find_map(|line| line.strip_prefix("0::"))?;
    // Outside, if the first process has ended and its number is somebody else's.
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
    fn a_container_without_groups_of_its_own_is_joined_itself() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path();
        fs::write(group.join("cgroup.subtree_control"), "\n").unwrap();
        let asked = exec_target(group, Path::new(CGROUP), || unreachable!("nobody needs to know"));
        assert_eq!(asked, None);
        // As many as the container likes, as long as it hands nothing on.
        fs::create_dir(group.join("job")).unwrap();
        assert_eq!(joined(group, "0::/kubepods/c1/job\n"), None);
    }

    #[test]
    fn the_group_called_init_or_the_first_process_is_followed() {
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
        assert_eq!(joined(group, "").as_deref(), Some("init"), "it will hand on");
    }
}
