//! The connection to PID 1.
//!
//! PID 1 outlives the agent, so the connection is made once. Without it the agent still serves;
//! requests for GPUs and for the boot record fail with an error that says so.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use firstlight_init_control::{FromInit, MAX_LINE, RequestId, ToInit, decode, encode};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};

use crate::boot_events::BootEvents;
use crate::error::{Error, Result};
use crate::gpu::View;

/// PID 1 replies from memory; a longer wait means that it hangs.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A driver may probe its devices while it is loaded.
const MODULE_TIMEOUT: Duration = Duration::from_secs(30);

/// Client of PID 1's control socket.
#[derive(Debug)]
pub struct Control {
    messages: mpsc::UnboundedSender<ToInit>,
    pending: Mutex<Pending>,
}

/// A reply of PID 1 to a request.
#[derive(Debug)]
enum Reply {
    /// The boot record as JSON.
    Record(String),
    /// Why a kernel module was not loaded, if it was not.
    Module(Option<String>),
}

/// Why there is no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NoReply {
    /// The connection is closed or was never established.
    NotConnected,
    /// The timeout is over.
    TimedOut,
}

/// Requests without a reply, by id.
#[derive(Debug, Default)]
struct Pending {
    last: u64,
    replies: BTreeMap<RequestId, oneshot::Sender<Reply>>,
    closed: bool,
}

impl Pending {
    /// Adds a request; `None` after the connection was closed.
    fn add(&mut self) -> Option<(RequestId, oneshot::Receiver<Reply>)> {
        if self.closed {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        self.last += 1;
        let id = RequestId(self.last);
        self.replies.insert(id, sender);
        Some((id, receiver))
    }

    /// Completes a request. A reply without a known id is dropped: its request has timed out.
    fn complete(&mut self, id: Option<RequestId>, reply: Reply) {
        if let Some(sender) = id.and_then(|id| self.replies.remove(&id)) {
            // The receiver may have been dropped.
            let _ = sender.send(reply);
        }
    }

    /// Fails all requests, now and later.
    fn close(&mut self) {
        self.closed = true;
        self.replies.clear();
    }
}

impl Control {
    /// Connects and copies GPU state from PID 1 into `view`. Returns at once; messages are queued
    /// until the connection is established.
    #[must_use]
    pub fn connect(path: &Path, view: watch::Sender<View>) -> Arc<Self> {
        let (messages, queue) = mpsc::unbounded_channel();
        let control = Arc::new(Self { messages, pending: Mutex::default() });
        let path = path.to_owned();
        let follower = Arc::clone(&control);
        tokio::spawn(async move {
            let why = match UnixStream::connect(&path).await {
                Ok(stream) => follower.follow(stream, queue, &view).await,
                Err(error) => format!("failed to connect: {error}"),
            };
            log::error!("PID 1 at {}: {why}", path.display());
            view.send_modify(|view| view.disconnected = Some(why));
            follower.pending().close();
        });
        control.send(ToInit::Subscribe);
        if crate::log::queue().is_some() {
            // A client may connect to the log port.
            control.send(ToInit::SubscribeLog);
        }
        control
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request and waits for its reply.
    async fn request(
        &self,
        timeout: Duration,
        request: impl FnOnce(RequestId) -> ToInit,
    ) -> std::result::Result<Reply, NoReply> {
        let (id, receiver) = self.pending().add().ok_or(NoReply::NotConnected)?;
        self.send(request(id));
        match tokio::time::timeout(timeout, receiver).await {
            Ok(reply) => reply.map_err(|_| NoReply::NotConnected),
            Err(_) => {
                self.pending().replies.remove(&id);
                Err(NoReply::TimedOut)
            }
        }
    }

    /// Asks PID 1 to load a kernel module.
    ///
    /// # Errors
    /// PID 1 failed to load it (with its reason), is not connected, or did not reply in time.
    pub async fn load_module(&self, name: &str, parameters: &str) -> Result<()> {
        let (requested, parameters) = (name.to_owned(), parameters.to_owned());
        let request = |id| ToInit::LoadModule { id: Some(id), name: requested, parameters };
        let why = match self.request(MODULE_TIMEOUT, request).await {
            Ok(Reply::Module(None)) => return Ok(()),
            Ok(Reply::Module(Some(why))) => return Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, why)),
            Ok(Reply::Record(_)) => "sent another reply",
            Err(NoReply::NotConnected) => "is not connected",
            Err(NoReply::TimedOut) => "did not load it in time",
        };
        Err(Error::new(ttrpc::Code::UNAVAILABLE, format!("kernel module {name}: PID 1 {why}")))
    }

    /// Queues a message to PID 1; never blocks.
    pub fn send(&self, message: ToInit) {
        // Fails only after the connection was lost, which has been logged.
        let _ = self.messages.send(message);
    }

    /// Returns the sink for events of the boot record.
    #[must_use]
    pub fn events(&self) -> BootEvents {
        BootEvents::new(self.messages.clone())
    }

    /// Returns the boot record as JSON.
    ///
    /// # Errors
    /// PID 1 is not connected or does not reply.
    pub async fn record(&self) -> Result<String> {
        let why = match self.request(REPLY_TIMEOUT, |id| ToInit::Record { id: Some(id) }).await {
            Ok(Reply::Record(record)) => return Ok(record),
            Ok(Reply::Module(_)) => "sent another reply",
            Err(NoReply::NotConnected) => "is not connected",
            Err(NoReply::TimedOut) => "does not reply",
        };
        Err(Error::new(ttrpc::Code::UNAVAILABLE, format!("boot record: PID 1 {why}")))
    }

