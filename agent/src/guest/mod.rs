//! Calls about the guest as a whole rather than one container.

pub mod cpuset;
pub mod date;
pub mod details;
pub mod diagnostic;
pub mod entropy;
pub mod online;
pub mod probe;
