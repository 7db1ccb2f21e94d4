//! The connection to PID 1.
//!
//! PID 1 outlives the agent, so the connection is made once. Without it the agent still serves;
//! requests for GPUs and for the boot record fail with an error that says so.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use firstlight_init_control::{FromInit, MAX_LINE, ToInit, decode, encode};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};

use crate::clock::now_us;
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
    records: Mutex<VecDeque<oneshot::Sender<String>>>,
    modules: Mutex<Vec<PendingModule>>,
}

/// A requested kernel module and the receiver of the result.
type PendingModule = (String, oneshot::Sender<Option<String>>);

impl Control {
    /// Connects and copies GPU state from PID 1 into `view`. Returns at once; messages are queued
    /// until the connection is established.
    #[must_use]
    pub fn connect(path: &Path, view: watch::Sender<View>) -> Arc<Self> {
        let (messages, queue) = mpsc::unbounded_channel();
        let control = Arc::new(Self { messages, records: Mutex::default(), modules: Mutex::default() });
        let path = path.to_owned();
        let follower = Arc::clone(&control);
        tokio::spawn(async move {
            let why = match UnixStream::connect(&path).await {
                Ok(stream) => follower.follow(stream, queue, &view).await,
                Err(error) => format!("failed to connect: {error}"),
            };
            log::error!("PID 1 at {}: {why}", path.display());
            view.send_modify(|view| view.disconnected = Some(why));
            follower.records().clear();
            follower.modules().clear();
        });
        control.send(ToInit::Subscribe);
        if crate::log::queue().is_some() {
            // A client may connect to the log port.
            control.send(ToInit::SubscribeLog);
        }
        control
    }

    fn records(&self) -> std::sync::MutexGuard<'_, VecDeque<oneshot::Sender<String>>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn modules(&self) -> std::sync::MutexGuard<'_, Vec<PendingModule>> {
        self.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks PID 1 to load a kernel module.
    ///
    /// # Errors
    /// PID 1 failed to load it (with its reason), is not connected, or did not reply in time.
    pub async fn load_module(&self, name: &str, parameters: &str) -> Result<()> {
        let unreachable =
            |why: &str| Error::new(ttrpc::Code::UNAVAILABLE, format!("kernel module {name}: PID 1 {why}"));
        let (sender, receiver) = oneshot::channel();
        self.modules().push((name.to_owned(), sender));
        self.send(ToInit::LoadModule { name: name.to_owned(), parameters: parameters.to_owned() });
        match tokio::time::timeout(MODULE_TIMEOUT, receiver).await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(why))) => Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, why)),
            Ok(Err(_)) => Err(unreachable("is not connected")),
            Err(_) => Err(unreachable("did not load it in time")),
        }
    }

    /// Queues a message to PID 1; never blocks.
    pub fn send(&self, message: ToInit) {
        // Fails only after the connection was lost, which has been logged.
        let _ = self.messages.send(message);
    }

    /// Adds an event to the boot record.
    pub fn event(&self, what: &str, object: &str, detail: &str) {
        let (what, object, detail) = (what.to_owned(), object.to_owned(), detail.to_owned());
        self.send(ToInit::Event { at_us: now_us(), kind: what, object, detail });
    }

    /// Returns the boot record as JSON.
    ///
    /// # Errors
    /// PID 1 is not connected or does not reply.
    pub async fn record(&self) -> Result<String> {
        let unreachable = |why: &str| Error::new(ttrpc::Code::UNAVAILABLE, format!("boot record: PID 1 {why}"));
        let (sender, receiver) = oneshot::channel();
        {
            let mut records = self.records();
            records.push_back(sender);
            // Under the lock: replies arrive in the order of the queue.
            self.messages.send(ToInit::Record).map_err(|_| unreachable("is not connected"))?;
        }
        match tokio::time::timeout(REPLY_TIMEOUT, receiver).await {
            Ok(Ok(record)) => Ok(record),
            Ok(Err(_)) => Err(unreachable("is not connected")),
            Err(_) => Err(unreachable("does not reply")),
        }
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
                Ok(FromInit::Record(record)) => {
                    let text = serde_json::to_string(&record).unwrap_or_default();
                    if let Some(waiting) = self.records().pop_front() {
                        let _ = waiting.send(text);
                    }
                }
                Ok(FromInit::Module { name, error }) => {
                    let mut pending = self.modules();
                    if let Some(at) = pending.iter().position(|(requested, _)| *requested == name) {
                        let _ = pending.remove(at).1.send(error);
                    }
                }
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
            control.event("container-started", "c1", "");
            let line = lines.next_line().await.unwrap().unwrap();
            assert!(line.contains("container-started") && line.contains("c1"), "{line}");
            let answer = async {
                assert_eq!(lines.next_line().await.unwrap().unwrap(), "\"record\"");
                let record = FromInit::Record(Box::new(BootRecord::new("v", 1)));
                writer.write_all(&encode(&record).unwrap()).await.unwrap();
            };
            let (record, ()) = tokio::join!(control.record(), answer);
            assert!(record.unwrap().contains("firstlight.boot-record/1"));
            let answer = async {
                assert!(lines.next_line().await.unwrap().unwrap().contains("\"load-module\":{\"name\":\"dm-mod\""));
                let module = FromInit::Module { name: "dm-mod".into(), error: Some("locked".into()) };
                writer.write_all(&encode(&module).unwrap()).await.unwrap();
            };
            let (loaded, ()) = tokio::join!(control.load_module("dm-mod", "a=1"), answer);
            assert_eq!(loaded.unwrap_err().message, "locked");
            drop((lines, writer));
            view.wait_for(|view| view.disconnected.is_some()).await.unwrap();
            assert_eq!(control.record().await.unwrap_err().code, ttrpc::Code::UNAVAILABLE);
        });
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
