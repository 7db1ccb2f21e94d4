//! Creates file system images with `mkfs` programs from a tar archive in a pipe:
//! without mounting, temporary directories or root.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use firstlight_progress::Bar;

use super::archive::{Files, write_tree};
use super::pipe::run_with_input;
use super::tar_writer::TarWriter;
use super::{Compression, Error, Format, Plan};
use crate::cache::digests::CachedFile;
use crate::cache::io_error;
use crate::packages::tools::Toolset;
use crate::tree::{Content, Node, Tree};

const BLOCK: u64 = 4096;

/// Writes the file system of `tree` to `path` with a program of `set`.
pub(super) fn write(plan: &Plan, tree: &Tree, set: &Toolset, path: &Path, bar: &Bar) -> Result<Files, Error> {
    let program = match plan.format {
        Format::Ext4 => "mke2fs",
        Format::Squashfs => "mksquashfs",
        _ => "mkfs.erofs",
    };
    let mut command = set.command(program)?;
    match plan.format {
        Format::Ext4 => ext4(&mut command, plan, &measure(tree)?, path)?,
        Format::Squashfs => squashfs(&mut command, plan, path),
        _ => erofs(&mut command, plan, path),
    }
    if let Some(dir) = path.parent() {
        command.env("TMPDIR", dir);
    }
    run_with_input(program, &mut command, path, Stdio::null(), |pipe| {
        let mut archive = TarWriter::new(pipe)?;
        let files = write_tree(tree, &mut archive, bar)?;
        archive.finish()?;
        Ok(files)
    })
}

fn erofs(command: &mut Command, plan: &Plan, path: &Path) {
    // The default block size is the page size of the build machine.
    command.args(["--quiet", "-b4096", "-T0", "--all-root", "-x-1"]).arg(format!("-U{}", plan.uuid()));
    match (plan.compression, plan.level) {
        // Uncompressed data that is page-aligned can be shared with the host by DAX.
        (Compression::None, _) => command.arg("-Enoinline_data"),
        (compression, None) => command.arg(format!("-z{}", compression.name())),
        (compression, Some(level)) => command.arg(format!("-z{},{level}", compression.name())),
    };
    if plan.cluster != 0 {
        command.arg(format!("-C{}", plan.cluster));
    }
    // Without a source argument the archive is read from stdin.
    command.arg("--tar=f").arg(path);
}

fn squashfs(command: &mut Command, plan: &Plan, path: &Path) {
    command.arg("-").arg(path).args(["-tar", "-noappend", "-quiet", "-no-progress", "-no-xattrs", "-all-root"]);
    command.args(["-mkfs-time", "0", "-all-time", "0", "-root-mode", "0755", "-root-uid", "0", "-root-gid", "0"]);
    command.args(["-b", &plan.cluster.to_string()]);
    match plan.compression {
        Compression::None => command.args(["-noI", "-noId", "-noD", "-noF", "-noX"]),
        Compression::Lz4hc => command.args(["-comp", "lz4", "-Xhc"]),
        compression => command.args(["-comp", compression.name()]),
    };
    if let Some(level) = plan.level {
        command.args(["-Xcompression-level", &level.to_string()]);
    }
}

/// Number of inodes and data blocks that an ext4 file system needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Measure {
    inodes: u64,
    blocks: u64,
}

/// Returns an upper bound of what the contents of `tree` need.
fn measure(tree: &Tree) -> Result<Measure, Error> {
    // The root directory, lost+found, and the reserved inodes.
    let mut measure = Measure { inodes: 16, blocks: 16 };
    let mut names = 0;
    for (path, node) in tree.iter() {
        measure.inodes += 1;
        // The entry in the parent directory has a header of eight bytes.
        names += path.rsplit('/').next().unwrap_or(path).len().next_multiple_of(4) as u64 + 8;
        measure.blocks += match node {
            Node::Directory { .. } => 1,
            Node::File { content: Content::Bytes(bytes), .. } => (bytes.len() as u64).div_ceil(BLOCK),
            Node::File { content: Content::File(path) | Content::Cached(CachedFile { file: path, .. }), .. } => {
                let data = std::fs::metadata(path).map_err(io_error("inspect", path))?;
                // One extent block for each 64 MiB, for fragmented files.
                data.len().div_ceil(BLOCK) + data.len() / (64 << 20)
            }
            Node::Symlink { target } => u64::from(target.len() >= 60),
            Node::Character { .. } => 0,
        };
    }
    // Directory blocks may be half empty.
    measure.blocks += names * 2 / BLOCK;
    Ok(measure)
}

