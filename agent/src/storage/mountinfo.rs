//! The kernel's table of mounts, `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// A line of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The mount's number.
    pub id: u32,
    /// The number of the mount that it is on; its own for the first.
    pub parent: u32,
    /// Where it is.
    pub point: PathBuf,
    /// Options of the mount.
    pub options: String,
    /// The kind of file system.
    pub kind: String,
    /// What is mounted, as it was called then.
    pub source: OsString,
    /// Options of the file system.
    pub data: String,
}

/// Reads the table. Lines that are none are left out.
#[must_use]
pub fn parse(table: &[u8]) -> Vec<Mount> {
    table.split(|byte| *byte == b'\n').filter_map(line).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn number(bytes: &[u8]) -> Option<u32> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

fn line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let (_device, _root) = (fields.next()?, fields.next()?);
    let point = OsString::from_vec(unescape(fields.next()?)).into();
    let options = text(fields.next()?);
    // Then words about propagation, as many as there are.
    fields.find(|field| *field == b"-")?;
    let kind = text(fields.next()?);
    let source = OsString::from_vec(unescape(fields.next()?));
    Some(Mount { id, parent, point, options, kind, source, data: text(fields.next()?) })
}

/// Turns `\040` and its like into bytes.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, more)) = rest.split_first() {
        let octal = || {
            let digits = rest.get(1..4)?;
            let digit = |byte: u8| (b'0'..=b'7').contains(&byte).then(|| u32::from(byte - b'0'));
            let value = digits.iter().try_fold(0, |value, byte| Some(value * 8 + digit(*byte)?))?;
            u8::try_from(value).ok()
        };
        match (first, octal()) {
            (b'\\', Some(byte)) => {
                out.push(byte);
                rest = rest.get(4..).unwrap_or_default();
            }
            _ => {
                out.push(*first);
                rest = more;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;

    const TABLE: &[u8] =
        b"36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=continue\n\
        nonsense\n\
        41 36 0:30 / /run/a rw - tmpfs none rw,size=4k\n";

    #[test]
    fn lines_are_read_and_nonsense_is_left_out() {
        let mounts = parse(TABLE);
        assert_eq!(mounts.len(), 2);
        assert_eq!((mounts[0].id, mounts[0].parent, mounts[0].kind.as_str()), (36, 35, "ext3"));
        assert_eq!(mounts[0].point, Path::new("/mnt 2"));
        assert_eq!((mounts[1].options.as_str(), mounts[1].data.as_str()), ("rw", "rw,size=4k"));
    }

    #[test]
    fn the_kernels_own_table_is_read_whole() {
        let table = std::fs::read("/proc/self/mountinfo").unwrap();
        assert_eq!(parse(&table).len(), table.iter().filter(|byte| **byte == b'\n').count());
    }

    /// As the kernel writes them.
    fn escape(bytes: &[u8]) -> Vec<u8> {
        let one = |byte: &u8| match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => format!("\\{byte:03o}").into_bytes(),
            byte => vec![*byte],
        };
        bytes.iter().flat_map(one).collect()
    }

    proptest! {
        #[test]
        fn any_mount_point_comes_back(point in proptest::collection::vec(1_u8.., 1..40)) {
            let mut table = b"1 2 0:1 / /".to_vec();
            table.extend(escape(&point));
            table.extend(b" rw shared:1 - tmpfs tmpfs rw\n");
            let mounts = parse(&table);
            prop_assert_eq!(mounts.len(), 1);
            let wanted = [b"/".as_slice(), &point].concat();
            prop_assert_eq!(mounts[0].point.as_os_str().as_encoded_bytes(), wanted.as_slice());
        }

        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }
    }
}
