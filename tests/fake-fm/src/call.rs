//! What can be asked of the manager, and what it tells.

use firstlight_partitions::PartitionId;
use serde::{Deserialize, Serialize};

/// One call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Call {
    /// All partitions that can be had.
    List,
    /// Those that failures took.
    Unsupported,
    /// What failed.
    FailedDevices,
    /// Connect the GPUs of one.
    Activate(PartitionId),
    /// The same for virtual functions.
    ActivateWithVfs(PartitionId),
    /// Part the GPUs of one.
    Deactivate(PartitionId),
    /// After a restart: these are active.
    SetActivated(Vec<PartitionId>),
}

/// The name of a call.
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
    /// Which call it is.
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

    /// The partitions that it names.
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
    /// Links that work in this partition.
    pub links_available: u32,
    /// Links of the GPU.
    pub links_max: u32,
    /// MB/s of a link.
    pub line_rate: u32,
}

/// A partition that can be had.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionInfo {
    /// Its number.
    pub id: PartitionId,
    /// Whether its GPUs are connected.
    pub is_active: bool,
    /// Its GPUs.
    pub gpus: Vec<GpuInfo>,
}

/// A partition that failures took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnsupportedPartition {
    /// Its number.
    pub id: PartitionId,
    /// Its GPUs, by module id.
    pub gpus: Vec<u32>,
}

/// A GPU or switch with links that do not work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedDevice {
    /// Its UUID.
    pub uuid: String,
    /// Its PCI address.
    pub pci_bus_id: String,
    /// The links.
    pub ports: Vec<u32>,
}

/// What a call that succeeded tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Payload {
    /// Nothing but the code.
    Nothing,
    /// To [`Call::List`].
    List {
        /// Those that can be had.
        partitions: Vec<PartitionInfo>,
        /// How many there would be without failures.
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
