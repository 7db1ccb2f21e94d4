//! A process in the place of NVIDIA's Fabric Manager.
//!
//! It starts, serves, refuses, dies and restarts as the real one is known to,
//! and its partitions are those of real baseboards. Beyond that it does what a
//! test asks over a socket of its own: be slow, hang, answer one thing and do
//! another. It also judges its caller: a tenant that loses its partition is
//! written down, and the exit code tells.
//!
//! The protocol of the real one is unknown and not imitated: a library in the
//! place of libnvfm ([`wire`]) is the seam.
#![forbid(unsafe_code)]

pub mod board;
pub mod call;
pub mod codes;
pub mod config;
pub mod control;
pub mod home;
pub mod machine;
pub mod scenario;
pub mod server;
mod simulation;
pub mod state_file;
pub mod tenant_monitor;
pub mod wire;