impl Measure {
    /// Returns the file system size in blocks, rounded up to whole MiB: contents,
    /// inodes, and the metadata of every block group of 128 MiB.
    fn size(self) -> u64 {
        let used = self.blocks + (self.inodes * 256).div_ceil(BLOCK);
        let groups = used.div_ceil(30_000);
        (used + used / 64 + groups * 16 + 256).next_multiple_of(256)
    }
}

fn ext4(command: &mut Command, plan: &Plan, measure: &Measure, path: &Path) -> Result<(), Error> {
    // mke2fs does not create the file.
    let size = measure.size() * BLOCK;
    File::create(path).and_then(|file| file.set_len(size)).map_err(io_error("create", path))?;
    // The mke2fs.conf of the host is ignored: every feature is listed.
    command.env("MKE2FS_CONFIG", "/dev/null").env("SOURCE_DATE_EPOCH", "0");
    command.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-r", "1"]);
    command.args(["-O", FEATURES, "-L", ""]);
    let uuid = plan.uuid();
    command.args(["-U", &uuid, "-N", &measure.inodes.to_string(), "-E"]);
    command.arg(format!("hash_seed={uuid},root_owner=0:0,lazy_itable_init=0,nodiscard"));
    command.args(["-d", "-"]).arg(path).arg(measure.size().to_string());
    Ok(())
}

/// Features of the file system. Those useful only for writing are left out: the
/// journal, and space for resizing. Checksums are enabled: they are cheap, and detect
/// corruption if dm-verity is not used.
const FEATURES: &str = "none,dir_index,dir_nlink,ext_attr,extent,extra_isize,filetype,flex_bg,huge_file,\
large_file,metadata_csum,sparse_super";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::plan::FormatSettings;

    fn arguments(settings: &FormatSettings<'_>, of: fn(&mut Command, &Plan, &Path)) -> String {
        let mut command = Command::new("x");
        of(&mut command, &Plan::new(settings).unwrap(), Path::new("/image"));
        let arguments: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        arguments.join(" ")
    }

    const SETTINGS: FormatSettings<'_> = FormatSettings {
        name: "base",
        format: Format::Erofs,
        compression: None,
        level: None,
        cluster: None,
        extension: None,
        verity: None,
    };

    #[test]
    fn erofs_command_sets_all_options() {
        let text = arguments(&SETTINGS, erofs);
        for word in ["-T0", "-b4096", "--all-root", "-zlz4hc,12", "-C65536", "--tar=f /image"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert!(text.contains(&format!("-U{}", Plan::new(&SETTINGS).unwrap().uuid())), "{text}");
        let plain = arguments(&FormatSettings { compression: Some(Compression::None), ..SETTINGS }, erofs);
        assert!(plain.contains("-Enoinline_data") && !plain.contains("-z") && !plain.contains("-C"), "{plain}");
        let fast = arguments(&FormatSettings { compression: Some(Compression::Lz4), ..SETTINGS }, erofs);
        assert!(fast.contains("-zlz4 -C65536"), "{fast}");
    }

    #[test]
    fn squashfs_command_sets_all_options() {
        let settings = FormatSettings { format: Format::Squashfs, ..SETTINGS };
        let text = arguments(&settings, squashfs);
        for word in ["- /image -tar", "-all-time 0", "-mkfs-time 0", "-comp zstd -Xcompression-level 15", "-b 131072"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        let plain = arguments(&FormatSettings { compression: Some(Compression::None), ..settings }, squashfs);
        assert!(plain.contains("-noD") && !plain.contains("-comp"), "{plain}");
    }

    #[test]
    fn ext4_size_covers_contents_and_metadata() {
        let mut tree = Tree::default();
        let file = |size| Node::File { mode: 0o644, content: Content::Bytes(vec![0; size]) };
        tree.add("a/b", file(4097)).unwrap();
        tree.add("a/c", Node::Symlink { target: "x".repeat(60) }).unwrap();
        let measured = measure(&tree).unwrap();
        assert_eq!(measured, Measure { inodes: 19, blocks: 16 + 1 + 2 + 1 });
        assert_eq!(measured.size() % 256, 0);
        let large = Measure { inodes: 1000, blocks: 1 << 20 };
        assert!(large.size() > (1 << 20) + 1000 / 16 + 35 * 16);
    }
}
