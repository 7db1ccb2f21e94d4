//! Network interfaces.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use libc::{c_short, ifreq};

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: no pointer is passed; the descriptor is checked before it is owned.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just returned by the kernel and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn request(name: &str) -> io::Result<ifreq> {
    // SAFETY: `ifreq` is plain data for which all-zero bytes are valid.
    let mut request: ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    Ok(request)
}

/// Brings an interface up, as `ip link set NAME up` does.
///
/// # Errors
/// The interface does not exist (`ENODEV`), or the caller lacks privileges.
pub fn set_up(name: &str) -> io::Result<()> {
    let socket = socket()?;
    let mut request = request(name)?;
    // SAFETY: SIOCGIFFLAGS reads the name and writes the flags of the `ifreq`
    // it is given, which is live and exclusively borrowed.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    #[expect(clippy::cast_possible_truncation, reason = "IFF_UP is 1")]
    let up = libc::IFF_UP as c_short;
    // SAFETY: SIOCGIFFLAGS has filled `ifru_flags`, so it is the union's live field.
    unsafe { request.ifr_ifru.ifru_flags |= up };
    // SAFETY: as above; SIOCSIFFLAGS only reads the structure.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_and_overlong_names_are_errors() {
        assert_eq!(set_up("fl-none0").unwrap_err().raw_os_error(), Some(libc::ENODEV));
        assert_eq!(set_up("a-name-of-20-letters").unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
