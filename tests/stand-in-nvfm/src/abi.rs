//! The structures, with our own names and the sizes and offsets of the interface, for x86-64 and aarch64.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};

/// Bytes of an address.
pub const ADDRESS_BYTES: usize = 256;
/// Bytes of a UUID.
pub const UUID_BYTES: usize = 80;
/// Bytes of a PCI address.
pub const PCI_BYTES: usize = 32;
/// GPUs of a partition.
pub const MAX_GPUS: usize = 16;
/// Switches of a baseboard.
pub const MAX_SWITCHES: usize = 12;
/// Partitions of a baseboard.
pub const MAX_PARTITIONS: usize = 64;
/// Links of a device.
pub const MAX_PORTS: usize = 64;

/// A connection handle: not a pointer, so that a stale one is harmless.
pub type Handle = *mut c_void;

/// `addressType`: an IP address.
pub const INET: u32 = 1;
/// `addressType`: the path of a Unix socket.
pub const UNIX: u32 = 2;
/// `addressType`: a virtual machine's socket.
pub const VSOCK: u32 = 3;

/// How to connect, first version.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ConnectParams1 {
    /// [`CONNECT_PARAMS_1`].
    pub version: u32,
    /// NUL-terminated.
    pub address: [u8; ADDRESS_BYTES],
    /// The timeout.
    pub timeout_ms: u32,
    /// Not 0: the address is a path.
    pub address_is_unix_socket: u32,
}

/// How to connect, second version.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ConnectParams2 {
    /// As before, with version [`CONNECT_PARAMS_2`].
    pub first: ConnectParams1,
    /// [`INET`], [`UNIX`] or [`VSOCK`].
    pub address_type: u32,
}

/// A PCI function.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PciDevice {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u32,
    /// Device.
    pub device: u32,
    /// Function.
    pub function: u32,
}

/// A GPU of a partition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GpuInfo {
    /// Module id.
    pub physical_id: u32,
    /// Its UUID.
    pub uuid: [u8; UUID_BYTES],
    /// Its PCI address.
    pub pci_bus_id: [u8; PCI_BYTES],
    /// Links that work.
    pub links_available: u32,
    /// Links that there are.
    pub links_max: u32,
    /// MB/s of each.
    pub line_rate: u32,
}

/// A partition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PartitionInfo {
    /// Its number.
    pub id: u32,
    /// 0 or 1.
    pub is_active: u32,
    /// How many of `gpus` count.
    pub num_gpus: u32,
    /// Its GPUs.
    pub gpus: [GpuInfo; MAX_GPUS],
}

/// All partitions.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PartitionList {
    /// [`PARTITION_LIST`].
    pub version: u32,
    /// How many of `partitions` count.
    pub num_partitions: u32,
    /// How many there could be.
    pub max_num_partitions: u32,
    /// The partitions.
    pub partitions: [PartitionInfo; MAX_PARTITIONS],
}

/// Partitions that are active.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ActivatedList {
    /// [`ACTIVATED_LIST`].
    pub version: u32,
    /// How many of `ids` count.
    pub num_partitions: u32,
    /// Their numbers.
    pub ids: [u32; MAX_PARTITIONS],
}

/// A device with links that failed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FailedDevice {
    /// Its UUID.
    pub uuid: [u8; UUID_BYTES],
    /// Its PCI address.
    pub pci_bus_id: [u8; PCI_BYTES],
    /// How many of `ports` count.
    pub num_ports: u32,
    /// The links.
    pub ports: [u32; MAX_PORTS],
}

/// All devices with links that failed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FailedDevices {
    /// [`FAILED_DEVICES`].
    pub version: u32,
    /// How many of `gpus` count.
    pub num_gpus: u32,
    /// How many of `switches` count.
    pub num_switches: u32,
    /// The GPUs.
    pub gpus: [FailedDevice; MAX_GPUS],
    /// The switches.
    pub switches: [FailedDevice; MAX_SWITCHES],
}

