//! Streams to a guest's vsock ports through a hybrid Unix socket.
//!
//! The host connects, writes `CONNECT port`, reads `OK ...`, and then uses the
//! stream. A guest that has not booted resets the connection, so connects are
//! retried.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

/// Retry interval. Guests boot within seconds; this bounds the delay of the first
/// connection.
const RETRY: Duration = Duration::from_millis(5);

/// Timeout of one attempt: a guest that accepts and never replies has not booted.
const ATTEMPT: Duration = Duration::from_secs(2);

/// Maximum length of the reply line.
const MAX_REPLY: usize = 64;

async fn once(socket: &Path, port: u32) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket).await?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes()).await?;
    let mut answer = Vec::new();
    loop {
        let byte = stream.read_u8().await?;
        if byte == b'\n' {
            break;
        }
        answer.push(byte);
        if answer.len() > MAX_REPLY {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the reply to CONNECT is too long"));
        }
    }
    if answer.starts_with(b"OK") {
        return Ok(stream);
    }
    let text = String::from_utf8_lossy(&answer).into_owned();
    Err(io::Error::new(io::ErrorKind::ConnectionRefused, format!("unexpected reply {text:?} to CONNECT")))
}

/// Makes one attempt to connect to the guest's `port`.
///
/// # Errors
/// The socket does not exist, the guest has not booted, or nothing listens.
pub async fn try_connect(socket: &Path, port: u32) -> io::Result<UnixStream> {
    match timeout(ATTEMPT, once(socket, port)).await {
        Ok(result) => result,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "no reply to CONNECT")),
    }
}

/// Retries until the guest accepts; the caller sets the deadline.
pub async fn connect(socket: &Path, port: u32, mut failed: impl FnMut(&io::Error)) -> UnixStream {
    loop {
        match try_connect(socket, port).await {
            Ok(stream) => return stream,
            Err(error) => failed(&error),
        }
        sleep(RETRY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    async fn answer(listener: &UnixListener, text: &[u8]) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 13];
        stream.read_exact(&mut request).await.unwrap();
        assert_eq!(&request, b"CONNECT 1024\n");
        stream.write_all(text).await.unwrap();
    }

    #[tokio::test]
    async fn connect_is_retried_until_the_guest_accepts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = async {
            // Not booted: closed without a reply; then a refusal; then accepted.
            drop(listener.accept().await.unwrap());
            answer(&listener, b"NO\n").await;
            answer(&listener, b"OK 77\nhello").await;
        };
        let client = async {
            let mut errors = Vec::new();
            let mut stream = connect(&path, 1024, |error| errors.push(error.kind())).await;
            let mut hello = String::new();
            stream.read_to_string(&mut hello).await.unwrap();
            (hello, errors.len())
        };
        let ((), (hello, failures)) = tokio::join!(server, client);
        assert_eq!(hello, "hello", "bytes after the answer belong to the stream");
        assert_eq!(failures, 2);
    }

    #[tokio::test]
    async fn overlong_reply_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let text = [b'x'; 200];
        let (error, ()) = tokio::join!(try_connect(&path, 1024), answer(&listener, &text));
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
