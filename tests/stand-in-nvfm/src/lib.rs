//! A library in the place of libnvfm: the same functions with the same
//! structures, to be opened by what opens the real one. What is behind it is a
//! `fake-fm`.
//!
//! `FAKE_NVFM` says which library it is, see [`variant`]. What is not known of
//! the real one is decided here: calls before the initialisation are -4 whatever
//! their arguments, and handles that were never given out are -1.
#![allow(unsafe_code, reason = "functions that C calls, with pointers")]

pub mod abi;
mod address;
mod calls;
mod connection;
mod fill;
mod library;
pub mod variant;

pub use calls::*;
