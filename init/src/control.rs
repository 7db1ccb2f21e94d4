//! The control socket's server side.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use firstlight_init_control::{FromInit, MAX_LINE, ToInit, decode, encode};
use rustix::net::sockopt::socket_peercred;

/// Maximum number of clients. The agent is one; others are for debugging.
const MOST_CLIENTS: usize = 32;

/// Maximum size of unsent output of a client, bytes: many times the size of the record.
const MOST_OUTPUT: usize = 8 << 20;

/// Size of unsent output from which on a client gets no log lines, bytes.
const MOST_LOG: usize = 64 << 10;

/// Maximum number of bytes read from one client per loop iteration.
const TURN: usize = 64 << 10;

/// The control socket and its clients.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    clients: Vec<Client>,
    next: u64,
}

/// Identifies a client while it is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientId(u64);

#[derive(Debug)]
struct Client {
    id: ClientId,
    stream: UnixStream,
    input: Vec<u8>,
    output: Vec<u8>,
    subscribed: bool,
    /// Whether it subscribed to the log: the number of dropped lines.
    reads_log: Option<u64>,
    disconnected: bool,
}

impl Server {
    /// Listens on a socket at `path` that only root can connect to.
    ///
    /// # Errors
    /// The socket could not be created.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(Self { listener, clients: Vec::new(), next: 0 })
    }

    /// Returns the descriptors to poll: the socket first, then each client, and whether it has
    /// unsent output.
    pub fn descriptors(&self) -> impl Iterator<Item = (BorrowedFd<'_>, bool)> {
        let clients = self.clients.iter().map(|client| (client.stream.as_fd(), !client.output.is_empty()));
        std::iter::once((self.listener.as_fd(), false)).chain(clients)
    }

    /// Accepts connections, reads requests, and sends queued output.
    pub fn turn(&mut self) -> Vec<(ClientId, ToInit)> {
        self.accept();
        let mut heard = Vec::new();
        for client in &mut self.clients {
            client.flush();
            client.read(&mut heard);
        }
        self.clients.retain(|client| !client.disconnected);
        heard
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let root = socket_peercred(&stream).is_ok_and(|peer| peer.uid.is_root());
            // Connections of non-root peers are dropped.
            if root && self.clients.len() < MOST_CLIENTS && stream.set_nonblocking(true).is_ok() {
                let id = ClientId(self.next);
                self.next += 1;
                let (input, output) = (Vec::new(), Vec::new());
                self.clients.push(Client {
                    id,
                    stream,
                    input,
                    output,
                    subscribed: false,
                    reads_log: None,
                    disconnected: false,
                });
            }
        }
    }

    /// Subscribes a client to changes.
    pub fn subscribe(&mut self, id: ClientId) {
        if let Some(client) = self.clients.iter_mut().find(|client| client.id == id) {
            client.subscribed = true;
        }
    }

    /// Subscribes a client to the log.
    pub fn subscribe_log(&mut self, id: ClientId) {
        if let Some(client) = self.clients.iter_mut().find(|client| client.id == id) {
            client.reads_log = Some(0);
        }
    }

    /// Returns whether a client subscribed to the log.
    #[must_use]
    pub fn has_readers(&self) -> bool {
        self.clients.iter().any(|client| client.reads_log.is_some())
    }

    /// Sends a log line to all subscribers of the log. Lines for a slow reader are dropped, and its
    /// next line contains their number.
    pub fn publish_log(&mut self, message: &FromInit) {
        let Ok(line) = encode(message) else { return };
        for client in &mut self.clients {
            let Some(missed) = &mut client.reads_log else { continue };
            if client.output.len() + line.len() > MOST_LOG {
                *missed += 1;
                continue;
            }
            if let missed @ 1.. = std::mem::take(missed)
                && let FromInit::Log { at_us, .. } = message
                && let Ok(note) = encode(&FromInit::Log {
                    at_us: *at_us,
                    level: "warning".to_owned(),
                    source: "init".to_owned(),
                    text: format!("the agent read too slowly, {missed} log lines are missing here"),
                })
            {
                client.send(&note);
            }
            client.send(&line);
        }
    }

    /// Sends a message to one client.
    pub fn send(&mut self, id: ClientId, message: &FromInit) {
        if let (Some(client), Ok(line)) = (self.clients.iter_mut().find(|client| client.id == id), encode(message)) {
            client.send(&line);
        }
    }

    /// Returns whether a client subscribed to changes.
    #[must_use]
    pub fn has_subscribers(&self) -> bool {
        self.clients.iter().any(|client| client.subscribed)
    }

    /// Sends a message to all subscribers of changes.
    pub fn publish(&mut self, message: &FromInit) {
        if let Ok(line) = encode(message) {
            for client in self.clients.iter_mut().filter(|client| client.subscribed) {
                client.send(&line);
            }
        }
    }
}

impl Client {
    fn send(&mut self, line: &[u8]) {
        if self.output.len() + line.len() > MOST_OUTPUT {
            self.disconnected = true;
            return;
        }
        self.output.extend_from_slice(line);
        self.flush();
    }

