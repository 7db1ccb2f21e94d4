//! Capabilities of the NVIDIA driver: permissions that a process has if it can open a device node,
//! such as the use of a GPU instance in MIG mode. Each has a file under `/proc` with the node's
//! minor number.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use super::{MakeNode, Maker, NodesError, field, major};
use crate::root::Root;

/// Directories with capabilities: of the GPUs, and of the fabric (`fabric-mgmt`).
const TREES: &[&str] = &[GPU_TREE, "/proc/driver/nvidia-nvlink/capabilities"];

const GPU_TREE: &str = "/proc/driver/nvidia/capabilities";

/// Name of their character device, and the directory of their nodes.
const CAPS: &str = "nvidia-caps";

/// Maximum depth of directories; the deepest known path is `gpu0/mig/gi1/ci0/access`.
const DEPTH: usize = 6;

/// Maximum number of files, more than the driver has capability numbers.
const MAX_FILES: usize = 8192;

/// Maximum size of a capability's file in bytes, more than the driver writes.
const MAX_BYTES: u64 = 1024;

/// The largest minor number of Linux.
const MAX_MINOR: u32 = (1 << 20) - 1;

/// The content of a capability's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Capability {
    minor: u32,
    mode: u32,
    modify: bool,
}

/// The node of a capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapabilityNode {
    /// The path.
    pub path: String,
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
    /// The mode that the driver requests.
    pub mode: u32,
}

/// A MIG device: a compute instance in a GPU instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Id of the GPU instance, which has memory and processors.
    pub gpu: u32,
    /// Id of the compute instance in the GPU instance.
    pub compute: u32,
    /// The nodes that a process must be able to open to use the device.
    pub nodes: [CapabilityNode; 2],
}

fn node_name(minor: u32) -> String {
    format!("{CAPS}/nvidia-cap{minor}")
}

/// Reads a capability's file; returns `None` if the driver is configured to create no nodes for
/// capabilities.
fn read(path: &Path) -> Result<Option<Capability>, NodesError> {
    let wrong = |reason: String| NodesError::Driver { path: path.to_owned(), reason };
    let mut text = String::new();
    let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
    file.take(MAX_BYTES).read_to_string(&mut text).map_err(|error| wrong(error.to_string()))?;
    parse(&text).map_err(wrong)
}

fn parse(text: &str) -> Result<Option<Capability>, String> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    let number = |name: &str| match field(text, name).map(|value| (value, value.parse::<u32>())) {
        None => Err(format!("it has no line '{name}'")),
        Some((_, Ok(value))) => Ok(value),
        Some((value, Err(_))) => Err(format!("its {name} is {value:?}, which is not a number")),
    };
    let (minor, mode, modify) = (number("DeviceFileMinor")?, number("DeviceFileMode")?, number("DeviceFileModify")?);
    if minor > MAX_MINOR {
        return Err(format!("its DeviceFileMinor is {minor}; no node has a number above {MAX_MINOR}"));
    }
    if mode > 0o777 {
        return Err(format!("its DeviceFileMode is {mode}, which is more than permissions"));
    }
    Ok(Some(Capability { minor, mode, modify: modify != 0 }))
}

