//! Finds the processes that have an IOMMU group open.

use std::fs;
use std::path::{Path, PathBuf};

/// A process that has an IOMMU group open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupUser {
    /// Its process id.
    pub pid: u32,
    /// The domain's name for a QEMU, else the program's name.
    pub name: String,
}

/// Iterates over the processes below `proc`: process id and directory.
pub fn processes(proc: &Path) -> impl Iterator<Item = (u32, PathBuf)> {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
}

/// Returns the arguments of a process.
#[must_use]
pub fn arguments(process: &Path) -> Vec<String> {
    let bytes = fs::read(process.join("cmdline")).unwrap_or_default();
    bytes.split(|byte| *byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}

/// Returns the argument after an option.
#[must_use]
pub fn option_value<'a>(arguments: &'a [String], option: &str) -> Option<&'a str> {
    let at = arguments.iter().position(|argument| argument == option)?;
    arguments.get(at + 1).map(String::as_str)
}

/// Returns the domain's name from `guest=NAME,debug-threads=on`, as libvirt writes it.
fn guest_of(arguments: &[String]) -> Option<String> {
    let name = option_value(arguments, "-name")?.split(',').next()?;
    Some(name.strip_prefix("guest=").unwrap_or(name).to_owned())
}

fn status_text(name: &str) -> String {
    name.trim().chars().filter(|letter| !letter.is_control()).take(80).collect()
}

/// Returns the processes below `proc` that have one of these IOMMU groups open. Only root can inspect other users'
/// processes.
#[must_use]
pub fn of_groups(proc: &Path, groups: impl IntoIterator<Item = u32>) -> Vec<GroupUser> {
    let nodes: Vec<PathBuf> = groups.into_iter().map(|group| format!("/dev/vfio/{group}").into()).collect();
    let mut users: Vec<GroupUser> = processes(proc)
        .filter(|(_, process)| {
            let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
            open.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|file| nodes.contains(&file))
        })
        .map(|(pid, process)| {
            let own = || fs::read_to_string(process.join("comm")).unwrap_or_default();
            GroupUser { pid, name: status_text(&guest_of(&arguments(&process)).unwrap_or_else(own)) }
        })
        .collect();
    users.sort_by_key(|user| user.pid);
    users
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant(proc: &Path, pid: u32, comm: &str, cmdline: &str, files: &[&str]) {
        let process = proc.join(pid.to_string());
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::write(process.join("comm"), format!("{comm}\n")).unwrap();
        fs::write(process.join("cmdline"), cmdline.replace(' ', "\0")).unwrap();
        for (at, file) in files.iter().enumerate() {
            std::os::unix::fs::symlink(file, process.join("fd").join(at.to_string())).unwrap();
        }
    }

    #[test]
    fn group_users_are_named_by_domain() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("self")).unwrap();
        plant(proc.path(), 7, "qemu-system-x86", "qemu -name guest=tenant,debug-threads=on", &["/dev/vfio/5"]);
        plant(proc.path(), 8, "dpdk\u{1b}[0m", "dpdk", &["/dev/null", "/dev/vfio/6"]);
        plant(proc.path(), 9, "other", "other", &["/dev/vfio/vfio", "/dev/vfio/55"]);
        assert_eq!(of_groups(proc.path(), [5]), [GroupUser { pid: 7, name: "tenant".into() }]);
        assert_eq!(of_groups(proc.path(), [6]), [GroupUser { pid: 8, name: "dpdk[0m".into() }]);
        assert_eq!(of_groups(proc.path(), [5, 6]).len(), 2);
        assert_eq!(of_groups(&proc.path().join("none"), [5]), []);
    }
}
