//! The single-threaded process that owns every container.
//!
//! libcontainer clones processes without the C library's knowledge, changes the caller's working directory and
//! OOM score, and waits for its own children. None of that works in a multi-threaded process or beside another
//! reaper. Therefore one process does nothing else: it is forked before any thread exists and receives [`Call`]s
//! on a `SEQPACKET` socket. libcontainer also blocks on file systems, hooks and processes, so a forked worker
//! carries out each call; container processes become children of the runtime itself (`CLONE_PARENT`), and a slow
//! or stuck call blocks no other. Exits are sent as [`FromRuntime::Exited`].
//!
//! The containers live as long as the socket: when the peer closes it, the runtime kills them and exits.
#![forbid(unsafe_code)]

mod call_queue;
mod cgroup;
mod children;
mod containers;
mod cpu_affinity;
mod executor;
mod filter;
mod helper_log;
mod home;
mod hooks;
mod message;
mod namespaces;
mod nested_cgroup;
mod prefork;
mod signal;
mod socket;
mod supervisor;
mod worker;

pub use cgroup::make as make_cgroup;
pub use home::HOME_FROM_PASSWD;
pub use hooks::{ARGUMENT as HOOKS_ARGUMENT, FILE as HOOKS_FILE, create_runtime_hook, create_runtime_hook_main};
pub use message::{Call, Done, Failure, FailureKind, FromRuntime, Request};
pub use socket::{MAX_MESSAGE, MAX_REQUEST, receive, send};
pub use supervisor::{Options, run};
