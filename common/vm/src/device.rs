//! Devices of a machine, cold-plugged or hot-plugged.

use std::ffi::OsString;
use std::path::PathBuf;

/// A device of the guest; each PCI device has its own root port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// A device served by a process over vfio-user.
    VfioUser {
        /// Its socket.
        socket: PathBuf,
    },
    /// A device of this host, bound to vfio-pci.
    Vfio {
        /// Its PCI address on the host.
        host: String,
    },
    /// A virtio-blk disk.
    Disk {
        /// Its raw content.
        file: PathBuf,
    },
    /// A virtio-blk disk that the guest cannot write, such as a root disk: several guests may have the same.
    ReadOnlyDisk {
        /// Its raw content.
        file: PathBuf,
    },
    /// A virtio-blk disk that the guest identifies by serial number, e.g. a service VM's state disk.
    DiskWithSerial {
        /// Its raw content.
        file: PathBuf,
        /// The serial number, at most 20 bytes.
        serial: String,
    },
    /// A read-only virtio-blk disk that the guest identifies by serial number, as
    /// Kata's runtimes attach extensions.
    Extension {
        /// Its raw content.
        file: PathBuf,
        /// The serial number, at most 20 bytes: `extension-gpu`.
        serial: String,
    },
    /// A virtio-blk disk without PCI (virtio-mmio). Only QEMU's microvm machine
    /// type supports it, so the machine becomes one: without persistent memory,
    /// IOMMU or CPU hotplug. The guest's kernel finds the disk in the ACPI tables,
    /// which an initramfs overwrites whose size is not a multiple of the page size.
    MmioDisk {
        /// Its raw content.
        file: PathBuf,
    },
    /// An NVMe controller with one disk.
    Nvme {
        /// The disk's raw content.
        file: PathBuf,
    },
    /// A virtio-scsi controller with one disk.
    Scsi {
        /// The disk's raw content.
        file: PathBuf,
        /// The disk's SCSI target.
        target: u8,
        /// The disk's logical unit number (LUN).
        lun: u16,
    },
    /// A virtio network interface without an uplink.
    Nic {
        /// Its MAC address, e.g. `52:54:00:00:00:01`.
        mac: String,
    },
    /// A virtio network interface in QEMU's user-mode network, 10.0.2.0/24: the
    /// guest's address is 10.0.2.15, and 10.0.2.2 is this host's loopback. Needs
    /// no privileges on the host.
    UserNic {
        /// Its MAC address.
        mac: String,
    },
    /// A watchdog timer (Intel 6300ESB), a device without a built-in driver in most kernels.
    Watchdog,
    /// An empty root port for hotplug.
    EmptyPort,
    /// An empty root port for hotplug with address space for a GPU's BARs.
    EmptyGpuPort,
    /// A device behind its own root complex (`pxb-pcie`).
    BehindRootComplex {
        /// The root complex's bus number, at least 0x20 and above all others.
        bus: u8,
        /// The device.
        device: Box<Device>,
    },
}

/// First slot of root ports, which are eight functions per slot.
const FIRST_PORT_SLOT: usize = 0x10;

/// Address space reserved behind a port for the BARs of the largest GPU.
const GPU_RESERVE: &str = ",pref64-reserve=512G,mem-reserve=32M";

/// Returns slot and function of a root port.
fn port(at: usize) -> (usize, usize) {
    (FIRST_PORT_SLOT + at / 8, at % 8)
}

impl Device {
    /// Returns the PCI path of device number `at` of its machine, as a shim sends it
    /// to the agent.
    #[must_use]
    pub fn pci_path(&self, at: usize) -> String {
        let (slot, function) = port(at);
        match self {
            Self::BehindRootComplex { bus, .. } => format!("{bus:02x}/00/00"),
            _ if function == 0 => format!("{slot:02x}/00"),
            _ => format!("{slot:02x}.{function}/00"),
        }
    }

