//! Device mapper: creates a read-only device with one target.
//!
//! The request is a buffer that begins with a header of fixed layout
//! (`linux/dm-ioctl.h`): three 32-bit version numbers, sizes, counts and flags,
//! then a name and a UUID in fields of fixed length. The target and
//! its parameters follow.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::{c_int, c_ulong};

/// Bytes of the header.
const HEADER: usize = 312;
/// Bytes of a target before its parameters.
const TARGET: usize = 40;
/// Fields of the header: offset, and length where it is a text.
const DATA_SIZE: usize = 12;
const DATA_START: usize = 16;
const TARGET_COUNT: usize = 20;
const FLAGS: usize = 28;
const DEVICE: usize = 40;
const NAME: (usize, usize) = (48, 128);
const UUID: (usize, usize) = (176, 129);
/// The target's name within it.
const KIND: (usize, usize) = (24, 16);

const READ_ONLY: u32 = 1;

/// `_IOWR(0xfd, number, struct dm_ioctl)`.
const fn request(number: c_ulong) -> c_ulong {
    3 << 30 | (HEADER as c_ulong) << 16 | 0xfd << 8 | number
}

const CREATE: c_ulong = request(3);
const REMOVE: c_ulong = request(4);
const RESUME: c_ulong = request(6);
const LOAD: c_ulong = request(9);

/// A device with one target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device<'a> {
    /// Its name, at most 127 bytes.
    pub name: &'a str,
    /// Its UUID, at most 128 bytes; may be empty.
    pub uuid: &'a str,
    /// Its length in sectors of 512 bytes.
    pub sectors: u64,
    /// The target's kind, such as `verity`, at most 15 bytes.
    pub kind: &'a str,
    /// The target's parameters.
    pub parameters: &'a str,
}

/// A failed step of creating a device.
#[derive(Debug, thiserror::Error)]
#[error("failed to {step}: {source}")]
pub struct Error {
    /// The step.
    pub step: &'static str,
    /// The kernel's error.
    pub source: io::Error,
}

/// Creates a read-only device through `control` (`/dev/mapper/control`) and
/// returns its minor number: its node is `/dev/dm-NUMBER`. A device that cannot
/// be activated is removed.
///
/// # Errors
/// A text is too long or has a NUL; the name is in use; the target refuses the
/// devices or parameters (the kernel log has the reason).
pub fn create(control: impl AsFd, device: &Device<'_>) -> Result<u32, Error> {
    let step = |step| move |source| Error { step, source };
    let header = || header(device);
    let mut created = header().map_err(step("name the device"))?;
    call(&control, CREATE, &mut created).map_err(step("create the device"))?;
    let number = minor(&created);
    let started = table(device)
        .and_then(|mut table| call(&control, LOAD, &mut table))
        .map_err(step("load the device's table"))
        .and_then(|()| {
            let mut resume = header().map_err(step("name the device"))?;
            call(&control, RESUME, &mut resume).map_err(step("activate the device"))
        });
    if started.is_err()
        && let Ok(mut remove) = header()
    {
        let _ = call(&control, REMOVE, &mut remove);
    }
    started.map(|()| number)
}

/// Decodes the minor number from the kernel's 64-bit device number: minor's low byte, major, rest of the minor.
fn minor(buffer: &[u8]) -> u32 {
    let bytes = buffer.get(DEVICE..DEVICE + 4).and_then(|bytes| bytes.try_into().ok()).unwrap_or_default();
    let device = u32::from_ne_bytes(bytes);
    device & 0xff | device >> 12 & 0xf_ff00
}

fn put(buffer: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(room) = buffer.get_mut(at..at + bytes.len()) {
        room.copy_from_slice(bytes);
    }
}

