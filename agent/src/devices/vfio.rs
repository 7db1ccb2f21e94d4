//! PCI functions that a program in the container drives itself.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_pci::{Address, Function};

use super::apply::Node;
use crate::error::{Error, Result};
use crate::hotplug::Hotplug;
use crate::paths::Paths;
use crate::work;

/// The driver that hands a function to a program.
const DRIVER: &str = "vfio-pci";

/// A bridge, by base class and sub-class: its driver does not keep a group from being handed out.
const BRIDGE: u32 = 0x0604;

/// Binds the functions to vfio-pci and waits for their nodes: the group's
/// `/dev/vfio/N`, at which the container finds what the host calls `listed`, and
/// `/dev/vfio/devices/vfioN` of each where the kernel has them.
///
/// # Errors
/// The functions are in several groups or in none, a neighbour in the group
/// keeps its driver, or the kernel does not hand them out.
pub(super) async fn take(hotplug: &Hotplug, paths: &Paths, functions: Vec<Address>, listed: &str) -> Result<Vec<Node>> {
    let Some(first) = functions.first().copied() else {
        return Err(Error::invalid("no option says where in the guest it is (HOST-ADDRESS=GUEST-PCI-PATH)"));
    };
    let sysfs = paths.sysfs.clone();
    let all = functions.clone();
    // Whole, as a function between two drivers is nobody's.
    let group = work::whole(work::blocking(move || {
        let group = group_of(&sysfs, &all)?;
        for function in &all {
            bind(&sysfs, *function)?;
        }
        neighbours(&sysfs, &group, &all)?;
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

/// The function's own VFIO device, `vfioN`. Without IOMMUFD the kernel lists it
/// too, but it has no number and so no node.
fn device_of(sysfs: &Path, function: Address) -> Option<String> {
    let devices = fs::read_dir(dir(sysfs, function).join("vfio-dev")).ok()?;
    let device = devices.flatten().find(|device| device.path().join("dev").exists())?;
    Some(device.file_name().to_string_lossy().into_owned())
}

/// The one IOMMU group that all are in.
fn group_of(sysfs: &Path, functions: &[Address]) -> Result<String> {
    let mut group: Option<(Address, String)> = None;
    for function in functions {
        let link = fs::read_link(dir(sysfs, *function).join("iommu_group")).ok();
        let name = link.and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
        let name = name.ok_or_else(|| {
            let hint = "the VM needs a virtual IOMMU, and the guest's kernel intel_iommu=on or its like";
            Error::internal(format!("{function} is in no IOMMU group: {hint}"))
        })?;
        match &group {
            Some((other, first)) if *first != name => {
                let message =
                    format!("{other} is in IOMMU group {first} and {function} in {name}; one device is one group");
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

/// Takes a function from its driver and gives it to vfio-pci. Blocks as long as the driver does.
fn bind(sysfs: &Path, function: Address) -> Result<()> {
    let dir = dir(sysfs, function);
    if driver(&dir).as_deref() == Some(DRIVER) {
        return Ok(());
    }
    let write = |path: PathBuf, text: &str| {
        fs::write(&path, text).map_err(|error: io::Error| {
            Error::internal(format!("{function}: cannot write {text:?} to {}: {error}", path.display()))
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

/// Whether everything else in the group lets go of it.
fn neighbours(sysfs: &Path, group: &str, ours: &[Address]) -> Result<()> {
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
            "{address} is in IOMMU group {group} too and driven by {driver}: nobody could open the group; give the \
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

    /// Classes, as a `modalias` has them.
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
    fn functions_of_one_device_are_in_one_group() {
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
    fn a_function_is_taken_from_its_driver_and_a_missing_module_is_named() {
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
    fn a_device_of_its_own_is_one_with_a_number() {
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
    fn a_neighbour_with_a_driver_keeps_the_group_and_a_bridge_does_not() {
        let root = tempfile::tempdir().unwrap();
        plant(root.path(), "0000:00:02.0", "7", Some("pcieport"), PORT);
        plant(root.path(), "0000:01:00.0", "7", Some("vfio-pci"), ETHERNET);
        let ours = [address("0000:01:00.0")];
        neighbours(root.path(), "7", &ours).unwrap();
        plant(root.path(), "0000:01:00.1", "7", Some("mlx5_core"), ETHERNET);
        let error = neighbours(root.path(), "7", &ours).unwrap_err().message;
        assert!(error.contains("0000:01:00.1") && error.contains("mlx5_core"), "{error}");
    }
}
