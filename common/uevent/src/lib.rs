//! Kernel uevents: netlink messages about added, changed and removed devices.
//!
//! A uevent only triggers a rescan: messages are lost when the socket buffer
//! overflows, and the state may have changed before a message is read.
#![forbid(unsafe_code)]

mod event;

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};

pub use event::Uevent;

/// Netlink group of the kernel's messages; udev's is group 2.
const KERNEL_GROUP: u32 = 1;

/// Buffer size for one message, bytes: the kernel's longest is 2 KiB of variables after a path.
pub const MAX_MESSAGE: usize = 8 * 1024;

/// Opens a non-blocking socket that receives all uevents from now on.
///
/// # Errors
/// The kernel refuses the socket.
pub fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(KOBJECT_UEVENT))?;
    bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
    Ok(socket)
}

/// Receives one message. Returns whether it is a kernel message that satisfies
/// `matches`, or messages were lost, one of which may have satisfied it.
///
/// # Errors
/// `WouldBlock` if no message is pending; other errors of the kernel.
pub fn receive(socket: &OwnedFd, buffer: &mut [u8], matches: impl Fn(&Uevent<'_>) -> bool) -> io::Result<bool> {
    // With TRUNC the length is that of the whole message, even if the buffer is shorter.
    match recvfrom(socket, &mut *buffer, RecvFlags::TRUNC) {
        Ok((_, len, from)) => {
            // Any privileged process in the guest can send to the group as well.
            let from_kernel =
                from.and_then(|from| SocketAddrNetlink::try_from(from).ok()).is_some_and(|from| from.pid() == 0);
            let is_match = |message| Uevent::parse(message).is_some_and(|event| matches(&event));
            Ok(from_kernel && buffer.get(..len).is_none_or(is_match))
        }
        // The socket buffer overflowed.
        Err(rustix::io::Errno::NOBUFS) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendFlags, getsockname, sendto};

    #[test]
    fn messages_of_other_processes_are_ignored() {
        let socket = open().unwrap();
        let forged = b"add@/x\0ACTION=add\0DEVPATH=/x\0SUBSYSTEM=forged\0";
        let flags = SocketFlags::CLOEXEC;
        let sender = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(KOBJECT_UEVENT)).unwrap();
        let to = SocketAddrNetlink::try_from(getsockname(&socket).unwrap()).unwrap();
        let sent = sendto(&sender, forged, SendFlags::empty(), &SocketAddrNetlink::new(to.pid(), 0));
        assert!(sent.is_ok(), "the forged message arrives: {sent:?}");
        let mut buffer = [0; MAX_MESSAGE];
        // The kernel's own messages may arrive in between.
        let mut messages = 0;
        loop {
            match receive(&socket, &mut buffer, |event| event.subsystem == "forged") {
                Ok(matched) => assert!(!matched),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
            messages += 1;
        }
        assert!(messages > 0, "the forged message was received");
    }
}
