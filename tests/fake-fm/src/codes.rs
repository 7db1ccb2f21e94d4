//! Return codes of libnvfm: a C enumeration of negative numbers.

use firstlight_partitions::known::KnownBaseboard;
use serde::{Deserialize, Serialize};

/// Success.
pub const SUCCESS: i32 = 0;
/// Invalid argument.
pub const BAD_PARAM: i32 = -1;
/// Unspecified error.
pub const GENERIC_ERROR: i32 = -2;
/// Not supported in this mode.
pub const NOT_SUPPORTED: i32 = -3;
/// The library was not initialised; also: the partition is not active.
pub const UNINITIALIZED: i32 = -4;
/// Timeout.
pub const TIMEOUT: i32 = -5;
/// Unsupported structure version.
pub const VERSION_MISMATCH: i32 = -6;
/// The library is initialised; also: the partition or a GPU of it is active.
pub const IN_USE: i32 = -7;
/// Starting, or waiting for the list of active partitions.
pub const NOT_CONFIGURED: i32 = -8;
/// The manager is not running.
pub const CONNECTION_NOT_VALID: i32 = -9;
/// A link could not be trained.
pub const NVLINK_ERROR: i32 = -10;
/// NVLink 5: the partition is active.
pub const PARTITION_ID_IN_USE: i32 = -17;
/// NVLink 5: the partition is not active.
pub const PARTITION_ID_NOT_IN_USE: i32 = -18;
/// NVLink 5: a GPU of it is in an active partition.
pub const RESOURCE_USED_IN_ANOTHER_PARTITION: i32 = -24;

/// NVLink generations use different codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// Up to the H200: as documented in the header.
    Nvl4,
    /// B200 and later: as observed in the field.
    Nvl5,
}

impl Family {
    /// Returns the generation of a baseboard's manager.
    #[must_use]
    pub fn of(known: &KnownBaseboard) -> Self {
        if known.name == "b200" { Self::Nvl5 } else { Self::Nvl4 }
    }

    /// The code for a partition that is active already.
    #[must_use]
    pub fn already_active(self) -> i32 {
        match self {
            Self::Nvl4 => IN_USE,
            Self::Nvl5 => PARTITION_ID_IN_USE,
        }
    }

    /// The code for a partition that shares a GPU with an active one.
    #[must_use]
    pub fn overlap(self) -> i32 {
        match self {
            Self::Nvl4 => IN_USE,
            Self::Nvl5 => RESOURCE_USED_IN_ANOTHER_PARTITION,
        }
    }

    /// The code for deactivating an inactive partition.
    #[must_use]
    pub fn not_active(self) -> i32 {
        match self {
            Self::Nvl4 => UNINITIALIZED,
            Self::Nvl5 => PARTITION_ID_NOT_IN_USE,
        }
    }
}
