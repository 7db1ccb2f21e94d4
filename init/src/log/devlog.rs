//! `/dev/log`: receives the daemons' `syslog(3)` messages.
//!
//! Every process in the guest's own mount namespace may write to the socket; containers have their
//! own `/dev`. PID 1 reads the socket as soon as it is readable, so that no daemon blocks in
//! `syslog(3)`, and in small batches, so that senders cannot keep PID 1 from other work. The kernel
//! limits the queue to `net.unix.max_dgram_qlen` datagrams, as set when the socket was created, and
//! charges the memory of each datagram to its sender.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use firstlight_sys::datagram::{Sender, receive};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with, sockopt};

use super::syslog::{MOST_TEXT, Message, parse};
use super::{Peer, Source};
use crate::daemons::table::DAEMONS;
use crate::root::Root;

/// Path of the socket.
pub const PATH: &str = "/dev/log";

/// Maximum number of queued datagrams (`net.unix.max_dgram_qlen`, read when a socket is created).
pub const QUEUE: (&str, &str) = ("/proc/sys/net/unix/max_dgram_qlen", "512");

/// Maximum number of cached senders.
const MOST_NAMES: usize = 16;

/// Time for which a sender's identity is cached, µs. It is short because process ids are reused.
const CACHED_US: u64 = 1_000_000;

/// The socket `/dev/log`.
#[derive(Debug)]
pub struct DevLog {
    socket: UnixDatagram,
    root: Root,
    /// Identities of recent senders, newest last.
    names: Vec<(Sender, u64, Source)>,
}

