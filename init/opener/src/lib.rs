//! Opens the root that a kernel command line describes, as the kernel itself
//! would with `CONFIG_DM_INIT`, which Debian's kernels lack.
//!
//! The program is `/init` of a small initial RAM file system that holds nothing
//! but it and the modules for disk, device mapper and file system. It loads
//! them, makes the dm-verity device that `dm-mod.create=` describes, mounts
//! `root=` read-only and hands over to the root's own PID 1. Whatever fails ends
//! in one sentence on the console and a machine that is off: there is no shell.
#![forbid(unsafe_code)]

pub mod open;
pub mod root_params;
