//! Receives uevents while a lookup waits for a device.

use std::io;
use std::os::fd::OwnedFd;

use firstlight_uevent::{MAX_MESSAGE, Uevent, receive};
use tokio::io::unix::AsyncFd;

/// Maximum of messages per wakeup.
const MAX_BATCH: usize = 256;

/// A uevent socket, one per waiter: opened for the wait and closed with it. Without waiters no
/// socket is open.
#[derive(Debug)]
pub struct Uevents {
    socket: AsyncFd<OwnedFd>,
    message: Box<[u8]>,
}

impl Uevents {
    /// Opens the socket: all uevents from now on are received.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> io::Result<Self> {
        let socket = firstlight_uevent::open()?;
        #[expect(
            deprecated,
            reason = "the successor is unsafe for types that may change their descriptor; OwnedFd cannot"
        )]
        let socket = AsyncFd::new(socket)?;
        Ok(Self { socket, message: vec![0; MAX_MESSAGE].into() })
    }

    /// Waits until a device was added or changed, or messages were lost, which may hide such a
    /// change. Cancel-safe.
    ///
    /// # Errors
    /// The socket cannot be read.
    pub async fn changed(&mut self) -> io::Result<()> {
        self.wait_for(|_| true).await
    }

    /// As [`changed`](Self::changed), for one subsystem.
    ///
    /// # Errors
    /// The socket cannot be read.
    pub async fn changed_in(&mut self, subsystem: &str) -> io::Result<()> {
        self.wait_for(|event| event.subsystem == subsystem).await
    }

    async fn wait_for(&mut self, matches: impl Fn(&Uevent<'_>) -> bool) -> io::Result<()> {
        let matches = |event: &Uevent<'_>| event.can_add_device() && matches(event);
        loop {
            let mut ready = self.socket.readable().await?;
            let mut changed = false;
            for _ in 0..MAX_BATCH {
                match ready.try_io(|socket| receive(socket.get_ref(), &mut self.message, matches)) {
                    Ok(message) => changed |= message?,
                    Err(_would_block) => break,
                }
            }
            if changed {
                return Ok(());
            }
        }
    }
}
