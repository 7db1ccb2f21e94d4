//! A stand-in for NVIDIA's Fabric Manager.
//!
//! It starts, serves, refuses, dies and restarts as the real one is known to, with the partitions of real baseboards.
//! On request of a test over a control socket it is slow, hangs, or returns codes that contradict the effect. It also
//! checks its caller: a tenant that loses its partition is logged as a violation, and sets the exit code.
//!
//! The real protocol is unknown and not imitated: the interface is a stand-in for libnvfm ([`wire`]).
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
