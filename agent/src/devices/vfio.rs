//! Binds PCI functions to vfio-pci for programs in the container.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_pci::{Address, Function};

use super::apply::Node;
use crate::background;
use crate::error::{Error, Result};
use crate::hotplug::Hotplug;
use crate::paths::Paths;

/// The driver that exposes a function to user space.
const DRIVER: &str = "vfio-pci";

/// A bridge, by base class and subclass: its driver does not make an IOMMU group unviable.
const BRIDGE: u32 = 0x0604;

/// Binds the functions to vfio-pci and waits for their nodes: the group's `/dev/vfio/N`, which
/// replaces the host's `listed` in the container, and `/dev/vfio/devices/vfioN` of each if the
/// kernel has them.
///
/// # Errors
/// The functions are in several groups or in none, another function of the group has a host driver,
/// or the kernel does not expose the nodes.
pub(super) async fn bind_group(
    hotplug: &Hotplug,
    paths: &Paths,
    functions: Vec<Address>,
    listed: &str,
) -> Result<Vec<Node>> {
    let Some(first) = functions.first().copied() else {
        return Err(Error::invalid("no option has its PCI path in the guest (HOST-ADDRESS=GUEST-PCI-PATH)"));
    };
    let sysfs = paths.sysfs.clone();
    let all = functions.clone();
    // Run to completion: a function must not stay unbound between two drivers.
    let group = background::to_completion(background::blocking(move || {
        let group = group_of(&sysfs, &all)?;
        for function in &all {
            bind(&sysfs, *function)?;
        }
        check_group_is_viable(&sysfs, &group, &all)?;
        Ok(group)
    }))
    .await?;
    let node = PathBuf::from("/dev/vfio").join(&group);
    let there = paths.root.join("dev/vfio").join(&group);
    hotplug.node(&there, &format!("IOMMU group {group} of {first}")).await?;
    let mut nodes = vec![Node::replacing(&there, listed, &node)?];
    for function in functions {
        let Some(name) = device_of(&paths.sysfs, function) else { continue };
        let path = Path::new("/dev/vfio/devices").join(&name);
        let there = paths.root.join("dev/vfio/devices").join(&name);
        hotplug.node(&there, &format!("VFIO device of {function}")).await?;
        nodes.push(Node::replacing(&there, &path.to_string_lossy(), &path)?);
    }
    Ok(nodes)
}

fn dir(sysfs: &Path, function: Address) -> PathBuf {
    sysfs.join("bus/pci/devices").join(function.to_string())
}

/// Returns the function's own VFIO device, `vfioN`. Without IOMMUFD the kernel lists it too, but
/// without number and node.
fn device_of(sysfs: &Path, function: Address) -> Option<String> {
    let devices = fs::read_dir(dir(sysfs, function).join("vfio-dev")).ok()?;
    let device = devices.flatten().find(|device| device.path().join("dev").exists())?;
    Some(device.file_name().to_string_lossy().into_owned())
}

/// Returns the IOMMU group that all functions are in.
fn group_of(sysfs: &Path, functions: &[Address]) -> Result<String> {
    let mut group: Option<(Address, String)> = None;
    for function in functions {
        let link = fs::read_link(dir(sysfs, *function).join("iommu_group")).ok();
        let name = link.and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
        let name = name.ok_or_else(|| {
            let hint = "the VM needs a virtual IOMMU, and the guest's kernel intel_iommu=on or the equivalent";
            Error::internal(format!("{function} has no IOMMU group: {hint}"))
        })?;
        match &group {
            Some((other, first)) if *first != name => {
                let message = format!(
                    "{other} is in IOMMU group {first} and {function} in {name}; all functions of a device must be in one group"
                );
                return Err(Error::invalid(message));
            }
            Some(_) => {}
            None => group = Some((*function, name)),
        }
    }
    group.map(|(_, name)| name).ok_or_else(|| Error::invalid("no function"))
}

