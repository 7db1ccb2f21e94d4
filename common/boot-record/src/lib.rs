//! The boot record: what every unit of a boot did, when, and why.
//!
//! One JSON document, schema [`SCHEMA`]. Times are microseconds of
//! `CLOCK_BOOTTIME`, whose zero is the kernel's start. PID 1 owns the record,
//! keeps it in `/run/firstlight/boot-record.json`, and writes every change as
//! one line to the console, from which [`Assembler`] puts the record together
//! again when the machine that made it is gone.
#![forbid(unsafe_code)]

mod assemble;
mod line;
mod log;
mod record;

pub use assemble::Assembler;
pub use line::{Line, LineError, PREFIX};
pub use log::{LEVELS, LOG_PREFIX, Level, LogLine, clean, word};
pub use record::{
    BootRecord, DriverCode, Event, Failure, Gpu, GpuPhase, Kernel, Milestone, Mode, Outcome, ReadError, SCHEMA,
    Severity, State, Unit,
};
