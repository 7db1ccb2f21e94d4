//! The service VM as a libvirt domain.
//!
//! [`members`] selects the functions of the host's PCI bus for the VM or reports why it cannot,
//! [`xml`] writes the domain and [`definition`] parses it as libvirt has it. [`service`] defines, starts and destroys
//! the domain by [`virsh`]. All kernel interfaces are read below the roots of
//! [`HostRoots`](firstlight_devices::HostRoots), so that tests can use directories.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod check;
pub mod definition;
pub mod members;
mod name;
mod qemu_process;
pub mod service;
pub mod state_disk;
pub mod virsh;
pub mod xml;

pub use name::{Name, NameError};
