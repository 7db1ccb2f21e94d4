//! Finds the QEMU process of a domain, and its start time.

use std::fs;
use std::path::Path;

use firstlight_devices::group_users::{arguments, option_value, processes};

/// A domain's QEMU process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Running {
    /// Its process id.
    pub pid: u32,
    /// Its start time, seconds since 1970.
    pub started_at: u64,
}

/// Ticks per second (`USER_HZ`) in `/proc`, the same on every architecture.
const TICKS_PER_SECOND: u64 = 100;

/// Returns the start time of a process, seconds since 1970.
fn started_at(proc: &Path, process: &Path) -> Option<u64> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    // The program's name is in parentheses and may contain any character.
    let (_, numbers) = stat.rsplit_once(')')?;
    let ticks: u64 = numbers.split_ascii_whitespace().nth(19)?.parse().ok()?;
    let system = fs::read_to_string(proc.join("stat")).ok()?;
    let boot: u64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(boot + ticks / TICKS_PER_SECOND)
}

/// Returns the QEMU of the domain with this UUID.
#[must_use]
pub(crate) fn find(proc: &Path, uuid: &str) -> Option<Running> {
    processes(proc).find_map(|(pid, process)| {
        let found = option_value(&arguments(&process), "-uuid") == Some(uuid);
        found.then(|| started_at(proc, &process)).flatten().map(|started_at| Running { pid, started_at })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domain_start_time_is_that_of_its_qemu() {
        let proc = tempfile::tempdir().unwrap();
        fs::write(proc.path().join("stat"), "cpu 1\nbtime 1000\n").unwrap();
        let process = proc.path().join("7");
        fs::create_dir(&process).unwrap();
        fs::write(process.join("cmdline"), ["qemu", "-uuid", "a-b", "-m", "1"].join("\0")).unwrap();
        fs::write(process.join("stat"), format!("7 (a) b) S 1{}500 0", " 0".repeat(17) + " ")).unwrap();
        assert_eq!(find(proc.path(), "a-b"), Some(Running { pid: 7, started_at: 1005 }));
        assert_eq!(find(proc.path(), "a"), None);
    }
}
