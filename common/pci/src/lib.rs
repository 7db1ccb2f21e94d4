//! PCI addresses, paths and functions.
//!
//! All functions take the sysfs root as a path, so tests pass a directory
//! instead of `/sys`.
#![forbid(unsafe_code)]

mod address;
mod function;
mod kind;
mod path;

pub use address::{Address, ParseAddressError};
pub use function::{Function, ScanError, driver, functions_of_kind, scan};
pub use kind::{KINDS, Kind, kind_of};
pub use path::{ParsePciPathError, PciPath, ResolveError, ResolvedFunction};
