//! ttrpc API of the Kata agent and of Firstlight's own services, generated from .proto.
//!
//! Each module is one file of `proto/`; the modules that end in `_ttrpc` hold
//! the asynchronous clients and server traits. The service name on the wire is
//! the package and the service, e.g. `grpc.AgentService`.
#![forbid(unsafe_code)]

#[cfg(feature = "serde")]
mod json;

include!(concat!(env!("OUT_DIR"), "/mod.rs"));

/// The vsock port of a guest's agent.
pub const AGENT_PORT: u32 = 1024;
