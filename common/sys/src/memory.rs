//! Prefaulting and releasing pages of this process.

use std::ffi::c_void;
use std::{fs, io};

/// Larger mappings are skipped, bytes.
const MAX_MAPPING: usize = 16 << 20;

/// Prefaults this process's program: a forked child otherwise takes a page fault at
/// the first access to each page.
///
/// # Errors
/// `/proc` is not mounted, or the kernel (before 5.14) lacks `MADV_POPULATE_READ`.
pub fn populate_program() -> io::Result<()> {
    for_program(|start, len| {
        // SAFETY: the advice faults pages in as reading would and changes no
        // byte, whatever is mapped there; a range that is no longer mapped
        // is only an error.
        unsafe { libc::madvise(start, len, libc::MADV_POPULATE_READ) }
    })
}

/// Releases memory that an idle process does not need: free heap memory, and the
/// mapped pages of its program, which then remain only in the page cache; they are
/// mapped again at the next access.
///
/// # Errors
/// `/proc` is not mounted; the heap is trimmed regardless.
pub fn release_unused() -> io::Result<()> {
    // SAFETY: no precondition; only free heap memory is released.
    unsafe { libc::malloc_trim(0) };
    for_program(|start, len| {
        // SAFETY: the range is code of a file, mapped private and not for
        // writing, so every page of it is the file's and is read from there
        // again at the next access, including the page of this code.
        unsafe { libc::madvise(start, len, libc::MADV_DONTNEED) }
    })
}

/// Calls `advise` for each executable mapping of a file.
fn for_program(mut advise: impl FnMut(*mut c_void, usize) -> libc::c_int) -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    for (start, len) in maps.lines().filter_map(program) {
        if advise(std::ptr::with_exposed_provenance_mut(start), len) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Parses start and length of an executable mapping of a file.
fn program(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (range, access) = (fields.next()?, fields.next()?);
    let (start, end) = range.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let len = usize::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    let file = fields.nth(3).is_some_and(|name| name.starts_with('/'));
    (file && access == "r-xp" && len <= MAX_MAPPING).then_some((start, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executable_file_mappings_are_selected() {
        let text = "55d0a1000-55d0a3000 r-xp 00001000 08:01 42                  /usr/bin/agent";
        assert_eq!(program(text), Some((0x5_5d0a_1000, 0x2000)));
        for left in [
            "1000-3000 ---p 00000000 00:00 0",
            "1000-3000 rw-p 00000000 00:00 0    [heap]",
            "1000-3000 r--p 00000000 08:01 42  /usr/bin/agent",
            "1000-3000 r-xp 00000000 00:00 0  [vdso]",
            "0-7fffffffffff r-xp 00000000 00:00 0  /big",
            "nonsense",
            "",
        ] {
            assert_eq!(program(left), None, "{left:?}");
        }
    }

    /// Returns resident file and anonymous memory of this process, KiB.
    fn resident() -> (usize, usize) {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        (value("RssFile:"), value("RssAnon:"))
    }

    #[test]
    fn released_memory_is_mapped_again_on_access() {
        // Every 64th block stays allocated, so the heap's end cannot shrink.
        const BLOCKS: usize = 16 << 10;
        let mut blocks: Vec<Option<Box<[u8; 1024]>>> = (0..BLOCKS).map(|_| Some(Box::new([7; 1024]))).collect();
        for (number, block) in blocks.iter_mut().enumerate() {
            if number % 64 != 0 {
                *block = None;
            }
        }
        populate_program().unwrap();
        let before = resident();
        release_unused().unwrap();
        let after = resident();
        assert!(after.0 + 100 < before.0, "of files: {before:?} {after:?} KiB");
        assert!(after.1 + (BLOCKS >> 1) < before.1, "others: {before:?} {after:?} KiB");
        assert!(blocks.iter().flatten().all(|block| block.iter().all(|byte| *byte == 7)));
        populate_program().unwrap();
        assert!(resident().0 > after.0 + 100, "the program is mapped again");
    }
}