fn driver(dir: &Path) -> Option<String> {
    let target = fs::read_link(dir.join("driver")).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

/// Rebinds a function to vfio-pci. Blocks as long as the current driver does.
fn bind(sysfs: &Path, function: Address) -> Result<()> {
    let dir = dir(sysfs, function);
    if driver(&dir).as_deref() == Some(DRIVER) {
        return Ok(());
    }
    let write = |path: PathBuf, text: &str| {
        fs::write(&path, text).map_err(|error: io::Error| {
            Error::internal(format!("{function}: failed to write {text:?} to {}: {error}", path.display()))
        })
    };
    write(dir.join("driver_override"), DRIVER)?;
    if dir.join("driver").exists() {
        write(dir.join("driver/unbind"), &function.to_string())?;
    }
    write(sysfs.join("bus/pci/drivers_probe"), &function.to_string())?;
    match driver(&dir).as_deref() {
        Some(DRIVER) => Ok(()),
        other => Err(Error::internal(format!(
            "{function} is driven by {} and not by {DRIVER}: the guest's kernel needs the module vfio-pci, loaded at boot",
            other.unwrap_or("nothing")
        ))),
    }
}

/// Checks that no other function in the group has a host driver.
fn check_group_is_viable(sysfs: &Path, group: &str, ours: &[Address]) -> Result<()> {
    let members = fs::read_dir(sysfs.join("kernel/iommu_groups").join(group).join("devices"));
    let members: Vec<Address> = members
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|member| !ours.contains(member))
        .collect();
    let functions = firstlight_pci::scan(sysfs).map_err(|error| Error::internal(error.to_string()))?;
    let member = |function: &&Function| members.contains(&function.address) && function.class >> 8 != BRIDGE;
    let driven = |function: &Function| Some((function.address, firstlight_pci::driver(sysfs, function.address)?));
    let mut driven = functions.iter().filter(member).filter_map(driven);
    match driven.find(|(_, driver)| !driver.starts_with("vfio")) {
        Some((address, driver)) => Err(Error::internal(format!(
            "{address} is in IOMMU group {group} too and bound to {driver}, so the group cannot be opened; give the \
             device a root port of its own"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn address(text: &str) -> Address {
        text.parse().unwrap()
    }

    /// Class part of a `modalias`.
    const ETHERNET: &str = "bc02sc00i00";
    const PORT: &str = "bc06sc04i00";

    /// A function in a group, driven by `driver`.
    fn plant(sysfs: &Path, function: &str, group: &str, driver: Option<&str>, class: &str) {
        let device = sysfs.join("bus/pci/devices").join(function);
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("modalias"), format!("pci:v000015B3d0000101Esv000015B3sd00000001{class}\n")).unwrap();
        let members = sysfs.join("kernel/iommu_groups").join(group).join("devices");
        fs::create_dir_all(&members).unwrap();
        symlink(&device, members.join(function)).unwrap();
        symlink(sysfs.join("kernel/iommu_groups").join(group), device.join("iommu_group")).unwrap();
        if let Some(driver) = driver {
            let driver = sysfs.join("bus/pci/drivers").join(driver);
            fs::create_dir_all(&driver).unwrap();
            symlink(driver, device.join("driver")).unwrap();
        }
    }

    #[test]
    fn functions_in_different_groups_are_rejected() {
        let root = tempfile::tempdir().unwrap();
        plant(root.path(), "0000:01:00.0", "7", None, ETHERNET);
        plant(root.path(), "0000:01:00.1", "7", None, ETHERNET);
        plant(root.path(), "0000:02:00.0", "8", None, ETHERNET);
        let [a, b, c] = ["0000:01:00.0", "0000:01:00.1", "0000:02:00.0"].map(address);
        assert_eq!(group_of(root.path(), &[a, b]).unwrap(), "7");
        let error = group_of(root.path(), &[a, c]).unwrap_err().message;
        assert!(error.contains("group 7") && error.contains("in 8"), "{error}");
        let error = group_of(root.path(), &[address("0000:03:00.0")]).unwrap_err().message;
        assert!(error.contains("virtual IOMMU"), "{error}");
    }

    #[test]
    fn function_is_unbound_and_missing_vfio_module_is_reported() {
        let root = tempfile::tempdir().unwrap();
        plant(root.path(), "0000:01:00.0", "7", Some("mlx5_core"), ETHERNET);
        let error = bind(root.path(), address("0000:01:00.0")).unwrap_err().message;
        assert!(error.contains("mlx5_core") && error.contains("vfio-pci"), "{error}");
        let read = |path: &str| fs::read_to_string(root.path().join("bus/pci").join(path)).unwrap();
        assert_eq!(read("devices/0000:01:00.0/driver_override"), "vfio-pci");
        assert_eq!(read("drivers/mlx5_core/unbind"), "0000:01:00.0");
        assert_eq!(read("drivers_probe"), "0000:01:00.0");
        plant(root.path(), "0000:02:00.0", "8", Some("vfio-pci"), ETHERNET);
        bind(root.path(), address("0000:02:00.0")).unwrap();
        assert!(!root.path().join("bus/pci/devices/0000:02:00.0/driver_override").exists(), "bound already");
    }

    #[test]
    fn vfio_device_without_a_number_is_ignored() {
        let root = tempfile::tempdir().unwrap();
        let function = address("0000:01:00.0");
        assert_eq!(device_of(root.path(), function), None);
        let device = dir(root.path(), function).join("vfio-dev/vfio3");
        fs::create_dir_all(&device).unwrap();
        assert_eq!(device_of(root.path(), function), None);
        fs::write(device.join("dev"), "511:3\n").unwrap();
        assert_eq!(device_of(root.path(), function).as_deref(), Some("vfio3"));
    }

    #[test]
    fn group_with_a_foreign_driver_is_not_viable_and_bridges_are_ignored() {
        let root = tempfile::tempdir().unwrap();
        plant(root.path(), "0000:00:02.0", "7", Some("pcieport"), PORT);
        plant(root.path(), "0000:01:00.0", "7", Some("vfio-pci"), ETHERNET);
        let ours = [address("0000:01:00.0")];
        check_group_is_viable(root.path(), "7", &ours).unwrap();
        plant(root.path(), "0000:01:00.1", "7", Some("mlx5_core"), ETHERNET);
        let error = check_group_is_viable(root.path(), "7", &ours).unwrap_err().message;
        assert!(error.contains("0000:01:00.1") && error.contains("mlx5_core"), "{error}");
    }
}
