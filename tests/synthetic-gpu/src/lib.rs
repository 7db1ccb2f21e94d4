//! PCI devices that look like GPUs, served to QEMU over vfio-user.
//!
//! QEMU 10.1 and later attaches each of them with `-device vfio-user-pci`, so
//! a guest without any hardware sees eight H100s with 128 GiB BARs, the four
//! NVSwitches of a baseboard and its management endpoint. Only the PCI side is
//! modelled: identity, BARs, capabilities, MSI-X, function level reset. GPU
//! functions are not; the stand-in `nvidia.ko` in `tests/stand-in-nvidia` reads
//! the duration and result of its attach from the [`registers`].
//!
//! The program is `synthetic-gpu DIR DEVICE...`; see [`Device`] for the
//! grammar of DEVICE and [`profile`] for the table of what can be served.
#![forbid(unsafe_code)]

mod config_space;
mod device;
mod function;
mod profile;
pub mod registers;
mod server;

pub use config_space::{CONFIG_SIZE, ConfigSpace, Effect};
pub use device::{Device, DeviceError};
pub use function::Function;
pub use profile::{Backing, Bar, MsiX, PROFILES, Profile, profile};
pub use server::{ServeError, Sockets};
