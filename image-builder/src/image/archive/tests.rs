//! Archives as operators supply them: right, other, packed, hostile.

use super::*;
use crate::image::manifest::Part;
use std::io::Write as _;
use tempfile::TempDir;

/// Appends a tar entry with any name, kind and mode, including invalid ones.
fn entry(out: &mut Vec<u8>, kind: u8, path: &str, link: &str, mode: u32, data: &[u8]) {
    let mut header = tar::Header::new_ustar();
    header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
    header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_size(data.len() as u64);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_cksum();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(512), 0);
}

/// Returns an archive with the layout of NVIDIA's.
fn good() -> Vec<u8> {
    let mut tar = Vec::new();
    entry(&mut tar, b'5', "./fm-1/", "", 0o755, b"");
    entry(&mut tar, b'0', "./fm-1/bin/nv-fm", "", 0o755, b"program");
    entry(&mut tar, b'0', "fm-1/share/a_topology", "", 0o600, b"a");
    entry(&mut tar, b'0', "fm-1/share/b_topology", "", 0o666, b"b");
    entry(&mut tar, b'0', "fm-1/lib/libfm.so.1.2", "", 0o644, b"library");
    entry(&mut tar, b'2', "fm-1/lib/libfm.so.1", "libfm.so.1.2", 0o777, b"");
    tar.resize(tar.len() + 1024, 0);
    tar
}

fn archive(dir: &TempDir, bytes: &[u8], files: &[(&str, &str)]) -> Archive {
    let path = dir.path().join("fm.tar");
    fs::write(&path, bytes).unwrap();
    let part = |(from, into): &(&str, &str)| Part { from: (*from).to_owned(), into: (*into).to_owned() };
    Archive {
        name: "fabric".into(),
        version: "1".into(),
        path: path.display().to_string(),
        sha256: digest::of_bytes(bytes),
        licence: "theirs".into(),
        reason: "ask the vendor".into(),
        files: files.iter().map(part).collect(),
    }
}

fn unpack(dir: &TempDir, archive: &Archive) -> Result<(ArchiveRecord, Vec<(String, Node)>), String> {
    entries(&dir.path().join("cache"), archive, Progress::quiet()).map_err(|error| error.to_string())
}

const REQUESTED_FILES: &[(&str, &str)] =
    &[("*/bin/nv-fm", "usr/bin"), ("*/share/*_topology", "usr/share"), ("*/lib/libfm.so*", "usr/lib")];

#[test]
fn files_are_added_from_any_supported_compression() {
    let tar = good();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&tar).unwrap();
    let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(6)).unwrap();
    xz.write_all(&tar).unwrap();
    for bytes in [tar, gzip.finish().unwrap(), xz.finish().unwrap()] {
        let dir = tempfile::tempdir().unwrap();
        let archive = archive(&dir, &bytes, REQUESTED_FILES);
        let (record, entries) = unpack(&dir, &archive).unwrap();
        assert_eq!((record.id().as_str(), record.size), ("fabric=1", bytes.len() as u64));
        assert_eq!((record.sha256, record.licence.as_str()), (digest::of_bytes(&bytes), "theirs"));
        let places: Vec<&str> = entries.iter().map(|(path, _)| path.as_str()).collect();
        let expected = [
            "usr/bin/nv-fm",
            "usr/lib/libfm.so.1",
            "usr/lib/libfm.so.1.2",
            "usr/share/a_topology",
            "usr/share/b_topology",
        ];
        assert_eq!(places, expected);
        let Node::File { mode: 0o755, content: Content::Cached(cached) } = &entries[0].1 else { panic!("{entries:?}") };
        assert_eq!(fs::read(&cached.file).unwrap(), b"program");
        assert_eq!(cached.sha256, digest::of_bytes(b"program"));
        assert_eq!(entries[1].1, Node::Symlink { target: "libfm.so.1.2".into() });
        assert!(matches!(entries[3].1, Node::File { mode: 0o644, .. }), "only the execute bit is preserved");
        // The cached result is the same, and the archive must still exist.
        assert_eq!(unpack(&dir, &archive).unwrap().1, entries);
        fs::remove_file(&archive.path).unwrap();
        let error = unpack(&dir, &archive).unwrap_err();
        assert!(error.contains("fm.tar") && error.contains("supplied by you: ask the vendor"), "{error}");
    }
}

