//! System calls and ioctls that no safe library covers: the one crate with unsafe code.
//!
//! One module per topic. Calls that rustix or the standard library wrap safely are
//! not wrapped again.
#![allow(unsafe_code, reason = "this crate is where system calls are wrapped")]
pub mod bpf;
pub mod child;
pub mod daemon;
pub mod datagram;
pub mod dm;
pub mod entropy;
pub mod fork;
pub mod memory;
pub mod mount;
pub mod net;
#[cfg(feature = "nvfm")]
pub mod nvfm;
pub mod nvidia;
#[cfg(feature = "nvml")]
pub mod nvml;
pub mod process_mark;
pub mod signals;
pub mod spawn;
pub mod swap;
pub mod tsc;
