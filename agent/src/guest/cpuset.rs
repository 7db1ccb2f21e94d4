//! CPU lists, and containers that are bound to some.

use std::fs;
use std::path::Path;

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

/// Writes a resource group's CPU list once more, so that the kernel takes the
/// CPUs of it that were missing before. A group without a list has what its
/// parent has, by itself. Returns whether there is a list.
///
/// # Errors
/// The kernel refuses the list.
pub fn renew(cgroup: &Path) -> std::io::Result<bool> {
    let file = cgroup.join("cpuset.cpus");
    // Not there: the controller is off, or the container is on its way out.
    let list = fs::read_to_string(&file).unwrap_or_default();
    let list = list.trim();
    if list.is_empty() {
        return Ok(false);
    }
    fs::write(&file, list).map(|()| true)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(!renew(root.path()).unwrap(), "no controller");
        fs::write(&file, "\n").unwrap();
        assert!(!renew(root.path()).unwrap());
        assert_eq!(fs::read_to_string(&file).unwrap(), "\n", "an empty list stays the parent's business");
        fs::write(&file, "2-3\n").unwrap();
        assert!(renew(root.path()).unwrap());
        assert_eq!(fs::read_to_string(&file).unwrap(), "2-3");
    }
}
