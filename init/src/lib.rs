//! PID 1 of a Firstlight guest.
//!
//! The boot is a plan: a table of units ([`units`]), checked ([`plan`]) and run by a state machine
//! ([`executor`]). Decisions are pure functions of time and events: [`executor`], [`attach`],
//! [`restart`], [`shutdown`], [`params`], [`mode`]. I/O is in thin layers around them;
//! [`supervisor`] is the main loop.
#![forbid(unsafe_code)]

pub mod actions;
pub mod agent;
pub mod attach;
pub mod cdi;
pub mod clock;
pub mod confidential;
pub mod console;
pub mod control;
pub mod daemons;
pub mod disks;
pub mod driver_files;
pub mod driver_paths;
pub mod executor;
pub mod extensions;
pub mod failures;
pub mod hotplug;
pub mod interrupts;
pub mod kmsg;
pub mod log;
pub mod mode;
pub mod modules;
pub mod mounts;
pub mod nodes;
pub mod open;
pub mod panic;
pub mod params;
pub mod plan;
pub mod processes;
pub mod record;
pub mod restart;
pub mod root;
pub mod settings;
pub mod shutdown;
pub mod state_disk;
pub mod supervisor;
pub mod sysctls;
pub mod unit_id;
pub mod units;
pub mod verified;
