//! What libnvfm's calls return: a C enumeration of negative numbers.

use firstlight_partitions::known::KnownBaseboard;
use serde::{Deserialize, Serialize};

/// Done.
pub const SUCCESS: i32 = 0;
/// An argument makes no sense.
pub const BAD_PARAM: i32 = -1;
/// Something else.
pub const GENERIC_ERROR: i32 = -2;
/// Not in this mode.
pub const NOT_SUPPORTED: i32 = -3;
/// The library was not initialised; also: the partition is not active.
pub const UNINITIALIZED: i32 = -4;
/// It took too long.
pub const TIMEOUT: i32 = -5;
/// Structures of another version.
pub const VERSION_MISMATCH: i32 = -6;
/// The library is initialised; also: the partition or a GPU of it is active.
pub const IN_USE: i32 = -7;
/// Starting, or waiting for the list of active partitions.
pub const NOT_CONFIGURED: i32 = -8;
/// The manager is gone or was never there.
pub const CONNECTION_NOT_VALID: i32 = -9;
/// A link could not be trained.
pub const NVLINK_ERROR: i32 = -10;
/// NVLink 5: the partition is active.
pub const PARTITION_ID_IN_USE: i32 = -17;
/// NVLink 5: the partition is not active.
pub const PARTITION_ID_NOT_IN_USE: i32 = -18;
/// NVLink 5: a GPU of it is in an active partition.
pub const RESOURCE_USED_IN_ANOTHER_PARTITION: i32 = -24;

/// Generations of NVLink answer with different codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// Up to the H200: what the header documents.
    Nvl4,
    /// B200 and later: what was seen in the field.
    Nvl5,
}

impl Family {
    /// The one that a baseboard's manager is of.
    #[must_use]
    pub fn of(known: &KnownBaseboard) -> Self {
        if known.name == "b200" { Self::Nvl5 } else { Self::Nvl4 }
    }

    /// Activated twice.
    #[must_use]
    pub fn already_active(self) -> i32 {
        match self {
            Self::Nvl4 => IN_USE,
            Self::Nvl5 => PARTITION_ID_IN_USE,
        }
    }

    /// Activated beside a partition that shares a GPU.
    #[must_use]
    pub fn overlap(self) -> i32 {
        match self {
            Self::Nvl4 => IN_USE,
            Self::Nvl5 => RESOURCE_USED_IN_ANOTHER_PARTITION,
        }
    }

    /// Deactivated and not active.
    #[must_use]
    pub fn not_active(self) -> i32 {
        match self {
            Self::Nvl4 => UNINITIALIZED,
            Self::Nvl5 => PARTITION_ID_NOT_IN_USE,
        }
    }
}
