//! Compiles a container's device rules to a cgroup BPF program.
//!
//! The kernel runs a program of type `BPF_PROG_TYPE_CGROUP_DEVICE` before a process of its cgroup opens a device
//! or creates a device node. The rules are those of the OCI configuration: they apply in order, the last one that
//! matches decides, and one of kind [`Kind::All`] discards those before it. What no rule matches is denied unless
//! an "all" rule allowed everything.
//!
//! # Several access bits
//!
//! The kernel checks all requested bits at once: an open for reading and writing is one check with two bits. Each
//! bit is decided separately, by the last rule that matches the device and has that bit, and access is allowed
//! only if every bit is. So
//!
//! * a rule that allows only `r` opens nothing for `rw`;
//! * a rule that denies only `w` denies `w` and `rw`, and not `r`;
//! * two rules that allow `r` and `w` of the same device allow `rw`, as in cgroup v1, where both become one entry;
//! * a check without bits (e.g. execute permission of a node) is allowed: it opens nothing.
//!
//! Unlike in cgroup v1, a deny rule restricts a broader rule before it, as the OCI specification requires.
#![forbid(unsafe_code)]

mod filter;
mod program;
mod rule;

pub use filter::{Error, Filter, MAX_RULES};
pub use program::Instruction;
pub use rule::{Access, AccessRequest, Kind, Rule};

#[cfg(test)]
mod tests;
