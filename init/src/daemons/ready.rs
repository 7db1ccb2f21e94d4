//! Whether a daemon takes connections at its socket.
//!
//! inotify tells when a socket's name appears. The kernel tells nobody when a
//! socket begins to listen, so a connection that is refused is tried again: at
//! every sign of life from the daemon, and after pauses that double.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_error;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::table::Ready;
use crate::root::Root;

/// The first pause, µs, and the longest.
const FIRST_PAUSE_US: u64 = 1_000;
const LAST_PAUSE_US: u64 = 256_000;

/// Where to knock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Door {
    /// A Unix socket.
    Unix(PathBuf),
    /// A port of the loopback interface.
    Tcp(u16),
}

/// How it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Accepts,
    Refuses,
    /// There is no such socket.
    Absent,
}

impl Door {
    /// The socket of a daemon that has one.
    #[must_use]
    pub fn of(ready: Ready, root: &Root) -> Option<Self> {
        match ready {
            Ready::Exit => None,
            Ready::Unix(path) => Some(Self::Unix(root.path(path))),
            Ready::Tcp(port) => Some(Self::Tcp(port)),
        }
    }

    fn knock(&self) -> Answer {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let connected = match self {
            Self::Unix(path) => SocketAddrUnix::new(path).and_then(|address| {
                let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
                connect(&socket, &address)
            }),
            Self::Tcp(port) => socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).and_then(|socket| {
                match connect(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, *port)) {
                    // Both ends are here: the answer is there as soon as the call is over.
                    Err(Errno::INPROGRESS) => outcome(&socket),
                    other => other,
                }
            }),
        };
        match connected {
            // A full queue is one that somebody listens at.
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

/// Tries a door until it opens.
#[derive(Debug)]
pub struct Probe {
    door: Door,
    due: Option<u64>,
    pause_us: u64,
}

impl Probe {
    /// A probe that has not tried yet.
    #[must_use]
    pub fn new(door: Door) -> Self {
        Self { door, due: None, pause_us: FIRST_PAUSE_US }
    }

    /// When it tries again by itself, µs.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.due
    }

    /// Tries if it is time, or if there was a `sign` of life; `true` when the daemon takes connections.
    pub fn turn(&mut self, now: u64, sign: bool) -> bool {
        let due = self.due.is_some_and(|at| at <= now);
        if !sign && !due {
            return false;
        }
        match self.door.knock() {
            Answer::Accepts => return true,
            Answer::Absent => {
                // The name's appearance is a sign.
                self.due = None;
                self.pause_us = FIRST_PAUSE_US;
            }
            // A sign does not put off what is planned.
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
    fn a_port_that_listens_accepts_and_another_is_tried_again_ever_later() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(Probe::new(Door::Tcp(port)).turn(0, true));
        drop(listener);
        let mut probe = Probe::new(Door::Tcp(port));
        assert!(!probe.turn(0, false));
        assert_eq!(probe.next_deadline(), None, "nobody has asked yet");
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
        assert_eq!(probe.next_deadline(), before, "a daemon that talks all the time does not stop the clock");
    }

    #[test]
    fn a_unix_socket_is_waited_for_by_name_and_then_by_answer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let mut probe = Probe::new(Door::Unix(path.clone()));
        assert!(!probe.turn(0, true));
        assert_eq!(probe.next_deadline(), None, "its directory is watched");
        drop(UnixListener::bind(&path).unwrap());
        assert!(!probe.turn(0, true), "one that an ended daemon left behind");
        assert_eq!(probe.next_deadline(), Some(FIRST_PAUSE_US));
        std::fs::remove_file(&path).unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(probe.turn(FIRST_PAUSE_US, false));
    }
}