/// Collects all files of a tree in `found`, and errors in `wrong`.
fn files(dir: &Path, depth: usize, found: &mut Vec<PathBuf>, wrong: &mut Vec<NodesError>) {
    let mut fail = |path: &Path, reason: String| wrong.push(NodesError::Driver { path: path.to_owned(), reason });
    let entries = match fs::read_dir(dir).and_then(Iterator::collect::<io::Result<Vec<_>>>) {
        Ok(entries) => entries,
        // Some drivers lack some trees, and an instance may be destroyed during the scan.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => return fail(dir, error.to_string()),
    };
    let mut paths: Vec<_> = entries.iter().map(|entry| (entry.path(), entry.file_type())).collect();
    paths.sort_by(|one, other| one.0.cmp(&other.0));
    for (path, kind) in paths {
        match kind {
            Ok(kind) if kind.is_dir() && depth < DEPTH => files(&path, depth + 1, found, wrong),
            Ok(kind) if kind.is_file() && found.len() < MAX_FILES => found.push(path),
            Ok(kind) if kind.is_dir() || kind.is_file() => {
                let reason =
                    format!("there are more than {DEPTH} directories in each other, or {MAX_FILES} capabilities");
                return wrong.push(NodesError::Driver { path, reason });
            }
            Ok(_) => wrong.push(NodesError::Driver { path, reason: "it is neither a file nor a directory".to_owned() }),
            Err(error) => wrong.push(NodesError::Driver { path, reason: error.to_string() }),
        }
    }
}

/// Creates the nodes of all existing capabilities; returns the errors.
pub(super) fn make(maker: &mut Maker<'_, impl MakeNode>) -> Vec<NodesError> {
    let (mut found, mut wrong) = (Vec::new(), Vec::new());
    for tree in TREES {
        files(&maker.root.path(tree), 1, &mut found, &mut wrong);
    }
    let mut taken: BTreeMap<u32, PathBuf> = BTreeMap::new();
    for path in found {
        let made = read(&path).and_then(|capability| {
            let Some(capability) = capability else { return Ok(()) };
            if let Some(other) = taken.insert(capability.minor, path.clone()) {
                let reason = format!("its DeviceFileMinor is {}, as that of {}", capability.minor, other.display());
                return Err(NodesError::Driver { path, reason });
            }
            let number = maker.major(&[CAPS]).ok_or(NodesError::NoMajor(CAPS))?;
            // With `DeviceFileModify: 0` another program manages the node.
            if !capability.modify {
                return Ok(());
            }
            maker.make(&node_name(capability.minor), number, capability.minor, capability.mode)
        });
        wrong.extend(made.err());
    }
    wrong
}

/// Returns the numbers in the names of a directory's subdirectories: 3 for `gi3`.
fn numbered(dir: &Path, prefix: &str) -> Vec<u32> {
    let entries = fs::read_dir(dir).into_iter().flatten().take(MAX_FILES).flatten();
    let mut numbers: Vec<u32> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let digits = name.to_str()?.strip_prefix(prefix)?;
            let number = digits.parse().ok()?;
            // "+1" and "01" would be parsed, but the driver does not use them.
            (format!("{number}") == digits).then_some(number)
        })
        .collect();
    numbers.sort_unstable();
    numbers
}

