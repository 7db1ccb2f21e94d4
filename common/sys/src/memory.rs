//! Pages of this process before they are touched.

use std::ffi::c_void;
use std::{fs, io};

/// Larger mappings are left alone, bytes.
const LARGEST: usize = 16 << 20;

/// What is done about one mapping.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    start: usize,
    len: usize,
    write: bool,
}

/// Gives this process its pages now: a copy of another process otherwise gets
/// each at its first touch, by a fault of its own. Programs and private data
/// only; the contents stay what they are.
///
/// # Errors
/// `/proc` is not mounted, or the kernel (before 5.14) knows no such advice.
pub fn populate() -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    for plan in maps.lines().filter_map(plan) {
        let advice = if plan.write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(plan.start);
        // SAFETY: the advice faults pages in as a touch would and changes no
        // byte, whatever is mapped there; a range that is not mapped (any more)
        // is an error and nothing else.
        if unsafe { libc::madvise(start, plan.len, advice) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn plan(line: &str) -> Option<Plan> {
    let mut fields = line.split_ascii_whitespace();
    let (range, access) = (fields.next()?, fields.next()?);
    let name = fields.nth(3).unwrap_or_default();
    let (start, end) = range.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let len = usize::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    let ours = name.starts_with('/') || matches!(name, "[heap]" | "[stack]");
    let private = access.starts_with('r') && access.ends_with('p');
    (ours && private && len <= LARGEST).then(|| Plan { start, len, write: access.starts_with("rw") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_read_and_data_is_written() {
        let of = |line: &str| plan(line).map(|plan| (plan.start, plan.len, plan.write));
        let text = "55d0a1000-55d0a3000 r-xp 00001000 08:01 42                  /usr/bin/agent";
        assert_eq!(of(text), Some((0x5_5d0a_1000, 0x2000, false)));
        assert_eq!(of("1000-3000 rw-p 00000000 00:00 0    [heap]"), Some((0x1000, 0x2000, true)));
        for left in [
            "1000-3000 ---p 00000000 00:00 0",
            "1000-3000 rw-p 00000000 00:00 0",
            "1000-3000 rw-s 00000000 00:00 0  /dev/shm/x",
            "1000-3000 r--p 00000000 00:00 0  [vvar]",
            "0-7fffffffffff r-xp 00000000 00:00 0  /big",
            "nonsense",
            "",
        ] {
            assert_eq!(of(left), None, "{left:?}");
        }
    }

    #[test]
    fn data_is_what_it_was() {
        let data: Vec<u8> = (0..=u8::MAX).cycle().take(1 << 16).collect();
        let before = data.clone();
        populate().unwrap();
        assert_eq!(data, before);
    }
}
