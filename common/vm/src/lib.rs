//! A QEMU virtual machine: command line, life, console, vsock.
//!
//! [`Machine`] says what to run and turns itself into a QEMU command line;
//! [`Vm`] is one running, with the daemons that it needs (vsock, virtio-fs),
//! all of which die with it. [`Console`] is what the guest printed, as text and
//! as a boot record. [`vsock`] opens streams to the guest's ports.
//! [`or_interrupted`] ends all of it when the user wants that.
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
pub mod vsock;

pub use console::Console;
pub use device::Device;
pub use error::VmError;
pub use interrupt::{Interrupted, or_interrupted};
pub use machine::{Accelerator, Machine, Memory, Share};
pub use qmp::Qmp;
pub use tool::Tool;
pub use vm::{Exit, Vm};
