//! A stand-in for libnvfm: the same functions and structures, loaded by the same binding, with `fake-fm` behind it.
//!
//! `FAKE_NVFM` selects the variant, see [`variant`]. Where the real library's behaviour is unknown: calls before the
//! initialisation return -4 whatever their arguments, and unknown handles return -1.
#![allow(unsafe_code, reason = "functions that C calls, with pointers")]

pub mod abi;
mod address;
mod calls;
mod connection;
mod fill;
mod library;
pub mod variant;

pub use calls::*;
