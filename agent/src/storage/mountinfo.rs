//! Parser of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// One line of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Mount id.
    pub id: u32,
    /// Id of the parent mount; its own for the root.
    pub parent: u32,
    /// Mount point.
    pub point: PathBuf,
    /// Per-mount options.
    pub options: String,
    /// File system type.
    pub kind: String,
    /// Mount source.
    pub source: OsString,
    /// Per-superblock options.
    pub data: String,
}

/// Parses the table. Invalid lines are skipped.
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
    // Optional propagation fields, up to the separator.
    fields.find(|field| *field == b"-")?;
    let kind = text(fields.next()?);
    let source = OsString::from_vec(unescape(fields.next()?));
    Some(Mount { id, parent, point, options, kind, source, data: text(fields.next()?) })
}

/// Decodes octal escapes such as `\040`.
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
    fn valid_lines_are_parsed_and_invalid_ones_skipped() {
        let mounts = parse(TABLE);
        assert_eq!(mounts.len(), 2);
        assert_eq!((mounts[0].id, mounts[0].parent, mounts[0].kind.as_str()), (36, 35, "ext3"));
        assert_eq!(mounts[0].point, Path::new("/mnt 2"));
        assert_eq!((mounts[1].options.as_str(), mounts[1].data.as_str()), ("rw", "rw,size=4k"));
    }

    #[test]
    fn every_line_of_the_kernels_table_is_parsed() {
        let table = std::fs::read("/proc/self/mountinfo").unwrap();
        assert_eq!(parse(&table).len(), table.iter().filter(|byte| **byte == b'\n').count());
    }

    /// Escapes as the kernel does.
    fn escape(bytes: &[u8]) -> Vec<u8> {
        let one = |byte: &u8| match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => format!("\\{byte:03o}").into_bytes(),
            byte => vec![*byte],
        };
        bytes.iter().flat_map(one).collect()
    }

    proptest! {
        #[test]
        fn any_mount_point_is_decoded(point in proptest::collection::vec(1_u8.., 1..40)) {
            let mut table = b"1 2 0:1 / /".to_vec();
            table.extend(escape(&point));
            table.extend(b" rw shared:1 - tmpfs tmpfs rw\n");
            let mounts = parse(&table);
            prop_assert_eq!(mounts.len(), 1);
            let expected = [b"/".as_slice(), &point].concat();
            prop_assert_eq!(mounts[0].point.as_os_str().as_encoded_bytes(), expected.as_slice());
        }

        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }
    }
}
