//! The service VM as a libvirt domain.
//!
//! [`topology`] reads the host's PCI bus, [`passthrough`] selects the functions for the VM or reports why it cannot,
//! [`xml`] writes the domain and [`definition`] parses it as libvirt has it. [`service`] defines, starts and destroys
//! the domain by [`virsh`]. All kernel interfaces are read below the roots of [`Host`], so that tests can use
//! directories.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod check;
pub mod definition;
pub mod group_users;
mod host;
mod name;
pub mod passthrough;
mod problem;
pub mod service;
pub mod state_disk;
pub mod topology;
pub mod virsh;
pub mod xml;

pub use host::Host;
pub use name::{Name, NameError};
pub use problem::Problem;
