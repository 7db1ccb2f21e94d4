//! The boot record: what every unit of a boot did, when, and why.
//!
//! One JSON document, schema [`SCHEMA`]. Times are microseconds of
//! `CLOCK_BOOTTIME`, whose zero is the kernel's start. PID 1 owns the record,
//! writes it to `/run/firstlight/boot-record.json`, and prints every change as
//! one line on the console, from which [`Assembler`] reassembles the record
//! after the guest is gone.
#![forbid(unsafe_code)]

mod assemble;
mod line;
mod log;
mod record;

pub use assemble::Assembler;
pub use line::{Line, LineError, PREFIX};
pub use log::{LEVELS, LOG_PREFIX, Level, LogLine, sanitize, sanitize_source};
pub use record::{
    BootRecord, DriverCode, Event, Failure, Gpu, GpuPhase, Kernel, Milestone, Mode, Outcome, ReadError, SCHEMA,
    Severity, State, Unit,
};
