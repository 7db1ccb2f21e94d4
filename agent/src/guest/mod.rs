//! Calls that concern the whole guest.

pub mod cpuset;
pub mod date;
pub mod details;
pub mod diagnostic;
pub mod entropy;
pub mod online;
pub mod probe;
