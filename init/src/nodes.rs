//! Device nodes of the NVIDIA driver, made from what its `/proc` files say.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use firstlight_pci::Address;
use rustix::fs::{CWD, FileType, Mode, chmod, makedev, mknodat};

use crate::root::Root;

/// Minor of `/dev/nvidiactl`.
const CONTROL_MINOR: u32 = 255;

/// The mode of nodes when the driver does not say: its own default.
const DEFAULT_MODE: u32 = 0o666;

/// Why nodes could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    /// The driver's character device is not registered.
    #[error("/proc/devices lists no character device named {0}: its module did not start; see the kernel log")]
    NoMajor(&'static str),
    /// A file of the driver could not be read or holds something else.
    #[error("cannot read {path}: {reason}")]
    Driver {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A node could not be made.
    #[error("cannot make {path}: {source}")]
    Node {
        /// The node.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// A character device's major number, by the first of `names` that is registered.
fn major(devices: &str, names: &[&str]) -> Option<u32> {
    let characters = devices.split("Block devices:").next().unwrap_or_default();
    names.iter().find_map(|name| {
        characters.lines().find_map(|line| {
            let (number, device) = line.trim().split_once(' ')?;
            if device.trim() == *name { number.parse().ok() } else { None }
        })
    })
}

/// The value of `Name: value` in a driver file.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// The mode that the driver wants its nodes to have.
fn node_mode(root: &Root) -> u32 {
    let text = fs::read_to_string(root.path("/proc/driver/nvidia/params")).unwrap_or_default();
    let value = field(&text, "DeviceFileMode").and_then(|value| value.parse::<u32>().ok());
    value.map_or(DEFAULT_MODE, |mode| mode & 0o777)
}

/// The minor number that the driver gave to a GPU.
///
/// # Errors
/// The driver does not drive this GPU, or its file cannot be understood.
pub fn minor(root: &Root, pci: Address) -> Result<u32, NodesError> {
    let path = root.path(&format!("/proc/driver/nvidia/gpus/{pci}/information"));
    let wrong = |reason: String| NodesError::Driver { path: path.clone(), reason };
    let text = fs::read_to_string(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => wrong("it is not there: the driver did not take this GPU".to_owned()),
        _ => wrong(error.to_string()),
    })?;
    let value = field(&text, "Device Minor").ok_or_else(|| wrong("it has no line 'Device Minor'".to_owned()))?;
    value.parse().map_err(|_| wrong(format!("its device minor is {value:?}")))
}

/// The GPU's own name, which the driver knows once the GPU has been attached.
#[must_use]
pub fn uuid(root: &Root, pci: Address) -> Option<String> {
    let text = fs::read_to_string(root.path(&format!("/proc/driver/nvidia/gpus/{pci}/information"))).ok()?;
    let uuid = field(&text, "GPU UUID")?;
    let rest = uuid.strip_prefix("GPU-")?;
    let fits = rest.len() == 36 && rest.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    fits.then(|| uuid.to_owned())
}

/// Makes nodes; a test puts something else in its place.
pub trait MakeNode {
    /// Makes one character device, or leaves it if it is already right.
    ///
    /// # Errors
    /// What the kernel said.
    fn make(&mut self, path: &Path, major: u32, minor: u32, mode: u32) -> io::Result<()>;
}

/// Makes them for real.
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
            Err(_) => mknodat(CWD, path, FileType::CharacterDevice, Mode::from_raw_mode(mode), device)?,
        }
        // mknod obeys the umask; the driver's wish does not.
        Ok(chmod(path, Mode::from_raw_mode(mode))?)
    }
}

/// A GPU's minor number, or why it has none.
pub type Minor = (Address, Result<u32, String>);

