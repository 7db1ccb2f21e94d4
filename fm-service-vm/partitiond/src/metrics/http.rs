//! The subset of HTTP that a scraper needs: one GET per connection. Clients are untrusted: length of the head, number
//! of connections and duration are bounded.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::actor::Handle;
use crate::listen;

/// Maximum length of a request head; a scraper's has some hundred bytes.
const MAX_HEAD: usize = 8 << 10;
/// Timeout of a connection.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of concurrent connections; further ones are closed.
const MAX_CONNECTIONS: usize = 16;

/// The address of the endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// TCP, without access control.
    Tcp(SocketAddr),
    /// A Unix socket that only root can open.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Unix(path))
            } else {
                Err("a Unix socket's path begins with /".to_owned())
            };
        }
        if let Ok(port) = text.strip_prefix(':').unwrap_or(text).parse::<u16>() {
            return Ok(Self::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, port))));
        }
        text.parse().map(Self::Tcp).map_err(|_| "it is PORT, ADDRESS:PORT or unix:PATH".to_owned())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// An open endpoint.
#[derive(Debug)]
pub enum Listener {
    /// A TCP listener.
    Tcp(TcpListener),
    /// A Unix socket.
    Unix(UnixListener),
}

impl Address {
    /// Opens the endpoint.
    ///
    /// # Errors
    /// The address is in use or invalid.
    pub async fn open(&self) -> Result<Listener, listen::Error> {
        match self {
            Self::Unix(path) => listen::unix(path).map(Listener::Unix),
            Self::Tcp(address) => {
                let bound = TcpListener::bind(address).await;
                let failed =
                    |source| listen::Error::System { what: "serve metrics on", object: address.to_string(), source };
                bound.map(Listener::Tcp).map_err(failed)
            }
        }
    }
}

/// Serves the endpoint.
pub async fn serve(listener: Listener, engine: Handle) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted: io::Result<Box<dyn Stream>> = match &listener {
            Listener::Tcp(listener) => listener.accept().await.map(|(stream, _)| Box::new(stream) as _),
            Listener::Unix(listener) => listener.accept().await.map(|(stream, _)| Box::new(stream) as _),
        };
        match accepted {
            Ok(stream) => {
                let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
                let engine = engine.clone();
                tokio::spawn(async move {
                    // Connections that fail or time out get no response.
                    let _ = timeout(TIMEOUT, answer(stream, &engine)).await;
                    drop(place);
                });
            }
            // Usually EMFILE: other connections have to be closed first.
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

async fn answer(mut stream: Box<dyn Stream>, engine: &Handle) -> io::Result<()> {
    let mut head = Vec::with_capacity(1024);
    let status = loop {
        if let Some(status) = status_of(&head) {
            break status;
        }
        let mut piece = [0; 1024];
        match stream.read(&mut piece).await? {
            0 => return Ok(()),
            read => head.extend_from_slice(piece.get(..read).unwrap_or_default()),
        }
    };
    let body = match status {
        "200 OK" => super::text(&engine.view()),
        _ => format!("{status}; only GET /metrics is served\n"),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await?;
    // Closing with unread input would reset the connection and lose the response.
    let mut left = [0; 1024];
    for _ in 0..64 {
        if stream.read(&mut left).await? == 0 {
            break;
        }
    }
    Ok(())
}

/// Returns the status for a request head, once it is complete or too long.
fn status_of(head: &[u8]) -> Option<&'static str> {
    let end = head.windows(4).position(|four| four == b"\r\n\r\n").or(head.windows(2).position(|two| two == b"\n\n"));
    if end.is_none() {
        return (head.len() > MAX_HEAD).then_some("431 Request Header Fields Too Large");
    }
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line.trim_ascii_end().split(|byte| *byte == b' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let is_http = version.is_some_and(|version| version.starts_with(b"HTTP/1.")) && words.next().is_none();
    Some(match (method, target) {
        _ if !is_http => "400 Bad Request",
        (Some(b"GET"), Some(b"/metrics")) => "200 OK",
        (Some(b"GET"), Some(target)) if target.starts_with(b"/metrics?") => "200 OK",
        (Some(b"GET"), _) => "404 Not Found",
        _ => "405 Method Not Allowed",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_addresses_default_to_loopback() {
        let read = |text: &str| text.parse::<Address>().map(|address| address.to_string());
        for (text, address) in [
            ("9402", "127.0.0.1:9402"),
            (":9402", "127.0.0.1:9402"),
            ("0.0.0.0:9402", "0.0.0.0:9402"),
            ("[::1]:9402", "[::1]:9402"),
            ("unix:/run/metrics", "unix:/run/metrics"),
        ] {
            assert_eq!(read(text).unwrap(), address);
        }
        for wrong in ["", "unix:metrics", "localhost:9402", "99999", "1.2.3.4"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn request_heads_get_a_status_when_complete() {
        for (head, status) in [
            (&b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"[..], Some("200 OK")),
            (b"GET /metrics?x=1 HTTP/1.0\n\n", Some("200 OK")),
            (b"GET /metrics HTTP/1.1\r\nHost: x\r\n", None),
            (b"GET / HTTP/1.1\r\n\r\n", Some("404 Not Found")),
            (b"POST /metrics HTTP/1.1\r\n\r\n", Some("405 Method Not Allowed")),
            (b"GET /metrics\r\n\r\n", Some("400 Bad Request")),
            (b"GET /metrics HTTP/1.1 x\r\n\r\n", Some("400 Bad Request")),
            (b"\xff\xfe\r\n\r\n", Some("400 Bad Request")),
            (&[b'x'; MAX_HEAD], None),
            (&[b'x'; MAX_HEAD + 1], Some("431 Request Header Fields Too Large")),
        ] {
            assert_eq!(status_of(head), status, "{:?}", String::from_utf8_lossy(head));
        }
    }
}
