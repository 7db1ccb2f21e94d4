//! Creates a container's cgroup (v2) before any process is in it, and removes the sub-cgroups that the container
//! created.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Every cgroup v2 directory has this file, and no directory above the mount does.
const CONTROLLERS: &str = "cgroup.controllers";
const ENABLED: &str = "cgroup.subtree_control";

/// Creates a cgroup and its missing ancestors, with every available controller. `false`: it existed and is unchanged.
///
/// # Errors
/// The kernel refuses to create it.
pub fn make(group: &Path) -> io::Result<bool> {
    if group.is_dir() {
        return Ok(false);
    }
    let above = group.ancestors().skip(1);
    let above: Vec<&Path> = above.take_while(|path| path.join(CONTROLLERS).exists() || !path.exists()).collect();
    for path in above.into_iter().rev() {
        create(path)?;
        enable(path);
    }
    create(group)
}

fn create(path: &Path) -> io::Result<bool> {
    match fs::create_dir(path) {
        Ok(()) => Ok(true),
        // Created by a concurrent call.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Enables all controllers for the children. One by one: a refused controller matters only if one of its limits
/// is set, and that error names it.
fn enable(path: &Path) {
    let read = |file| fs::read_to_string(path.join(file)).unwrap_or_default();
    let enabled = read(ENABLED);
    let missing = read(CONTROLLERS);
    for name in missing.split_whitespace().filter(|name| !enabled.split_whitespace().any(|other| other == *name)) {
        let _ = fs::write(path.join(ENABLED), format!("+{name}"));
    }
}

/// Kills all processes in a cgroup that has sub-cgroups, and removes those, deepest first. If one stays, removing
/// the cgroup itself reports the error.
pub(crate) fn clear(group: &Path) {
    const TRIES: u32 = 20;
    for _ in 0..TRIES {
        let mut all = below(group);
        if all.is_empty() {
            return;
        }
        let _ = fs::write(group.join("cgroup.kill"), "1");
        all.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
        let stayed = all.iter().filter(|path| fs::remove_dir(path).is_err()).count();
        if stayed > 0 {
            // Killed processes have not exited yet.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Returns all descendants of a cgroup.
fn below(group: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    let mut left = vec![group.to_owned()];
    while let Some(path) = left.pop() {
        let entries = fs::read_dir(&path).into_iter().flatten().flatten();
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let dirs: Vec<PathBuf> = dirs.map(|entry| entry.path()).collect();
        all.extend(dirs.iter().cloned());
        left.extend(dirs);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sub_cgroups_are_removed_and_the_cgroup_stays() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("c1");
        fs::create_dir_all(group.join("init/a/b")).unwrap();
        fs::create_dir_all(group.join("system.slice")).unwrap();
        fs::create_dir(dir.path().join("c2")).unwrap();
        clear(&group);
        // Here `cgroup.kill` is a regular file.
        assert_eq!(fs::read_dir(&group).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(group.join("cgroup.kill")).unwrap(), "1");
        assert!(dir.path().join("c2").exists());
        clear(&dir.path().join("c2"));
        assert_eq!(fs::read_dir(dir.path().join("c2")).unwrap().count(), 0, "without sub-cgroups nothing is killed");
    }

    #[test]
    fn new_cgroups_get_the_controllers_that_are_not_enabled_yet() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cgroup");
        fs::create_dir(&root).unwrap();
        fs::write(root.join(CONTROLLERS), "cpu memory\n").unwrap();
        fs::write(root.join(ENABLED), "cpu\n").unwrap();
        assert!(make(&root.join("pod/c1")).unwrap());
        // A regular file keeps only the last write; the kernel would have both controllers.
        assert_eq!(fs::read_to_string(root.join(ENABLED)).unwrap(), "+memory");
        assert!(!make(&root.join("pod/c1")).unwrap(), "it existed");
        assert!(!dir.path().join(ENABLED).exists(), "the directory above the root is not a cgroup");
        fs::write(root.join(ENABLED), "cpu memory\n").unwrap();
        assert!(make(&root.join("c2")).unwrap());
        assert_eq!(
            fs::read_to_string(root.join(ENABLED)).unwrap(),
            "cpu memory\n",
            "enabled controllers are not written again"
        );
        assert!(make(&dir.path().join("nowhere/c3")).is_ok_and(|made| made));
    }
}
