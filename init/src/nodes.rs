//! Creates the device nodes of the NVIDIA driver from the contents of its `/proc` files.

mod capabilities;
mod fabric;

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use firstlight_pci::Address;
use rustix::fs::{CWD, FileType, Mode, chmod, makedev, mknodat};

use crate::root::Root;

pub use capabilities::{CapabilityNode, Instance, instances};

/// The driver's current parameters.
const PARAMS: &str = "/proc/driver/nvidia/params";

/// Minor number of `/dev/nvidiactl`, and of the NVSwitches' control node.
const CONTROL_MINOR: u32 = 255;

/// The mode of nodes if the driver does not publish one: the driver's default.
const DEFAULT_MODE: u32 = 0o666;

/// Why device nodes could not be created.
#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    /// The driver's character device is not registered.
    #[error("/proc/devices lists no character device named {0}: its module did not start; see the kernel log")]
    NoMajor(&'static str),
    /// A `/proc` file of the driver could not be read or parsed.
    #[error("cannot read {path}: {reason}")]
    Driver {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A node could not be created.
    #[error("cannot make {path}: {source}")]
    Node {
        /// The node.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// More IMEX channels are requested than the driver has.
    #[error(
        "firstlight.imex-channels asks for {asked} channels and the driver has {there}: give it as many with \
         firstlight.nvidia.NVreg_ImexChannelCount={asked}"
    )]
    Channels {
        /// Number of requested channels.
        asked: u32,
        /// Number of channels of the driver.
        there: u32,
    },
}

/// Returns a character device's major number: that of the first of `names` that is registered.
fn major(devices: &str, names: &[&str]) -> Option<u32> {
    let characters = devices.split("Block devices:").next().unwrap_or_default();
    names.iter().find_map(|name| {
        characters.lines().find_map(|line| {
            let (number, device) = line.trim().split_once(' ')?;
            if device.trim() == *name { number.parse().ok() } else { None }
        })
    })
}

/// Names under which the driver registers its major number, the name of old versions last.
const DRIVER: &[&str] = &["nvidia", "nvidia-frontend"];

/// Returns the driver's major number, if the driver is loaded.
#[must_use]
pub fn driver_major(root: &Root) -> Option<u32> {
    major(&fs::read_to_string(root.path("/proc/devices")).ok()?, DRIVER)
}

/// Returns the value of a line `Name: value` of a driver file.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// Returns the mode of nodes that a driver file specifies.
fn mode_in(root: &Root, file: &str) -> Result<u32, NodesError> {
    let path = root.path(file);
    let text = fs::read_to_string(&path).unwrap_or_default();
    match field(&text, "DeviceFileMode").map(|value| (value, value.parse::<u32>())) {
        None => Ok(DEFAULT_MODE),
        Some((_, Ok(mode))) => Ok(mode & 0o777),
        Some((value, Err(_))) => {
            Err(NodesError::Driver { path, reason: format!("its DeviceFileMode is {value:?}, which is not a number") })
        }
    }
}

/// Returns the path of the driver's information file of a GPU.
fn information(root: &Root, pci: Address) -> PathBuf {
    root.path(&format!("/proc/driver/nvidia/gpus/{pci}/information"))
}

/// Returns whether the driver has bound a GPU: its information file exists while the GPU is bound.
#[must_use]
pub fn is_taken(root: &Root, pci: Address) -> bool {
    information(root, pci).exists()
}

/// Returns the minor number that the driver assigned to a GPU.
///
/// # Errors
/// The driver has not bound the GPU, or its file cannot be parsed.
pub fn minor(root: &Root, pci: Address) -> Result<u32, NodesError> {
    let path = information(root, pci);
    let wrong = |reason: String| NodesError::Driver { path: path.clone(), reason };
    let text = fs::read_to_string(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => wrong("it does not exist: the driver has not bound this GPU".to_owned()),
        _ => wrong(error.to_string()),
    })?;
    let value = field(&text, "Device Minor").ok_or_else(|| wrong("it has no line 'Device Minor'".to_owned()))?;
    value.parse().map_err(|_| wrong(format!("its device minor is {value:?}")))
}

/// Returns the GPU's UUID, which the driver knows once the GPU has been attached.
#[must_use]
pub fn uuid(root: &Root, pci: Address) -> Option<String> {
    let text = fs::read_to_string(information(root, pci)).ok()?;
    let uuid = field(&text, "GPU UUID")?;
    let rest = uuid.strip_prefix("GPU-")?;
    let fits = rest.len() == 36 && rest.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    fits.then(|| uuid.to_owned())
}

/// Creates device nodes; tests replace it.
pub trait MakeNode {
    /// Creates a character device and its directory; an existing node with the same properties is
    /// kept.
    ///
    /// # Errors
    /// The kernel's error.
    fn make(&mut self, path: &Path, major: u32, minor: u32, mode: u32) -> io::Result<()>;
}

