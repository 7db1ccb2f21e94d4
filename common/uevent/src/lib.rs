//! What the kernel says when a device comes, changes or goes: messages of its
//! netlink family for objects of sysfs.
//!
//! A message is a reason to look, never a fact: messages are lost when many
//! come at once, and what was true when one was sent need not be true when it is read.
#![forbid(unsafe_code)]

mod event;

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};

pub use event::Uevent;

/// The kernel's own messages; udev's go to group 2.
const FROM_KERNEL: u32 = 1;

/// Bytes for one message: the kernel's longest is 2 KiB of variables behind a path.
pub const MAX_MESSAGE: usize = 8 * 1024;

/// A socket that hears everything from now on, and does not block.
///
/// # Errors
/// The kernel gives no socket.
pub fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(KOBJECT_UEVENT))?;
    bind(&socket, &SocketAddrNetlink::new(0, FROM_KERNEL))?;
    Ok(socket)
}

/// Takes one message; whether it is one of the kernel that is `wanted`, or
/// messages were lost, so that one of them may have been.
///
/// # Errors
/// `WouldBlock` when nothing is left; else the kernel's.
pub fn receive(socket: &OwnedFd, buffer: &mut [u8], wanted: impl Fn(&Uevent<'_>) -> bool) -> io::Result<bool> {
    // With TRUNC the length is the whole message's, also where the buffer is shorter.
    match recvfrom(socket, &mut *buffer, RecvFlags::TRUNC) {
        Ok((_, len, from)) => {
            // Anybody in the guest who may can send to the group as well.
            let kernel =
                from.and_then(|from| SocketAddrNetlink::try_from(from).ok()).is_some_and(|from| from.pid() == 0);
            let news = |message| Uevent::parse(message).is_some_and(|event| wanted(&event));
            Ok(kernel && buffer.get(..len).is_none_or(news))
        }
        // More came than the socket holds.
        Err(rustix::io::Errno::NOBUFS) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendFlags, getsockname, sendto};

    #[test]
    fn what_is_not_the_kernels_is_not_heard() {
        let socket = open().unwrap();
        let forged = b"add@/x\0ACTION=add\0DEVPATH=/x\0SUBSYSTEM=forged\0";
        let flags = SocketFlags::CLOEXEC;
        let sender = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(KOBJECT_UEVENT)).unwrap();
        let to = SocketAddrNetlink::try_from(getsockname(&socket).unwrap()).unwrap();
        let sent = sendto(&sender, forged, SendFlags::empty(), &SocketAddrNetlink::new(to.pid(), 0));
        assert!(sent.is_ok(), "the forged message arrives: {sent:?}");
        let mut buffer = [0; MAX_MESSAGE];
        // The machine's own messages may come in between.
        let mut messages = 0;
        loop {
            match receive(&socket, &mut buffer, |event| event.subsystem == "forged") {
                Ok(wanted) => assert!(!wanted),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
            messages += 1;
        }
        assert!(messages > 0, "it has arrived");
    }
}
