//! Container Device Interface specifications: read, written and applied.
//!
//! The subset of CDI 0.5.0 that a guest needs, with our own types: the
//! published crate brings an HTTPS client and a JSON schema validator along.
#![forbid(unsafe_code)]

#[cfg(feature = "apply")]
mod apply;
mod capability;
mod dir;
mod name;
mod spec;

#[cfg(feature = "apply")]
pub use apply::{ApplyError, apply};
pub use capability::{Capabilities, Capability, DRIVER_KIND};
pub use dir::{Directory, DirectoryError, UnknownDevice};
pub use name::{DeviceName, ParseNameError};
pub use spec::{ContainerEdits, Device, DeviceNode, Hook, Mount, SPEC_VERSION, Spec, SpecError};

/// The directory in which specifications are looked for, inside the guest.
pub const SPEC_DIR: &str = "/var/run/cdi";

/// The kind under which this project publishes GPUs.
pub const GPU_KIND: &str = "nvidia.com/gpu";
