//! Pages of this process: before they are touched, and after they were.

use std::ffi::c_void;
use std::{fs, io};

/// Larger mappings are left alone, bytes.
const LARGEST: usize = 16 << 20;

/// Maps this process's program now: a copy of another process otherwise gets
/// each piece of it at the first touch, by a fault of its own.
///
/// # Errors
/// `/proc` is not mounted, or the kernel (before 5.14) knows no such advice.
pub fn populate_program() -> io::Result<()> {
    for_program(|start, len| {
        // SAFETY: the advice faults pages in as reading would and changes no
        // byte, whatever is mapped there; a range that is not mapped (any more)
        // is an error and nothing else.
        unsafe { libc::madvise(start, len, libc::MADV_POPULATE_READ) }
    })
}

/// Gives back what this process does not need while it has nothing to do: free
/// memory of the heap, and its hold on its program, whose pages the kernel may
/// then drop or keep as it likes; what is touched again is mapped again.
///
/// # Errors
/// `/proc` is not mounted; the heap's part is done all the same.
pub fn give_back() -> io::Result<()> {
    // SAFETY: no precondition; only memory that the heap has free is given back.
    unsafe { libc::malloc_trim(0) };
    for_program(|start, len| {
        // SAFETY: the range is code of a file, mapped private and not for
        // writing, so that every page of it is the file's, and comes from there
        // again at the next touch: also the one that runs this.
        unsafe { libc::madvise(start, len, libc::MADV_DONTNEED) }
    })
}

/// Does something with each mapping that has code of a file.
fn for_program(mut advise: impl FnMut(*mut c_void, usize) -> libc::c_int) -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    for (start, len) in maps.lines().filter_map(program) {
        if advise(std::ptr::with_exposed_provenance_mut(start), len) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Start and length of a mapping that has code of a file.
fn program(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (range, access) = (fields.next()?, fields.next()?);
    let (start, end) = range.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let len = usize::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    let file = fields.nth(3).is_some_and(|name| name.starts_with('/'));
    (file && access == "r-xp" && len <= LARGEST).then_some((start, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_files_is_mapped() {
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

    /// Resident pages of this process, of files and others, KiB.
    fn resident() -> (usize, usize) {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        (value("RssFile:"), value("RssAnon:"))
    }

    #[test]
    fn what_is_not_needed_is_given_back_and_comes_again() {
        // Blocks with a kept one after every 64th: the heap's end cannot sink.
        const BLOCKS: usize = 16 << 10;
        let mut blocks: Vec<Option<Box<[u8; 1024]>>> = (0..BLOCKS).map(|_| Some(Box::new([7; 1024]))).collect();
        for (number, block) in blocks.iter_mut().enumerate() {
            if number % 64 != 0 {
                *block = None;
            }
        }
        populate_program().unwrap();
        let before = resident();
        give_back().unwrap();
        let after = resident();
        assert!(after.0 + 100 < before.0, "of files: {before:?} {after:?} KiB");
        assert!(after.1 + (BLOCKS >> 1) < before.1, "others: {before:?} {after:?} KiB");
        assert!(blocks.iter().flatten().all(|block| block.iter().all(|byte| *byte == 7)));
        populate_program().unwrap();
        assert!(resident().0 > after.0 + 100, "the program is mapped again");
    }
}