/// Creates nodes by mknod.
#[derive(Debug, Clone, Copy)]
pub struct Mknod;

impl MakeNode for Mknod {
    fn make(&mut self, path: &Path, major: u32, minor: u32, mode: u32) -> io::Result<()> {
        let device = makedev(major, minor);
        match fs::symlink_metadata(path) {
            Ok(old) if old.file_type().is_char_device() && old.rdev() == device => {}
            Ok(_) => {
                fs::remove_file(path)?;
                mknodat(CWD, path, FileType::CharacterDevice, Mode::from_raw_mode(mode), device)?;
            }
            Err(_) => {
                if let Some(dir) = path.parent().filter(|dir| !dir.exists()) {
                    fs::create_dir(dir)?;
                    chmod(dir, Mode::from_raw_mode(0o755))?;
                }
                mknodat(CWD, path, FileType::CharacterDevice, Mode::from_raw_mode(mode), device)?;
            }
        }
        // mknod applies the umask, which must not change the driver's mode.
        Ok(chmod(path, Mode::from_raw_mode(mode))?)
    }
}

/// A GPU's minor number, or the reason why it has none.
pub type Minor = (Address, Result<u32, String>);

/// The result of creating device nodes.
#[derive(Debug)]
pub struct Made {
    /// The minor numbers of the GPUs.
    pub minors: Vec<Minor>,
    /// Errors of nodes that no GPU requires: capabilities, NVSwitches, IMEX channels.
    pub left_out: Vec<NodesError>,
}

/// Creates nodes below a root with the major numbers that the kernel has registered.
struct Maker<'a, N> {
    root: &'a Root,
    devices: String,
    nodes: &'a mut N,
}

impl<'a, N: MakeNode> Maker<'a, N> {
    fn new(root: &'a Root, nodes: &'a mut N) -> Result<Self, NodesError> {
        let path = root.path("/proc/devices");
        match fs::read_to_string(&path) {
            Ok(devices) => Ok(Self { root, devices, nodes }),
            Err(error) => Err(NodesError::Driver { path, reason: error.to_string() }),
        }
    }

    fn major(&self, names: &[&str]) -> Option<u32> {
        major(&self.devices, names)
    }

    fn make(&mut self, name: &str, major: u32, minor: u32, mode: u32) -> Result<(), NodesError> {
        let path = self.root.path("/dev").join(name);
        self.nodes.make(&path, major, minor, mode).map_err(|source| NodesError::Node { path, source })
    }
}

/// Creates the nodes of the driver, of all `gpus`, of the existing capabilities and NVSwitches, and
/// of the first `channels` IMEX channels.
///
/// # Errors
/// The driver is not loaded, or one of its own nodes could not be created. An error of one GPU is
/// in that GPU's [`Minor`].
pub fn make(root: &Root, gpus: &[Address], channels: u32, nodes: &mut impl MakeNode) -> Result<Made, NodesError> {
    let mut maker = Maker::new(root, nodes)?;
    let mode = mode_in(root, PARAMS)?;
    let driver = maker.major(DRIVER).ok_or(NodesError::NoMajor("nvidia"))?;
    maker.make("nvidiactl", driver, CONTROL_MINOR, mode)?;
    // Without nvidia-uvm GPUs can be attached, but CUDA cannot be initialised; the module's own
    // unit reports the error.
    if let Some(uvm) = maker.major(&["nvidia-uvm"]) {
        maker.make("nvidia-uvm", uvm, 0, mode)?;
        maker.make("nvidia-uvm-tools", uvm, 1, mode)?;
    }
    let mut minors = Vec::with_capacity(gpus.len());
    for gpu in gpus {
        let made = minor(root, *gpu)
            .and_then(|minor| maker.make(&format!("nvidia{minor}"), driver, minor, mode).map(|()| minor));
        minors.push((*gpu, made.map_err(|error| error.to_string())));
    }
    let mut left_out = capabilities::make(&mut maker);
    left_out.extend(fabric::make(&mut maker, channels, mode));
    Ok(Made { minors, left_out })
}

