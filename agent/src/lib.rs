//! The agent of a Firstlight guest.
//!
//! Serves Kata's `AgentService` to an unmodified shim. Two processes: this
//! library's [`server`] speaks ttrpc and keeps the sandbox in order; the
//! runtime (crate `firstlight-runtime`) owns the containers. PID 1 tells which
//! GPUs are ready; a container that asks for one waits for that one only.
#![forbid(unsafe_code)]

pub mod adapt;
pub mod agent;
pub mod bundle;
pub mod capabilities;
pub mod clock;
pub mod config;
mod console;
pub mod container;
pub mod control;
pub mod convert;
pub mod copy;
mod create;
pub mod devices;
mod dns;
pub mod error;
mod exec;
mod first;
mod freeze;
pub mod gpu;
mod group;
pub mod guest;
mod hooks;
pub mod hotplug;
pub mod limits;
pub mod log;
pub mod metrics;
mod modules;
pub mod network;
pub mod oom;
pub mod paths;
pub mod policy;
pub mod process;
mod remove;
pub mod rest;
pub mod runtime;
pub mod server;
pub mod service;
pub mod stats;
pub mod storage;
pub mod stream;
mod swap;
mod update;
mod vsock;
pub mod work;