/// Makes the nodes of the driver and of all `gpus`.
///
/// # Errors
/// The driver itself is not there, or a node of it could not be made. What is
/// wrong with one GPU is in that GPU's [`Minor`].
pub fn make(root: &Root, gpus: &[Address], nodes: &mut impl MakeNode) -> Result<Vec<Minor>, NodesError> {
    let path = root.path("/proc/devices");
    let devices = fs::read_to_string(&path).map_err(|error| NodesError::Driver { path, reason: error.to_string() })?;
    let mode = node_mode(root);
    let mut make = |name: &str, major, minor| {
        let path = root.path("/dev").join(name);
        nodes.make(&path, major, minor, mode).map_err(|source| NodesError::Node { path, source })
    };
    let driver = major(&devices, &["nvidia", "nvidia-frontend"]).ok_or(NodesError::NoMajor("nvidia"))?;
    make("nvidiactl", driver, CONTROL_MINOR)?;
    // Without it GPUs attach, but CUDA does not start: the module's own unit says so.
    if let Some(uvm) = major(&devices, &["nvidia-uvm"]) {
        make("nvidia-uvm", uvm, 0)?;
        make("nvidia-uvm-tools", uvm, 1)?;
    }
    let mut minors = Vec::with_capacity(gpus.len());
    for gpu in gpus {
        let made = minor(root, *gpu).and_then(|minor| make(&format!("nvidia{minor}"), driver, minor).map(|()| minor));
        minors.push((*gpu, made.map_err(|error| error.to_string())));
    }
    Ok(minors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DEVICES: &str =
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n238 nvidia-uvm\n\nBlock devices:\n  7 loop\n";

    #[derive(Default)]
    struct Written(Vec<(String, u32, u32, u32)>);

    impl MakeNode for Written {
        fn make(&mut self, path: &Path, major: u32, minor: u32, mode: u32) -> io::Result<()> {
            self.0.push((path.file_name().unwrap().to_string_lossy().into_owned(), major, minor, mode));
            Ok(())
        }
    }

    fn write(folder: &tempfile::TempDir, path: &str, text: &str) {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn addresses(texts: &[&str]) -> Vec<Address> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn nodes_are_what_the_driver_says() {
        let folder = tempfile::tempdir().unwrap();
        write(&folder, "proc/devices", DEVICES);
        write(&folder, "proc/driver/nvidia/params", "ResmanDebugLevel: 1\nDeviceFileMode: 432\n");
        let info = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\nBus Location: \t 0000:02:00.0\nDevice Minor: \t 1\n";
        write(&folder, "proc/driver/nvidia/gpus/0000:02:00.0/information", info);
        let mut written = Written::default();
        let gpus = addresses(&["0000:01:00.0", "0000:02:00.0"]);
        let minors = make(&Root::at(folder.path()), &gpus, &mut written).unwrap();
        assert_eq!(
            written.0,
            [
                ("nvidiactl".to_owned(), 195, 255, 0o660),
                ("nvidia-uvm".to_owned(), 238, 0, 0o660),
                ("nvidia-uvm-tools".to_owned(), 238, 1, 0o660),
                ("nvidia1".to_owned(), 195, 1, 0o660),
            ]
        );
        assert!(minors[0].1.as_ref().unwrap_err().contains("did not take this GPU"));
        assert_eq!(minors[1].1, Ok(1));
    }

    #[test]
    fn a_uuid_counts_once_it_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let (root, gpu) = (Root::at(folder.path()), addresses(&["0000:01:00.0"])[0]);
        assert_eq!(uuid(&root, gpu), None);
        for (text, known) in [
            ("GPU-12345678-9abc-def0-1234-56789abcdef0", true),
            ("GPU-????????-????-????-????-????????????", false),
            ("GPU-/../", false),
        ] {
            write(&folder, "proc/driver/nvidia/gpus/0000:01:00.0/information", &format!("GPU UUID: \t {text}\n"));
            assert_eq!(uuid(&root, gpu), known.then(|| text.to_owned()), "{text}");
        }
    }

    #[test]
    fn a_driver_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        write(&folder, "proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia\n");
        let error = make(&Root::at(folder.path()), &[], &mut Written::default()).unwrap_err().to_string();
        assert!(error.contains("no character device named nvidia"), "{error}");
    }

    #[test]
    fn rubbish_in_the_drivers_files_is_quoted() {
        let folder = tempfile::tempdir().unwrap();
        let path = "proc/driver/nvidia/gpus/0000:01:00.0/information";
        let gpu = addresses(&["0000:01:00.0"])[0];
        write(&folder, path, "Device Minor: \t ?\n");
        let error = minor(&Root::at(folder.path()), gpu).unwrap_err().to_string();
        assert!(error.contains("device minor is \"?\""), "{error}");
        write(&folder, path, "Model: x\n");
        assert!(minor(&Root::at(folder.path()), gpu).unwrap_err().to_string().contains("no line"));
        assert_eq!(node_mode(&Root::at(folder.path())), 0o666);
    }

    proptest! {
        #[test]
        fn any_text_is_a_list_or_not(text in "(\\PC|\n){0,200}") {
            let _ = major(&text, &["nvidia"]);
            let _ = field(&text, "Device Minor");
        }
    }
}
