//! Calls to the manager, and their results.

use firstlight_partitions::PartitionId;
use serde::{Deserialize, Serialize};

/// One call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Call {
    /// Lists the supported partitions.
    List,
    /// Lists partitions that failures made unavailable.
    Unsupported,
    /// Lists failed devices.
    FailedDevices,
    /// Activates a partition.
    Activate(PartitionId),
    /// Activates a partition with virtual functions.
    ActivateWithVfs(PartitionId),
    /// Deactivates a partition.
    Deactivate(PartitionId),
    /// Sends the list of active partitions after a restart.
    SetActivated(Vec<PartitionId>),
}

/// The kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// [`Call::List`].
    List,
    /// [`Call::Unsupported`].
    Unsupported,
    /// [`Call::FailedDevices`].
    FailedDevices,
    /// [`Call::Activate`].
    Activate,
    /// [`Call::ActivateWithVfs`].
    ActivateWithVfs,
    /// [`Call::Deactivate`].
    Deactivate,
    /// [`Call::SetActivated`].
    SetActivated,
}

impl Call {
    /// Returns the kind.
    #[must_use]
    pub fn op(&self) -> Op {
        match self {
            Self::List => Op::List,
            Self::Unsupported => Op::Unsupported,
            Self::FailedDevices => Op::FailedDevices,
            Self::Activate(_) => Op::Activate,
            Self::ActivateWithVfs(_) => Op::ActivateWithVfs,
            Self::Deactivate(_) => Op::Deactivate,
            Self::SetActivated(_) => Op::SetActivated,
        }
    }

    /// Returns the partitions that the call names.
    #[must_use]
    pub fn ids(&self) -> &[PartitionId] {
        match self {
            Self::List | Self::Unsupported | Self::FailedDevices => &[],
            Self::Activate(id) | Self::ActivateWithVfs(id) | Self::Deactivate(id) => std::slice::from_ref(id),
            Self::SetActivated(ids) => ids,
        }
    }
}

/// A GPU of a partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInfo {
    /// Module id.
    pub physical_id: u32,
    /// Empty from the H100 on.
    pub uuid: String,
    /// Zeros from the H100 on.
    pub pci_bus_id: String,
    /// Working links in this partition.
    pub links_available: u32,
    /// Links of the GPU.
    pub links_max: u32,
    /// MB/s of a link.
    pub line_rate: u32,
}

/// A supported partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionInfo {
    /// The partition id.
    pub id: PartitionId,
    /// Whether it is active.
    pub is_active: bool,
    /// Its GPUs.
    pub gpus: Vec<GpuInfo>,
}

/// A partition that failures made unavailable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnsupportedPartition {
    /// The partition id.
    pub id: PartitionId,
    /// Its GPUs, by module id.
    pub gpus: Vec<u32>,
}

/// A GPU or switch with failed links.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedDevice {
    /// Its UUID.
    pub uuid: String,
    /// Its PCI address.
    pub pci_bus_id: String,
    /// The failed links.
    pub ports: Vec<u32>,
}

/// The result of a successful call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Payload {
    /// No data.
    Nothing,
    /// To [`Call::List`].
    List {
        /// The supported partitions.
        partitions: Vec<PartitionInfo>,
        /// Their number without failures.
        most: u32,
    },
    /// To [`Call::Unsupported`].
    Unsupported(Vec<UnsupportedPartition>),
    /// To [`Call::FailedDevices`].
    FailedDevices {
        /// The GPUs.
        gpus: Vec<FailedDevice>,
        /// The switches.
        switches: Vec<FailedDevice>,
    },
}
