//! Making a container's resource group (cgroup v2) before anything is in it.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

/// Every folder of cgroup v2 has this file, and none above it does.
const CONTROLLERS: &str = "cgroup.controllers";
const ENABLED: &str = "cgroup.subtree_control";

/// Makes a group and those above it that are missing, with every controller
/// that there is. `false` if it was there; then it is left as it is.
///
/// # Errors
/// The kernel makes no such group.
pub(crate) fn make(group: &Path) -> io::Result<bool> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_below_the_root_get_the_controllers_that_are_not_on_yet() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("cgroup");
        fs::create_dir(&root).unwrap();
        fs::write(root.join(CONTROLLERS), "cpu memory\n").unwrap();
        fs::write(root.join(ENABLED), "cpu\n").unwrap();
        assert!(make(&root.join("pod/c1")).unwrap());
        // A file remembers only the last word; the kernel would have both.
        assert_eq!(fs::read_to_string(root.join(ENABLED)).unwrap(), "+memory");
        assert!(!make(&root.join("pod/c1")).unwrap(), "it was there");
        assert!(!folder.path().join(ENABLED).exists(), "what is above the root is nobody's group");
        fs::write(root.join(ENABLED), "cpu memory\n").unwrap();
        assert!(make(&root.join("c2")).unwrap());
        assert_eq!(fs::read_to_string(root.join(ENABLED)).unwrap(), "cpu memory\n", "nothing is written in vain");
        assert!(make(&folder.path().join("nowhere/c3")).is_ok_and(|made| made));
    }
}
