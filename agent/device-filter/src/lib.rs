//! Device rules of a container as a program for the kernel.
//!
//! The kernel asks a program of type `BPF_PROG_TYPE_CGROUP_DEVICE` before a
//! process of its resource group opens a device or makes a node of it. Rules
//! are those of the OCI configuration: they hold in their order, the last one
//! that matches decides, and one of kind [`Kind::All`] throws away those before
//! it. What no rule matches is denied unless an "all" rule allowed everything.
//!
//! # More than one bit
//!
//! The kernel asks once for everything that somebody wants: an open for
//! reading and writing is one question with two bits. Each bit is decided by
//! itself, by the last rule that matches the device and has that bit, and the
//! answer is yes only if it is for every bit. So
//!
//! * a rule that allows only `r` opens nothing for `rw`;
//! * a rule that denies only `w` denies `w` and `rw`, and not `r`;
//! * two rules that allow `r` and `w` of the same device allow `rw`, as the
//!   lists of cgroup v1 do, in which both become one entry;
//! * a question without bits (may this node be executed?) is answered with yes:
//!   nothing is opened by it.
//!
//! Unlike cgroup v1 a rule that denies takes something away from a wider rule
//! before it, as the OCI specification has it.
#![forbid(unsafe_code)]

mod filter;
mod program;
mod rule;

pub use filter::{Error, Filter, MOST_RULES};
pub use program::Instruction;
pub use rule::{Access, Asked, Kind, Rule};

#[cfg(test)]
mod tests;
