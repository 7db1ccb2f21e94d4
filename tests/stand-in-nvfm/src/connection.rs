//! A connection to the manager.

use std::io::{Error, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use firstlight_fake_fm::call::Call;
use firstlight_fake_fm::wire::{Reply, Request, request};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::address::Address;

/// The default timeout.
const TIMEOUT: Duration = Duration::from_secs(1);

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn open(address: &Address, timeout: Duration) -> Result<Self, Error> {
        match address {
            Address::Inet(address) => TcpStream::connect_timeout(address, timeout).map(Self::Tcp),
            Address::Unix(path) => unix(path).map(Self::Unix),
            Address::Vsock => Err(ErrorKind::ConnectionRefused.into()),
        }
    }

    fn set_timeout(&self, timeout: Option<Duration>) -> Result<(), Error> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(timeout),
            Self::Tcp(stream) => stream.set_read_timeout(timeout),
        }
    }

    fn try_clone(&self) -> Result<Self, Error> {
        match self {
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
        }
    }

    fn close(&self) -> Result<(), Error> {
        match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        }
    }
}

/// Non-blocking: a manager with a full backlog counts as unreachable.
fn unix(path: &Path) -> Result<UnixStream, Error> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize, Error> {
        match self {
            Self::Unix(stream) => stream.read(bytes),
            Self::Tcp(stream) => stream.read(bytes),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// Calls on one connection are serialised; closing does not wait for them.
pub(crate) struct Connection {
    stream: Mutex<Stream>,
    closer: Stream,
}

impl Connection {
    /// Connects, and waits for the manager's first reply.
    pub(crate) fn open(address: &Address, timeout_ms: u32) -> Result<Self, Error> {
        let timeout = if timeout_ms == 0 { TIMEOUT } else { Duration::from_millis(timeout_ms.into()) };
        let start = Instant::now();
        let mut stream = Stream::open(address, timeout)?;
        let left = timeout.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
        stream.set_timeout(Some(left))?;
        request(&mut stream, &Request::Hello)?;
        stream.set_timeout(None)?;
        Ok(Self { closer: stream.try_clone()?, stream: Mutex::new(stream) })
    }

    /// Executes a call, without a timeout.
    pub(crate) fn call(&self, call: Call) -> Result<Reply, Error> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        request(&mut *stream, &Request::Call(call))
    }
}

impl Connection {
    /// Aborts waiting calls.
    pub(crate) fn close(&self) {
        // The manager may have closed it already.
        let _ = self.closer.close();
    }
}
