//! Clients of the control socket: receives their requests and sends them messages.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use firstlight_boot_record::{Gpu, LogLine};
use firstlight_init_control::{FromInit, GpuState, ToInit};

use super::effect::{Effect, ModuleRequest};
use crate::control::{ClientId, Server};
use crate::record::cut;
use crate::shutdown::Goal;

/// The server of the control socket, once it is open, and the pending GPU update.
#[derive(Debug, Default)]
pub(super) struct Clients {
    server: Option<Server>,
    /// Whether subscribers need a GPU update.
    gpus_changed: bool,
}

impl Clients {
    /// Opens the control socket.
    ///
    /// # Errors
    /// The socket could not be created.
    pub(super) fn listen(&mut self, path: &Path) -> io::Result<()> {
        self.server = Some(Server::bind(path)?);
        Ok(())
    }

    /// Returns the descriptors to poll, each with the flag whether it has unsent output.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = (BorrowedFd<'_>, bool)> {
        self.server.iter().flat_map(Server::descriptors)
    }

    /// Receives requests and sends queued output.
    pub(super) fn receive(&mut self) -> Vec<(ClientId, ToInit)> {
        self.server.as_mut().map(Server::turn).unwrap_or_default()
    }

    /// Handles a request of a client.
    pub(super) fn handle(&mut self, now: u64, client: ClientId, request: ToInit) -> Vec<Effect> {
        match request {
            ToInit::Subscribe => {
                if let Some(server) = &mut self.server {
                    server.subscribe(client);
                }
                vec![Effect::SendState(client)]
            }
            ToInit::SubscribeLog => {
                if let Some(server) = &mut self.server {
                    server.subscribe_log(client);
                }
                Vec::new()
            }
            ToInit::Listening { at_us } => vec![Effect::AgentListens(at_us.min(now))],
            ToInit::Event { at_us, kind, object, detail } => {
                let (kind, object, detail) = (cut(kind), cut(object), cut(detail));
                vec![Effect::ClientEvent { at_us: at_us.min(now), kind, object, detail }]
            }
            ToInit::Record { id } => vec![Effect::SendRecord(client, id)],
            ToInit::LoadModule { id, name, parameters } => {
                vec![Effect::LoadModule { request: ModuleRequest { client, id, name }, parameters }]
            }
            ToInit::PowerOff { reason } => vec![Effect::BeginShutdown(Goal::PowerOff, cut(reason))],
        }
    }

    /// Sends a message to one client.
    pub(super) fn send(&mut self, client: ClientId, message: &FromInit) {
        if let Some(server) = &mut self.server {
            server.send(client, message);
        }
    }

    /// Sends a message to all subscribers.
    pub(super) fn publish(&mut self, message: &FromInit) {
        if let Some(server) = &mut self.server {
            server.publish(message);
        }
    }

    /// Sends a log line to all clients that subscribed to the log.
    pub(super) fn publish_line(&mut self, line: LogLine) {
        if let Some(server) = self.server.as_mut().filter(|server| server.has_readers()) {
            let LogLine { at_us, level, source, text } = line;
            server.publish_log(&FromInit::Log { at_us, level: level.as_str().to_owned(), source, text });
        }
    }

    /// Requests an update of the GPUs to all subscribers at the end of this loop iteration: eight
    /// GPUs that become ready at once are one coalesced update.
    pub(super) fn gpus_changed(&mut self) {
        self.gpus_changed = true;
    }

    /// Sends the requested update, if one was requested and a client subscribed.
    pub(super) fn send_gpus(&mut self, scanned: bool, gpus: &[Gpu]) {
        if std::mem::take(&mut self.gpus_changed) && self.server.as_ref().is_some_and(Server::has_subscribers) {
            self.publish(&gpu_message(scanned, gpus));
        }
    }
}

/// Returns the message with the state of all GPUs.
pub(super) fn gpu_message(scanned: bool, gpus: &[Gpu]) -> FromInit {
    FromInit::Gpus { scanned, gpus: gpus.iter().map(GpuState::from).collect() }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixStream;

    use firstlight_init_control::{RequestId, decode, encode};

    use super::*;

    fn clients() -> (tempfile::TempDir, Clients, UnixStream) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let mut clients = Clients::default();
        clients.listen(&path).unwrap();
        let stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        (dir, clients, stream)
    }

    fn request(clients: &mut Clients, stream: &mut UnixStream, message: &ToInit) -> Vec<Effect> {
        stream.write_all(&encode(message).unwrap()).unwrap();
        let (client, request) = clients.receive().remove(0);
        clients.handle(100, client, request)
    }

    #[test]
    fn requests_become_effects_with_bounded_times_and_texts() {
        let (_directory, mut clients, mut stream) = clients();
        let mut effects = |message| request(&mut clients, &mut stream, &message);
        assert_eq!(effects(ToInit::Listening { at_us: 900 }), [Effect::AgentListens(100)]);
        assert!(matches!(effects(ToInit::Subscribe)[..], [Effect::SendState(_)]));
        let id = Some(RequestId(4));
        assert!(matches!(effects(ToInit::Record { id })[..], [Effect::SendRecord(_, Some(RequestId(4)))]));
        let load = ToInit::LoadModule { id, name: "x".into(), parameters: String::new() };
        assert!(matches!(&effects(load)[..], [Effect::LoadModule { request, .. }] if request.id == id));
        assert_eq!(effects(ToInit::SubscribeLog), []);
        let reason = "x".repeat(5000);
        let effects = effects(ToInit::PowerOff { reason });
        assert!(matches!(&effects[..], [Effect::BeginShutdown(Goal::PowerOff, text)] if text.len() == 1024));
    }

    #[test]
    fn several_changes_are_one_update_to_subscribers() {
        let (_directory, mut clients, mut stream) = clients();
        request(&mut clients, &mut stream, &ToInit::Subscribe);
        clients.gpus_changed();
        clients.gpus_changed();
        clients.send_gpus(true, &[]);
        clients.send_gpus(false, &[]);
        clients.publish(&FromInit::Refused { reason: "last".to_owned() });
        let lines: Vec<String> = BufReader::new(stream).lines().take(2).map(Result::unwrap).collect();
        assert_eq!(decode::<FromInit>(lines[0].as_bytes()).unwrap(), gpu_message(true, &[]));
        assert!(lines[1].contains("last"));
    }

    #[test]
    fn closed_socket_sends_nothing() {
        let mut clients = Clients::default();
        clients.gpus_changed();
        clients.send_gpus(true, &[]);
        assert!(clients.receive().is_empty() && clients.descriptors().next().is_none());
    }
}
