//! Return codes of libnvfm.

use std::fmt;

/// A return code: 0 is success. Codes of later libraries may be unknown here; they are printed as numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Code(pub i32);

/// Names of the known codes, by absolute value.
const NAMES: &[&str] = &[
    "success",
    "bad parameter",
    "generic error",
    "not supported",
    "uninitialised",
    "timeout",
    "version mismatch",
    "in use",
    "not configured",
    "connection not valid",
    "NVLink error",
    "resource bad",
    "resource in use",
    "resource not in use",
    "resource exhausted",
    "resource not ready",
    "partition exists",
    "partition id in use",
    "partition id not in use",
    "partition name in use",
    "partition name not in use",
    "partition id and name do not fit",
    "not ready",
    "resource used in this partition",
    "resource used in another partition",
    "partition has miswired trunks",
    "partition has too few trunks",
    "partition misses switches",
    "partition's network configuration failed",
    "programming the partition's routes failed",
];

impl Code {
    /// Success.
    pub const SUCCESS: Self = Self(0);
    /// An invalid argument, such as a partition that does not exist.
    pub const BAD_PARAMETER: Self = Self(-1);
    /// Unspecified error.
    pub const GENERIC: Self = Self(-2);
    /// Also returned for every partition call where FM is not in the shared mode.
    pub const NOT_SUPPORTED: Self = Self(-3);
    /// The library is not initialised; older fabric managers: the partition is not active.
    pub const UNINITIALISED: Self = Self(-4);
    /// FM timed out; what it has done is unknown.
    pub const TIMEOUT: Self = Self(-5);
    /// The version of a structure is not supported.
    pub const VERSION_MISMATCH: Self = Self(-6);
    /// Older fabric managers: the partition, or a GPU of it, is active.
    pub const IN_USE: Self = Self(-7);
    /// FM is not configured yet, or waits for the list of active partitions.
    pub const NOT_CONFIGURED: Self = Self(-8);
    /// FM is not running.
    pub const CONNECTION_NOT_VALID: Self = Self(-9);
    /// NVLinks could not be brought up or down.
    pub const NVLINK: Self = Self(-10);

    /// Returns the name, if the code is known.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        let at = usize::try_from(self.0.checked_neg()?).ok()?;
        NAMES.get(at).copied()
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name().unwrap_or("unknown code"), self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_print_as_names_or_numbers() {
        assert_eq!(Code::NVLINK.to_string(), "NVLink error (-10)");
        assert_eq!(Code(-24).to_string(), "resource used in another partition (-24)");
        assert_eq!(Code(-29).name(), Some("programming the partition's routes failed"));
        for unknown in [-30, 1, i32::MIN, i32::MAX] {
            assert_eq!(Code(unknown).to_string(), format!("unknown code ({unknown})"));
        }
    }
}
