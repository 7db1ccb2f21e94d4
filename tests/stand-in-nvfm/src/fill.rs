//! Converts the manager's results to C structures, with the variant's defects.

use firstlight_fake_fm::call;

use crate::abi::{FailedDevice, GpuInfo, MAX_PORTS, PartitionInfo, Unsupported};
use crate::variant::Variant;

/// Beyond the limit of any list.
pub(crate) const TOO_MANY_PARTITIONS: u32 = 200;
/// Beyond the limit of any partition.
pub(crate) const TOO_MANY_GPUS: u32 = 99;

const NO_GPU: GpuInfo =
    GpuInfo { physical_id: 0, uuid: [0; 80], pci_bus_id: [0; 32], links_available: 0, links_max: 0, line_rate: 0 };

/// Converts a length.
pub(crate) fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

fn text<const N: usize>(variant: Variant, text: &str) -> [u8; N] {
    if variant == Variant::Garbage {
        return [b'A'; N];
    }
    let mut bytes = [0; N];
    let length = text.len().min(N - 1);
    bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
    bytes
}

/// Copies as many elements as fit.
fn array<T: Copy, const N: usize>(empty: T, items: impl Iterator<Item = T>) -> [T; N] {
    let mut array = [empty; N];
    array.iter_mut().zip(items).for_each(|(to, from)| *to = from);
    array
}

fn gpu(variant: Variant, gpu: &call::GpuInfo) -> GpuInfo {
    GpuInfo {
        physical_id: gpu.physical_id,
        uuid: text(variant, &gpu.uuid),
        pci_bus_id: text(variant, &gpu.pci_bus_id),
        links_available: gpu.links_available,
        links_max: gpu.links_max,
        line_rate: gpu.line_rate,
    }
}

pub(crate) fn partition(variant: Variant, it: &call::PartitionInfo) -> PartitionInfo {
    PartitionInfo {
        id: it.id,
        is_active: if variant == Variant::Garbage { 7 } else { it.is_active.into() },
        num_gpus: variant.count(count(it.gpus.len()), TOO_MANY_GPUS),
        gpus: array(NO_GPU, it.gpus.iter().map(|it| gpu(variant, it))),
    }
}

pub(crate) fn unsupported(variant: Variant, it: &call::UnsupportedPartition) -> Unsupported {
    let num_gpus = variant.count(count(it.gpus.len()), TOO_MANY_GPUS);
    Unsupported { id: it.id, num_gpus, gpus: array(0, it.gpus.iter().copied()) }
}

pub(crate) fn failed(variant: Variant, it: &call::FailedDevice) -> FailedDevice {
    FailedDevice {
        uuid: text(variant, &it.uuid),
        pci_bus_id: text(variant, &it.pci_bus_id),
        num_ports: count(it.ports.len().min(MAX_PORTS)),
        ports: array(0, it.ports.iter().copied()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_nul_terminated_unless_garbage() {
        assert_eq!(text::<4>(Variant::V610, "abcdef"), *b"abc\0");
        assert_eq!(text::<4>(Variant::V610, ""), [0; 4]);
        assert_eq!(text::<4>(Variant::Garbage, ""), *b"AAAA");
    }
}
