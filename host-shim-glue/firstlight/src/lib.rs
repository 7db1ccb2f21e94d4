//! The host side of Firstlight.
//!
//! [`run`] boots a guest, runs one container in it through the agent and returns a
//! report with a timeline. [`boot`] boots a guest without a container. [`guest`]
//! makes a virtual machine of a built image.
#![forbid(unsafe_code)]

pub mod agent;
pub mod boot;
pub mod container;
mod explain;
pub mod guest;
pub mod run;

pub use explain::explain;
