//! Tests of the agent's program with real containers.
//!
//! They need root, cgroup v2 and a static busybox; without these every test fails and names what is missing. The
//! scenario `agent_in_guest` of tests/e2e runs them in a guest, and the bundle of `cargo xtask agent-tests
//! --bundle` runs them on another machine. There, further requirements of a test may be missing: it then panics
//! with the message of [`support::not_runnable`] and never counts as passed.
#![cfg(test)]
#![forbid(unsafe_code)]

mod cleanup;
mod connections;
mod containers;
mod destroy_sandbox;
mod devices;
mod error_codes;
mod gpus;
mod guest;
mod hooks;
mod invalid_requests;
mod isolation;
mod libcontainer_regressions;
mod network;
mod nvidia_variables;
mod oom_events;
mod pause;
mod pid_reuse;
mod policy;
mod processes;
mod resources;
mod rollback;
mod short_processes;
mod storage;
mod streams;
mod support;
mod update;
