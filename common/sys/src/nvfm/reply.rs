//! Converts libnvfm's replies to plain values. Invalid replies are refused, not truncated: an excessive count means
//! that the library's layouts differ, and then the whole reply is unusable.

use super::abi;

/// A GPU in a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its module id.
    pub physical_id: u32,
    /// Empty on H100 and later.
    pub uuid: String,
    /// The PCI address: valid on A100 only, zeros or empty on later ones.
    pub pci: String,
    /// NVLinks in this partition.
    pub links: u32,
    /// NVLinks of the GPU.
    pub max_links: u32,
    /// The rate of a link, in MB/s.
    pub line_rate: u32,
}

/// A partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The partition id.
    pub id: u32,
    /// Whether it is active.
    pub is_active: bool,
    /// Its GPUs.
    pub gpus: Vec<Gpu>,
}

/// A GPU or switch with failed NVLinks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedDevice {
    /// Its UUID, if FM knows it.
    pub uuid: String,
    /// Its address, if FM knows it.
    pub pci: String,
    /// The ports.
    pub ports: Vec<u32>,
}

/// Devices that failed when FM started; A100 and earlier only.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Failed {
    /// GPUs.
    pub gpus: Vec<FailedDevice>,
    /// Switches.
    pub switches: Vec<FailedDevice>,
}

/// A partition that the state of the hardware does not allow; A100 and earlier only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// The partition id.
    pub id: u32,
    /// Its GPUs' module ids.
    pub gpus: Vec<u32>,
}

/// Returns the first `count` elements; a count beyond the array is an error.
fn counted<'a, T>(all: &'a [T], count: u32, what: &str) -> Result<&'a [T], String> {
    let wrong = || format!("the reply lists {count} {what}, the limit is {}", all.len());
    usize::try_from(count).ok().and_then(|count| all.get(..count)).ok_or_else(wrong)
}

/// Returns the text up to NUL, or the whole array if FM has not terminated it.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).escape_debug().to_string()
}

pub(super) fn partitions(raw: &abi::Partitions) -> Result<Vec<Partition>, String> {
    counted(&raw.partition, raw.partitions, "partitions")?.iter().map(partition).collect()
}

fn partition(raw: &abi::Partition) -> Result<Partition, String> {
    let gpus = counted(&raw.gpu, raw.gpus, "GPUs").map_err(|what| format!("partition {}: {what}", raw.id))?;
    let gpus = gpus.iter().map(|raw| Gpu {
        physical_id: raw.physical_id,
        uuid: text(&raw.uuid),
        pci: text(&raw.pci),
        links: raw.links,
        max_links: raw.max_links,
        line_rate: raw.line_rate,
    });
    // Any value but 0 counts as active, so that the partition is not touched.
    Ok(Partition { id: raw.id, is_active: raw.is_active != 0, gpus: gpus.collect() })
}

pub(super) fn failed(raw: &abi::FailedDevices) -> Result<Failed, String> {
    let one = |raw: &abi::FailedDevice| {
        let ports = counted(&raw.port, raw.ports, "ports")?.to_vec();
        Ok(FailedDevice { uuid: text(&raw.uuid), pci: text(&raw.pci), ports })
    };
    Ok(Failed {
        gpus: counted(&raw.gpu, raw.gpus, "GPUs")?.iter().map(one).collect::<Result<_, String>>()?,
        switches: counted(&raw.switch, raw.switches, "switches")?.iter().map(one).collect::<Result<_, String>>()?,
    })
}

pub(super) fn unsupported(raw: &abi::Unsupported) -> Result<Vec<Unsupported>, String> {
    let one = |raw: &abi::UnsupportedPartition| {
        Ok(Unsupported { id: raw.id, gpus: counted(&raw.gpu, raw.gpus, "GPUs")?.to_vec() })
    };
    counted(&raw.partition, raw.partitions, "partitions")?.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_is_read_up_to_its_count() {
        let mut raw = abi::Partitions::empty();
        raw.partitions = 2;
        raw.partition[1].id = 7;
        raw.partition[1].is_active = 7;
        raw.partition[1].gpus = 1;
        raw.partition[1].gpu[0].physical_id = 3;
        raw.partition[1].gpu[0].uuid = [b'G'; 80];
        raw.partition[1].gpu[0].pci[..5].copy_from_slice(b"00\n\0x");
        raw.partition[2].id = 9;
        let read = partitions(&raw).unwrap();
        assert_eq!(read.len(), 2);
        assert!(read[1].is_active && read[1].gpus.len() == 1 && !read[0].is_active);
        let gpu = &read[1].gpus[0];
        assert_eq!((gpu.physical_id, gpu.uuid.len(), gpu.pci.as_str()), (3, 80, "00\\n"));
    }

    #[test]
    fn counts_past_the_arrays_are_refused() {
        let mut raw = abi::Partitions::empty();
        raw.partitions = 65;
        let error = partitions(&raw).unwrap_err();
        assert_eq!(error, "the reply lists 65 partitions, the limit is 64");
        raw.partitions = 64;
        assert_eq!(partitions(&raw).unwrap().len(), 64);
        raw.partition[63].gpus = u32::MAX;
        raw.partition[63].id = 5;
        let error = partitions(&raw).unwrap_err();
        assert!(error.starts_with("partition 5: the reply lists 4294967295 GPUs"), "{error}");

        let mut raw = abi::FailedDevices::empty();
        (raw.gpus, raw.switches) = (16, 12);
        assert_eq!(failed(&raw).unwrap().switches.len(), 12);
        raw.switch[11].ports = 65;
        assert!(failed(&raw).unwrap_err().contains("65 ports"));
        raw.switches = 13;
        assert!(failed(&raw).unwrap_err().contains("13 switches"));

        let mut raw = abi::Unsupported::empty();
        raw.partitions = 1;
        raw.partition[0].gpus = 17;
        assert!(unsupported(&raw).unwrap_err().contains("17 GPUs"));
    }
}
