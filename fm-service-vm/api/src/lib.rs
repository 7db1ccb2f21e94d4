//! The partition daemon's gRPC API.
//!
//! `proto/fabric.proto` is the text of it: who calls it from another language
//! takes that file.
#![forbid(unsafe_code)]

#[cfg(feature = "connect")]
pub mod connect;

/// Everything of the API's version 1.
#[expect(missing_docs, reason = "generated; the documentation is the .proto's")]
#[allow(clippy::pedantic, clippy::nursery, unreachable_pub, rust_2018_idioms, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("firstlight.fabric.v1");
}

/// The vsock port at which the daemon of a service VM answers its host.
pub const VSOCK_PORT: u32 = 1030;
