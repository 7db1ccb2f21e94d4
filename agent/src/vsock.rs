//! Listening where only the host may connect.

use std::io;
use std::time::Duration;

use tokio_vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockAddr, VsockListener, VsockStream};

/// Before the next try when no connection could be taken, descriptors having run out for example.
const PAUSE: Duration = Duration::from_millis(200);

/// Binds a port of every address of the guest.
///
/// # Errors
/// The port is taken, or the kernel has no vsock.
pub(crate) fn listen(port: u32) -> io::Result<VsockListener> {
    VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port))
}

/// The host's next connection. A container can open vsock connections too, and
/// the guest's own address leads back to us; those are closed.
///
/// # Errors
/// The kernel's.
pub(crate) async fn accept(listener: &VsockListener) -> io::Result<VsockStream> {
    loop {
        let (stream, peer) = listener.accept().await?;
        if peer.cid() == VMADDR_CID_HOST {
            return Ok(stream);
        }
        log::error!("refused a connection from vsock CID {}: only the host may connect", peer.cid());
    }
}

/// The host's next connection, however long it takes until one can be had.
pub(crate) async fn next(listener: &VsockListener, what: &str) -> VsockStream {
    loop {
        match accept(listener).await {
            Ok(stream) => return stream,
            Err(error) => {
                log::error!("{what}: cannot take a connection: {error}");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
