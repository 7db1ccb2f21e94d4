//! The agent's program with real containers.
//!
//! Needs root, cgroup v2, a static busybox, and the right to raise the limit of
//! locked memory; without them every test fails and says what is missing. The
//! scenario `agent_in_guest` of tests/e2e runs these tests in a guest.
#![cfg(test)]
#![forbid(unsafe_code)]

mod containers;
mod gpus;
mod limits;
mod policy;
mod support;
