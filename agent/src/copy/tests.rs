use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ttrpc::Code;

use super::*;

const FILE: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const LINK: u32 = 0o120_000;

/// A guest's root with a file outside the share that must not change.
struct Root {
    dir: tempfile::TempDir,
    share: PathBuf,
    copies: FileCopies,
}

impl Root {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let share = dir.path().join("shared/containers");
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/file"), "precious").unwrap();
        Self { dir, share, copies: FileCopies::default() }
    }

    fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    fn request(&self, name: &str, mode: u32, data: &[u8]) -> CopyFileRequest {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        CopyFileRequest {
            path: self.share.join(name).display().to_string(),
            file_size: i64::try_from(data.len()).unwrap(),
            file_mode: mode,
            dir_mode: 0o040_750,
            uid: uid.cast_signed(),
            gid: gid.cast_signed(),
            data: data.to_vec(),
            ..Default::default()
        }
    }

    fn take(&self, request: &CopyFileRequest) -> Result<()> {
        self.copies.handle(&self.share, request)
    }

    fn copy(&self, name: &str, mode: u32, data: &[u8]) -> Result<()> {
        self.take(&self.request(name, mode, data))
    }

    /// Sends a chunk of a file of `size` bytes.
    fn write_chunk(&self, name: &str, size: i64, offset: i64, data: &[u8]) -> Result<()> {
        let whole = self.request(name, FILE | 0o644, data);
        self.take(&CopyFileRequest { file_size: size, offset, ..whole })
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.share.join(name)).unwrap()
    }

    /// Returns the names in a directory of the share.
    fn names(&self, dir: &str) -> Vec<String> {
        let entries = fs::read_dir(self.share.join(dir)).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn chunked_file_appears_when_complete_with_mode_and_parents() {
    let root = Root::new();
    root.write_chunk("c1/etc/app.conf", 6, 0, b"abc").unwrap();
    assert!(!root.share.join("c1/etc/app.conf").exists());
    root.write_chunk("c1/etc/app.conf", 6, 3, b"def").unwrap();
    assert_eq!(root.text("c1/etc/app.conf"), "abcdef");
    assert_eq!(root.names("c1/etc"), ["app.conf"]);
    assert_eq!(mode(&root.share.join("c1/etc/app.conf")), 0o644);
    assert_eq!((mode(&root.share.join("c1")), mode(&root.share.join("c1/etc"))), (0o750, 0o750));
    root.copy("c1/run", FILE | 0o4755, b"").unwrap();
    assert_eq!(mode(&root.share.join("c1/run")), 0o4755, "an empty file is complete at once");
}

#[test]
fn existing_file_is_replaced_only_when_the_new_one_is_complete() {
    let root = Root::new();
    root.copy("f", FILE | 0o600, b"old").unwrap();
    let old = fs::metadata(root.share.join("f")).unwrap().ino();
    root.write_chunk("f", 6, 0, b"new").unwrap();
    assert_eq!(root.text("f"), "old");
    root.write_chunk("f", 6, 3, b"est").unwrap();
    assert_eq!(root.text("f"), "newest");
    assert_ne!(fs::metadata(root.share.join("f")).unwrap().ino(), old);
}

#[test]
fn files_with_similar_names_do_not_collide() {
    let root = Root::new();
    for (name, data) in [("a.conf", b"1"), ("a.txt", b"2"), ("a.tmp", b"3"), ("a", b"4")] {
        root.write_chunk(name, 2, 0, data).unwrap();
    }
    // A name that resembles a temporary file.
    let temporary = root.names("").into_iter().find(|name| name.starts_with(".firstlight-copy-")).unwrap();
    let alike = format!("{temporary}0");
    root.write_chunk(&alike, 2, 0, b"5").unwrap();
    for (name, data) in [("a.conf", b"1"), ("a.txt", b"2"), ("a.tmp", b"3"), ("a", b"4"), (&alike, b"5")] {
        root.write_chunk(name, 2, 1, data).unwrap();
    }
    for (name, text) in [("a.conf", "11"), ("a.txt", "22"), ("a.tmp", "33"), ("a", "44"), (&alike, "55")] {
        assert_eq!(root.text(name), text);
    }
    assert_eq!(root.names("").len(), 5);
}

#[test]
fn existing_directories_are_retained_and_links_replaced() {
    let root = Root::new();
    root.copy("d", DIRECTORY | 0o1777, b"").unwrap();
    root.copy("d/f", FILE | 0o600, b"x").unwrap();
    root.copy("d", DIRECTORY | 0o700, b"").unwrap();
    assert_eq!((mode(&root.share.join("d")), root.text("d/f")), (0o700, "x".to_owned()));
    root.copy("d/..data", LINK | 0o777, b"..2026_11_21").unwrap();
    root.copy("d/..data", LINK | 0o777, b"..2026_11_22").unwrap();
    assert_eq!(fs::read_link(root.share.join("d/..data")).unwrap(), Path::new("..2026_11_22"));
    assert_eq!(root.names("d"), ["..data", "f"]);
    for target in [&b""[..], b"a\0b", &[b'x'; 5000]] {
        assert_eq!(root.copy("l", LINK, target).unwrap_err().code, Code::INVALID_ARGUMENT);
    }
    // A type is never replaced by another.
    assert!(root.copy("d/f", DIRECTORY | 0o700, b"").unwrap_err().message.contains("create the directory"));
    assert!(root.copy("d", FILE | 0o600, b"x").unwrap_err().message.contains("rename"));
    assert!(root.copy("d", LINK, b"x").unwrap_err().message.contains("rename the link"));
    assert_eq!(root.names(""), ["d"], "failed requests leave no files");
}

#[test]
fn other_types_and_invalid_sizes_are_rejected() {
    let root = Root::new();
    for kind in [0, 0o010_000, 0o020_000, 0o060_000, 0o140_000, 0o170_000] {
        assert_eq!(root.copy("x", kind | 0o666, b"").unwrap_err().code, Code::INVALID_ARGUMENT, "{kind:o}");
    }
    for (size, offset) in
        [(-1, 0), (3, -1), (2, 0), (3, 1), (i64::MAX, 0), (i64::MAX, i64::MAX), (i64::MIN, i64::MIN), (3, i64::MAX)]
    {
        let error = root.write_chunk("x", size, offset, b"abc").unwrap_err();
        assert_eq!(error.code, Code::INVALID_ARGUMENT, "{size} {offset}");
        assert!(error.message.contains('x') && error.message.contains("3 bytes at"), "{error}");
    }
    assert!(!root.share.exists(), "nothing was created");
}

#[test]
fn chunks_must_be_contiguous() {
    let root = Root::new();
    let refused = |name: &str, offset| {
        let error = root.write_chunk(name, 9, offset, b"x").unwrap_err();
        assert_eq!(error.code, Code::FAILED_PRECONDITION);
        error.message
    };
    assert!(refused("f", 3).contains("not started"));
    root.write_chunk("f", 9, 0, b"abc").unwrap();
    assert!(refused("f", 4).contains("only 3 bytes"));
    // Repeats the last chunk, as after a lost reply, and then restarts.
    root.write_chunk("f", 9, 2, b"c").unwrap();
    root.write_chunk("f", 4, 0, b"xy").unwrap();
    assert_eq!(root.names("").len(), 1, "the first transfer is discarded");
    root.write_chunk("f", 4, 2, b"zz").unwrap();
    assert_eq!((root.names(""), root.text("f")), (vec!["f".to_owned()], "xyzz".to_owned()));
}

#[test]
fn incomplete_files_are_bounded() {
    let root = Root::new();
    for number in 0..ABOVE_MAX {
        root.write_chunk(&format!("f{number}"), 2, 0, b"a").unwrap();
    }
    assert_eq!(root.names("").len(), incomplete::MAX_INCOMPLETE);
    assert!(root.write_chunk("f0", 2, 1, b"b").unwrap_err().message.contains("discarded"));
    root.write_chunk(&format!("f{}", ABOVE_MAX - 1), 2, 1, b"b").unwrap();
    drop(root.copies);
    let left = fs::read_dir(&root.share).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(left, [format!("f{}", ABOVE_MAX - 1).as_str()]);
}

const ABOVE_MAX: usize = incomplete::MAX_INCOMPLETE + 40;

#[test]
fn symlink_at_any_component_is_not_followed() {
    let root = Root::new();
    fs::create_dir_all(root.share.join("a/b")).unwrap();
    fs::create_dir_all(root.outside().join("b")).unwrap();
    // Replaces each directory of the path, by absolute and relative links, to the outside and
    // within.
    let targets =
        [root.outside(), "../../outside".into(), "../../../outside".into(), ".".into(), "/proc/self/root".into()];
    for target in targets {
        for at in ["a", "a/b"] {
            let link_at = root.share.join(at);
            fs::remove_dir_all(&link_at).unwrap();
            symlink(&target, &link_at).unwrap();
            for (kind, data) in [(FILE, &b"x"[..]), (DIRECTORY, b""), (LINK, b"t")] {
                for name in ["a/b/file", "a/b/new", "a/b/c/d"] {
                    let error = root.copy(name, kind | 0o777, data).unwrap_err();
                    assert_eq!(error.code, Code::INTERNAL);
                    assert!(error.message.contains("is not followed") || error.message.contains("os error"), "{error}");
                }
            }
            fs::remove_file(&link_at).unwrap();
            fs::create_dir_all(root.share.join("a/b")).unwrap();
        }
    }
    // As last component a link is replaced, never written through.
    symlink(root.outside().join("file"), root.share.join("a/b/file")).unwrap();
    root.copy("a/b/file", FILE | 0o644, b"new").unwrap();
    assert!(fs::symlink_metadata(root.share.join("a/b/file")).unwrap().is_file());
    symlink(root.outside(), root.share.join("a/link")).unwrap();
    assert!(root.copy("a/link", DIRECTORY | 0o777, b"").is_err());
    assert_untouched(&root);
}

fn assert_untouched(root: &Root) {
    assert_eq!(fs::read_to_string(root.outside().join("file")).unwrap(), "precious");
    let mut names: Vec<_> =
        fs::read_dir(root.outside()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names == ["file"] || names == ["b", "file"], "{names:?}");
    assert!(!root.outside().join("b").exists() || fs::read_dir(root.outside().join("b")).unwrap().next().is_none());
}

/// One thread swaps a directory for a link to the outside in a loop, while files are copied through
/// that directory.
#[test]
fn symlink_race_does_not_escape_the_share() {
    let root = Arc::new(Root::new());
    fs::create_dir_all(root.share.join("way/deep")).unwrap();
    symlink(root.outside(), root.share.join("link")).unwrap();
    let (stop, swaps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let racer = {
        let (root, stop, swaps) = (Arc::clone(&root), Arc::clone(&stop), Arc::clone(&swaps));
        std::thread::spawn(move || {
            let (way, link) = (root.share.join("way"), root.share.join("link"));
            while !stop.load(Ordering::Relaxed) {
                // Both names always exist; they are only swapped.
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(rustix::fs::CWD, &way, rustix::fs::CWD, &link, flags).unwrap();
                swaps.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    let (mut succeeded, mut refused) = (0, 0);
    let begin = std::time::Instant::now();
    while begin.elapsed() < std::time::Duration::from_millis(1500) {
        for (name, kind, data) in [
            ("way/file", FILE, &b"x"[..]),
            ("way/deep/file", FILE, b"x"),
            ("way/b/file", FILE, b"x"),
            ("way/link", LINK, b"t"),
            ("way/b", DIRECTORY, b""),
        ] {
            match root.copy(name, kind | 0o777, data) {
                Ok(()) => succeeded += 1,
                Err(_) => refused += 1,
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    racer.join().unwrap();
    assert!(
        succeeded > 100 && refused > 100 && swaps.load(Ordering::Relaxed) > 1000,
        "{succeeded} {refused} {swaps:?}: no race occurred"
    );
    assert_untouched(&root);
}