/// A partition that failures made unavailable.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Unsupported {
    /// Its number.
    pub id: u32,
    /// How many of `gpus` count.
    pub num_gpus: u32,
    /// Module ids.
    pub gpus: [u32; MAX_GPUS],
}

/// All partitions that failures made unavailable.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UnsupportedList {
    /// [`UNSUPPORTED_LIST`].
    pub version: u32,
    /// How many of `partitions` count.
    pub num_partitions: u32,
    /// The partitions.
    pub partitions: [Unsupported; MAX_PARTITIONS],
}

/// Returns a structure's version: its size, and a number in the upper bits.
#[expect(clippy::cast_possible_truncation, reason = "checked below; no conversion is const")]
const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// Of [`ConnectParams1`].
pub const CONNECT_PARAMS_1: u32 = version::<ConnectParams1>(1);
/// Of [`ConnectParams2`].
pub const CONNECT_PARAMS_2: u32 = version::<ConnectParams2>(2);
/// Of [`PartitionList`].
pub const PARTITION_LIST: u32 = version::<PartitionList>(1);
/// Of [`ActivatedList`].
pub const ACTIVATED_LIST: u32 = version::<ActivatedList>(1);
/// Of [`FailedDevices`].
pub const FAILED_DEVICES: u32 = version::<FailedDevices>(1);
/// Of [`UnsupportedList`].
pub const UNSUPPORTED_LIST: u32 = version::<UnsupportedList>(1);

const _: () = {
    assert!(CONNECT_PARAMS_1 == 0x0100_010c && CONNECT_PARAMS_2 == 0x0200_0110);
    assert!(PARTITION_LIST == 0x0102_030c && ACTIVATED_LIST == 0x0100_0108);
    assert!(FAILED_DEVICES == 0x0100_28bc && UNSUPPORTED_LIST == 0x0100_1208);
    assert!(size_of::<ConnectParams1>() == 268 && size_of::<ConnectParams2>() == 272);
    assert!(offset_of!(ConnectParams1, address) == 4 && offset_of!(ConnectParams1, timeout_ms) == 260);
    assert!(offset_of!(ConnectParams1, address_is_unix_socket) == 264);
    assert!(offset_of!(ConnectParams2, address_type) == 268);
    assert!(size_of::<PciDevice>() == 16 && offset_of!(PciDevice, function) == 12);
    assert!(size_of::<GpuInfo>() == 128 && offset_of!(GpuInfo, uuid) == 4 && offset_of!(GpuInfo, pci_bus_id) == 84);
    assert!(offset_of!(GpuInfo, links_available) == 116 && offset_of!(GpuInfo, links_max) == 120);
    assert!(offset_of!(GpuInfo, line_rate) == 124);
    assert!(size_of::<PartitionInfo>() == 2060 && offset_of!(PartitionInfo, is_active) == 4);
    assert!(offset_of!(PartitionInfo, num_gpus) == 8 && offset_of!(PartitionInfo, gpus) == 12);
    assert!(size_of::<PartitionList>() == 131_852 && offset_of!(PartitionList, num_partitions) == 4);
    assert!(offset_of!(PartitionList, max_num_partitions) == 8 && offset_of!(PartitionList, partitions) == 12);
    assert!(size_of::<ActivatedList>() == 264 && offset_of!(ActivatedList, ids) == 8);
    assert!(size_of::<FailedDevice>() == 372 && offset_of!(FailedDevice, pci_bus_id) == 80);
    assert!(offset_of!(FailedDevice, num_ports) == 112 && offset_of!(FailedDevice, ports) == 116);
    assert!(size_of::<FailedDevices>() == 10_428 && offset_of!(FailedDevices, num_switches) == 8);
    assert!(offset_of!(FailedDevices, gpus) == 12 && offset_of!(FailedDevices, switches) == 5964);
    assert!(size_of::<Unsupported>() == 72 && offset_of!(Unsupported, gpus) == 8);
    assert!(size_of::<UnsupportedList>() == 4616 && offset_of!(UnsupportedList, partitions) == 8);
};
