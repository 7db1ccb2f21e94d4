//! Attaches one GPU: the first open of its device node, and the driver's answer.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use firstlight_boot_record::DriverCode;
use firstlight_sys::nvidia::wait_open_complete;

/// The step that opens the node. A driver without non-blocking open attaches the GPU in this step.
pub const OPEN: &str = "open";

/// The step that waits for the driver to complete a non-blocking open.
pub const WAIT: &str = "wait-open-complete";

/// The result of an attach.
#[derive(Debug)]
pub enum Answer {
    /// The GPU is initialised and stays so while this descriptor is open (the effect of persistence
    /// mode).
    Attached(OwnedFd, Option<DriverCode>),
    /// The GPU is not attached.
    Failed(Refusal),
}

/// Why a GPU was not attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// [`OPEN`] or [`WAIT`].
    pub step: &'static str,
    /// The error text.
    pub reason: String,
    /// The driver's status code, if the driver returned one.
    pub code: Option<DriverCode>,
}

/// Attaches the GPU of a device node; blocks until the driver answers. `opened` is called between
/// the two steps.
pub fn attach(node: &Path, opened: impl FnOnce()) -> Answer {
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
    let device = match OpenOptions::new().read(true).write(true).custom_flags(flags).open(node) {
        Ok(device) => OwnedFd::from(device),
        Err(error) => {
            let reason = format!("open of {}: {error}{}", node.display(), hint(&error));
            return Answer::Failed(Refusal { step: OPEN, reason, code: None });
        }
    };
    opened();
    let answer = loop {
        match wait_open_complete(&device) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            answer => break answer,
        }
    };
    match answer {
        Ok(done) => {
            let code = DriverCode { rc: done.rc, adapter_status: done.adapter_status };
            if done.rc == 0 {
                return Answer::Attached(device, Some(code));
            }
            let reason = format!("driver rc {}, adapter status {:#x}", code.rc, code.adapter_status);
            Answer::Failed(Refusal { step: WAIT, reason, code: Some(code) })
        }
        // A driver without this ioctl has attached the GPU in the open.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
            Answer::Attached(device, None)
        }
        Err(error) => Answer::Failed(Refusal { step: WAIT, reason: error.to_string(), code: None }),
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENXIO | libc::ENODEV) => " (the driver has no GPU behind it)",
        Some(libc::EBUSY) => " (the GPU is excluded, or another program has taken it away)",
        Some(libc::EIO) => " (the driver could not initialise the GPU)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_without_the_ioctl_attaches_in_open() {
        let mut opened = false;
        let answer = attach(Path::new("/dev/null"), || opened = true);
        assert!(matches!(answer, Answer::Attached(_, None)), "{answer:?}");
        assert!(opened);
    }

    #[test]
    fn node_that_cannot_be_opened_is_reported() {
        let Answer::Failed(refusal) = attach(Path::new("/dev/nvidia-none"), || panic!()) else { panic!() };
        assert_eq!(refusal.step, OPEN);
        assert!(refusal.reason.contains("/dev/nvidia-none"), "{}", refusal.reason);
    }
}
