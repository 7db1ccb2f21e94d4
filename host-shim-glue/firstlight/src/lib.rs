//! The host side of Firstlight.
//!
//! [`run`] boots a guest, runs one container in it through the agent and returns a
//! report with a timeline.
#![forbid(unsafe_code)]

pub mod agent;
pub mod container;
mod explain;
pub mod run;

pub use explain::explain;
