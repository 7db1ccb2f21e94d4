//! Container Device Interface (CDI) specifications: parsing, writing, applying.
//!
//! Implements the subset of CDI 0.5.0 that a guest needs: the published crate
//! depends on an HTTPS client and a JSON schema validator.
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

/// The guest's directory of specifications.
pub const SPEC_DIR: &str = "/var/run/cdi";

/// The CDI kind of GPUs.
pub const GPU_KIND: &str = "nvidia.com/gpu";
