//! QEMU virtual machines: command line, lifecycle, console.
//!
//! [`Machine`] is the configuration and generates the QEMU command line; [`Vm`] is
//! a running machine with its daemons (vsock, virtio-fs), which are killed with
//! it. [`Console`] has the guest's output as text and as a boot record.
//! [`or_interrupted`] cancels all of it on a signal.
#![forbid(unsafe_code)]

mod console;
mod device;
mod error;
mod helper;
mod interrupt;
mod machine;
mod qmp;
mod tool;
mod vm;

pub use console::Console;
pub use device::Device;
pub use error::VmError;
pub use interrupt::{Interrupted, or_interrupted};
pub use machine::{Accelerator, Machine, Nvdimm, Share};
pub use qmp::Qmp;
pub use tool::Tool;
pub use vm::{Exit, Vm};
