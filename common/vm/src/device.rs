//! What is plugged into a machine, at its start or while it runs.

use std::ffi::OsString;
use std::path::PathBuf;

/// A device handed to the guest; those of PCI have a root port each.
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
    /// A virtio-blk disk that the guest knows by a serial number, as a service VM knows the one that it keeps things on.
    Named {
        /// Its raw content.
        file: PathBuf,
        /// The number, at most 20 bytes.
        serial: String,
    },
    /// A virtio-blk disk that the guest cannot write to and knows by a serial
    /// number, as Kata's runtimes plug in extensions.
    Extension {
        /// Its raw content.
        file: PathBuf,
        /// The number, at most 20 bytes: `extension-gpu`.
        serial: String,
    },
    /// A virtio-blk disk without PCI, on the board itself (virtio-mmio). Only
    /// QEMU's microvm has places for it, so the machine becomes one: without
    /// persistent memory, an IOMMU or spare processors. The guest's kernel finds
    /// the disk in ACPI's tables, which an initramfs of other than whole pages
    /// overwrites.
    MmioDisk {
        /// Its raw content.
        file: PathBuf,
    },
    /// An NVMe controller with one disk.
    Nvme {
        /// The disk's raw content.
        file: PathBuf,
    },
    /// A virtio-scsi host with one disk.
    Scsi {
        /// The disk's raw content.
        file: PathBuf,
        /// The disk's target on the host.
        target: u8,
        /// The disk's unit on the target.
        lun: u16,
    },
    /// A virtio network interface that leads nowhere.
    Nic {
        /// Its hardware address, e.g. `52:54:00:00:00:01`.
        mac: String,
    },
    /// A virtio network interface into QEMU's user-mode network, 10.0.2.0/24: the
    /// guest is 10.0.2.15 there, and what it says to 10.0.2.2 goes to this
    /// host's loopback. Needs no rights on the host.
    UserNic {
        /// Its hardware address.
        mac: String,
    },
    /// A watchdog timer (Intel 6300ESB), which no kernel needs and few have built in.
    Watchdog,
    /// Nothing yet: a port for something that is plugged in later.
    Empty,
    /// Nothing yet: a port with room for a GPU's memory.
    EmptyForGpu,
    /// A device behind a root complex of its own (`pxb-pcie`).
    Beyond {
        /// The root complex's bus, 0x20 or more and above all others.
        bus: u8,
        /// The device.
        device: Box<Device>,
    },
}

/// Root ports are the functions of slots from here on, eight a slot.
const FIRST_PORT_SLOT: usize = 0x10;

/// Room behind a port for the largest GPU's memory and its other regions.
const GPU_ROOM: &str = ",pref64-reserve=512G,mem-reserve=32M";

/// The slot and the function of a root port.
fn port(at: usize) -> (usize, usize) {
    (FIRST_PORT_SLOT + at / 8, at % 8)
}

impl Device {
    /// The PCI path of the device that is number `at` of its machine, as a shim
    /// tells it to the guest's agent.
    #[must_use]
    pub fn pci_path(&self, at: usize) -> String {
        let (slot, function) = port(at);
        match self {
            Self::Beyond { bus, .. } => format!("{bus:02x}/00/00"),
            _ if function == 0 => format!("{slot:02x}/00"),
            _ => format!("{slot:02x}.{function}/00"),
        }
    }

