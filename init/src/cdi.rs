//! Writes the CDI specifications, which define what a container with a GPU gets.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use firstlight_cdi::{ContainerEdits, Device, DeviceNode, GPU_KIND, SPEC_DIR, SPEC_VERSION, Spec};
use firstlight_pci::Address;
use rustix::fs::{major, minor};

use crate::driver_files::{self, DriverSpec};
use crate::nodes;
use crate::root::Root;

/// Device nodes of every container with a GPU, if the driver created them.
const COMMON: &[&str] = &["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];

/// The file with the GPUs.
const FILE: &str = "nvidia.json";

/// The file with the driver's libraries and programs.
const DRIVER_FILE: &str = "nvidia-driver.json";

/// A GPU that is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyGpu {
    /// Position in PCI order.
    pub index: u32,
    /// The PCI address.
    pub pci: Address,
    /// Minor number of its node.
    pub minor: u32,
}

/// Why a specification could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {path}: {source}")]
pub struct CdiError {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

fn node(root: &Root, path: &str) -> Option<DeviceNode> {
    let found = fs::symlink_metadata(root.path(path)).ok().filter(|found| found.file_type().is_char_device());
    let device = found?.rdev();
    Some(numbered(path.to_owned(), major(device), minor(device)))
}

fn numbered(path: String, major: u32, minor: u32) -> DeviceNode {
    DeviceNode {
        path,
        node_type: Some("c".to_owned()),
        major: Some(i64::from(major)),
        minor: Some(i64::from(minor)),
        permissions: Some("rw".to_owned()),
        ..DeviceNode::default()
    }
}

/// The nodes of a GPU and of its MIG instances.
#[derive(Debug)]
struct Nodes {
    own: DeviceNode,
    instances: Vec<Vec<DeviceNode>>,
}

impl Nodes {
    fn of(root: &Root, gpu: &ReadyGpu) -> Self {
        let path = format!("/dev/nvidia{}", gpu.minor);
        // If the node cannot be inspected, the device numbers come from the driver; without them the
        // container runtime has to inspect the node.
        let own = node(root, &path).unwrap_or_else(|| match nodes::driver_major(root) {
            Some(major) => numbered(path, major, gpu.minor),
            None => DeviceNode { path, ..DeviceNode::default() },
        });
        let instances = nodes::instances(root, gpu.minor).into_iter().map(|instance| {
            let nodes = instance.nodes.into_iter().map(capability);
            std::iter::once(own.clone()).chain(nodes).collect()
        });
        Self { instances: instances.collect(), own }
    }

    /// Returns the nodes of the GPU with all of its instances. In MIG mode the GPU cannot be used
    /// without them, and a container that is granted the whole GPU may choose one.
    fn whole(&self) -> Vec<DeviceNode> {
        let mut all = vec![self.own.clone()];
        for node in self.instances.iter().flatten() {
            if !all.contains(node) {
                all.push(node.clone());
            }
        }
        all
    }
}

/// Returns the device of a capability. A process that can open the node for reading has the
/// capability; nothing is written to it.
fn capability(node: nodes::CapabilityNode) -> DeviceNode {
    let permissions = Some("r".to_owned());
    DeviceNode { file_mode: Some(node.mode), permissions, ..numbered(node.path, node.major, node.minor) }
}

/// A GPU's data from the driver's files.
#[derive(Debug)]
struct DriverData {
    minor: u32,
    nodes: Nodes,
    uuid: Option<String>,
}

impl DriverData {
    fn of(root: &Root, gpu: &ReadyGpu) -> Self {
        Self { minor: gpu.minor, nodes: Nodes::of(root, gpu), uuid: nodes::uuid(root, gpu.pci) }
    }
}

/// The driver's data of each GPU, read once: the specification is rewritten with all ready GPUs
/// whenever another becomes ready.
#[derive(Debug, Default)]
pub struct Catalogue {
    data: BTreeMap<Address, DriverData>,
}

impl Catalogue {
    /// Removes the cached data of a GPU that was attached, removed, or whose MIG instances changed.
    pub fn forget(&mut self, pci: Address) {
        self.data.remove(&pci);
    }

