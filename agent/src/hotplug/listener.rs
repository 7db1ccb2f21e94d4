//! The kernel's messages about devices, for as long as somebody waits for one.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};
use tokio::io::unix::AsyncFd;

use super::uevent::Uevent;

/// The kernel's own messages; udev's go to group 2.
const FROM_KERNEL: u32 = 1;

/// The kernel's longest message is 2 KiB of variables behind a path.
const MAX_MESSAGE: usize = 8 * 1024;

/// Messages taken in one go before whoever waits may look.
const AT_ONCE: usize = 256;

/// A socket of its own for everybody who waits: opened for the wait and closed
/// with it, however it ends. Nothing runs and nothing is kept in between.
#[derive(Debug)]
pub struct Uevents {
    socket: AsyncFd<OwnedFd>,
    message: Box<[u8]>,
}

impl Uevents {
    /// Hears everything from now on.
    ///
    /// # Errors
    /// The kernel gives no socket.
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(KOBJECT_UEVENT))?;
        bind(&socket, &SocketAddrNetlink::new(0, FROM_KERNEL))?;
        #[expect(
            deprecated,
            reason = "the successor is unsafe for types that may change their descriptor; OwnedFd cannot"
        )]
        let socket = AsyncFd::new(socket)?;
        Ok(Self { socket, message: vec![0; MAX_MESSAGE].into() })
    }

    /// Waits until something came or changed, or messages were lost: then
    /// anything may have. May be dropped at any time.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn news(&mut self) -> io::Result<()> {
        loop {
            let mut ready = self.socket.readable().await?;
            let mut news = false;
            for _ in 0..AT_ONCE {
                match ready.try_io(|socket| receive(socket.get_ref(), &mut self.message)) {
                    Ok(message) => news |= message?,
                    Err(_would_block) => break,
                }
            }
            if news {
                return Ok(());
            }
        }
    }
}

/// Takes one message; whether it is news.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<bool> {
    // With TRUNC the length is the whole message's, also where the buffer is shorter.
    match recvfrom(socket, &mut *buffer, RecvFlags::TRUNC) {
        Ok((_, len, from)) => {
            // Anybody in the guest who may can send to the group as well.
            let kernel =
                from.and_then(|from| SocketAddrNetlink::try_from(from).ok()).is_some_and(|from| from.pid() == 0);
            let whole = buffer.get(..len);
            Ok(kernel && whole.is_none_or(|message| Uevent::parse(message).is_some_and(|event| event.is_news())))
        }
        // More came than the socket holds.
        Err(rustix::io::Errno::NOBUFS) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendFlags, sendto};
    use std::time::Duration;

    #[test]
    fn what_is_not_the_kernels_is_not_heard() {
        let executor = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        executor.block_on(async {
            let mut events = Uevents::open().unwrap();
            let forged = b"add@/x\0ACTION=add\0DEVPATH=/x\0SUBSYSTEM=block\0";
            let sender =
                socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(KOBJECT_UEVENT))
                    .unwrap();
            let name = rustix::net::getsockname(events.socket.get_ref()).unwrap();
            let to = SocketAddrNetlink::try_from(name).unwrap();
            let sent = sendto(&sender, forged, SendFlags::empty(), &SocketAddrNetlink::new(to.pid(), 0));
            assert!(sent.is_ok(), "the forged message arrives: {sent:?}");
            let heard = tokio::time::timeout(Duration::from_millis(200), events.news()).await;
            assert!(heard.is_err(), "{heard:?}");
        });
    }
}
