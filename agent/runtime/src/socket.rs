//! Packets that carry file descriptors (`SCM_RIGHTS`).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// The largest reply, bytes. Long error texts are truncated.
pub const MAX_MESSAGE: usize = 16 * 1024;

/// The largest request, bytes: it must hold the longest list of device rules; the rest of a configuration is
/// passed as a file.
pub const MAX_REQUEST: usize = 64 * 1024;

/// Standard input, output and error, and a device filter.
const MAX_FDS: usize = 4;

/// Sends one packet. The caller keeps its descriptors; the receiver gets duplicates.
///
/// # Errors
/// `EAGAIN`: a non-blocking socket is full. `EPIPE`: the peer has closed the socket.
pub fn send(socket: impl AsFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if fds.len() > MAX_FDS || message.len() > MAX_REQUEST {
        return Err(Errno::MSGSIZE);
    }
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::MSGSIZE);
    }
    loop {
        match sendmsg(&socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            result => return result.map(|_| ()),
        }
    }
}

/// Receives one packet into `buffer`; length 0 means that the peer has closed the socket. If the descriptor limit
/// does not allow all descriptors, none are returned (`MSG_CTRUNC`); the consumer of the packet reports the
/// missing ones.
///
/// # Errors
/// `EAGAIN`: a non-blocking socket is empty. `EMSGSIZE`: the packet is longer than the buffer.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            result => break result?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        fds.clear();
    }
    Ok((received.bytes, fds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    /// Set in the subprocess with a lowered `RLIMIT_NOFILE`.
    const LIMITED: &str = "FIRSTLIGHT_TEST_WITHOUT_DESCRIPTORS";

    #[test]
    fn packet_whose_descriptors_exceed_the_limit_arrives_without_them() {
        if std::env::var_os(LIMITED).is_none() {
            // RLIMIT_NOFILE is per process, so the test runs in a subprocess.
            let name = "socket::tests::packet_whose_descriptors_exceed_the_limit_arrives_without_them";
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            let output = again.args(["--exact", name]).env(LIMITED, "1").output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let (a, b) = pair();
        let free = rustix::io::dup(&a).unwrap();
        let limit = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&free)).unwrap() + 1;
        let limit = rustix::process::Rlimit { current: Some(limit), maximum: Some(limit) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
        send(&a, b"two", &[a.as_fd(), b.as_fd()]).unwrap();
        send(&a, b"one", &[a.as_fd()]).unwrap();
        drop(free);
        let mut buffer = [0; 8];
        // The limit allows one of the two.
        let (len, fds) = receive(&b, &mut buffer).unwrap();
        assert_eq!((&buffer[..len], fds.len()), (&b"two"[..], 0));
        let (len, fds) = receive(&b, &mut buffer).unwrap();
        assert_eq!((&buffer[..len], fds.len()), (&b"one"[..], 1));
    }

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
            .unwrap()
    }

    #[test]
    fn packets_keep_boundaries_and_carry_descriptors() {
        let (a, b) = pair();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        send(&a, b"one", &[writer.as_fd()]).unwrap();
        send(&a, b"two", &[]).unwrap();
        let mut buffer = [0; 16];
        let (len, fds) = receive(&b, &mut buffer).unwrap();
        assert_eq!((&buffer[..len], fds.len()), (&b"one"[..], 1));
        drop(writer);
        rustix::io::write(&fds[0], b"x").unwrap();
        drop(fds);
        assert_eq!(rustix::io::read(&reader, &mut buffer).unwrap(), 1);
        assert_eq!(rustix::io::read(&reader, &mut buffer).unwrap(), 0, "no copy is left open");
        let (len, fds) = receive(&b, &mut buffer).unwrap();
        assert_eq!((&buffer[..len], fds.len()), (&b"two"[..], 0));
        assert_eq!(receive(&b, &mut buffer).unwrap_err(), Errno::AGAIN);
        drop(a);
        assert_eq!(receive(&b, &mut buffer).unwrap().0, 0);
    }

    #[test]
    fn oversized_packets_are_refused_by_sender_and_receiver() {
        let (a, b) = pair();
        assert_eq!(send(&a, &vec![0; MAX_REQUEST + 1], &[]).unwrap_err(), Errno::MSGSIZE);
        send(&a, &[0; 32], &[]).unwrap();
        assert_eq!(receive(&b, &mut [0; 16]).unwrap_err(), Errno::MSGSIZE);
    }
}
