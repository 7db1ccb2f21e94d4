//! Detects whether the guest's root is an initramfs.

use std::sync::OnceLock;

/// Returns whether `pivot_root` cannot replace the root: it fails if the root mount has no parent,
/// like the kernel's first root. PID 1 mounts the guest's root on top of that before it starts this
/// process, so the answer is constant.
pub(super) fn root_is_initramfs() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    let read = || std::fs::read_to_string("/proc/self/mountinfo").is_ok_and(|table| without_parent(&table));
    *ANSWER.get_or_init(read)
}

/// Returns whether the topmost mount of `/` is its own parent.
fn without_parent(mountinfo: &str) -> bool {
    let fields = |line: &str| line.split(' ').take(5).map(str::to_owned).collect::<Vec<_>>();
    let top = mountinfo.lines().map(fields).rfind(|fields| fields.get(4).is_some_and(|target| target == "/"));
    top.is_some_and(|fields| fields[0] == fields[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn initramfs_root_is_detected() {
        assert!(without_parent("1 1 0:1 / / rw - rootfs rootfs rw\n22 1 0:2 / /proc rw - proc proc rw\n"));
        assert!(!without_parent("1 1 0:1 / / rw - rootfs rootfs rw\n30 1 0:9 / / rw - tmpfs tmpfs rw\n"));
        assert!(!without_parent("29 1 0:2 / / rw,relatime - rootfs none rw\n31 29 0:20 / /proc rw - proc proc rw\n"));
        assert!(!without_parent("24 1 254:0 / / ro shared:1 - erofs /dev/vda ro\n"));
        assert!(!without_parent(""));
    }
}
