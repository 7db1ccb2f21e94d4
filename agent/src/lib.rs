//! The agent of a Firstlight guest.
//!
//! Serves Kata's `AgentService` to an unmodified shim. Two processes: this library's [`server`]
//! speaks ttrpc and manages the sandbox; the runtime (crate `firstlight-runtime`) owns the
//! containers. PID 1 reports which GPUs are ready; a container waits only for the GPUs that it
//! requests.
#![forbid(unsafe_code)]

pub mod agent;
pub mod background;
pub mod boot_events;
pub mod bundle;
pub mod capabilities;
pub mod clock;
pub mod config;
mod console;
pub mod container;
pub mod containers;
pub mod control;
pub mod convert;
pub mod copy;
pub mod devices;
mod dns;
pub mod error;
#[cfg(test)]
mod fake_runtime;
pub mod gpu;
pub mod guest;
mod hooks;
pub mod hotplug;
pub mod idle;
pub mod limits;
pub mod log;
pub mod metrics;
mod modules;
pub mod network;
pub mod oci_config;
pub mod oom;
pub mod paths;
pub mod policy;
pub mod process;
pub mod runtime;
pub mod sandbox;
pub mod server;
pub mod service;
pub mod stats;
pub mod storage;
pub mod stream;
pub mod swap;
mod vsock;

/// The agent's version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
