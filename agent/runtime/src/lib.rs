//! The single-threaded process that owns every container.
//!
//! libcontainer clones processes without telling the C library, changes the
//! caller's working directory and OOM score, and waits for children of its own.
//! None of that goes together with threads or with another reaper, so one
//! process does nothing else: it is forked before any thread exists, takes one
//! [`Call`] at a time from a `SEQPACKET` socket, and reaps children only
//! between calls. Exits are sent as [`FromRuntime::Exited`].
//!
//! The containers live as long as the socket: when its other end is gone, the
//! runtime kills them and ends.
#![forbid(unsafe_code)]

mod children;
mod containers;
mod entry;
mod message;
mod namespaces;
mod signal;
mod socket;
mod supervisor;
mod words;

pub use message::{Call, Done, Failure, FailureKind, FromRuntime, Request};
pub use socket::{MAX_MESSAGE, receive, send};
pub use supervisor::{Options, run};
