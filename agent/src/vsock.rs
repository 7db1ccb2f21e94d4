//! Listening where only the host may connect, and taking connections however
//! badly that goes.

use std::io;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use tokio_vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockAddr, VsockListener, VsockStream};

use crate::log::Seldom;

/// Before the next try when no connection could be taken, descriptors having run out for example.
const PAUSE: Duration = Duration::from_millis(200);

/// Binds a port of every address of the guest.
///
/// # Errors
/// The port is taken, or the kernel has no vsock.
pub(crate) fn listen(port: u32) -> io::Result<VsockListener> {
    VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port))
}

/// Whether somebody at this address may connect. A container can open vsock
/// connections too: the guest's own address and the local one lead back to us.
fn may_connect(cid: u32) -> bool {
    cid == VMADDR_CID_HOST
}

/// The host's next connection; others are closed.
///
/// # Errors
/// The kernel's.
pub(crate) async fn accept(listener: &VsockListener) -> io::Result<VsockStream> {
    static REFUSED: Seldom = Seldom::new();
    loop {
        let (stream, peer) = listener.accept().await?;
        if may_connect(peer.cid()) {
            return Ok(stream);
        }
        drop(stream);
        if let Some(times) = REFUSED.count(Instant::now()) {
            let cid = peer.cid();
            log::error!("refused {times} connections, the last from vsock CID {cid}: only the host may connect");
        }
    }
}

/// The host's next connection, however long it takes until one can be had.
pub(crate) async fn next(listener: &VsockListener, what: &str) -> VsockStream {
    loop {
        match accept(listener).await {
            Ok(stream) => return stream,
            Err(error) => failed(what, &error).await,
        }
    }
}

/// A listener's connections without its errors: after one it is left alone for
/// a while, because whoever is told of it would ask again at once.
pub(crate) fn patiently<S>(
    listener: impl Stream<Item = io::Result<S>>,
    what: &str,
) -> impl Stream<Item = io::Result<S>> {
    futures::stream::unfold(Box::pin(listener), async move |mut listener| {
        loop {
            match listener.next().await? {
                Ok(stream) => return Some((Ok(stream), listener)),
                Err(error) => failed(what, &error).await,
            }
        }
    })
}

async fn failed(what: &str, error: &io::Error) {
    static FAILED: Seldom = Seldom::new();
    if let Some(times) = FAILED.count(Instant::now()) {
        log::error!("{what}: cannot take a connection: {error} ({times} times)");
    }
    tokio::time::sleep(PAUSE).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio_vsock::{VMADDR_CID_HYPERVISOR, VMADDR_CID_LOCAL};

    #[test]
    fn only_the_host_may_connect() {
        assert!(may_connect(VMADDR_CID_HOST));
        for cid in [VMADDR_CID_LOCAL, VMADDR_CID_HYPERVISOR, VMADDR_CID_ANY, 3, 4] {
            assert!(!may_connect(cid), "{cid}");
        }
    }

    proptest! {
        #[test]
        fn nobody_else_is_the_host(cid in 3u32..) {
            prop_assert!(!may_connect(cid));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_listener_that_fails_is_asked_five_times_a_second() {
        let mut asked = 0;
        let broken = futures::stream::poll_fn(|_| {
            asked += 1;
            let answer = if asked <= 10 { Err(io::Error::from_raw_os_error(24)) } else { Ok(asked) };
            std::task::Poll::Ready(Some(answer))
        });
        let begin = tokio::time::Instant::now();
        let mut listener = std::pin::pin!(patiently(broken, "test"));
        assert_eq!(listener.next().await.unwrap().unwrap(), 11);
        assert_eq!(begin.elapsed().as_millis(), 2000);
        assert_eq!(listener.next().await.unwrap().unwrap(), 12, "and then at once again");
        assert_eq!(begin.elapsed().as_millis(), 2000);
    }
}
