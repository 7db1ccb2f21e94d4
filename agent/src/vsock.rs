//! vsock listeners that accept connections from the host only, and retry after errors.

use std::io;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use tokio_vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockAddr, VsockListener, VsockStream};

use crate::log::RateLimit;

/// Delay after a failed accept, for example without free descriptors.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Binds a port on every address of the guest.
///
/// # Errors
/// The port is in use, or the kernel has no vsock.
pub(crate) fn listen(port: u32) -> io::Result<VsockListener> {
    VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port))
}

/// Returns whether a peer may connect. Containers can open vsock connections too: the guest's own
/// CID and the local one are loopback.
fn may_connect(cid: u32) -> bool {
    cid == VMADDR_CID_HOST
}

/// Accepts the host's next connection; others are closed.
///
/// # Errors
/// The accept fails.
pub(crate) async fn accept(listener: &VsockListener) -> io::Result<VsockStream> {
    static REFUSED: RateLimit = RateLimit::new();
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

/// Accepts the host's next connection, retrying after errors.
pub(crate) async fn accept_next(listener: &VsockListener, what: &str) -> VsockStream {
    loop {
        match accept(listener).await {
            Ok(stream) => return stream,
            Err(error) => log_and_delay(what, &error).await,
        }
    }
}

/// Wraps a listener's connections: errors are logged and followed by a delay, because the caller
/// would retry at once.
pub(crate) fn retry_accept<S>(
    listener: impl Stream<Item = io::Result<S>>,
    what: &str,
) -> impl Stream<Item = io::Result<S>> {
    futures::stream::unfold(Box::pin(listener), async move |mut listener| {
        loop {
            match listener.next().await? {
                Ok(stream) => return Some((Ok(stream), listener)),
                Err(error) => log_and_delay(what, &error).await,
            }
        }
    })
}

async fn log_and_delay(what: &str, error: &io::Error) {
    static FAILED: RateLimit = RateLimit::new();
    if let Some(times) = FAILED.count(Instant::now()) {
        log::error!("{what}: failed to accept a connection: {error} ({times} times)");
    }
    tokio::time::sleep(RETRY_DELAY).await;
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
        fn every_other_cid_is_rejected(cid in 3u32..) {
            prop_assert!(!may_connect(cid));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failing_listener_is_retried_five_times_a_second() {
        let mut polls = 0;
        let broken = futures::stream::poll_fn(|_| {
            polls += 1;
            let answer = if polls <= 10 { Err(io::Error::from_raw_os_error(24)) } else { Ok(polls) };
            std::task::Poll::Ready(Some(answer))
        });
        let begin = tokio::time::Instant::now();
        let mut listener = std::pin::pin!(retry_accept(broken, "test"));
        assert_eq!(listener.next().await.unwrap().unwrap(), 11);
        assert_eq!(begin.elapsed().as_millis(), 2000);
        assert_eq!(listener.next().await.unwrap().unwrap(), 12, "then without delay");
        assert_eq!(begin.elapsed().as_millis(), 2000);
    }
}
