//! The rtnetlink socket: one request at a time, its responses, and their timeout.

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

/// A safety limit: the kernel responds within the `send`.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Twice the kernel's largest datagram.
const DATAGRAM: usize = 64 << 10;

/// The most entries of a list; more than any guest has.
const MAX_ENTRIES: usize = 1 << 16;

/// How often a list is requested that changes during the dump.
const MAX_ATTEMPTS: usize = 8;

/// A connection to the kernel's network configuration, in the namespace of the
/// thread that opened it. Closed when dropped.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    datagram: Vec<u8>,
}

impl Netlink {
    /// Opens the socket.
    ///
    /// # Errors
    /// The kernel refuses the socket.
    pub fn open() -> Result<Self> {
        let failed = |source| Error::Socket { what: "open".to_owned(), source };
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(failed)?;
        socket.bind_auto().map_err(failed)?;
        // Old kernels have no extended ack; then errors have no message.
        let _ = socket.set_ext_ack(true);
        Ok(Self { socket, sequence: 0, datagram: vec![0; DATAGRAM] })
    }

    /// Sends a request and waits for its acknowledgement.
    pub(crate) fn request(&mut self, what: impl Display, message: RouteNetlinkMessage, flags: u16) -> Result<()> {
        let what = what.to_string();
        self.exchange(&what, message, NLM_F_ACK | flags, |_| Ok(())).map(drop)
    }

    /// Requests a list. Malformed entries are logged and skipped.
    pub(crate) fn list<T>(
        &mut self,
        what: &str,
        message: &RouteNetlinkMessage,
        read: impl Fn(RouteNetlinkMessage) -> Vec<T>,
    ) -> Result<Vec<T>> {
        for _ in 0..MAX_ATTEMPTS {
            let mut all = Vec::new();
            let interrupted = self.exchange(what, message.clone(), NLM_F_DUMP, |entry| {
                all.extend(read(entry));
                if all.len() > MAX_ENTRIES {
                    return Err(malformed(what, format!("more than {MAX_ENTRIES} entries")));
                }
                Ok(())
            })?;
            if !interrupted {
                return Ok(all);
            }
        }
        Err(malformed(what, format!("the list changed each of the {MAX_ATTEMPTS} times it was read")))
    }

    /// Sends a request and reads its responses to the end; returns whether a dump was interrupted.
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
                    Answer::Malformed(why) => log::warn!("{what}: skipped a malformed entry: {why}"),
                    Answer::Done { interrupted } => return Ok(interrupted),
                    Answer::Refused(source, ext_ack) => {
                        return Err(Error::Refused { what: what.to_owned(), source, ext_ack });
                    }
                }
            }
        }
    }

    fn receive(&mut self, what: &str, begin: Instant) -> Result<Vec<Answer>> {
        let failed = |errno: Errno| Error::Socket { what: what.to_owned(), source: errno.into() };
        loop {
            let left = TIMEOUT.saturating_sub(begin.elapsed());
            let time = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], time.as_ref()) {
                Ok(0) => return Err(Error::Timeout { what: what.to_owned(), limit: TIMEOUT }),
                Err(Errno::INTR) => continue,
                other => other.map(drop).map_err(failed)?,
            }
            let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
            match rustix::net::recv(&self.socket, &mut self.datagram[..], flags) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(failed(error)),
                // With TRUNC the second value is the datagram's full length.
                Ok((_, whole)) => {
                    let datagram = self.datagram.get(..whole);
                    let datagram = datagram.ok_or_else(|| malformed(what, format!("a datagram of {whole} bytes")))?;
                    return answers(datagram, self.sequence).map_err(|detail| malformed(what, detail));
                }
            }
        }
    }
}

fn malformed(what: &str, detail: String) -> Error {
    Error::Malformed { what: what.to_owned(), detail }
}