    /// Writes the specification of these GPUs into the CDI directory.
    ///
    /// # Errors
    /// The directory or the file could not be written.
    pub fn publish(&mut self, root: &Root, gpus: &[ReadyGpu]) -> Result<PathBuf, CdiError> {
        let path = dir(root)?.join(FILE);
        write_spec(&path, &self.spec(root, gpus))?;
        Ok(path)
    }

    /// Returns the specification of these GPUs. A GPU's device names are its index, its PCI address
    /// and its UUID; a MIG instance is named by the GPU's index and its own, counted as by NVML
    /// (`0:1`); `all` is all GPUs. The driver's files do not contain the UUIDs of instances.
    pub fn spec(&mut self, root: &Root, gpus: &[ReadyGpu]) -> Spec {
        for gpu in gpus {
            if self.data.get(&gpu.pci).is_none_or(|data| data.minor != gpu.minor) {
                self.data.insert(gpu.pci, DriverData::of(root, gpu));
            }
        }
        let rows: Vec<(&ReadyGpu, &DriverData)> =
            gpus.iter().filter_map(|gpu| Some((gpu, self.data.get(&gpu.pci)?))).collect();
        let mut devices: Vec<Device> = Vec::with_capacity(gpus.len() * 3 + 1);
        devices.extend(rows.iter().map(|(gpu, data)| device(gpu.index.to_string(), data.nodes.whole())));
        devices.extend(rows.iter().map(|(gpu, data)| device(gpu.pci.to_string(), data.nodes.whole())));
        for (_, data) in &rows {
            // Two devices with the same name would make the whole file invalid.
            let uuid = data.uuid.clone().filter(|uuid| devices.iter().all(|known| known.name != *uuid));
            devices.extend(uuid.map(|uuid| device(uuid, data.nodes.whole())));
        }
        for (gpu, data) in &rows {
            let named = data.nodes.instances.iter().enumerate();
            devices.extend(named.map(|(at, nodes)| device(format!("{}:{at}", gpu.index), nodes.clone())));
        }
        devices.push(device("all".to_owned(), rows.iter().flat_map(|(_, data)| data.nodes.whole()).collect()));
        document(root, devices)
    }
}

fn device(name: String, device_nodes: Vec<DeviceNode>) -> Device {
    Device { name, container_edits: ContainerEdits { device_nodes, ..ContainerEdits::default() } }
}

fn document(root: &Root, devices: Vec<Device>) -> Spec {
    Spec {
        cdi_version: SPEC_VERSION.to_owned(),
        kind: GPU_KIND.to_owned(),
        devices,
        container_edits: ContainerEdits {
            // Other tools in the image that evaluate this variable must not add devices.
            env: vec!["NVIDIA_VISIBLE_DEVICES=void".to_owned()],
            device_nodes: COMMON.iter().filter_map(|path| node(root, path)).collect(),
            ..ContainerEdits::default()
        },
    }
}

/// Writes a file atomically: a reader sees the old content or the new content.
///
/// # Errors
/// The directory or the file could not be written.
pub fn write_whole(path: &Path, text: &[u8]) -> Result<(), CdiError> {
    let failed = |what, path: &Path| {
        let path = path.to_owned();
        move |source| CdiError { what, path, source }
    };
    let mut new = path.to_owned().into_os_string();
    new.push(".new");
    let new = PathBuf::from(new);
    let written = File::create(&new).and_then(|mut file| {
        file.write_all(text)?;
        // Written to disk before the rename, so that a crash does not leave a truncated file.
        file.sync_all()
    });
    written.map_err(failed("write", &new))?;
    fs::rename(&new, path).map_err(failed("replace", path))
}

/// Writes the specification of the driver's files into the CDI directory. It does not change while
/// the driver is loaded; call it before the first GPU is published. An image without driver files
/// has no such specification. Returns the file of the image that it was read from, if there is one.
///
/// # Errors
/// The directory or the file could not be written.
pub fn publish_driver(root: &Root) -> Result<Option<String>, CdiError> {
    let path = root.path(SPEC_DIR).join(DRIVER_FILE);
    let (text, image) = match driver_files::driver_spec(root).map_err(encode(&path))? {
        DriverSpec::None => return Ok(None),
        DriverSpec::Generated(text) => (text, None),
        DriverSpec::FromImage { path, text } => (text, Some(path)),
    };
    dir(root)?;
    write_whole(&path, &text)?;
    Ok(image)
}

/// Calls [`publish_driver`] unless the specification exists.
///
/// # Errors
/// As [`publish_driver`].
pub fn ensure_driver(root: &Root) -> Result<(), CdiError> {
    if root.path(SPEC_DIR).join(DRIVER_FILE).exists() { Ok(()) } else { publish_driver(root).map(drop) }
}

/// Calls [`Catalogue::publish`] with an empty cache.
///
/// # Errors
/// The directory or the file could not be written.
pub fn publish(root: &Root, gpus: &[ReadyGpu]) -> Result<PathBuf, CdiError> {
    Catalogue::default().publish(root, gpus)
}

fn dir(root: &Root) -> Result<PathBuf, CdiError> {
    let dir = root.path(SPEC_DIR);
    match fs::create_dir_all(&dir) {
        Ok(()) => Ok(dir),
        Err(source) => Err(CdiError { what: "make", path: dir, source }),
    }
}

fn write_spec(path: &Path, spec: &Spec) -> Result<(), CdiError> {
    write_whole(path, &serde_json::to_vec(spec).map_err(encode(path))?)
}

fn encode(path: &Path) -> impl FnOnce(serde_json::Error) -> CdiError + use<> {
    let path = path.to_owned();
    |source| CdiError { what: "encode", path, source: source.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus() -> [ReadyGpu; 2] {
        let gpu = |index, pci: &str, minor| ReadyGpu { index, pci: pci.parse().unwrap(), minor };
        // The driver's minor numbers may be in another order than PCI addresses.
        [gpu(0, "0000:01:00.0", 1), gpu(2, "0000:03:00.0", 0)]
    }

    #[test]
    fn gpu_devices_are_named_by_index_address_and_uuid() {
        let dir = tempfile::tempdir().unwrap();
        let spec = Catalogue::default().spec(&Root::at(dir.path()), &gpus());
        let nodes = |name: &str| {
            let device = spec.device(name).unwrap();
            device.container_edits.device_nodes.iter().map(|node| node.path.clone()).collect::<Vec<_>>()
        };
        assert_eq!(nodes("0"), ["/dev/nvidia1"]);
        assert_eq!(nodes("0000:01:00.0"), ["/dev/nvidia1"]);
        assert_eq!(nodes("2"), ["/dev/nvidia0"]);
        assert_eq!(nodes("all"), ["/dev/nvidia1", "/dev/nvidia0"]);
        assert_eq!(spec.devices.len(), 5);
        assert_eq!(spec.container_edits.env, ["NVIDIA_VISIBLE_DEVICES=void"]);
        assert_eq!(spec.container_edits.device_nodes, [], "nodes that do not exist are not promised");
    }

    #[test]
    fn mig_instance_is_named_by_two_indices_and_included_in_its_gpu() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let plant = |path: &str, text: &str| {
            let path = root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        plant("/proc/devices", "Character devices:\n195 nvidia\n241 nvidia-caps\n");
        for (path, minor) in [("gi1", 10), ("gi1/ci0", 11), ("gi1/ci1", 12), ("gi2", 20), ("gi2/ci0", 21)] {
            let text = format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
            // The directory has the driver's minor number: this is the GPU with index 0.
            plant(&format!("/proc/driver/nvidia/capabilities/gpu1/mig/{path}/access"), &text);
        }
        let spec = Catalogue::default().spec(&root, &gpus());
        let nodes = |name: &str| {
            let device = spec.device(name).unwrap();
            let paths = device.container_edits.device_nodes.iter().map(|node| node.path.rsplit('/').next().unwrap());
            paths.map(|name| name.trim_start_matches("nvidia-").to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(nodes("0:0"), ["nvidia1", "cap10", "cap11"]);
        assert_eq!(nodes("0:1"), ["nvidia1", "cap10", "cap12"]);
        assert_eq!(nodes("0:2"), ["nvidia1", "cap20", "cap21"]);
        assert!(spec.device("0:3").is_none() && spec.device("2:0").is_none());
        let whole = ["nvidia1", "cap10", "cap11", "cap12", "cap20", "cap21"];
        assert_eq!(nodes("0"), whole);
        assert_eq!(nodes("0000:01:00.0"), whole);
        assert_eq!(nodes("2"), ["nvidia0"]);
        assert_eq!(nodes("all"), [&whole[..], &["nvidia0"]].concat());
        let node = &spec.device("0:0").unwrap().container_edits.device_nodes[2];
        assert_eq!((node.major, node.minor, node.file_mode), (Some(241), Some(11), Some(0o444)));
        assert_eq!(node.permissions.as_deref(), Some("r"), "a capability is never written");
    }

    #[test]
    fn file_is_replaced_atomically_and_is_readable() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        publish(&root, &gpus()[..1]).unwrap();
        let path = publish(&root, &gpus()).unwrap();
        assert!(path.ends_with("var/run/cdi/nvidia.json"));
        let read = Spec::from_json(&fs::read_to_string(&path).unwrap(), &path).unwrap();
        assert_eq!(read, Catalogue::default().spec(&root, &gpus()));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn uuid_is_a_device_name_and_driver_files_are_a_second_specification() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let plant = |path: &str, text: &str| {
            let path = root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let uuid = "GPU-12345678-9abc-def0-1234-56789abcdef0";
        for gpu in gpus() {
            let information = format!("/proc/driver/nvidia/gpus/{}/information", gpu.pci);
            plant(&information, &format!("GPU UUID: \t {uuid}\n"));
        }
        plant(driver_files::VERSION_FILE, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1.2  x\n");
        plant("/usr/bin/nvidia-smi", "");
        ensure_driver(&root).unwrap();
        let path = publish(&root, &gpus()).unwrap();
        let spec = Spec::from_json(&fs::read_to_string(&path).unwrap(), &path).unwrap();
        let nodes = &spec.device(uuid).unwrap().container_edits.device_nodes;
        assert!(nodes.len() == 1 && nodes[0].path == "/dev/nvidia1", "the first of two counts: {nodes:?}");
        let path = root.path("/var/run/cdi/nvidia-driver.json");
        let driver = Spec::from_json(&fs::read_to_string(&path).unwrap(), &path).unwrap();
        assert_eq!(driver.device("utility").unwrap().container_edits.mounts[0].container_path, "/usr/bin/nvidia-smi");
    }

    #[test]
    fn gpu_data_is_read_once_until_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let [first, second] = gpus();
        let say = |uuid: &str| {
            let path = root.path(&format!("/proc/driver/nvidia/gpus/{}/information", first.pci));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("GPU UUID: \t {uuid}\n")).unwrap();
        };
        let (old, new) = ("GPU-12345678-9abc-def0-1234-56789abcdef0", "GPU-00000000-9abc-def0-1234-56789abcdef0");
        let mut catalogue = Catalogue::default();
        say(old);
        assert!(catalogue.spec(&root, &[first]).device(old).is_some());
        say(new);
        let spec = catalogue.spec(&root, &[first, second]);
        assert!(spec.device(old).is_some() && spec.device(new).is_none() && spec.device("2").is_some());
        // The index is the current one, not the cached one.
        let moved = ReadyGpu { index: 7, ..first };
        assert!(catalogue.spec(&root, &[moved]).device("7").is_some());
        let other_node = ReadyGpu { minor: 5, ..first };
        assert!(catalogue.spec(&root, &[other_node]).device(new).is_some(), "with another node it is another GPU");
        say(old);
        catalogue.forget(first.pci);
        assert!(catalogue.spec(&root, &[first]).device(old).is_some());
    }

    #[test]
    fn existing_node_has_its_device_numbers() {
        let null = node(&Root::real(), "/dev/null").unwrap();
        assert_eq!((null.major, null.minor, null.node_type.as_deref()), (Some(1), Some(3), Some("c")));
        assert_eq!(node(&Root::real(), "/dev"), None);
    }

    #[test]
    fn directory_that_cannot_be_created_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("var"), "").unwrap();
        let error = publish(&Root::at(dir.path()), &gpus()).unwrap_err().to_string();
        assert!(error.contains("cannot make") && error.contains("var/run/cdi"), "{error}");
    }
}
