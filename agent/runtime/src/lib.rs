//! The single-threaded process that owns every container.
//!
//! libcontainer clones processes without telling the C library, changes the
//! caller's working directory and OOM score, and waits for children of its own.
//! None of that goes together with threads or with another reaper, so one
//! process does nothing else: it is forked before any thread exists and takes
//! [`Call`]s from a `SEQPACKET` socket. libcontainer also waits, for file
//! systems, hooks and processes, so each call to it is made by a copy of that
//! process: the processes of containers become the original's children all the
//! same, and nothing that is slow or stuck is in anybody's way. Exits are sent
//! as [`FromRuntime::Exited`].
//!
//! The containers live as long as the socket: when its other end is gone, the
//! runtime kills them and ends.
#![forbid(unsafe_code)]

mod children;
mod containers;
mod executor;
mod filter;
mod call_queue;
mod cgroup;
mod home;
mod hooks;
mod message;
mod namespaces;
mod nested_cgroup;
mod cpu_affinity;
mod signal;
mod socket;
mod prefork;
mod supervisor;
mod helper_log;
mod worker;

pub use cgroup::make as make_cgroup;
pub use home::HOME_FROM_PASSWD;
pub use hooks::{ARGUMENT as HOOKS_ARGUMENT, FILE as HOOKS_FILE, create_runtime_hook, create_runtime_hook_main};
pub use message::{Call, Done, Failure, FailureKind, FromRuntime, Request};
pub use socket::{MAX_MESSAGE, MAX_REQUEST, receive, send};
pub use supervisor::{Options, run};
