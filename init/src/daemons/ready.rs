//! Detects whether a daemon accepts connections on its socket.
//!
//! inotify reports when the socket's path appears. The kernel has no notification
//! for `listen(2)`, so a refused connection is retried: at every activity of the
//! daemon, and with exponential backoff.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_error;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::table::Ready;
use crate::root::Root;

/// The first and the longest backoff, µs.
const FIRST_PAUSE_US: u64 = 1_000;
const LAST_PAUSE_US: u64 = 256_000;

/// The endpoint to connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadyEndpoint {
    /// A Unix socket.
    Unix(PathBuf),
    /// A port of the loopback interface.
    Tcp(u16),
}

/// The result of a connection attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Accepts,
    Refuses,
    /// There is no such socket.
    Absent,
}

impl ReadyEndpoint {
    /// Returns the endpoint, unless readiness is [`Ready::Exit`].
    #[must_use]
    pub fn of(ready: Ready, root: &Root) -> Option<Self> {
        match ready {
            Ready::Exit => None,
            Ready::Unix(path) => Some(Self::Unix(root.path(path))),
            Ready::Tcp(port) => Some(Self::Tcp(port)),
        }
    }

    fn try_connect(&self) -> Answer {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let connected = match self {
            Self::Unix(path) => SocketAddrUnix::new(path).and_then(|address| {
                let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
                connect(&socket, &address)
            }),
            Self::Tcp(port) => socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).and_then(|socket| {
                match connect(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, *port)) {
                    // Both ends are local: the result is known when the call returns.
                    Err(Errno::INPROGRESS) => outcome(&socket),
                    other => other,
                }
            }),
        };
        match connected {
            // EAGAIN: the backlog is full, so a listener exists.
            Ok(()) | Err(Errno::AGAIN) => Answer::Accepts,
            Err(Errno::NOENT) => Answer::Absent,
            Err(_) => Answer::Refuses,
        }
    }
}

fn outcome(socket: &OwnedFd) -> Result<(), Errno> {
    let mut fds = [PollFd::new(socket, PollFlags::OUT)];
    if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? == 0 {
        return Err(Errno::INPROGRESS);
    }
    socket_error(socket)?
}

/// Retries connections until one is accepted.
#[derive(Debug)]
pub struct Probe {
    endpoint: ReadyEndpoint,
    due: Option<u64>,
    pause_us: u64,
}

impl Probe {
    /// Creates a probe that has not tried yet.
    #[must_use]
    pub fn new(endpoint: ReadyEndpoint) -> Self {
        Self { endpoint, due: None, pause_us: FIRST_PAUSE_US }
    }

    /// Returns when the next retry is due, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.due
    }

    /// Tries to connect if a retry is due or the daemon showed `activity`; `true` when it accepts connections.
    pub fn turn(&mut self, now: u64, activity: bool) -> bool {
        let due = self.due.is_some_and(|at| at <= now);
        if !activity && !due {
            return false;
        }
        match self.endpoint.try_connect() {
            Answer::Accepts => return true,
            Answer::Absent => {
                // inotify reports when the path appears.
                self.due = None;
                self.pause_us = FIRST_PAUSE_US;
            }
            // Activity does not postpone the scheduled retry.
            Answer::Refuses if due || self.due.is_none() => {
                self.due = Some(now.saturating_add(self.pause_us));
                self.pause_us = (self.pause_us * 2).min(LAST_PAUSE_US);
            }
            Answer::Refuses => {}
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    #[test]
    fn refused_port_is_retried_with_backoff() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(Probe::new(ReadyEndpoint::Tcp(port)).turn(0, true));
        drop(listener);
        let mut probe = Probe::new(ReadyEndpoint::Tcp(port));
        assert!(!probe.turn(0, false));
        assert_eq!(probe.next_deadline(), None, "no attempt yet");
        assert!(!probe.turn(0, true));
        let mut pauses = Vec::new();
        let mut now = 0;
        for _ in 0..12 {
            let at = probe.next_deadline().unwrap();
            pauses.push(at - now);
            now = at;
            assert!(!probe.turn(now, false));
        }
        assert_eq!(pauses[..3], [1_000, 2_000, 4_000]);
        assert!(pauses.iter().all(|pause| *pause <= LAST_PAUSE_US));
        let before = probe.next_deadline();
        assert!(!probe.turn(now + 1, true));
        assert_eq!(probe.next_deadline(), before, "constant output does not postpone the retry");
    }

    #[test]
    fn unix_socket_is_ready_only_when_it_accepts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let mut probe = Probe::new(ReadyEndpoint::Unix(path.clone()));
        assert!(!probe.turn(0, true));
        assert_eq!(probe.next_deadline(), None, "its directory is watched");
        drop(UnixListener::bind(&path).unwrap());
        assert!(!probe.turn(0, true), "stale socket of an ended daemon");
        assert_eq!(probe.next_deadline(), Some(FIRST_PAUSE_US));
        std::fs::remove_file(&path).unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(probe.turn(FIRST_PAUSE_US, false));
    }
}
