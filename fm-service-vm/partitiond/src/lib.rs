//! The sole interface to a service VM's NVLink fabric.
//!
//! The actual state is what the fabric manager (FM) lists. The desired state is what was requested and acknowledged;
//! the journal has it, and the change in progress. FM's reply to a change is never sufficient: the list that it
//! returns afterwards decides. There is one change at a time, each on the disk before FM is called and again when it
//! is done, so that a daemon killed at any step can recover.

pub mod actor;
pub mod change_stats;
pub mod engine;
pub mod error;
pub mod error_class;
pub mod fabric;
pub mod fault;
pub mod journal;
pub mod kernel_log;
pub mod listen;
pub mod logging;
pub mod manager;
pub mod metrics;
mod module_map_api;
pub mod module_map_store;
pub mod options;
pub mod service;
mod snapshot;
pub mod state;
pub mod versions;
pub mod view;

pub use engine::{Activated, Engine, PartitionSelector};
pub use error::EngineError;
pub use snapshot::{FabricSnapshot, Step};