    /// The arguments for it and its root port, if it has one: pairs of an option and its value.
    pub(crate) fn arguments(&self, at: usize) -> Vec<(&'static str, OsString)> {
        let (slot, function) = port(at);
        let chassis = at + 1;
        let mut all: Vec<(&'static str, OsString)> = Vec::new();
        let device = if matches!(self, Self::MmioDisk { .. }) {
            self
        } else if let Self::Beyond { bus, device } = self {
            all.push(("-device", format!("pxb-pcie,id=root{at},bus_nr={bus},bus=pcie.0").into()));
            let port = format!("pcie-root-port,id=port{at},chassis={chassis},slot={at},bus=root{at}");
            all.push(("-device", port.into()));
            device
        } else {
            let place = format!("bus=pcie.0,addr={slot:x}.{function},multifunction=on");
            // The kernel gives a port as much address space as it asks for; an empty one asks for little.
            let room = if *self == Self::EmptyForGpu { GPU_ROOM } else { "" };
            let port = format!("pcie-root-port,id=port{at},chassis={chassis},slot={at},{place}{room}");
            all.push(("-device", port.into()));
            self
        };
        // JSON throughout, as QEMU's monitor takes the same. Paths are ours and
        // hold no quote or backslash.
        all.extend(device.back(at).map(|(option, value)| (option, value.to_string().into())));
        all.extend(device.front(at).into_iter().map(|value| ("-device", value.to_string().into())));
        all
    }

    /// What QEMU needs behind the device: the option and its value.
    pub(crate) fn back(&self, at: usize) -> Option<(&'static str, serde_json::Value)> {
        match self {
            Self::Extension { file, .. } => {
                let (file, disk) = (file.to_string_lossy(), format!("disk{at}"));
                let back =
                    serde_json::json!({"driver": "file", "node-name": disk, "filename": file, "read-only": true});
                Some(("-blockdev", back))
            }
            Self::Disk { file }
            | Self::Named { file, .. }
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
            | Self::Empty
            | Self::EmptyForGpu
            | Self::Beyond { .. } => None,
        }
    }

    /// What QEMU shows to the guest, in order.
    pub(crate) fn front(&self, at: usize) -> Vec<serde_json::Value> {
        let (id, bus, disk) = (format!("device{at}"), format!("port{at}"), format!("disk{at}"));
        match self {
            Self::VfioUser { socket } => vec![serde_json::json!({
                "driver": "vfio-user-pci", "id": id, "bus": bus,
                "socket": {"type": "unix", "path": socket.to_string_lossy()},
            })],
            Self::Vfio { host } => vec![serde_json::json!({"driver": "vfio-pci", "id": id, "bus": bus, "host": host})],
            Self::Disk { .. } => {
                vec![serde_json::json!({"driver": "virtio-blk-pci", "id": id, "bus": bus, "drive": disk})]
            }
            Self::Extension { serial, .. } | Self::Named { serial, .. } => vec![serde_json::json!({
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
                // No firmware boots from it.
                "romfile": "",
            })],
            Self::Watchdog => vec![serde_json::json!({"driver": "i6300esb", "id": id, "bus": bus})],
            Self::Empty | Self::EmptyForGpu | Self::Beyond { .. } => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_pci_has_no_port() {
        let text = format!("{:?}", Device::MmioDisk { file: "/d".into() }.arguments(2));
        assert!(text.contains("virtio-blk-device") && text.contains("disk2") && !text.contains("port"), "{text}");
    }

    #[test]
    fn an_extension_has_its_serial_number_and_is_not_written() {
        let disk = Device::Extension { file: "/d".into(), serial: "extension-x".into() };
        let text: Vec<String> =
            disk.arguments(1).iter().map(|(_, value)| value.to_string_lossy().into_owned()).collect();
        assert!(text[1].contains(r#""read-only":true"#) && text[1].contains(r#""filename":"/d""#), "{text:?}");
        assert!(text[2].contains(r#""serial":"extension-x""#) && text[2].contains("virtio-blk-pci"), "{text:?}");
    }

    #[test]
    fn paths_are_those_of_the_arguments() {
        let disk = Device::Disk { file: "/d".into() };
        assert_eq!(disk.pci_path(0), "10/00");
        assert_eq!(disk.pci_path(11), "11.3/00");
        let beyond = Device::Beyond { bus: 0x20, device: Box::new(disk) };
        assert_eq!(beyond.pci_path(3), "20/00/00");
        let text: Vec<String> =
            beyond.arguments(3).iter().map(|(_, value)| value.to_string_lossy().into_owned()).collect();
        assert!(text[0].contains("pxb-pcie") && text[0].contains("bus_nr=32"), "{text:?}");
        assert!(text[1].contains("bus=root3") && text[2].contains("disk3") && text[3].contains("port3"), "{text:?}");
    }
}
