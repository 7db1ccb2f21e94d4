//! The C layouts of libnvfm: 32-bit numbers and character arrays, without padding. Each begins with a word of size
//! and version.

use std::mem::{offset_of, size_of};

pub(super) const MAX_GPUS: usize = 16;
pub(super) const MAX_SWITCHES: usize = 12;
pub(super) const MAX_PARTITIONS: usize = 64;
pub(super) const MAX_PORTS: usize = 64;
/// Length of an address.
pub(super) const ADDRESS: usize = 256;
const UUID: usize = 80;
const PCI: usize = 32;

/// Returns the word of size and version.
const fn version(size: usize, version: u32) -> u32 {
    // Every layout here is far smaller than 16 MiB.
    #[expect(clippy::cast_possible_truncation, reason = "the sizes are asserted below")]
    let size = size as u32;
    size | version << 24
}

/// Connection parameters. The older layout lacks the last field.
#[repr(C)]
pub(super) struct Connect {
    pub(super) version: u32,
    pub(super) address: [u8; ADDRESS],
    pub(super) timeout_ms: u32,
    pub(super) is_unix: u32,
    pub(super) kind: u32,
}

/// Version words of [`Connect`]: from 580 on, and before.
pub(super) const CONNECT: u32 = version(size_of::<Connect>(), 2);
pub(super) const CONNECT_OLD: u32 = version(offset_of!(Connect, kind), 1);

#[repr(C)]
pub(super) struct Gpu {
    pub(super) physical_id: u32,
    pub(super) uuid: [u8; UUID],
    pub(super) pci: [u8; PCI],
    pub(super) links: u32,
    pub(super) max_links: u32,
    pub(super) line_rate: u32,
}

#[repr(C)]
pub(super) struct Partition {
    pub(super) id: u32,
    pub(super) is_active: u32,
    pub(super) gpus: u32,
    pub(super) gpu: [Gpu; MAX_GPUS],
}

#[repr(C)]
pub(super) struct Partitions {
    pub(super) version: u32,
    pub(super) partitions: u32,
    pub(super) most: u32,
    pub(super) partition: [Partition; MAX_PARTITIONS],
}

#[repr(C)]
pub(super) struct Activated {
    pub(super) version: u32,
    pub(super) partitions: u32,
    pub(super) id: [u32; MAX_PARTITIONS],
}

#[repr(C)]
pub(super) struct FailedDevice {
    pub(super) uuid: [u8; UUID],
    pub(super) pci: [u8; PCI],
    pub(super) ports: u32,
    pub(super) port: [u32; MAX_PORTS],
}

#[repr(C)]
pub(super) struct FailedDevices {
    pub(super) version: u32,
    pub(super) gpus: u32,
    pub(super) switches: u32,
    pub(super) gpu: [FailedDevice; MAX_GPUS],
    pub(super) switch: [FailedDevice; MAX_SWITCHES],
}

#[repr(C)]
pub(super) struct UnsupportedPartition {
    pub(super) id: u32,
    pub(super) gpus: u32,
    pub(super) gpu: [u32; MAX_GPUS],
}

#[repr(C)]
pub(super) struct Unsupported {
    pub(super) version: u32,
    pub(super) partitions: u32,
    pub(super) partition: [UnsupportedPartition; MAX_PARTITIONS],
}

// The published sizes and offsets, the same for x86-64 and aarch64.
const _: () = {
    assert!(size_of::<Connect>() == 272 && CONNECT == 0x0200_0110 && CONNECT_OLD == 0x0100_010c);
    assert!(offset_of!(Connect, address) == 4 && offset_of!(Connect, timeout_ms) == 260);
    assert!(offset_of!(Connect, is_unix) == 264 && offset_of!(Connect, kind) == 268);
    assert!(size_of::<Gpu>() == 128 && offset_of!(Gpu, uuid) == 4 && offset_of!(Gpu, pci) == 84);
    assert!(offset_of!(Gpu, links) == 116 && offset_of!(Gpu, max_links) == 120 && offset_of!(Gpu, line_rate) == 124);
    assert!(size_of::<Partition>() == 2060 && offset_of!(Partition, gpu) == 12);
    assert!(size_of::<Partitions>() == 131_852 && Partitions::VERSION == 0x0102_030c);
    assert!(offset_of!(Partitions, partition) == 12);
    assert!(size_of::<Activated>() == 264 && Activated::VERSION == 0x0100_0108 && offset_of!(Activated, id) == 8);
    assert!(size_of::<FailedDevice>() == 372 && offset_of!(FailedDevice, pci) == 80);
    assert!(offset_of!(FailedDevice, ports) == 112 && offset_of!(FailedDevice, port) == 116);
    assert!(size_of::<FailedDevices>() == 10_428 && FailedDevices::VERSION == 0x0100_28bc);
    assert!(offset_of!(FailedDevices, gpu) == 12 && offset_of!(FailedDevices, switch) == 5964);
    assert!(size_of::<UnsupportedPartition>() == 72 && offset_of!(UnsupportedPartition, gpu) == 8);
    assert!(size_of::<Unsupported>() == 4616 && Unsupported::VERSION == 0x0100_1208);
    assert!(offset_of!(Unsupported, partition) == 8);
};

impl Gpu {
    const EMPTY: Self = Self { physical_id: 0, uuid: [0; UUID], pci: [0; PCI], links: 0, max_links: 0, line_rate: 0 };
}

impl Partition {
    const EMPTY: Self = Self { id: 0, is_active: 0, gpus: 0, gpu: [const { Gpu::EMPTY }; MAX_GPUS] };
}

impl Partitions {
    /// The library uses version 1, whatever its macro is called.
    const VERSION: u32 = version(size_of::<Self>(), 1);

    /// Allocates the buffer for FM's reply on the heap: it is too large for the stack.
    pub(super) fn empty() -> Box<Self> {
        let partition = [const { Partition::EMPTY }; MAX_PARTITIONS];
        Box::new(Self { version: Self::VERSION, partitions: 0, most: 0, partition })
    }
}

impl Activated {
    const VERSION: u32 = version(size_of::<Self>(), 1);

    pub(super) fn empty() -> Self {
        Self { version: Self::VERSION, partitions: 0, id: [0; MAX_PARTITIONS] }
    }
}

impl FailedDevice {
    const EMPTY: Self = Self { uuid: [0; UUID], pci: [0; PCI], ports: 0, port: [0; MAX_PORTS] };
}

impl FailedDevices {
    const VERSION: u32 = version(size_of::<Self>(), 1);

    pub(super) fn empty() -> Box<Self> {
        let (gpu, switch) = ([const { FailedDevice::EMPTY }; MAX_GPUS], [const { FailedDevice::EMPTY }; MAX_SWITCHES]);
        Box::new(Self { version: Self::VERSION, gpus: 0, switches: 0, gpu, switch })
    }
}

impl UnsupportedPartition {
    const EMPTY: Self = Self { id: 0, gpus: 0, gpu: [0; MAX_GPUS] };
}

impl Unsupported {
    const VERSION: u32 = version(size_of::<Self>(), 1);

    pub(super) fn empty() -> Box<Self> {
        let partition = [const { UnsupportedPartition::EMPTY }; MAX_PARTITIONS];
        Box::new(Self { version: Self::VERSION, partitions: 0, partition })
    }
}
