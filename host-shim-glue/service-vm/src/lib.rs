//! The service VM as a domain of libvirt.
//!
//! [`topology`] reads what is on the host's PCI bus, [`members`] decides which
//! functions the VM is given and says why it is none, [`xml`] writes the domain
//! and [`definition`] reads what libvirt has of one. [`service`] is the domain's
//! life, by [`virsh`]. Everything that the kernel shows is read below the roots
//! of [`Host`], so that tests hand in directories.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod check;
pub mod definition;
pub mod holder;
mod host;
pub mod members;
mod name;
mod problem;
pub mod service;
pub mod state_disk;
pub mod topology;
pub mod virsh;
pub mod xml;

pub use host::Host;
pub use name::{Name, NameError};
pub use problem::Problem;
