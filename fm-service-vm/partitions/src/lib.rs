//! Partitions of an NVLink fabric.
//!
//! A baseboard has GPUs, known by the module id of the place that they are in
//! (FM's "physical id"), and FM a fixed list of sets of them that may be
//! connected. Two partitions may be active together if no GPU is in both, and
//! a virtual machine has to have exactly the GPUs of one partition. Everything
//! here is arithmetic on sets: which partition a request gets, and why none.

mod gpus;
pub mod known;
mod plan;
mod table;

pub use gpus::{Gpus, MOST, NoGpu};
pub use plan::{Choice, Free, Refusal, Request, State};
pub use table::{Partition, PartitionId, Table, TableError};
