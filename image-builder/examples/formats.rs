//! Prints the size of a directory in every image format as a table:
//! `cargo run --release -p firstlight-image-builder --example formats DIR`.
//! Seconds are wall-clock time.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use firstlight_image_builder::cache;
use firstlight_image_builder::format::{Compression, Format, FormatSettings, Plan, build_image};
use firstlight_image_builder::packages::Packages;
use firstlight_image_builder::tree::{Content, Node, Tree};
use firstlight_progress::Progress;

/// Format, packing, level, cluster in KiB.
type Row = (Format, Option<Compression>, Option<u32>, Option<u32>);

const ROWS: &[Row] = &[
    (Format::Initramfs, Some(Compression::None), None, None),
    (Format::Initramfs, Some(Compression::Lz4), None, None),
    (Format::Initramfs, Some(Compression::Zstd), None, None),
    (Format::Initramfs, Some(Compression::Zstd), Some(19), None),
    (Format::Erofs, Some(Compression::None), None, None),
    (Format::Erofs, Some(Compression::Lz4), None, None),
    (Format::Erofs, Some(Compression::Lz4hc), None, Some(4)),
    (Format::Erofs, Some(Compression::Lz4hc), None, None),
    (Format::Erofs, Some(Compression::Zstd), None, None),
    (Format::Squashfs, Some(Compression::Lz4hc), None, None),
    (Format::Squashfs, Some(Compression::Zstd), None, None),
    (Format::Squashfs, Some(Compression::Xz), None, None),
    (Format::Ext4, None, None, None),
];

fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::args_os().nth(1).map(PathBuf::from).ok_or("usage: formats DIR")?;
    let mut tree = Tree::default();
    let mut bytes = 0;
    add(&mut tree, &dir, Path::new(""), &mut bytes)?;
    println!("{} entries, {bytes} bytes in files\n", tree.iter().count());
    println!("| format | bytes | dm-verity | s |\n|---|---:|---:|---:|");
    let mut packages = Packages::new(&cache::root()?, None, Progress::quiet());
    for (format, compression, level, kib) in ROWS {
        let plan = Plan::new(&FormatSettings {
            name: "table",
            format: *format,
            compression: *compression,
            level: *level,
            cluster: kib.map(|kib| kib << 10),
            extension: None,
            verity: (*format != Format::Initramfs).then_some(None),
        })?;
        let out = tempfile::tempdir()?;
        let started = Instant::now();
        let built = build_image(&plan, &tree, &mut packages, out.path(), &out.path().join("none"))?;
        let seconds = started.elapsed().as_secs_f64();
        let (size, hashes) = match built.root.disk {
            None => (fs::metadata(out.path().join(&built.root.file))?.len(), String::new()),
            Some(disk) => (disk.data.size, disk.verity.map_or(0, |(part, _)| part.size).to_string()),
        };
        println!("| {} | {size} | {hashes} | {seconds:.1} |", plan.summary().replace(", dm-verity", ""));
    }
    Ok(())
}

fn add(tree: &mut Tree, root: &Path, part: &Path, bytes: &mut u64) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(root.join(part))? {
        let entry = entry?;
        let path = part.join(entry.file_name());
        let name = path.to_str().ok_or("a name that is not UTF-8")?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            tree.add(name, Node::Directory { mode: 0o755 })?;
            add(tree, root, &path, bytes)?;
        } else if kind.is_symlink() {
            let target = fs::read_link(entry.path())?;
            tree.add(name, Node::Symlink { target: target.to_str().ok_or("a target that is not UTF-8")?.to_owned() })?;
        } else if kind.is_file() {
            *bytes += entry.metadata()?.len();
            tree.add(name, Node::File { mode: 0o644, content: Content::File(entry.path()) })?;
        }
    }
    Ok(())
}
