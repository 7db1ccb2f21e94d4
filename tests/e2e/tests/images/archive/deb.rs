//! Packages: valid ones made by `dpkg-deb`, malicious ones byte by byte.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use tar::{EntryType, Header};

/// A package file with its archive metadata.
#[derive(Debug, Clone)]
pub(super) struct Deb {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) bytes: Vec<u8>,
}

impl Deb {
    pub(super) fn file_name(&self) -> String {
        format!("{}_{}_amd64.deb", self.name, self.version)
    }

    pub(super) fn control(&self) -> String {
        let Self { name, version, .. } = self;
        format!(
            "Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: A Test <test@test.invalid>\n\
             Description: made by a test\n"
        )
    }
}

/// Returns incompressible, deterministic bytes.
fn noise(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Some(state.to_le_bytes()[3])
    };
    std::iter::from_fn(next).take(length).collect()
}

/// The release of the kernel in [`kernel`].
pub(super) const RELEASE: &str = "9.9.9-test";
/// Size of the kernel file in bytes.
const KERNEL_SIZE: usize = 1 << 20;

/// Returns an uncompressed `bzImage` with an ELF file that has a PVH note.
fn vmlinuz() -> Vec<u8> {
    let mut elf = noise(1, KERNEL_SIZE);
    let mut put = |at: usize, bytes: &[u8]| elf[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01");
    // One program header behind the file's: a note of 20 bytes at 120.
    put(32, &64u64.to_le_bytes());
    put(54, &56u16.to_le_bytes());
    put(56, &1u16.to_le_bytes());
    put(64, &4u32.to_le_bytes());
    put(72, &120u64.to_le_bytes());
    put(96, &20u64.to_le_bytes());
    for (at, word) in [(120, 4u32), (124, 4), (128, 18), (136, 0x0100_0000)] {
        put(at, &word.to_le_bytes());
    }
    put(132, b"Xen\0");

    let mut image = vec![0; 1024];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x202, b"HdrS");
    put(0x206, &0x20fu16.to_le_bytes());
    put(0x24c, &u32::try_from(KERNEL_SIZE).unwrap().to_le_bytes());
    image.extend(elf);
    image
}

/// Packs files with their modes with `dpkg-deb`.
fn packed(name: &str, version: &str, files: &[(&str, u32, &[u8])], links: &[(&str, &str)]) -> Deb {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    let place = |path: &str| {
        let place = tree.join(path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        place
    };
    let mut deb = Deb { name: name.to_owned(), version: version.to_owned(), bytes: Vec::new() };
    fs::write(place("DEBIAN/control"), deb.control()).unwrap();
    for (path, mode, bytes) in files {
        fs::write(place(path), bytes).unwrap();
        fs::set_permissions(place(path), fs::Permissions::from_mode(*mode)).unwrap();
    }
    for (path, target) in links {
        symlink(target, place(path)).unwrap();
    }
    let file = dir.path().join("it.deb");
    let mut command = Command::new("dpkg-deb");
    // Fixed times make the package reproducible.
    command.env("SOURCE_DATE_EPOCH", "1700000000").args(["--root-owner-group", "-Zxz", "-z0", "--build"]);
    let output = command.arg(&tree).arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    deb.bytes = fs::read(file).unwrap();
    deb
}

/// Returns a minimal kernel package.
pub(super) fn kernel() -> Deb {
    let modules = |name: &str| format!("usr/lib/modules/{RELEASE}/{name}");
    let files: [(&str, u32, &[u8]); 4] = [
        (&format!("boot/vmlinuz-{RELEASE}"), 0o644, &vmlinuz()),
        (&format!("boot/config-{RELEASE}"), 0o644, b"CONFIG_PVH=y\n"),
        (&modules("modules.builtin"), 0o644, b""),
        (&modules("kernel/none"), 0o644, b""),
    ];
    packed(&format!("linux-image-{RELEASE}"), "9.9.9-1", &files, &[])
}

/// Name of the test package.
pub(super) const HELLO: &str = "hello";

/// Returns a valid package: a program, data, a link.
pub(super) fn hello(version: &str) -> Deb {
    let text = format!("hello from {version}\n");
    let files: [(&str, u32, &[u8]); 3] = [
        ("usr/bin/hello", 0o755, text.as_bytes()),
        ("usr/bin/as-root", 0o4755, b"a set-uid program\n"),
        ("usr/share/hello/noise", 0o644, &noise(2, 2 << 20)),
    ];
    packed(HELLO, version, &files, &[("usr/share/hello/link", "/usr/bin/hello")])
}

/// One tar entry of a crafted package.
pub(super) struct Entry {
    pub(super) path: &'static str,
    pub(super) kind: EntryType,
    pub(super) mode: u32,
    /// The target of a link, or the contents of a file.
    pub(super) what: &'static str,
}

pub(super) fn file(path: &'static str, mode: u32) -> Entry {
    Entry { path, kind: EntryType::Regular, mode, what: "some text\n" }
}

pub(super) fn dir(path: &'static str, mode: u32) -> Entry {
    Entry { path, kind: EntryType::Directory, mode, what: "" }
}

pub(super) fn link(path: &'static str, kind: EntryType, target: &'static str) -> Entry {
    Entry { path, kind, mode: 0o777, what: target }
}

fn header(entry: &Entry) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(entry.kind);
    header.set_mode(entry.mode);
    header.set_mtime(1_700_000_000);
    let is_link = matches!(entry.kind, EntryType::Symlink | EntryType::Link);
    let is_device = matches!(entry.kind, EntryType::Char | EntryType::Block);
    header.set_size(if is_link { 0 } else { entry.what.len() as u64 });
    if is_device {
        header.set_device_major(1).unwrap();
        header.set_device_minor(8).unwrap();
    }
    // The tar crate refuses such names.
    let bytes = header.as_mut_bytes();
    bytes[..entry.path.len()].copy_from_slice(entry.path.as_bytes());
    if is_link {
        bytes[157..157 + entry.what.len()].copy_from_slice(entry.what.as_bytes());
    }
    header.set_cksum();
    header
}

fn tar_of(entries: &[Entry]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for entry in entries {
        let is_link = matches!(entry.kind, EntryType::Symlink | EntryType::Link);
        let data = if is_link { &[][..] } else { entry.what.as_bytes() };
        builder.append(&header(entry), data).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Returns a package with entries that `dpkg-deb` would refuse to pack.
pub(super) fn crafted(name: &str, version: &str, entries: &[Entry]) -> Deb {
    let mut deb = Deb { name: name.to_owned(), version: version.to_owned(), bytes: b"!<arch>\n".to_vec() };
    let control = deb.control();
    let mut of_control = tar::Builder::new(Vec::new());
    let mut about = Header::new_gnu();
    about.set_size(control.len() as u64);
    about.set_mode(0o644);
    of_control.append_data(&mut about, Path::new("./control"), control.as_bytes()).unwrap();
    let of_control = of_control.into_inner().unwrap();
    for (name, data) in
        [("debian-binary", b"2.0\n".to_vec()), ("control.tar", of_control), ("data.tar", tar_of(entries))]
    {
        let size = data.len();
        deb.bytes.extend(format!("{name:<16}{:<12}{:<6}{:<6}{:<8}{size:<10}`\n", 0, 0, 0, 100_644).bytes());
        deb.bytes.extend(data);
        if size % 2 == 1 {
            deb.bytes.push(b'\n');
        }
    }
    deb
}
