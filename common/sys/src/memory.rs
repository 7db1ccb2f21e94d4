//! Pages of this process before they are touched.

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
    let maps = fs::read_to_string("/proc/self/maps")?;
    for (start, len) in maps.lines().filter_map(program) {
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(start);
        // SAFETY: the advice faults pages in as reading would and changes no
        // byte, whatever is mapped there; a range that is not mapped (any more)
        // is an error and nothing else.
        if unsafe { libc::madvise(start, len, libc::MADV_POPULATE_READ) } != 0 {
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

    #[test]
    fn a_program_can_be_mapped() {
        populate_program().unwrap();
    }
}
