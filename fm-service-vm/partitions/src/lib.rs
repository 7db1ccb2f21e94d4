//! Partitions of an NVLink fabric.
//!
//! A baseboard has GPUs, identified by module id (FM's "physical id"), and FM a fixed list of sets of GPUs that may
//! be connected. Two partitions may be active together if they have no GPU in common, and a virtual machine needs
//! exactly the GPUs of one partition. This crate is set arithmetic: which partition a request gets, or why none.

mod gpus;
pub mod known;
mod plan;
mod table;

pub use gpus::{Gpus, InvalidModuleId, MODULE_ID_LIMIT};
pub use plan::{Allocation, Choice, Free, PlanError, Request};
pub use table::{Partition, PartitionId, Table, TableError};
