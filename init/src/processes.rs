//! Lists the processes that survived SIGKILL during shutdown.

use std::fs;

use crate::root::Root;

/// Returns the user-space processes other than process 1, at most `most` of them, and the number of
/// further ones.
#[must_use]
pub fn alive(root: &Root, most: usize) -> Vec<String> {
    let entries = fs::read_dir(root.path("/proc")).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    let mut rows = Vec::new();
    let mut more = 0_usize;
    for pid in numbers.into_iter().filter(|pid| *pid != 1) {
        let Some(row) = fs::read(root.path(&format!("/proc/{pid}/stat"))).ok().and_then(|text| row(pid, &text)) else {
            continue;
        };
        if rows.len() < most {
            rows.push(row);
        } else {
            more += 1;
        }
    }
    if more > 0 {
        rows.push(format!("{more} more processes"));
    }
    rows
}

/// Returns `pid 7 (name), state D` for a user-space process that has not exited.
fn row(pid: u32, stat: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(stat);
    // A process chooses its own name, which may contain brackets and spaces.
    let (head, rest) = text.rsplit_once(')')?;
    let name = head.split_once('(')?.1;
    let mut fields = rest.split_ascii_whitespace();
    let (state, parent) = (fields.next()?, fields.next()?);
    // Kernel threads are children of process 2.
    (pid != 2 && parent != "2" && state != "Z").then(|| format!("pid {pid} ({name}), state {state}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_threads_and_zombies_are_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        for (pid, text) in [
            (1, "1 (init) S 0 1"),
            (2, "2 (kthreadd) S 0 0"),
            (9, "9 (kworker/0:1) I 2 0"),
            (40, "40 (gone) Z 1 40"),
            (51, "51 (a) b (c) D 1 51"),
            (52, "52 (x) R 51 52"),
            (53, "53 (y) S 51 53"),
            (54, "broken"),
        ] {
            let place = dir.path().join(format!("proc/{pid}"));
            fs::create_dir_all(&place).unwrap();
            fs::write(place.join("stat"), text).unwrap();
        }
        let root = Root::at(dir.path());
        assert_eq!(alive(&root, 2), ["pid 51 (a) b (c), state D", "pid 52 (x), state R", "1 more processes"]);
        assert_eq!(alive(&root, 8).len(), 3);
    }
}
