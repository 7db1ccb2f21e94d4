//! The host's PCI devices for passthrough.
//!
//! [`Topology`] has the PCI functions with their IOMMU groups and drivers, [`vfio`] checks whether functions can be passed
//! through, [`group_users`] finds the processes that have a group open. A [`Problem`] names the object and the remedy.
//! All kernel interfaces are read below the directories of [`HostRoots`], so that tests can use their own.
#![forbid(unsafe_code)]

pub mod group_users;
mod host;
mod problem;
mod topology;
pub mod vfio;

pub use host::HostRoots;
pub use problem::{Problem, joined};
pub use topology::{PciFunction, Topology};
