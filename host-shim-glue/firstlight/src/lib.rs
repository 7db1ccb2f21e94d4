//! The host side of Firstlight.
//!
//! [`run`] boots a guest, runs one container in it through the agent and
//! reports what happened and when.
#![forbid(unsafe_code)]

pub mod agent;
pub mod container;
mod explain;
pub mod run;

pub use explain::explain;