/// Writes a text with its terminating NUL.
fn put_text(buffer: &mut [u8], (at, room): (usize, usize), text: &str) -> io::Result<()> {
    let text = CString::new(text).map_err(io::Error::from)?;
    let bytes = text.as_bytes_with_nul();
    if bytes.len() > room {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    put(buffer, at, bytes);
    Ok(())
}

fn header(device: &Device<'_>) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; HEADER];
    let size = u32::try_from(HEADER).unwrap_or_default();
    for (at, value) in [(0, 4_u32), (DATA_SIZE, size), (DATA_START, size), (FLAGS, READ_ONLY)] {
        put(&mut buffer, at, &value.to_ne_bytes());
    }
    put_text(&mut buffer, NAME, device.name)?;
    put_text(&mut buffer, UUID, device.uuid)?;
    Ok(buffer)
}

/// Returns the header followed by the target.
fn table(device: &Device<'_>) -> io::Result<Vec<u8>> {
    let mut buffer = header(device)?;
    let parameters = CString::new(device.parameters).map_err(io::Error::from)?;
    let mut target = vec![0; TARGET];
    put(&mut target, 8, &device.sectors.to_ne_bytes());
    put_text(&mut target, KIND, device.kind)?;
    target.extend_from_slice(parameters.as_bytes_with_nul());
    // Targets are aligned to eight bytes.
    target.resize(target.len().next_multiple_of(8), 0);
    buffer.extend_from_slice(&target);
    let size = u32::try_from(buffer.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    put(&mut buffer, DATA_SIZE, &size.to_ne_bytes());
    put(&mut buffer, TARGET_COUNT, &1_u32.to_ne_bytes());
    Ok(buffer)
}

fn call(control: &impl AsFd, request: c_ulong, buffer: &mut [u8]) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as `control` is borrowed. The
    // request reads and writes at most `data_size` bytes behind the pointer, which
    // is at most the buffer's length: `header` and `table` write it so, and the
    // buffer is exclusively borrowed.
    let answer = unsafe { libc::ioctl(control.as_fd().as_raw_fd(), request, buffer.as_mut_ptr()) };
    check(answer)
}

fn check(answer: c_int) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: Device<'_> =
        Device { name: "root", uuid: "", sectors: 0x1234, kind: "verity", parameters: "1 /dev/a /dev/b" };

    fn word(buffer: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(buffer[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn requests_and_layout_match_the_kernels() {
        assert_eq!((CREATE, RESUME, LOAD), (0xc138_fd03, 0xc138_fd06, 0xc138_fd09));
        let buffer = table(&DEVICE).unwrap();
        assert_eq!((word(&buffer, 0), word(&buffer, 12), word(&buffer, 16)), (4, 312 + 40 + 16, 312));
        assert_eq!((word(&buffer, 20), word(&buffer, 28), buffer.len()), (1, 1, 368));
        assert_eq!(&buffer[48..53], b"root\0");
        let target = &buffer[312..];
        assert_eq!((word(target, 0), word(target, 8), &target[24..31]), (0, 0x1234, &b"verity\0"[..]));
        assert_eq!(&target[40..], b"1 /dev/a /dev/b\0");
    }

    #[test]
    fn minor_is_decoded_from_the_device_number() {
        let mut buffer = header(&DEVICE).unwrap();
        for (device, number) in [(0xfd00_u32, 0), (0xfd03, 3), (0x0010_fd01, 0x101)] {
            put(&mut buffer, super::DEVICE, &device.to_ne_bytes());
            assert_eq!(minor(&buffer), number);
        }
    }

    #[test]
    fn overlong_texts_and_nul_are_refused() {
        let long = "x".repeat(128);
        assert!(header(&Device { name: &long, ..DEVICE }).is_err());
        assert!(header(&Device { name: &long[..127], uuid: &long, ..DEVICE }).is_ok());
        assert!(header(&Device { name: "a\0b", ..DEVICE }).is_err());
        assert!(table(&Device { kind: "sixteen-bytes-xx", ..DEVICE }).is_err());
        assert!(table(&Device { parameters: "a\0b", ..DEVICE }).is_err());
    }

    #[test]
    fn other_device_node_is_refused() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let error = create(&null, &DEVICE).unwrap_err();
        assert_eq!((error.step, error.source.raw_os_error()), ("create the device", Some(libc::ENOTTY)));
    }
}
