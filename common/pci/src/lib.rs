//! PCI addresses and the functions that sysfs lists.
//!
//! Everything here reads a tree below a root path, so that tests hand in a
//! directory of their own instead of `/sys`.
#![forbid(unsafe_code)]

mod address;
mod function;
mod kind;
mod place;

pub use address::{Address, ParseAddressError};
pub use function::{Function, ScanError, driver, of_kind, scan};
pub use kind::{KINDS, Kind, kind_of};
pub use place::{Found, Missing, ParsePlaceError, Place};
