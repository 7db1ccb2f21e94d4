//! The agent's program with real containers.
//!
//! Needs root, cgroup v2, a static busybox, and the right to raise the limit of
//! locked memory; a test says what is missing and does nothing without it.
#![cfg(test)]
#![forbid(unsafe_code)]

mod containers;
mod gpus;
mod limits;
mod support;
