//! Classes of libnvfm's return codes. NVLink generations use different codes for the same error, and some codes have
//! two meanings, so no code decides what happened: FM's list afterwards does.

use firstlight_sys::nvfm::{Code, Error};

/// The class of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// The partition, or one that shares a GPU with it, is active already.
    ActiveOrInConflict,
    /// The partition is not active.
    NotActive,
    /// FM is starting, or waits for the list of active partitions.
    NotReady,
    /// FM is not in the shared mode, so it has no partitions.
    WrongMode,
    /// FM is not running.
    Gone,
    /// There is no such partition, or a parameter is invalid.
    NoSuchThing,
    /// Links or switches could not be configured.
    Hardware,
    /// The versions of library and FM do not match.
    OtherVersion,
    /// The outcome is unknown.
    Unknown,
}

impl ErrorClass {
    /// Returns the class of a code.
    #[must_use]
    pub fn of(code: Code) -> Self {
        match code.0 {
            -1 => Self::NoSuchThing,
            -3 => Self::WrongMode,
            -4 | -13 | -18 => Self::NotActive,
            -6 => Self::OtherVersion,
            -7 | -12 | -17 | -23 | -24 => Self::ActiveOrInConflict,
            -8 | -15 | -22 => Self::NotReady,
            -9 => Self::Gone,
            -29..=-25 | -11 | -10 => Self::Hardware,
            _ => Self::Unknown,
        }
    }

    /// Returns the class of an error.
    #[must_use]
    pub fn of_error(error: &Error) -> Self {
        match error {
            Error::Refused { code, .. } => Self::of(*code),
            Error::Reply { .. } | Error::Missing { .. } => Self::OtherVersion,
            Error::Address { .. } => Self::Gone,
        }
    }

    /// Returns what to do about it.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::ActiveOrInConflict => "list the partitions: another active one shares a GPU with it",
            Self::NotActive => "list the partitions: it is not active",
            Self::NotReady => {
                "the fabric manager is starting; retry in some seconds, and look at its log if that persists"
            }
            Self::WrongMode => "fabricmanager.cfg has to say FABRIC_MODE=1, and the fabric manager to be restarted",
            Self::Gone => "the fabric manager does not run, or listens elsewhere: look at check its unit and log",
            Self::NoSuchThing => "list the partitions for their numbers",
            Self::Hardware => "look for SXid and Xid lines in the kernel's log; quarantine the GPU that they name",
            Self::OtherVersion => "the fabric manager, libnvfm and the driver have to be of one version",
            Self::Unknown => "list the partitions, and look at the fabric manager's log",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_both_generations_map_to_the_same_class() {
        for (older, later, error_class) in [(-7, -17, ErrorClass::ActiveOrInConflict), (-4, -18, ErrorClass::NotActive)]
        {
            assert_eq!((ErrorClass::of(Code(older)), ErrorClass::of(Code(later))), (error_class, error_class));
        }
        for (code, error_class) in [
            (-5, ErrorClass::Unknown),
            (-2, ErrorClass::Unknown),
            (-99, ErrorClass::Unknown),
            (7, ErrorClass::Unknown),
            (-10, ErrorClass::Hardware),
            (-29, ErrorClass::Hardware),
            (-8, ErrorClass::NotReady),
        ] {
            assert_eq!(ErrorClass::of(Code(code)), error_class, "{code}");
        }
        for code in -30..=1 {
            assert!(!ErrorClass::of(Code(code)).remedy().is_empty());
        }
    }
}
