//! dm-verity devices: waits for a disk, creates the mapping, explains read errors.
//!
//! The opener uses one as root file system; PID 1 uses others as extensions.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use firstlight_sys::dm;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::clock::now_us;

/// The device mapper's control node.
const CONTROL: &str = "/dev/mapper/control";

/// Hint for input/output errors of a verified device.
const NOT_THE_SAME: &str = "; a block of the disk does not match the root hash: the disk is damaged, or the root hash is that of another image";

/// Why a verified device could not be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no device mapper.
    #[error("cannot open {CONTROL}: {0}; is the module dm_verity in this image?")]
    Control(#[source] io::Error),
    /// The device mapper refused the table.
    #[error("{0}; the kernel log has the device mapper's words")]
    Mapping(#[from] dm::Error),
}

/// A dm-verity device to create.
#[derive(Debug, Clone, Copy)]
pub struct Verity<'a> {
    /// The device's name in the device mapper.
    pub name: &'a str,
    /// The device's UUID; may be empty.
    pub uuid: &'a str,
    /// The length in sectors of 512 bytes.
    pub sectors: u64,
    /// Parameters of the `verity` target.
    pub parameters: &'a str,
}

/// Creates a verified device; returns the number N of its node `/dev/dm-N`.
///
/// # Errors
/// The kernel has no device mapper, or it refuses the table.
pub fn make(verity: &Verity<'_>) -> Result<u32, Error> {
    let control = File::options().read(true).write(true).open(CONTROL).map_err(Error::Control)?;
    let Verity { name, uuid, sectors, parameters } = *verity;
    Ok(dm::create(&control, &dm::Device { name, uuid, sectors, kind: "verity", parameters })?)
}

/// Returns a hint for errors that mean failed verification; empty for others.
#[must_use]
pub fn hint(source: &io::Error) -> &'static str {
    let damage = [Errno::IO, Errno::UCLEAN].map(|errno| Some(errno.raw_os_error()));
    if damage.contains(&source.raw_os_error()) { NOT_THE_SAME } else { "" }
}

/// Waits until `look` finds something, at most until `until_us`; returns `None` on timeout.
/// `uevents` must have been opened before the awaited device can appear.
pub fn wait<T>(uevents: &OwnedFd, until_us: u64, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let mut buffer = vec![0; firstlight_uevent::MAX_MESSAGE];
    loop {
        // A node is created before its uevent is sent.
        if let Some(found) = look() {
            return Some(found);
        }
        let left = until_us.saturating_sub(now_us());
        if left == 0 {
            return None;
        }
        let timeout = Timespec {
            tv_sec: i64::try_from(left / 1_000_000).unwrap_or_default(),
            tv_nsec: i64::try_from(left % 1_000_000 * 1000).unwrap_or_default(),
        };
        let _ = poll(&mut [PollFd::new(uevents, PollFlags::IN)], Some(&timeout));
        while firstlight_uevent::receive(uevents, &mut buffer, |_| true).is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_error_of_a_verified_disk_has_a_hint() {
        for errno in [Errno::IO, Errno::UCLEAN] {
            assert!(hint(&io::Error::from(errno)).contains("root hash"), "{errno}");
        }
        assert_eq!(hint(&io::Error::from(Errno::NOENT)), "");
        assert_eq!(hint(&io::Error::other("x")), "");
    }

    #[test]
    fn wait_for_a_device_is_bounded() {
        let uevents = firstlight_uevent::open().unwrap();
        assert_eq!(wait(&uevents, 0, || Some(1)), Some(1), "what is there is found without waiting");
        let mut looks = 0;
        let begin = now_us();
        let none: Option<()> = wait(&uevents, begin + 30_000, || {
            looks += 1;
            None
        });
        assert_eq!(none, None);
        assert!(looks >= 2 && now_us() >= begin + 30_000, "it is looked for once more at the end");
    }
}
