//! What a code of libnvfm means for whoever asked. The same thing is said in
//! different codes by different generations, and some codes say two things: none
//! of them decides what is true. That is what FM lists afterwards.

use firstlight_sys::nvfm::{Code, Error};

/// What kind of answer it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// The partition is active already, or one that shares a GPU with it is.
    ActiveOrInConflict,
    /// It is not active.
    NotActive,
    /// FM begins, or waits for the list of active partitions.
    NotReady,
    /// FM does not partition: it is not in the shared mode.
    WrongMode,
    /// FM is not there.
    Gone,
    /// There is no such partition, or FM takes the request for nonsense.
    NoSuchThing,
    /// Links or switches could not be set up.
    Hardware,
    /// The library and FM do not understand each other.
    OtherVersion,
    /// Nobody knows what was done.
    Unknown,
}

impl Meaning {
    /// Of a code.
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

    /// Of an error of the binding.
    #[must_use]
    pub fn of_error(error: &Error) -> Self {
        match error {
            Error::Refused { code, .. } => Self::of(*code),
            Error::Reply { .. } | Error::Missing { .. } => Self::OtherVersion,
            Error::Address { .. } => Self::Gone,
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn advice(self) -> &'static str {
        match self {
            Self::ActiveOrInConflict => "list the partitions: another one has a GPU of it",
            Self::NotActive => "list the partitions: it is not active",
            Self::NotReady => {
                "the fabric manager has just begun; ask again in some seconds, and look at its log if that lasts"
            }
            Self::WrongMode => "fabricmanager.cfg has to say FABRIC_MODE=1, and the fabric manager to be started again",
            Self::Gone => "the fabric manager does not run, or listens elsewhere: look at its unit and its log",
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
    fn both_generations_say_the_same_in_their_codes() {
        for (older, later, meaning) in [(-7, -17, Meaning::ActiveOrInConflict), (-4, -18, Meaning::NotActive)] {
            assert_eq!((Meaning::of(Code(older)), Meaning::of(Code(later))), (meaning, meaning));
        }
        for (code, meaning) in [
            (-5, Meaning::Unknown),
            (-2, Meaning::Unknown),
            (-99, Meaning::Unknown),
            (7, Meaning::Unknown),
            (-10, Meaning::Hardware),
            (-29, Meaning::Hardware),
            (-8, Meaning::NotReady),
        ] {
            assert_eq!(Meaning::of(Code(code)), meaning, "{code}");
        }
        for code in -30..=1 {
            assert!(!Meaning::of(Code(code)).advice().is_empty());
        }
    }
}
