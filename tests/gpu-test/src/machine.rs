//! The machine's driver and GPUs, and the test's requirements.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;

use anyhow::bail;
use firstlight_init::cdi::ReadyGpu;
use firstlight_init::root::Root;
use firstlight_init::{driver_files, nodes};
use firstlight_pci::{Address, Kind};

/// A machine with a driver.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    /// The driver's version.
    pub(crate) driver: String,
    /// The GPUs with a device node, in PCI order.
    pub(crate) gpus: Vec<ReadyGpu>,
    /// CPU count and model.
    pub(crate) processor: String,
}

/// Inspects the machine.
///
/// # Errors
/// A requirement is missing; the message has the next step.
pub(crate) fn inspect(root: &Root) -> anyhow::Result<Machine> {
    let file = root.path(driver_files::VERSION_FILE);
    if !file.exists() {
        bail!("no NVIDIA driver: {} does not exist; load the driver and run again", driver_files::VERSION_FILE);
    }
    let Some(driver) = driver_files::version(root) else {
        bail!("no version in {}: {:?}", driver_files::VERSION_FILE, fs::read_to_string(&file).unwrap_or_default());
    };
    if !rustix::process::geteuid().is_root() {
        bail!("containers need root: run as root, or with sudo");
    }
    if !fs::read_to_string(root.path("/proc/filesystems")).is_ok_and(|text| text.contains("cgroup2")) {
        bail!("this kernel has no cgroup v2, which the agent needs for device access control");
    }
    let gpus = gpus(root)?;
    if gpus.is_empty() {
        bail!(
            "no GPU with a node in /dev: is one present ({}/gpus), and was it passed to this container or machine?",
            "/proc/driver/nvidia"
        );
    }
    Ok(Machine { driver, gpus, processor: processor(root) })
}

/// Returns the driver's GPUs with a device node. In a container with some of a machine's GPUs, the others have no
/// node.
pub(crate) fn gpus(root: &Root) -> anyhow::Result<Vec<ReadyGpu>> {
    let functions = firstlight_pci::scan(&root.path("/sys"))?;
    let mut gpus = Vec::new();
    for function in functions.iter().filter(|function| function.kind() == Some(Kind::Gpu)) {
        let Ok(minor) = nodes::minor(root, function.address) else { continue };
        let node: PathBuf = root.path(&format!("/dev/nvidia{minor}"));
        if fs::metadata(node).is_ok_and(|found| found.file_type().is_char_device()) {
            gpus.push(ReadyGpu { index: u32::try_from(gpus.len())?, pci: function.address, minor });
        }
    }
    Ok(gpus)
}

/// Whether CUDA's PCI bus id means this address; it may be in upper case.
pub(crate) fn same_gpu(text: &str, pci: Address) -> bool {
    text.to_ascii_lowercase().parse() == Ok(pci)
}

fn processor(root: &Root) -> String {
    let text = fs::read_to_string(root.path("/proc/cpuinfo")).unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown CPU");
    let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    format!("{count} x {}", model.trim_start_matches([' ', '\t', ':']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_pci_bus_ids_are_compared_without_case() {
        let pci = "0000:0a:00.0".parse().unwrap();
        assert!(same_gpu("0000:0A:00.0", pci) && !same_gpu("0000:0B:00.0", pci) && !same_gpu("", pci));
    }

    #[test]
    fn missing_driver_is_reported() {
        let root = tempfile::tempdir().unwrap();
        let error = inspect(&Root::at(root.path())).unwrap_err().to_string();
        assert_eq!(
            error,
            "no NVIDIA driver: /proc/driver/nvidia/version does not exist; load the driver and run again"
        );
        let file = root.path().join("proc/driver/nvidia/version");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "tea").unwrap();
        let error = inspect(&Root::at(root.path())).unwrap_err().to_string();
        assert!(error.contains("no version in") && error.contains("tea"), "{error}");
    }
}
