//! The connection to PID 1.
//!
//! PID 1 does not end before the guest does, so the connection is made once.
//! Without it the agent still serves; only GPUs and the boot record are out of
//! reach, and whoever asks for them is told so.

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

/// PID 1 answers from memory; longer means that it hangs.
const PATIENCE: Duration = Duration::from_secs(5);

/// A driver may look for its devices while it is loaded.
const MODULE_PATIENCE: Duration = Duration::from_secs(30);

/// PID 1, from the agent's side.
#[derive(Debug)]
pub struct Control {
    messages: mpsc::UnboundedSender<ToInit>,
    records: Mutex<VecDeque<oneshot::Sender<String>>>,
    modules: Mutex<Vec<Asked>>,
}

/// A module that PID 1 was asked for, and who waits for it.
type Asked = (String, oneshot::Sender<Option<String>>);

impl Control {
    /// Connects and follows what PID 1 says about GPUs, which goes into `view`.
    /// Returns at once; what is said before the connection stands is sent then.
    #[must_use]
    pub fn connect(path: &Path, view: watch::Sender<View>) -> Arc<Self> {
        let (messages, queue) = mpsc::unbounded_channel();
        let control = Arc::new(Self { messages, records: Mutex::default(), modules: Mutex::default() });
        let path = path.to_owned();
        let follower = Arc::clone(&control);
        tokio::spawn(async move {
            let why = match UnixStream::connect(&path).await {
                Ok(stream) => follower.follow(stream, queue, &view).await,
                Err(error) => format!("cannot connect: {error}"),
            };
            log::error!("PID 1 at {}: {why}", path.display());
            view.send_modify(|view| view.lost = Some(why));
            follower.records().clear();
            follower.modules().clear();
        });
        control.say(ToInit::Subscribe);
        if crate::log::queue().is_some() {
            // Somebody may ask for it.
            control.say(ToInit::SubscribeLog);
        }
        control
    }

    fn records(&self) -> std::sync::MutexGuard<'_, VecDeque<oneshot::Sender<String>>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn modules(&self) -> std::sync::MutexGuard<'_, Vec<Asked>> {
        self.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has PID 1 load a kernel module.
    ///
    /// # Errors
    /// PID 1 cannot, with its reason, or does not answer.
    pub async fn load_module(&self, name: &str, parameters: &str) -> Result<()> {
        let unreachable =
            |why: &str| Error::new(ttrpc::Code::UNAVAILABLE, format!("kernel module {name}: PID 1 {why}"));
        let (sender, receiver) = oneshot::channel();
        self.modules().push((name.to_owned(), sender));
        self.say(ToInit::LoadModule { name: name.to_owned(), parameters: parameters.to_owned() });
        match tokio::time::timeout(MODULE_PATIENCE, receiver).await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(why))) => Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, why)),
            Ok(Err(_)) => Err(unreachable("is not connected")),
            Err(_) => Err(unreachable("has not loaded it in time")),
        }
    }

    /// Says something; never waits.
    pub fn say(&self, message: ToInit) {
        // Fails only when the connection is gone, which has been logged.
        let _ = self.messages.send(message);
    }

    /// Puts an event into the boot record.
    pub fn event(&self, what: &str, object: &str, detail: &str) {
        let (what, object, detail) = (what.to_owned(), object.to_owned(), detail.to_owned());
        self.say(ToInit::Event { at_us: now_us(), kind: what, object, detail });
    }

    /// The boot record as JSON.
    ///
    /// # Errors
    /// PID 1 is gone or does not answer.
    pub async fn record(&self) -> Result<String> {
        let unreachable = |why: &str| Error::new(ttrpc::Code::UNAVAILABLE, format!("boot record: PID 1 {why}"));
        let (sender, receiver) = oneshot::channel();
        {
            let mut records = self.records();
            records.push_back(sender);
            // Under the lock, so that answers come in the order of the queue.
            self.messages.send(ToInit::Record).map_err(|_| unreachable("is not connected"))?;
        }
        match tokio::time::timeout(PATIENCE, receiver).await {
            Ok(Ok(record)) => Ok(record),
            Ok(Err(_)) => Err(unreachable("is not connected")),
            Err(_) => Err(unreachable("does not answer")),
        }
    }

    /// Reads and writes until something fails; returns what.
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
                Ok(0) => return "the connection ended".to_owned(),
                Ok(_) => {}
                Err(error) => return format!("cannot read: {error}"),
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
                    let mut asked = self.modules();
                    if let Some(at) = asked.iter().position(|(wanted, _)| *wanted == name) {
                        let _ = asked.remove(at).1.send(error);
                    }
                }
                Ok(FromInit::Log { level, source, text, .. }) => crate::log::foreign(&level, &source, &text),
                // Daemons are others' business.
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
            return format!("cannot write: {error}");
        }
    }
    "nobody talks to it any more".to_owned()
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
    fn subscribes_follows_asks_and_reports() {
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
            view.wait_for(|view| view.lost.is_some()).await.unwrap();
            assert_eq!(control.record().await.unwrap_err().code, ttrpc::Code::UNAVAILABLE);
        });
    }

    #[test]
    fn without_pid_1_everybody_is_told() {
        run(async {
            let (sender, mut view) = watch::channel(View::default());
            let control = Control::connect(Path::new("/nonexistent/control.sock"), sender);
            view.wait_for(|view| view.lost.is_some()).await.unwrap();
            assert!(control.record().await.is_err());
        });
    }
}
