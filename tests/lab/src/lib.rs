//! The lab: the environment of end-to-end tests, prepared without root.
//!
//! [`host_packages`] names the Debian packages a machine needs to build and
//! run the project. [`toolbox`] prepares QEMU, its helpers, a kernel and the
//! headers of exactly that kernel in the cache. [`stand_in`] builds the
//! modules that stand in for NVIDIA's driver, [`binaries`] our own programs,
//! [`libvirt`] runs the machine's libvirt isolated from the machine.
//! [`Lab`] prepares all of them, and creates virtual machines from a [`Guest`].
#![forbid(unsafe_code)]

pub mod agent_tests_bundle;
pub mod binaries;
mod busybox;
pub mod formats;
pub mod gpu_bundle;
mod gpus;
mod guest;
pub mod host_packages;
mod lab;
pub mod libvirt;
mod manifest;
pub mod shipped;
pub mod stand_in;
pub mod toolbox;

pub use firstlight_image_builder::cache::root as cache_root;
pub use gpus::{GpuError, SyntheticGpus};
pub use guest::{Guest, Prepared, accelerator, fail_with, h100};
pub use lab::{AgentBench, Lab, LabError};
pub use libvirt::Libvirt;
pub use stand_in::StandIn;
pub use toolbox::{DiskTools, FileSystem, Toolbox};
