//! What PID 1 says of the fabric manager's process: it sees its end before anybody asks it in vain.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firstlight_init_control::{FromInit, MAX_LINE, ToInit, decode, encode};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::time::sleep;

use crate::actor::Handle;

/// Its name in PID 1's table of daemons.
const NAME: &str = "fabricmanager";

/// Between two tries to reach PID 1: without it nothing in this machine goes on.
const PAUSE: Duration = Duration::from_secs(1);

/// Letters of a text that is shown.
const MOST: usize = 400;

/// How its process is, as PID 1 said last.
#[derive(Debug, Clone)]
pub struct News {
    /// Whether it serves.
    pub serves: bool,
    /// What happened.
    pub detail: String,
}

/// Listens to PID 1 for as long as there is one, and lets the fabric be looked at at once when the
/// manager has begun anew: after `--restart` it waits for 60 s to be told what is active.
pub async fn follow(socket: PathBuf, engine: Handle) {
    loop {
        // PID 1's own words, or none: what is known is kept.
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
            let detail = detail.chars().filter(|letter| !letter.is_control()).take(MOST).collect();
            engine.manager(News { serves: ready, detail });
        }
    }
}
