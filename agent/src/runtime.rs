//! Client of the runtime process.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use firstlight_runtime::{Call, Done, FromRuntime, MAX_MESSAGE, Request, receive, send};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::sync::oneshot;

use crate::error::{Error, Result};

type Answer = std::result::Result<(Done, Option<OwnedFd>), firstlight_runtime::Failure>;

/// Client of the runtime. Replies arrive in any order; no lock is held while waiting.
#[derive(Debug)]
pub struct Runtime {
    // tokio has no SEQPACKET socket; this type only registers the descriptor.
    socket: UnixDatagram,
    next: AtomicU64,
    pending: Mutex<HashMap<u64, oneshot::Sender<Answer>>>,
}

impl Runtime {
    /// Creates the client from the socket that is connected to the runtime.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking or registered.
    pub fn new(socket: OwnedFd) -> io::Result<Arc<Self>> {
        let socket = std::os::unix::net::UnixDatagram::from(socket);
        socket.set_nonblocking(true)?;
        let socket = UnixDatagram::from_std(socket)?;
        Ok(Arc::new(Self { socket, next: AtomicU64::new(1), pending: Mutex::new(HashMap::new()) }))
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, HashMap<u64, oneshot::Sender<Answer>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call. The runtime completes it even if the caller is dropped.
    ///
    /// # Errors
    /// The runtime's error, or the runtime has exited.
    pub async fn call(&self, call: Call, fds: &[BorrowedFd<'_>]) -> Result<(Done, Option<OwnedFd>)> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let packet = serde_json::to_vec(&Request { id, call }).map_err(|error| Error::internal(error.to_string()))?;
        let (sender, receiver) = oneshot::channel();
        self.pending().insert(id, sender);
        let sent = self
            .socket
            .async_io(Interest::WRITABLE, || send(&self.socket, &packet, fds).map_err(io::Error::from))
            .await;
        if let Err(error) = sent {
            self.pending().remove(&id);
            return Err(Error::internal(format!("failed to send to the container runtime: {error}")));
        }
        match receiver.await {
            Ok(answer) => answer.map_err(Error::from),
            Err(_) => Err(Error::internal("the container runtime has exited")),
        }
    }

    /// Dispatches replies, and passes exits (container, name, code) to `exited`, until the runtime
    /// exits.
    ///
    /// # Errors
    /// Always, with the reason: the server cannot continue without its runtime.
    pub async fn serve(&self, mut exited: impl FnMut(&str, &str, i32)) -> io::Error {
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            let received = self
                .socket
                .async_io(Interest::READABLE, || receive(&self.socket, &mut buffer).map_err(io::Error::from))
                .await;
            let (len, mut fds) = match received {
                Ok((0, _)) => return io::Error::other("the container runtime has exited"),
                Ok(received) => received,
                Err(error) => return error,
            };
            match serde_json::from_slice(&buffer[..len]) {
                Ok(FromRuntime::Reply { id, result }) => {
                    if let Some(sender) = self.pending().remove(&id) {
                        let _ = sender.send(result.map(|done| (done, fds.pop())));
                    }
                }
                Ok(FromRuntime::Exited { container, exec, code }) => exited(&container, &exec, code),
                Err(error) => log::error!("container runtime: invalid message: {error}"),
            }
        }
    }
}

/// Borrows owned descriptors, as calls take them.
#[must_use]
pub fn borrow(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_runtime::{Failure, FailureKind};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn replies_are_matched_by_id_and_exits_are_dispatched() {
        let local = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        local.block_on(async {
            let (ours, theirs) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            let runtime = Runtime::new(ours).unwrap();
            let fake = std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                let mut ids = Vec::new();
                for _ in 0..2 {
                    let (len, fds) = receive(&theirs, &mut buffer).unwrap();
                    let request: Request = serde_json::from_slice(&buffer[..len]).unwrap();
                    ids.push((request.id, fds.len()));
                }
                let exit = FromRuntime::Exited { container: "c".into(), exec: "e".into(), code: 3 };
                send(&theirs, &serde_json::to_vec(&exit).unwrap(), &[]).unwrap();
                // Out of order: replies are matched by id.
                for (id, fds) in ids.iter().rev() {
                    let result = if *fds == 1 {
                        Ok(Done { pid: Some(42) })
                    } else {
                        Err(Failure { kind: FailureKind::NotFound, message: "gone".into() })
                    };
                    let reply = FromRuntime::Reply { id: *id, result };
                    send(&theirs, &serde_json::to_vec(&reply).unwrap(), &[]).unwrap();
                }
            });
            let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
            let exits = Mutex::new(Vec::new());
            let calls = async {
                let start = || Call::Start { container: "c".into() };
                let null = [null.as_fd()];
                tokio::join!(runtime.call(start(), &null), runtime.call(start(), &[]))
            };
            let served = runtime.serve(|c, e, code| exits.lock().unwrap().push((c.to_owned(), e.to_owned(), code)));
            let ((first, second), end) = tokio::join!(calls, served);
            assert_eq!(first.unwrap().0.pid, Some(42));
            assert_eq!(second.unwrap_err().code, ttrpc::Code::NOT_FOUND);
            assert!(end.to_string().contains("exited"));
            assert_eq!(*exits.lock().unwrap(), [("c".to_owned(), "e".to_owned(), 3)]);
            fake.join().unwrap();
        });
    }
}
