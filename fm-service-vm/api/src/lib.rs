//! The partition daemon's gRPC API.
//!
//! Clients in other languages are generated from `proto/fabric.proto`.
#![forbid(unsafe_code)]

#[cfg(feature = "connect")]
pub mod connect;

/// The generated API, version 1.
#[expect(missing_docs, reason = "generated; the documentation is the .proto's")]
#[allow(clippy::pedantic, clippy::nursery, unreachable_pub, rust_2018_idioms, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("firstlight.fabric.v1");
}

/// The vsock port on which the daemon of a service VM serves its host.
pub const VSOCK_PORT: u32 = 1030;