    /// Returns QEMU's arguments for the device and its root port, as pairs of option and value.
    pub(crate) fn arguments(&self, at: usize) -> Vec<(&'static str, OsString)> {
        let (slot, function) = port(at);
        let chassis = at + 1;
        let mut all: Vec<(&'static str, OsString)> = Vec::new();
        let device = if matches!(self, Self::MmioDisk { .. }) {
            self
        } else if let Self::BehindRootComplex { bus, device } = self {
            all.push(("-device", format!("pxb-pcie,id=root{at},bus_nr={bus},bus=pcie.0").into()));
            let port = format!("pcie-root-port,id=port{at},chassis={chassis},slot={at},bus=root{at}");
            all.push(("-device", port.into()));
            device
        } else {
            let location = format!("bus=pcie.0,addr={slot:x}.{function},multifunction=on");
            // The kernel assigns a port the address space it reserves; an empty port reserves little.
            let reserve = if *self == Self::EmptyGpuPort { GPU_RESERVE } else { "" };
            let port = format!("pcie-root-port,id=port{at},chassis={chassis},slot={at},{location}{reserve}");
            all.push(("-device", port.into()));
            self
        };
        // JSON, which QEMU's monitor takes too. Paths are generated here and have no
        // quote or backslash.
        all.extend(device.backend(at).map(|(option, value)| (option, value.to_string().into())));
        all.extend(device.frontend(at).into_iter().map(|value| ("-device", value.to_string().into())));
        all
    }

    /// Returns QEMU's backend of the device: option and value.
    pub(crate) fn backend(&self, at: usize) -> Option<(&'static str, serde_json::Value)> {
        match self {
            Self::Extension { file, .. } | Self::ReadOnlyDisk { file } => {
                let (file, disk) = (file.to_string_lossy(), format!("disk{at}"));
                let back =
                    serde_json::json!({"driver": "file", "node-name": disk, "filename": file, "read-only": true});
                Some(("-blockdev", back))
            }
            Self::Disk { file }
            | Self::DiskWithSerial { file, .. }
            | Self::MmioDisk { file }
            | Self::Nvme { file }
            | Self::Scsi { file, .. } => {
                let file = file.to_string_lossy();
                Some((
                    "-blockdev",
                    serde_json::json!({"driver": "file", "node-name": format!("disk{at}"), "filename": file}),
                ))
            }
            Self::Nic { .. } => {
                Some(("-netdev", serde_json::json!({"type": "hubport", "id": format!("net{at}"), "hubid": at})))
            }
            Self::UserNic { .. } => {
                Some(("-netdev", serde_json::json!({"type": "user", "id": format!("net{at}"), "ipv6": false})))
            }
            Self::VfioUser { .. }
            | Self::Vfio { .. }
            | Self::Watchdog
            | Self::EmptyPort
            | Self::EmptyGpuPort
            | Self::BehindRootComplex { .. } => None,
        }
    }

    /// Returns QEMU's frontend devices, in order.
    pub(crate) fn frontend(&self, at: usize) -> Vec<serde_json::Value> {
        let (id, bus, disk) = (format!("device{at}"), format!("port{at}"), format!("disk{at}"));
        match self {
            Self::VfioUser { socket } => vec![serde_json::json!({
                "driver": "vfio-user-pci", "id": id, "bus": bus,
                "socket": {"type": "unix", "path": socket.to_string_lossy()},
            })],
            Self::Vfio { host } => vec![serde_json::json!({"driver": "vfio-pci", "id": id, "bus": bus, "host": host})],
            Self::Disk { .. } | Self::ReadOnlyDisk { .. } => {
                vec![serde_json::json!({"driver": "virtio-blk-pci", "id": id, "bus": bus, "drive": disk})]
            }
            Self::Extension { serial, .. } | Self::DiskWithSerial { serial, .. } => vec![serde_json::json!({
                "driver": "virtio-blk-pci", "id": id, "bus": bus, "drive": disk, "serial": serial,
            })],
            Self::MmioDisk { .. } => {
                vec![serde_json::json!({"driver": "virtio-blk-device", "id": id, "drive": disk})]
            }
            Self::Nvme { .. } => {
                vec![serde_json::json!({"driver": "nvme", "id": id, "bus": bus, "drive": disk, "serial": disk})]
            }
            Self::Scsi { target, lun, .. } => vec![
                serde_json::json!({"driver": "virtio-scsi-pci", "id": id, "bus": bus}),
                serde_json::json!({
                    "driver": "scsi-hd", "id": format!("{id}-disk"), "bus": format!("{id}.0"), "drive": disk,
                    "channel": 0, "scsi-id": target, "lun": lun,
                }),
            ],
            Self::Nic { mac } | Self::UserNic { mac } => vec![serde_json::json!({
                "driver": "virtio-net-pci", "id": id, "bus": bus, "netdev": format!("net{at}"), "mac": mac,
                // No network boot ROM.
                "romfile": "",
            })],
            Self::Watchdog => vec![serde_json::json!({"driver": "i6300esb", "id": id, "bus": bus})],
            Self::EmptyPort | Self::EmptyGpuPort | Self::BehindRootComplex { .. } => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mmio_disk_has_no_root_port() {
        let text = format!("{:?}", Device::MmioDisk { file: "/d".into() }.arguments(2));
        assert!(text.contains("virtio-blk-device") && text.contains("disk2") && !text.contains("port"), "{text}");
    }

    #[test]
    fn extension_disk_has_its_serial_number_and_is_read_only() {
        let disk = Device::Extension { file: "/d".into(), serial: "extension-x".into() };
        let text: Vec<String> =
            disk.arguments(1).iter().map(|(_, value)| value.to_string_lossy().into_owned()).collect();
        assert!(text[1].contains(r#""read-only":true"#) && text[1].contains(r#""filename":"/d""#), "{text:?}");
        assert!(text[2].contains(r#""serial":"extension-x""#) && text[2].contains("virtio-blk-pci"), "{text:?}");
    }

    #[test]
    fn only_a_read_only_disk_is_opened_read_only() {
        let opened_read_only = |disk: Device| format!("{:?}", disk.arguments(0)).contains("read-only");
        assert!(opened_read_only(Device::ReadOnlyDisk { file: "/d".into() }));
        assert!(!opened_read_only(Device::Disk { file: "/d".into() }));
    }

    #[test]
    fn pci_paths_match_the_arguments() {
        let disk = Device::Disk { file: "/d".into() };
        assert_eq!(disk.pci_path(0), "10/00");
        assert_eq!(disk.pci_path(11), "11.3/00");
        let behind = Device::BehindRootComplex { bus: 0x20, device: Box::new(disk) };
        assert_eq!(behind.pci_path(3), "20/00/00");
        let text: Vec<String> =
            behind.arguments(3).iter().map(|(_, value)| value.to_string_lossy().into_owned()).collect();
        assert!(text[0].contains("pxb-pcie") && text[0].contains("bus_nr=32"), "{text:?}");
        assert!(text[1].contains("bus=root3") && text[2].contains("disk3") && text[3].contains("port3"), "{text:?}");
    }
}