/// Returns the MIG devices of the GPU with this minor number, in NVML's order. A device whose files
/// cannot be read is skipped; [`super::make`] and [`super::make_capabilities`] report the error.
#[must_use]
pub fn instances(root: &Root, minor: u32) -> Vec<Instance> {
    let gpu = root.path(&format!("{GPU_TREE}/gpu{minor}/mig"));
    let parts = numbered(&gpu, "gi");
    if parts.is_empty() {
        return Vec::new();
    }
    let devices = fs::read_to_string(root.path("/proc/devices")).unwrap_or_default();
    let Some(major) = major(&devices, &[CAPS]) else { return Vec::new() };
    let node = |dir: &Path| {
        let Capability { minor, mode, .. } = read(&dir.join("access")).ok().flatten()?;
        Some(CapabilityNode { path: format!("/dev/{}", node_name(minor)), major, minor, mode })
    };
    let mut found = Vec::new();
    for part in parts {
        let dir = gpu.join(format!("gi{part}"));
        let Some(whole) = node(&dir) else { continue };
        for compute in numbered(&dir, "ci") {
            let own = node(&dir.join(format!("ci{compute}")));
            found.extend(own.map(|own| Instance { gpu: part, compute, nodes: [whole.clone(), own] }));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::make_capabilities;
    use super::super::tests::{Node, Written, write};
    use super::*;
    use proptest::prelude::*;

    const DEVICES: &str = "Character devices:\n195 nvidia\n241 nvidia-caps\n\nBlock devices:\n";

    fn text(minor: u32, mode: u32, modify: u32) -> String {
        format!("DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: {modify}\n")
    }

    /// Creates a tree of capability files with these contents.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        write(&dir, "proc/devices", DEVICES);
        for (path, text) in files {
            write(&dir, &format!("proc/driver/{path}"), text);
        }
        let root = Root::at(dir.path());
        (dir, root)
    }

    fn made(root: &Root) -> (Vec<Node>, Vec<String>) {
        let mut written = Written::default();
        let wrong = make_capabilities(root, &mut written).unwrap();
        (written.0, wrong.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn capability_nodes_have_number_and_mode_of_their_file() {
        let (_directory, root) = tree(&[
            ("nvidia/capabilities/mig/config", &text(1, 256, 1)),
            ("nvidia/capabilities/mig/monitor", &text(2, 292, 1)),
            ("nvidia/capabilities/fabric-imex-mgmt", &text(4323, 256, 1)),
            ("nvidia/capabilities/gpu0/mig/gi1/access", &text(12, 292, 1)),
            ("nvidia/capabilities/gpu0/mig/gi1/ci0/access", &text(13, 292, 1)),
            ("nvidia/capabilities/gpu1/mig/gi1/access", &text(147, 292, 0)),
            ("nvidia-nvlink/capabilities/fabric-mgmt", &text(0, 256, 1)),
        ]);
        let (nodes, wrong) = made(&root);
        let node = |minor: u32, mode| (node_name(minor), 241, minor, mode);
        assert_eq!(
            nodes,
            [node(4323, 0o400), node(12, 0o444), node(13, 0o444), node(1, 0o400), node(2, 0o444), node(0, 0o400),],
            "and none for the node that another program manages"
        );
        assert_eq!(wrong, [] as [String; 0]);
    }

    #[test]
    fn missing_tree_and_empty_files_are_no_error() {
        let (dir, root) = tree(&[]);
        assert_eq!(made(&root), (vec![], vec![]));
        // With nv_cap_enable_devfs=0 processes open the `/proc` files themselves, and the device is
        // not registered.
        write(&dir, "proc/devices", "Character devices:\n195 nvidia\n");
        write(&dir, "proc/driver/nvidia/capabilities/mig/config", "");
        assert_eq!(made(&root), (vec![], vec![]));
        write(&dir, "proc/driver/nvidia/capabilities/mig/monitor", &text(2, 292, 1));
        let (nodes, wrong) = made(&root);
        assert!(nodes.is_empty() && wrong.len() == 1 && wrong[0].contains("named nvidia-caps"), "{wrong:?}");
    }

    #[test]
    fn invalid_file_is_reported_and_others_are_used() {
        for (bad, part) in [
            ("DeviceFileMode: 256\nDeviceFileModify: 1\n", "no line 'DeviceFileMinor'"),
            ("DeviceFileMinor: 3\nDeviceFileModify: 1\n", "no line 'DeviceFileMode'"),
            ("DeviceFileMinor: 3\nDeviceFileMode: 256\n", "no line 'DeviceFileModify'"),
            ("DeviceFileMinor: -1\nDeviceFileMode: 256\nDeviceFileModify: 1\n", "DeviceFileMinor is \"-1\""),
            ("DeviceFileMinor: 3\nDeviceFileMode: rw\nDeviceFileModify: 1\n", "DeviceFileMode is \"rw\""),
            ("DeviceFileMinor: 3\nDeviceFileMode: 2541\nDeviceFileModify: 1\n", "more than permissions"),
            ("DeviceFileMinor: 1048576\nDeviceFileMode: 256\nDeviceFileModify: 1\n", "above 1048575"),
            ("DeviceFileMinor: 2\nDeviceFileMode: 256\nDeviceFileModify: 1\n", "capabilities/mig/config"),
            ("\u{1}\u{2}", "no line"),
        ] {
            let (_directory, root) =
                tree(&[("nvidia/capabilities/mig/config", &text(2, 292, 1)), ("nvidia/capabilities/mig/monitor", bad)]);
            let (nodes, wrong) = made(&root);
            assert_eq!(nodes, [(node_name(2), 241, 2, 0o444)], "{bad:?}");
            assert!(wrong.len() == 1 && wrong[0].contains("capabilities/mig/monitor"), "{wrong:?}");
            assert!(wrong[0].contains(part), "{wrong:?}");
        }
    }

    #[test]
    fn unexpected_tree_is_reported_and_not_followed() {
        let (dir, root) = tree(&[
            ("nvidia/capabilities/1/2/3/4/5/6/7/access", &text(9, 292, 1)),
            ("nvidia/capabilities/mig/monitor", &text(2, 292, 1)),
        ]);
        let capabilities = dir.path().join("proc/driver/nvidia/capabilities");
        std::os::unix::fs::symlink(&capabilities, capabilities.join("again")).unwrap();
        fs::write(capabilities.join("binary"), [0xff, 0xfe]).unwrap();
        let (nodes, wrong) = made(&root);
        assert_eq!(nodes, [(node_name(2), 241, 2, 0o444)]);
        assert_eq!(wrong.len(), 3, "{wrong:?}");
        for part in ["1/2/3/4/5/6", "again: it is neither", "binary"] {
            assert!(wrong.iter().any(|wrong| wrong.contains(part)), "{part}: {wrong:?}");
        }
    }

    #[test]
    fn mig_instance_has_both_nodes() {
        let gpu = "nvidia/capabilities/gpu3/mig";
        let (_directory, root) = tree(&[
            (&format!("{gpu}/gi10/access"), &text(30, 292, 1)),
            (&format!("{gpu}/gi10/ci0/access"), &text(31, 292, 1)),
            (&format!("{gpu}/gi2/access"), &text(20, 292, 0)),
            (&format!("{gpu}/gi2/ci1/access"), &text(22, 292, 1)),
            (&format!("{gpu}/gi2/ci0/access"), &text(21, 292, 1)),
            (&format!("{gpu}/gi4/access"), &text(40, 292, 1)),
            (&format!("{gpu}/gi5/access"), "rubbish"),
            (&format!("{gpu}/gi5/ci0/access"), &text(51, 292, 1)),
            (&format!("{gpu}/gi07/access"), &text(70, 292, 1)),
            (&format!("{gpu}/gi07/ci0/access"), &text(71, 292, 1)),
        ]);
        let found: Vec<_> = instances(&root, 3)
            .into_iter()
            .map(|instance| (instance.gpu, instance.compute, instance.nodes.map(|node| node.path)))
            .collect();
        let nodes = |gpu: u32, compute: u32| [gpu, compute].map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}"));
        assert_eq!(found, [(2, 0, nodes(20, 21)), (2, 1, nodes(20, 22)), (10, 0, nodes(30, 31))]);
        assert_eq!(instances(&root, 0), []);
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_a_capability_or_an_error(
            text in "((DeviceFile(Minor|Mode|Modify)|\\PC{0,9}): ?(-?[0-9]{0,12}|\\PC{0,9})\n?){0,5}"
        ) {
            if let Ok(Some(capability)) = parse(&text) {
                prop_assert!(capability.minor <= MAX_MINOR && capability.mode <= 0o777);
            }
        }

        #[test]
        fn capability_file_of_the_driver_is_parsed(minor in 0..=MAX_MINOR, mode in 0..=0o777_u32, modify: bool) {
            let read = parse(&text(minor, mode, u32::from(modify)));
            prop_assert_eq!(read, Ok(Some(Capability { minor, mode, modify })));
        }
    }
}
