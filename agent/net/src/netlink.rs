//! The socket: one request, its answers, and how long they may take.

use std::fmt::Display;
use std::io;
use std::time::{Duration, Instant};

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::error::{Error, Result};
use crate::message::{Answer, answers, request};

/// The kernel answers within the `send`; it is never this late.
const LIMIT: Duration = Duration::from_secs(5);

/// Twice what the kernel puts into one datagram.
const DATAGRAM: usize = 64 << 10;

/// More entries than any guest has; a list that goes on is not collected.
const MOST: usize = 1 << 16;

/// How often a list that changes while it is told is asked for again.
const TRIES: usize = 8;

/// A connection to the kernel's network configuration, in the namespace of the
/// thread that opened it. Closed when dropped.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    datagram: Vec<u8>,
}

impl Netlink {
    /// Opens one.
    ///
    /// # Errors
    /// The kernel refuses a socket.
    pub fn open() -> Result<Self> {
        let failed = |source| Error::Socket { what: "open".to_owned(), source };
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(failed)?;
        socket.bind_auto().map_err(failed)?;
        // Old kernels have no words for a refusal; then there are none.
        let _ = socket.set_ext_ack(true);
        Ok(Self { socket, sequence: 0, datagram: vec![0; DATAGRAM] })
    }

    /// Has something done.
    pub(crate) fn act(&mut self, what: impl Display, message: RouteNetlinkMessage, flags: u16) -> Result<()> {
        let what = what.to_string();
        self.exchange(&what, message, NLM_F_ACK | flags, |_| Ok(())).map(drop)
    }

    /// Asks for a list. Entries that cannot be read are left out, with a word in the log.
    pub(crate) fn list<T>(
        &mut self,
        what: &str,
        message: &RouteNetlinkMessage,
        read: impl Fn(RouteNetlinkMessage) -> Vec<T>,
    ) -> Result<Vec<T>> {
        for _ in 0..TRIES {
            let mut all = Vec::new();
            let interrupted = self.exchange(what, message.clone(), NLM_F_DUMP, |entry| {
                all.extend(read(entry));
                if all.len() > MOST {
                    return Err(unreadable(what, format!("there are more than {MOST} entries")));
                }
                Ok(())
            })?;
            if !interrupted {
                return Ok(all);
            }
        }
        Err(unreadable(what, format!("the list changed each of the {TRIES} times it was read")))
    }

    /// Sends a request and takes its answers to their end; whether a list was interrupted.
    fn exchange(
        &mut self,
        what: &str,
        message: RouteNetlinkMessage,
        flags: u16,
        mut entry: impl FnMut(RouteNetlinkMessage) -> Result<()>,
    ) -> Result<bool> {
        let begin = Instant::now();
        self.sequence = self.sequence.wrapping_add(1);
        let bytes = request(message, flags, self.sequence);
        let failed = |source| Error::Socket { what: what.to_owned(), source };
        let sent = self.socket.send_to(&bytes, &SocketAddr::new(0, 0), 0).map_err(failed)?;
        if sent != bytes.len() {
            return Err(failed(io::Error::from(io::ErrorKind::WriteZero)));
        }
        loop {
            for answer in self.receive(what, begin)? {
                match answer {
                    Answer::Entry(message) => entry(message)?,
                    Answer::Unreadable(why) => log::warn!("{what}: an entry cannot be read and is left out: {why}"),
                    Answer::Done { interrupted } => return Ok(interrupted),
                    Answer::Refused(source, words) => {
                        return Err(Error::Refused { what: what.to_owned(), source, words });
                    }
                }
            }
        }
    }

    fn receive(&mut self, what: &str, begin: Instant) -> Result<Vec<Answer>> {
        let failed = |errno: Errno| Error::Socket { what: what.to_owned(), source: errno.into() };
        loop {
            let left = LIMIT.saturating_sub(begin.elapsed());
            let time = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], time.as_ref()) {
                Ok(0) => return Err(Error::Late { what: what.to_owned(), limit: LIMIT }),
                Err(Errno::INTR) => continue,
                other => other.map(drop).map_err(failed)?,
            }
            let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
            match rustix::net::recv(&self.socket, &mut self.datagram[..], flags) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(failed(error)),
                // With TRUNC the second figure is the datagram's own length.
                Ok((_, whole)) => {
                    let datagram = self.datagram.get(..whole);
                    let datagram = datagram.ok_or_else(|| unreadable(what, format!("{whole} bytes in one piece")))?;
                    return answers(datagram, self.sequence).map_err(|detail| unreadable(what, detail));
                }
            }
        }
    }
}

fn unreadable(what: &str, detail: String) -> Error {
    Error::Unreadable { what: what.to_owned(), detail }
}
