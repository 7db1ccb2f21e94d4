//! A tree with everything that images have, and what reads it back.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use firstlight_image_builder::cache;
use firstlight_image_builder::format::{BuiltImage, Compression, Format, FormatSettings, Plan, build_image};
use firstlight_image_builder::packages::Packages;
use firstlight_image_builder::packages::tools::{Kit, Toolset};
use firstlight_image_builder::tree::{Content, Node, Tree};
use firstlight_progress::Progress;

pub(crate) fn packages() -> Packages<'static> {
    Packages::new(&cache::root().unwrap(), None, Progress::stderr("images"))
}

/// Text that packs, and noise that does not.
fn content(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed;
    let noise = std::iter::from_fn(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Some(state.to_le_bytes()[3])
    });
    let text = b"the same words again and again, ".iter().copied().cycle();
    if seed.is_multiple_of(2) { text.take(length).collect() } else { noise.take(length).collect() }
}

/// What the tree is made of: by path, the mode and the contents.
pub(crate) fn files() -> BTreeMap<String, (u32, Vec<u8>)> {
    let long = format!("usr/share/{}/{}", "deep-".repeat(30), "long-".repeat(40));
    let mut files = BTreeMap::from([
        ("init".to_owned(), (0o755, content(3, 70_001))),
        ("usr/bin/tool".to_owned(), (0o4755, content(2, 3_000_000))),
        ("usr/lib/noise".to_owned(), (0o644, content(5, 300_000))),
        ("etc/empty".to_owned(), (0o600, Vec::new())),
        ("etc/naïve name".to_owned(), (0o644, b"x".to_vec())),
        (long, (0o644, content(4, 4096))),
    ]);
    for number in 0..300 {
        files.insert(format!("usr/share/many/file-{number}"), (0o644, content(number, 40)));
    }
    files
}

/// The tree, from files below `directory` that are written in this order or the
/// reverse, with times and modes of their own.
pub(crate) fn tree(dir: &Path, reverse: bool) -> Tree {
    fs::create_dir_all(dir).unwrap();
    let mut entries: Vec<(String, Node)> = Vec::new();
    let mut files: Vec<_> = files().into_iter().collect();
    if reverse {
        files.reverse();
    }
    for (index, (path, (mode, data))) in files.into_iter().enumerate() {
        // Half of it lies in files whose own times, modes and names must not show.
        let content = if index % 2 == usize::from(reverse) {
            let place = dir.join(format!("{index}-{reverse}"));
            fs::write(&place, data).unwrap();
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 * (index as u64 + 1));
            fs::File::options().write(true).open(&place).unwrap().set_modified(time).unwrap();
            fs::set_permissions(&place, fs::Permissions::from_mode(0o640)).unwrap();
            Content::File(place)
        } else {
            Content::Bytes(data)
        };
        entries.push((path, Node::File { mode, content }));
    }
    entries.push(("run".to_owned(), Node::Directory { mode: 0o755 }));
    entries.push(("tmp".to_owned(), Node::Directory { mode: 0o1777 }));
    entries.push(("var/run".to_owned(), Node::Symlink { target: "../run".to_owned() }));
    entries.push(("var/long".to_owned(), Node::Symlink { target: "x/".repeat(80) }));
    entries.push(("dev/nvidia255".to_owned(), Node::Character { mode: 0o666, major: 195, minor: 255 }));
    if reverse {
        entries.reverse();
    }
    let mut tree = Tree::default();
    for (path, node) in entries {
        tree.add(&path, node).unwrap();
    }
    tree
}

pub(crate) fn plan(format: Format, compression: Option<Compression>, level: Option<u32>) -> Plan {
    Plan::new(&FormatSettings {
        name: "test",
        format,
        compression,
        level,
        cluster: None,
        extension: None,
        verity: None,
    })
    .unwrap()
}

pub(crate) fn made(plan: &Plan, tree: &Tree, dir: &Path) -> BuiltImage {
    fs::create_dir_all(dir).unwrap();
    build_image(plan, tree, &mut packages(), dir, &dir.join("none")).unwrap()
}

/// What a program prints; it must succeed.
pub(crate) fn says(kit: Kit, program: &str, arguments: impl FnOnce(&mut Command)) -> String {
    let mut command = Toolset::of(kit, &mut packages()).unwrap().command(program).unwrap();
    arguments(&mut command);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {out}{err}");
    out.into_owned()
}