/// Creates the nodes of all capabilities again: MIG instances are created and destroyed while the
/// driver runs. Returns the errors.
///
/// # Errors
/// `/proc/devices` cannot be read.
pub fn make_capabilities(root: &Root, nodes: &mut impl MakeNode) -> Result<Vec<NodesError>, NodesError> {
    Ok(capabilities::make(&mut Maker::new(root, nodes)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DEVICES: &str =
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n238 nvidia-uvm\n\nBlock devices:\n  7 loop\n";

    /// Name below `/dev`, major, minor, mode.
    pub(super) type Node = (String, u32, u32, u32);

    #[derive(Default)]
    pub(super) struct Written(pub(super) Vec<Node>);

    impl MakeNode for Written {
        fn make(&mut self, path: &Path, major: u32, minor: u32, mode: u32) -> io::Result<()> {
            let (_, name) = path.to_str().unwrap().split_once("/dev/").unwrap();
            self.0.push((name.to_owned(), major, minor, mode));
            Ok(())
        }
    }

    pub(super) fn write(dir: &tempfile::TempDir, path: &str, text: &str) {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn addresses(texts: &[&str]) -> Vec<Address> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn nodes_have_the_drivers_numbers_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir, "proc/devices", DEVICES);
        write(&dir, "proc/driver/nvidia/params", "ResmanDebugLevel: 1\nDeviceFileMode: 432\n");
        let info = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\nBus Location: \t 0000:02:00.0\nDevice Minor: \t 1\n";
        write(&dir, "proc/driver/nvidia/gpus/0000:02:00.0/information", info);
        let mut written = Written::default();
        let gpus = addresses(&["0000:01:00.0", "0000:02:00.0"]);
        let Made { minors, left_out } = make(&Root::at(dir.path()), &gpus, 1, &mut written).unwrap();
        assert!(left_out.is_empty(), "{left_out:?}");
        assert_eq!(
            written.0,
            [
                ("nvidiactl".to_owned(), 195, 255, 0o660),
                ("nvidia-uvm".to_owned(), 238, 0, 0o660),
                ("nvidia-uvm-tools".to_owned(), 238, 1, 0o660),
                ("nvidia1".to_owned(), 195, 1, 0o660),
            ]
        );
        assert!(minors[0].1.as_ref().unwrap_err().contains("has not bound this GPU"));
        assert_eq!(minors[1].1, Ok(1));
    }

    #[test]
    fn node_is_created_once_with_directory_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nvidia-caps/nvidia-cap1");
        // The device numbers of /dev/null: creating other devices requires root and is not
        // permitted everywhere.
        for _ in 0..2 {
            match Mknod.make(&path, 1, 3, 0o444) {
                Err(error)
                    if error.kind() == io::ErrorKind::PermissionDenied && !rustix::process::geteuid().is_root() => {}
                made => {
                    made.unwrap();
                    let found = fs::symlink_metadata(&path).unwrap();
                    assert_eq!((found.rdev(), found.mode() & 0o7777), (makedev(1, 3), 0o444));
                }
            }
            assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o7777, 0o755);
        }
    }

    #[test]
    fn uuid_is_used_once_known() {
        let dir = tempfile::tempdir().unwrap();
        let (root, gpu) = (Root::at(dir.path()), addresses(&["0000:01:00.0"])[0]);
        assert_eq!(uuid(&root, gpu), None);
        for (text, known) in [
            ("GPU-12345678-9abc-def0-1234-56789abcdef0", true),
            ("GPU-????????-????-????-????-????????????", false),
            ("GPU-/../", false),
        ] {
            write(&dir, "proc/driver/nvidia/gpus/0000:01:00.0/information", &format!("GPU UUID: \t {text}\n"));
            assert_eq!(uuid(&root, gpu), known.then(|| text.to_owned()), "{text}");
        }
    }

    #[test]
    fn missing_driver_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir, "proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia\n");
        let error = make(&Root::at(dir.path()), &[], 1, &mut Written::default()).unwrap_err().to_string();
        assert!(error.contains("no character device named nvidia"), "{error}");
    }

    #[test]
    fn invalid_driver_file_is_quoted() {
        let dir = tempfile::tempdir().unwrap();
        let path = "proc/driver/nvidia/gpus/0000:01:00.0/information";
        let gpu = addresses(&["0000:01:00.0"])[0];
        write(&dir, path, "Device Minor: \t ?\n");
        let error = minor(&Root::at(dir.path()), gpu).unwrap_err().to_string();
        assert!(error.contains("device minor is \"?\""), "{error}");
        write(&dir, path, "Model: x\n");
        assert!(minor(&Root::at(dir.path()), gpu).unwrap_err().to_string().contains("no line"));
        assert_eq!(mode_in(&Root::at(dir.path()), PARAMS).unwrap(), 0o666);
        write(&dir, "proc/driver/nvidia/params", "DeviceFileMode: 0666x\n");
        let error = mode_in(&Root::at(dir.path()), PARAMS).unwrap_err().to_string();
        assert!(error.contains("driver/nvidia/params") && error.contains("\"0666x\""), "{error}");
    }

    proptest! {
        #[test]
        fn arbitrary_driver_files_do_not_panic(text in "(\\PC|\n){0,200}") {
            let _ = major(&text, &["nvidia"]);
            let _ = field(&text, "Device Minor");
        }
    }
}
