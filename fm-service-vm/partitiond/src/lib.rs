//! The only door to a service VM's NVLink fabric.
//!
//! State is what the fabric manager (FM) lists. Intent is what was asked for
//! and acknowledged; the journal has it, and what is under way. No answer of FM to a
//! change is believed alone: what it lists afterwards decides. One change at a
//! time, each on the disk before FM is asked and again when it is done, so that
//! whoever is killed at whatever step leaves what the next one can settle.

pub mod actor;
pub mod engine;
pub mod fabric;
pub mod fault;
mod inventory;
pub mod journal;
pub mod kernel_log;
pub mod listen;
mod look;
pub mod manager;
pub mod meaning;
pub mod metrics;
pub mod modules;
pub mod options;
pub mod refused;
pub mod service;
pub mod state;
pub mod tally;
pub mod versions;
pub mod view;

pub use engine::{Activated, Ask, Engine};
pub use look::{Look, Step};
pub use refused::Refused;