    /// Reads and writes until either fails; returns the cause.
    async fn follow(
        &self,
        stream: UnixStream,
        queue: mpsc::UnboundedReceiver<ToInit>,
        view: &watch::Sender<View>,
    ) -> String {
        let (reader, writer) = stream.into_split();
        tokio::select! {
            why = self.read(reader, view) => why,
            why = write(writer, queue) => why,
        }
    }

    async fn read(&self, reader: OwnedReadHalf, view: &watch::Sender<View>) -> String {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        let limit = u64::try_from(MAX_LINE).unwrap_or(u64::MAX).saturating_add(1);
        loop {
            line.clear();
            match (&mut reader).take(limit).read_until(b'\n', &mut line).await {
                Ok(0) => return "connection closed".to_owned(),
                Ok(_) => {}
                Err(error) => return format!("failed to read: {error}"),
            }
            match decode::<FromInit>(&line) {
                Ok(FromInit::Gpus { scanned, gpus }) => {
                    view.send_modify(|view| {
                        view.scanned = scanned;
                        view.gpus = gpus;
                    });
                }
                Ok(FromInit::Record { id, record }) => {
                    let text = serde_json::to_string(&record).unwrap_or_default();
                    self.pending().complete(id, Reply::Record(text));
                }
                Ok(FromInit::Module { id, error, .. }) => self.pending().complete(id, Reply::Module(error)),
                Ok(FromInit::Log { level, source, text, .. }) => crate::log::forward(&level, &source, &text),
                // Daemon state is not used by the agent.
                Ok(FromInit::Daemon { .. }) => {}
                Ok(FromInit::Refused { reason }) => log::warn!("PID 1 refused a message: {reason}"),
                Err(error) if line.len() > MAX_LINE => return error.to_string(),
                Err(error) => log::warn!("PID 1: {error}"),
            }
        }
    }
}

async fn write(mut writer: OwnedWriteHalf, mut queue: mpsc::UnboundedReceiver<ToInit>) -> String {
    while let Some(message) = queue.recv().await {
        let Ok(line) = encode(&message) else { continue };
        if let Err(error) = writer.write_all(&line).await {
            return format!("failed to write: {error}");
        }
    }
    "all senders were dropped".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_boot_record::BootRecord;
    use tokio::net::UnixListener;

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn client_subscribes_requests_and_reports_events() {
        run(async {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("control.sock");
            let listener = UnixListener::bind(&path).unwrap();
            let (sender, mut view) = watch::channel(View::default());
            let control = Control::connect(&path, sender);
            let (stream, _) = listener.accept().await.unwrap();
            let (reader, mut writer) = stream.into_split();
            let mut lines = BufReader::new(reader).lines();
            assert_eq!(lines.next_line().await.unwrap().unwrap(), "\"subscribe\"");
            writer.write_all(b"rubbish\n{\"gpus\":{\"scanned\":true,\"gpus\":[]}}\n").await.unwrap();
            view.wait_for(|view| view.scanned).await.unwrap();
            control.events().add("container-started", "c1", "");
            let line = lines.next_line().await.unwrap().unwrap();
            assert!(line.contains("container-started") && line.contains("c1"), "{line}");
            // The replies arrive in another order than the requests.
            let answer = async {
                assert_eq!(lines.next_line().await.unwrap().unwrap(), r#"{"record":{"id":1}}"#);
                let line = lines.next_line().await.unwrap().unwrap();
                assert!(line.contains(r#""load-module":{"id":2,"name":"dm-mod""#), "{line}");
                let module =
                    FromInit::Module { id: Some(RequestId(2)), name: "dm-mod".into(), error: Some("locked".into()) };
                writer.write_all(&encode(&module).unwrap()).await.unwrap();
                let record = Box::new(BootRecord::new("v", 1));
                let record = FromInit::Record { id: Some(RequestId(1)), record };
                writer.write_all(&encode(&record).unwrap()).await.unwrap();
            };
            let (record, loaded, ()) = tokio::join!(control.record(), control.load_module("dm-mod", "a=1"), answer);
            assert!(record.unwrap().contains("firstlight.boot-record/1"));
            assert_eq!(loaded.unwrap_err().message, "locked");
            drop((lines, writer));
            view.wait_for(|view| view.disconnected.is_some()).await.unwrap();
            assert_eq!(control.record().await.unwrap_err().code, ttrpc::Code::UNAVAILABLE);
        });
    }

    #[test]
    fn reply_completes_its_own_request_once() {
        let mut pending = Pending::default();
        let (first, mut one) = pending.add().unwrap();
        let (second, mut two) = pending.add().unwrap();
        pending.complete(None, Reply::Module(None));
        pending.complete(Some(second), Reply::Module(Some("no".into())));
        pending.complete(Some(second), Reply::Module(None));
        assert!(matches!(two.try_recv(), Ok(Reply::Module(Some(why))) if why == "no"));
        assert!(first != second && one.try_recv().is_err());
        pending.close();
        assert!(one.try_recv().is_err() && pending.add().is_none());
    }

    #[test]
    fn missing_pid_1_fails_requests() {
        run(async {
            let (sender, mut view) = watch::channel(View::default());
            let control = Control::connect(Path::new("/nonexistent/control.sock"), sender);
            view.wait_for(|view| view.disconnected.is_some()).await.unwrap();
            assert!(control.record().await.is_err());
        });
    }
}
