//! The state of the fabric manager's process, as PID 1 reports it: faster than a failing call.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firstlight_init_control::{FromInit, MAX_LINE, ToInit, decode, encode};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::time::sleep;

use crate::actor::Handle;

/// The name in PID 1's table of daemons.
const NAME: &str = "fabricmanager";

/// Pause between attempts to connect to PID 1; it runs as long as the machine does.
const PAUSE: Duration = Duration::from_secs(1);

/// Maximum length of the detail, in characters.
const MAX_DETAIL: usize = 400;

/// The state of the process in PID 1's last message.
#[derive(Debug, Clone)]
pub struct ManagerState {
    /// Whether it is ready.
    pub ready: bool,
    /// The last event.
    pub detail: String,
}

/// Follows PID 1's messages. When the fabric manager was restarted, it is polled immediately: after `--restart` it
/// waits 60 s for the list of active partitions.
pub async fn follow(socket: PathBuf, engine: Handle) {
    loop {
        // After an error the last state stays.
        let _ = listen(&socket, &engine).await;
        sleep(PAUSE).await;
    }
}

async fn listen(socket: &Path, engine: &Handle) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(socket).await?;
    let subscribe = encode(&ToInit::Subscribe).map_err(std::io::Error::other)?;
    stream.write_all(&subscribe).await?;
    let mut lines = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        let most = u64::try_from(MAX_LINE).unwrap_or(u64::MAX);
        (&mut lines).take(most).read_until(b'\n', &mut line).await?;
        if line.last() != Some(&b'\n') {
            return Ok(());
        }
        if let Ok(FromInit::Daemon { name, ready, detail }) = decode(&line)
            && name == NAME
        {
            let detail = detail.chars().filter(|letter| !letter.is_control()).take(MAX_DETAIL).collect();
            engine.report_manager_state(ManagerState { ready, detail });
        }
    }
}