impl DevLog {
    /// Creates the socket with mode 0666.
    ///
    /// # Errors
    /// The socket could not be created, configured or bound; the error names the step.
    pub fn open(root: &Root) -> Result<Self, String> {
        let path = root.path(PATH);
        // If the write fails, the kernel's default of 10 datagrams applies.
        let _ = fs::write(root.path(QUEUE.0), QUEUE.1);
        let failed = |what: &'static str| move |error: io::Error| format!("cannot {what} {PATH}: {error}");
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
                .map_err(|error| failed("make the socket for")(error.into()))?;
        // SO_PASSCRED is set before bind, so that every message has credentials.
        sockopt::set_socket_passcred(&socket, true).map_err(|error| failed("ask for the senders at")(error.into()))?;
        bind_to(&socket, &path).map_err(failed("bind"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).map_err(failed("set the mode of"))?;
        Ok(Self { socket: socket.into(), root: root.clone(), names: Vec::new() })
    }

    /// Receives at most `most` queued messages.
    ///
    /// # Errors
    /// Reading from the socket failed.
    pub fn read(&mut self, now: u64, most: usize) -> io::Result<Vec<(Source, Message)>> {
        let mut messages = Vec::new();
        // Large enough for the longest text with a priority and a timestamp; a longer datagram is
        // truncated, and its full length is known (MSG_TRUNC).
        let mut buffer = [0; MOST_TEXT + 64];
        for _ in 0..most {
            match receive(&self.socket, &mut buffer) {
                Ok(datagram) => {
                    let bytes = buffer.get(..datagram.length).unwrap_or(&buffer);
                    if let (Some(sender), Some(message)) = (datagram.sender, parse(bytes, datagram.length)) {
                        messages.push((self.source(now, sender), message));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(messages)
    }

    /// Returns the source of a sender: the daemon in whose cgroup the process is, or the process
    /// itself.
    fn source(&mut self, now: u64, sender: Sender) -> Source {
        let mut before = None;
        if let Some(at) = self.names.iter().position(|(known, ..)| *known == sender) {
            let (_, since, source) = &self.names[at];
            if now.saturating_sub(*since) < CACHED_US {
                return source.clone();
            }
            before = Some(self.names.remove(at).2);
        }
        // The sender may have exited before its last messages are read: use the cached identity.
        let source = self.look_up(sender).or(before);
        let source = source.unwrap_or_else(|| {
            let (pid, user) = (sender.pid.unwrap_or_default(), sender.user);
            Source::Peer(Peer { pid, user, program: "ended".to_owned() })
        });
        if self.names.len() >= MOST_NAMES {
            self.names.remove(0);
        }
        self.names.push((sender, now, source.clone()));
        source
    }

    /// Returns the source of a process from its `/proc` files; `None` if the process has exited.
    fn look_up(&self, sender: Sender) -> Option<Source> {
        let pid = sender.pid?;
        let read = |file: &str| fs::read(self.root.path(&format!("/proc/{pid}/{file}")));
        if let Some(name) = read("cgroup").ok().and_then(|text| daemon_of(&String::from_utf8_lossy(&text))) {
            return Some(Source::Daemon(name));
        }
        let program = String::from_utf8_lossy(read("comm").ok()?.trim_ascii_end()).into_owned();
        Some(Source::Peer(Peer { pid, user: sender.user, program }))
    }
}

impl AsFd for DevLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn bind_to<F: AsFd>(socket: F, path: &Path) -> io::Result<()> {
    let address = SocketAddrUnix::new(path)?;
    match bind(&socket, &address) {
        // The image has a stale file at this path.
        Err(rustix::io::Errno::ADDRINUSE) => {
            fs::remove_file(path)?;
            Ok(bind(&socket, &address)?)
        }
        other => Ok(other?),
    }
}

/// Returns the daemon in whose cgroup a process is, from the text of `/proc/PID/cgroup`.
fn daemon_of(text: &str) -> Option<&'static str> {
    let group = text.lines().find_map(|line| line.strip_prefix("0::/firstlight/"))?;
    let name = group.split('/').next()?;
    DAEMONS.iter().map(|spec| spec.name).find(|known| *known == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::Level;
    use rustix::net::{SendFlags, sendto};

    fn log() -> (tempfile::TempDir, DevLog, UnixDatagram) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        fs::create_dir_all(root.path("/dev")).unwrap();
        fs::create_dir_all(root.path("/proc")).unwrap();
        let log = DevLog::open(&root).unwrap();
        let client = UnixDatagram::unbound().unwrap();
        client.connect(root.path(PATH)).unwrap();
        (dir, log, client)
    }

    fn process(dir: &tempfile::TempDir, group: &str, name: &str) {
        let place = dir.path().join(format!("proc/{}", std::process::id()));
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("cgroup"), format!("0::{group}\n")).unwrap();
        fs::write(place.join("comm"), format!("{name}\n")).unwrap();
    }

    #[test]
    fn messages_have_their_senders_credentials() {
        let (dir, mut log, client) = log();
        process(&dir, "/", "some one");
        client.send(b"<11>Nov 21 18:40:02 tag: text").unwrap();
        client.send(b"").unwrap();
        client.send(b"\xff<0>").unwrap();
        let messages = log.read(0, 10).unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        let user = rustix::process::getuid().as_raw();
        let peer = Source::Peer(Peer { pid, user, program: "some one".into() });
        let expected = [(Level::Error, "tag: text"), (Level::Notice, "\\xff<0>")]
            .map(|(level, text)| (peer.clone(), Message { level, text: text.into() }));
        assert_eq!(messages, expected);
        assert_eq!(log.read(0, 10).unwrap(), []);
    }

    #[test]
    fn daemon_is_identified_by_cgroup_not_by_tag() {
        let (dir, mut log, client) = log();
        process(&dir, "/firstlight/imex", "x");
        client.send(b"<14>fabricmanager: x").unwrap();
        assert_eq!(log.read(0, 1).unwrap()[0].0, Source::Daemon("imex"));
        process(&dir, "/firstlight/imex2", "x");
        client.send(b"<14>x").unwrap();
        assert_eq!(log.read(1, 1).unwrap()[0].0, Source::Daemon("imex"), "believed for a while");
        client.send(b"<14>x").unwrap();
        assert!(matches!(log.read(CACHED_US, 1).unwrap()[0].0, Source::Peer(_)), "there is no such daemon");
        fs::remove_dir_all(dir.path().join("proc")).unwrap();
        client.send(b"<14>x").unwrap();
        assert!(
            matches!(log.read(9 * CACHED_US, 1).unwrap()[0].0, Source::Peer(Peer { ref program, .. }) if program == "x")
        );
        log.names.clear();
        client.send(b"<14>x").unwrap();
        let ended = log.read(9 * CACHED_US, 1).unwrap().remove(0).0;
        assert!(ended.name().starts_with("ended["), "{ended:?}");
        for text in ["0::/", "0::/../firstlight/imex", "1:memory:/firstlight/imex", "", "0::/firstlight/"] {
            assert_eq!(daemon_of(text), None, "{text}");
        }
    }

    #[test]
    fn batch_is_bounded_and_senders_do_not_block() {
        let (_directory, mut log, client) = log();
        client.set_nonblocking(true).unwrap();
        let sent = (0..100_000).take_while(|_| client.send(&[b'x'; 100]).is_ok()).count();
        assert!((8..100_000).contains(&sent), "the kernel's queue has an end: {sent}");
        assert_eq!(log.read(0, 5).unwrap().len(), 5);
        let rest: usize =
            std::iter::from_fn(|| Some(log.read(0, 64).unwrap().len())).take_while(|count| *count > 0).sum();
        assert_eq!(rest, sent - 5);
    }

    #[test]
    fn stale_socket_is_replaced_and_all_users_may_write() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        fs::create_dir_all(root.path("/dev")).unwrap();
        fs::write(root.path(PATH), "x").unwrap();
        let mut log = DevLog::open(&root).unwrap();
        assert_eq!(fs::metadata(root.path(PATH)).unwrap().permissions().mode() & 0o777, 0o666);
        let client = UnixDatagram::unbound().unwrap();
        let address = SocketAddrUnix::new(root.path(PATH)).unwrap();
        sendto(&client, &[b'y'; 5000], SendFlags::empty(), &address).unwrap();
        let messages = log.read(0, 5).unwrap();
        assert!(messages[0].1.text.ends_with(&format!("[{} bytes more]", 5000 - MOST_TEXT)), "{messages:?}");
        let missing = Root::at(&dir.path().join("none"));
        assert!(DevLog::open(&missing).unwrap_err().contains("cannot bind /dev/log"));
    }
}
