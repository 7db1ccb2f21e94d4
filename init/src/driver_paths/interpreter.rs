//! The loader of a program (`PT_INTERP` of a 64-bit ELF file).

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Number of bytes read from the start of a file: linkers put the program headers after the ELF
/// header.
const HEAD: usize = 4096;

/// The type `PT_INTERP` of a program header.
const INTERPRETER: u64 = 3;

/// Returns the path of a program's loader; `None` if the program is statically linked or the file
/// is not an ELF program.
#[must_use]
pub fn of(file: &Path) -> Option<String> {
    let file = File::open(file).ok()?;
    let mut head = vec![0; HEAD];
    let length = file.read_at(&mut head, 0).ok()?;
    head.truncate(length);
    in_head(&head)
}

fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(size)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// Returns the path of the loader from the first bytes of a program.
#[must_use]
pub fn in_head(head: &[u8]) -> Option<String> {
    // 64-bit, little-endian.
    if head.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let place = |at, size| usize::try_from(number(head, at, size)?).ok();
    let (table, entry, count) = (place(32, 8)?, place(54, 2)?, place(56, 2)?);
    for at in 0..count {
        let header = table.checked_add(entry.checked_mul(at)?)?;
        if number(head, header, 4)? == INTERPRETER {
            let (start, size) = (place(header.checked_add(8)?, 8)?, place(header.checked_add(32)?, 8)?);
            let text = head.get(start..start.checked_add(size)?)?;
            let text = std::str::from_utf8(text.split(|byte| *byte == 0).next()?).ok()?;
            return text.starts_with('/').then(|| text.to_owned());
        }
    }
    None
}

/// Returns a program for tests, with a header of another type and a header that names this loader.
#[cfg(test)]
pub(crate) fn sample(loader: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 64 + 2 * 56];
    bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
    bytes[32] = 64;
    bytes[54] = 56;
    bytes[56] = 2;
    bytes[64] = 1;
    let second = 64 + 56;
    bytes[second] = 3;
    bytes[second + 32] = u8::try_from(loader.len()).unwrap();
    // The path follows the program headers.
    bytes[second + 8..second + 10].copy_from_slice(&176_u16.to_le_bytes());
    bytes.extend_from_slice(loader);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn loader_is_read_from_the_program() {
        assert_eq!(in_head(&sample(b"/lib64/ld.so\0")).as_deref(), Some("/lib64/ld.so"));
        assert_eq!(in_head(&sample(b"ld.so\0")), None, "a relative one is none");
        let mut none = sample(b"/lib64/ld.so\0");
        none[64 + 56] = 1;
        assert_eq!(in_head(&none), None);
        assert_eq!(of(Path::new("/none")), None);
        let own = of(&std::env::current_exe().unwrap());
        assert!(own.is_none_or(|loader| loader.starts_with("/lib")), "this test's own program");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(at in 0..200_usize, byte in any::<u8>(), cut in 0..200_usize, more in prop::collection::vec(any::<u8>(), 0..80)) {
            let mut bytes = sample(b"/lib64/ld.so\0");
            let length = bytes.len();
            bytes[at % length] = byte;
            bytes.truncate(cut);
            prop_assert!(in_head(&bytes).is_none_or(|loader| loader.starts_with('/')));
            let _ = in_head(&[&b"\x7fELF\x02\x01"[..], &more].concat());
        }
    }
}