    fn flush(&mut self) {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(count) if count > 0 => drop(self.output.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                _ => {
                    self.disconnected = true;
                    return;
                }
            }
        }
    }

    fn read(&mut self, heard: &mut Vec<(ClientId, ToInit)>) {
        let mut buffer = [0; 4096];
        let mut left = TURN;
        while left > 0 && !self.disconnected {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.disconnected = true,
                Ok(count) => {
                    left = left.saturating_sub(count);
                    self.input.extend_from_slice(&buffer[..count]);
                    self.split(heard);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.disconnected = true,
            }
        }
    }

    fn split(&mut self, heard: &mut Vec<(ClientId, ToInit)>) {
        while let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            match decode(&line) {
                Ok(message) => heard.push((self.id, message)),
                Err(error) => self.refuse(&error.to_string()),
            }
        }
        if self.input.len() > MAX_LINE {
            self.refuse("the line is too long; the connection is closed");
            self.disconnected = true;
        }
    }

    fn refuse(&mut self, reason: &str) {
        if let Ok(line) = encode(&FromInit::Refused { reason: reason.to_owned() }) {
            self.send(&line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufRead as _;

    fn pair() -> (tempfile::TempDir, Server, UnixStream) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let server = Server::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        client.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        (dir, server, client)
    }

    fn answer(client: &UnixStream) -> FromInit {
        let mut line = String::new();
        io::BufReader::new(client).read_line(&mut line).unwrap();
        decode(line.as_bytes()).unwrap()
    }

    #[test]
    fn messages_split_across_reads_are_reassembled() {
        let (_directory, mut server, mut client) = pair();
        let line = encode(&ToInit::PowerOff { reason: "x".into() }).unwrap();
        client.write_all(&line[..5]).unwrap();
        assert_eq!(server.turn(), []);
        client.write_all(&line[5..]).unwrap();
        client.write_all(&encode(&ToInit::Record { id: None }).unwrap()).unwrap();
        let heard: Vec<_> = server.turn().into_iter().map(|(_, message)| message).collect();
        assert_eq!(heard, [ToInit::PowerOff { reason: "x".into() }, ToInit::Record { id: None }]);
    }

    #[test]
    fn only_subscribers_receive_changes() {
        let (_directory, mut server, mut client) = pair();
        client.write_all(&encode(&ToInit::Subscribe).unwrap()).unwrap();
        let (id, _) = server.turn().remove(0);
        let message = FromInit::Gpus { scanned: true, gpus: Vec::new() };
        server.publish(&message);
        server.subscribe(id);
        server.publish(&message);
        assert_eq!(answer(&client), message);
        client.set_nonblocking(true).unwrap();
        assert!(client.read(&mut [0; 1]).is_err(), "there was one message only");
    }

    #[test]
    fn slow_log_reader_loses_lines_and_uses_bounded_memory() {
        let (_directory, mut server, mut client) = pair();
        client.write_all(&encode(&ToInit::SubscribeLog).unwrap()).unwrap();
        let (id, message) = server.turn().remove(0);
        assert!(message == ToInit::SubscribeLog && !server.has_readers());
        server.subscribe_log(id);
        let line = |at_us| FromInit::Log { at_us, level: "info".into(), source: "x".into(), text: "y".repeat(500) };
        for at_us in 0..5000 {
            server.publish_log(&line(at_us));
        }
        assert!(server.has_readers() && server.clients[0].output.len() <= MOST_LOG);
        // The client reads again: it gets all queued lines, then the number of dropped ones.
        let mut reader = io::BufReader::new(client);
        let mut next = |server: &mut Server| {
            let mut text = String::new();
            // Queued output is sent as the socket has room.
            server.turn();
            reader.read_line(&mut text).unwrap();
            decode::<FromInit>(text.as_bytes()).unwrap()
        };
        let mut count = 0;
        while !server.clients[0].output.is_empty() {
            assert_eq!(next(&mut server), line(count));
            count += 1;
        }
        server.publish_log(&line(9999));
        let mut message = next(&mut server);
        while message == line(count) {
            count += 1;
            message = next(&mut server);
        }
        let FromInit::Log { text, .. } = message else { panic!("{message:?}") };
        assert_eq!(text, format!("the agent read too slowly, {} log lines are missing here", 5000 - count));
        assert_eq!(next(&mut server), line(9999));
    }

    #[test]
    fn invalid_message_is_refused_and_connection_stays() {
        let (_directory, mut server, mut client) = pair();
        client.write_all(b"{\"reboot\":1}\n").unwrap();
        assert_eq!(server.turn(), []);
        assert!(matches!(answer(&client), FromInit::Refused { .. }));
        client.write_all(&encode(&ToInit::Record { id: None }).unwrap()).unwrap();
        assert_eq!(server.turn().len(), 1);
    }

    #[test]
    fn endless_line_closes_the_connection() {
        let (_directory, mut server, mut client) = pair();
        client.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while sent <= MAX_LINE + 1 && !server.clients.iter().any(|client| client.disconnected) {
            sent += client.write(&[b'x'; 4096]).unwrap_or(0);
            server.turn();
            if sent > 4096 && server.clients.is_empty() {
                break;
            }
        }
        assert!(server.clients.is_empty());
    }

    #[test]
    fn client_that_never_reads_is_disconnected() {
        let (_directory, mut server, mut client) = pair();
        client.write_all(&encode(&ToInit::Subscribe).unwrap()).unwrap();
        let (id, _) = server.turn().remove(0);
        server.subscribe(id);
        let message = FromInit::Refused { reason: "x".repeat(100_000) };
        for _ in 0..200 {
            server.publish(&message);
        }
        server.turn();
        assert!(server.clients.is_empty());
    }
}