#[test]
fn wrong_archive_and_unmatched_patterns_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let right = archive(&dir, &good(), REQUESTED_FILES);
    let mut other = right.clone();
    other.sha256 = "ab".repeat(32);
    let error = unpack(&dir, &other).unwrap_err();
    assert!(error.contains(&right.sha256) && error.contains("abab") && error.contains("ask the vendor"), "{error}");
    assert!(!dir.path().join("cache/unpacked").exists(), "it is not unpacked");
    let error = unpack(&dir, &archive(&dir, &good(), &[("*/sbin/x", "usr")])).unwrap_err();
    assert!(error.contains("\"*/sbin/x\"") && error.contains("it has fm-1/bin/nv-fm, "), "{error}");
    // * does not match /.
    assert!(unpack(&dir, &archive(&dir, &good(), &[("*/nv-fm", "usr")])).is_err());
}

#[test]
fn malicious_archives_are_refused_completely() {
    type Make = fn(&mut Vec<u8>);
    let cases: [(&str, Make); 12] = [
        ("leads out", |t| entry(t, b'0', "../x", "", 0o644, b"evil")),
        ("leads out", |t| entry(t, b'0', "/x", "", 0o644, b"evil")),
        ("leads out", |t| entry(t, b'2', "a/l", "../../x", 0o777, b"")),
        ("leads out", |t| entry(t, b'2', "l", "/etc", 0o777, b"")),
        ("is set-uid or set-gid", |t| entry(t, b'0', "su", "", 0o4755, b"evil")),
        ("is set-uid or set-gid", |t| entry(t, b'0', "sg", "", 0o2755, b"evil")),
        ("Char", |t| entry(t, b'3', "null", "", 0o666, b"")),
        ("Block", |t| entry(t, b'4', "sda", "", 0o666, b"")),
        ("Fifo", |t| entry(t, b'6', "pipe", "", 0o666, b"")),
        ("Link", |t| entry(t, b'1', "hard", "fm-1/bin/nv-fm", 0o644, b"")),
        ("fm-1/bin/nv-fm", |t| entry(t, b'0', "fm-1/bin/nv-fm", "", 0o644, b"twice")),
        ("fm-1/bin/nv-fm", |t| entry(t, b'0', "fm-1/bin/nv-fm/below", "", 0o644, b"evil")),
    ];
    for (expected, make) in cases {
        let dir = tempfile::tempdir().unwrap();
        let mut tar = good();
        tar.truncate(tar.len() - 1024);
        make(&mut tar);
        let error = unpack(&dir, &archive(&dir, &tar, REQUESTED_FILES)).unwrap_err();
        assert!(error.contains(expected) && error.contains("none of its files is used"), "{expected}: {error}");
        let left: Vec<_> = fs::read_dir(dir.path().join("cache/unpacked")).unwrap().flatten().collect();
        assert!(
            left.iter().all(|entry| entry.path().extension().is_some_and(|it| it == "lock")),
            "{expected}: {left:?}"
        );
        assert!(!dir.path().join("x").exists() && !dir.path().join("cache/x").exists());
    }
    for (bytes, expected) in [(&b"PK\x03\x04"[..], "tar.xz"), (b"", "empty"), (b"\x1f\x8b\x08junk", "failed to unpack")]
    {
        let dir = tempfile::tempdir().unwrap();
        let error = unpack(&dir, &archive(&dir, bytes, REQUESTED_FILES)).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn file_below_a_link_is_not_written_through_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut tar = Vec::new();
    entry(&mut tar, b'2', "d", "e", 0o777, b"");
    entry(&mut tar, b'0', "d/file", "", 0o644, b"x");
    let (_, entries) = unpack(&dir, &archive(&dir, &tar, &[("d/file", "usr")])).unwrap();
    let Node::File { content, .. } = &entries[0].1 else { panic!("{entries:?}") };
    let path = content.path().unwrap();
    assert!(path.starts_with(dir.path().join("cache/unpacked")) && fs::symlink_metadata(path).unwrap().is_file());
}
