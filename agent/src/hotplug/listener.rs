//! The kernel's messages about devices, for as long as somebody waits for one.

use std::io;
use std::os::fd::OwnedFd;

use firstlight_uevent::{MAX_MESSAGE, Uevent, receive};
use tokio::io::unix::AsyncFd;

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
        let socket = firstlight_uevent::open()?;
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
        self.heard(|_| true).await
    }

    /// The same for things of one subsystem.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn news_of(&mut self, subsystem: &str) -> io::Result<()> {
        self.heard(|event| event.subsystem == subsystem).await
    }

    async fn heard(&mut self, wanted: impl Fn(&Uevent<'_>) -> bool) -> io::Result<()> {
        let wanted = |event: &Uevent<'_>| event.can_add_device() && wanted(event);
        loop {
            let mut ready = self.socket.readable().await?;
            let mut news = false;
            for _ in 0..AT_ONCE {
                match ready.try_io(|socket| receive(socket.get_ref(), &mut self.message, wanted)) {
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
