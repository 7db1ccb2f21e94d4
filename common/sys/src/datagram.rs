//! Datagrams of a Unix socket with their senders' credentials.
//!
//! `rustix` can receive credentials, but assumes that the sender's process id is
//! never zero; it is zero for a sender outside this process's PID namespace.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd};

/// A datagram's sender, as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    /// Process id, if it has one in this PID namespace.
    pub pid: Option<i32>,
    /// User id.
    pub user: u32,
}

/// A received datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram {
    /// Its full length; bytes beyond the buffer are lost.
    pub length: usize,
    /// Its sender; known only if `SO_PASSCRED` was set before it arrived.
    pub sender: Option<Sender>,
}

/// The kernel's structure: process, user and group.
const CREDENTIALS: u32 = 12;
const _: () = assert!(mem::size_of::<libc::ucred>() == 12);

/// Space for the credentials only: descriptors that a sender passes do not fit, and the kernel closes them.
// SAFETY: an arithmetic of numbers.
const SPACE: usize = unsafe { libc::CMSG_SPACE(CREDENTIALS) } as usize;

/// Control buffer, aligned for `cmsghdr`.
#[repr(C, align(8))]
struct Control([u8; SPACE]);

/// Receives the next datagram without blocking.
///
/// # Errors
/// `WouldBlock` if none is pending; other errors of the kernel.
pub fn receive<F: AsFd>(socket: F, buffer: &mut [u8]) -> io::Result<Datagram> {
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut control = Control([0; SPACE]);
    // SAFETY: plain data for which all zero is a value.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = SPACE as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the message points to one buffer and one control buffer of the
    // lengths given, both live and exclusively borrowed until the call returns.
    let length = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel has filled the control buffer and set its length.
    let first = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    let mut sender = None;
    if !first.is_null() {
        // SAFETY: a header that the macro hands out lies within the control buffer, which is aligned for it.
        let header = unsafe { first.read() };
        // The length has another type in other C libraries.
        // SAFETY: an arithmetic of numbers.
        let whole = header.cmsg_len >= unsafe { libc::CMSG_LEN(CREDENTIALS) } as _;
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_CREDENTIALS && whole {
            // SAFETY: the header's length says that the data is there; it need not be aligned.
            let peer = unsafe { libc::CMSG_DATA(first).cast::<libc::ucred>().read_unaligned() };
            sender = Some(Sender { pid: (peer.pid > 0).then_some(peer.pid), user: peer.uid });
        }
    }
    Ok(Datagram { length, sender })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::IoSlice;
    use std::os::unix::net::UnixDatagram;

    fn pair() -> (UnixDatagram, UnixDatagram) {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        rustix::net::sockopt::set_socket_passcred(&ours, true).unwrap();
        (ours, theirs)
    }

    #[test]
    fn senders_are_reported_and_long_datagrams_are_truncated_with_their_full_length() {
        let (ours, theirs) = pair();
        let mut buffer = [0; 4];
        assert_eq!(receive(&ours, &mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        theirs.send(b"hi").unwrap();
        theirs.send(b"a long one").unwrap();
        theirs.send(b"").unwrap();
        let sender = Some(Sender {
            pid: Some(rustix::process::getpid().as_raw_nonzero().get()),
            user: rustix::process::getuid().as_raw(),
        });
        assert_eq!(receive(&ours, &mut buffer).unwrap(), Datagram { length: 2, sender });
        assert_eq!(&buffer[..2], b"hi");
        assert_eq!(receive(&ours, &mut buffer).unwrap(), Datagram { length: 10, sender });
        assert_eq!(&buffer, b"a lo");
        assert_eq!(receive(&ours, &mut buffer).unwrap(), Datagram { length: 0, sender });
    }

    #[test]
    fn without_passcred_the_sender_is_unknown() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        theirs.send(b"x").unwrap();
        assert_eq!(receive(&ours, &mut [0; 4]).unwrap().sender, None);
    }

    #[test]
    fn passed_descriptors_are_closed() {
        let (ours, theirs) = pair();
        let (reader, writer) = std::io::pipe().unwrap();
        let descriptors = [writer.as_fd(), writer.as_fd()];
        let mut space = [mem::MaybeUninit::uninit(); 128];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&descriptors)));
        rustix::net::sendmsg(&theirs, &[IoSlice::new(b"x")], &mut control, rustix::net::SendFlags::empty()).unwrap();
        let datagram = receive(&ours, &mut [0; 4]).unwrap();
        assert!(datagram.length == 1 && datagram.sender.is_some(), "{datagram:?}");
        drop(writer);
        // The pipe reports end of file when no process has its other end open.
        // A child that another test is starting has it too, until it executes its program.
        let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        let mut ends = [rustix::event::PollFd::new(&reader, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut ends, Some(&limit)).unwrap(), 1, "a process keeps it open");
        rustix::fs::fcntl_setfl(&reader, rustix::fs::OFlags::NONBLOCK).unwrap();
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0));
    }
}
