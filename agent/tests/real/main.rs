//! The agent's program with real containers.
//!
//! Needs root, cgroup v2 and a static busybox; without them every test fails
//! and says what is missing. The scenario `agent_in_guest` of tests/e2e runs
//! these tests in a guest, and the directory that `cargo xtask agent-tests --bundle`
//! makes on another machine. There, what a test needs beyond that may be
//! missing: it then ends with the words of [`support::not_here`], never as one
//! that passed.
#![cfg(test)]
#![forbid(unsafe_code)]

mod bad_input;
mod connections;
mod containers;
mod destroyed;
mod devices;
mod gpus;
mod guest;
mod held;
mod hooks;
mod limits;
mod narrow;
mod network;
mod nothing_left;
mod pause;
mod policy;
mod processes;
mod recycled;
mod short_processes;
mod statuses;
mod storage;
mod streams;
mod stuck;
mod support;
mod taken_back;
mod traps;
mod update;
