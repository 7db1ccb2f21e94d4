//! Making a container's resource group (cgroup v2) before anything is in it,
//! and taking away the groups that the container made below it.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Every directory of cgroup v2 has this file, and none above it does.
const CONTROLLERS: &str = "cgroup.controllers";
const ENABLED: &str = "cgroup.subtree_control";

/// Makes a group and those above it that are missing, with every controller
/// that there is. `false` if it was there; then it is left as it is.
///
/// # Errors
/// The kernel makes no such group.
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
        // By another call at the same time.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Lets the groups below have what this one has. One by one: a controller that
/// is refused is missed only by who sets a limit of it, and that error names it.
fn enable(path: &Path) {
    let read = |file| fs::read_to_string(path.join(file)).unwrap_or_default();
    let enabled = read(ENABLED);
    let missing = read(CONTROLLERS);
    for name in missing.split_whitespace().filter(|name| !enabled.split_whitespace().any(|other| other == *name)) {
        let _ = fs::write(path.join(ENABLED), format!("+{name}"));
    }
}

/// Ends everything in a group that has groups below it, and takes those away,
/// deepest first. What cannot be taken away is for the one who removes the group to tell.
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
            // What was killed has not ended yet.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Every group below one.
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
    fn groups_below_go_and_the_group_itself_stays() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("c1");
        fs::create_dir_all(group.join("init/a/b")).unwrap();
        fs::create_dir_all(group.join("system.slice")).unwrap();
        fs::create_dir(dir.path().join("c2")).unwrap();
        clear(&group);
        // The word that ends everything is a file here.
        assert_eq!(fs::read_dir(&group).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(group.join("cgroup.kill")).unwrap(), "1");
        assert!(dir.path().join("c2").exists());
        clear(&dir.path().join("c2"));
        assert_eq!(fs::read_dir(dir.path().join("c2")).unwrap().count(), 0, "nothing is killed in vain");
    }

    #[test]
    fn groups_below_the_root_get_the_controllers_that_are_not_on_yet() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cgroup");
        fs::create_dir(&root).unwrap();
        fs::write(root.join(CONTROLLERS), "cpu memory\n").unwrap();
        fs::write(root.join(ENABLED), "cpu\n").unwrap();
        assert!(make(&root.join("pod/c1")).unwrap());
        // A file remembers only the last word; the kernel would have both.
        assert_eq!(fs::read_to_string(root.join(ENABLED)).unwrap(), "+memory");
        assert!(!make(&root.join("pod/c1")).unwrap(), "it was there");
        assert!(!dir.path().join(ENABLED).exists(), "what is above the root is nobody's group");
        fs::write(root.join(ENABLED), "cpu memory\n").unwrap();
        assert!(make(&root.join("c2")).unwrap());
        assert_eq!(fs::read_to_string(root.join(ENABLED)).unwrap(), "cpu memory\n", "nothing is written in vain");
        assert!(make(&dir.path().join("nowhere/c3")).is_ok_and(|made| made));
    }
}
