//! The HTTP server of the Prometheus endpoint: HTTP/1, one request per connection. Clients are untrusted: length of the
//! head, number of connections and duration are bounded.

use std::convert::Infallible;
use std::fmt;
use std::future::ready;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::actor::Handle;
use crate::listen;

/// Maximum length of a request head; a scraper's has some hundred bytes. hyper accepts no lower limit of its buffer.
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
                    // Connections that time out get no response.
                    let _ = timeout(TIMEOUT, serve_connection(stream, || super::text(&engine.view()))).await;
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

/// Returns hyper's configuration.
fn http() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(TIMEOUT)
        .max_header_size(MAX_HEAD)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false)
        // A client may shut down its sending side after the request.
        .half_close(true)
        .title_case_headers(true);
    http
}

/// Serves one request of a connection.
async fn serve_connection(mut stream: impl AsyncRead + AsyncWrite + Unpin, metrics: impl Fn() -> String) {
    let service = service_fn(|request| ready(Ok::<_, Infallible>(respond(&request, &metrics))));
    let served = http().serve_connection(TokioIo::new(&mut stream), service).await;
    // The only malformed request that hyper does not answer.
    if served.is_err_and(|error| error.is_parse_version_h2()) {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await;
    }
    let _ = stream.shutdown().await;
    // Closing with unread input would reset the connection and lose the response.
    let mut unread = [0; 1024];
    for _ in 0..64 {
        if !matches!(stream.read(&mut unread).await, Ok(1..)) {
            break;
        }
    }
}

/// Returns the response to a request.
fn respond<B>(request: &Request<B>, metrics: impl Fn() -> String) -> Response<String> {
    const METRICS: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
    let status = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => StatusCode::OK,
        (&Method::GET | &Method::HEAD, _) => StatusCode::NOT_FOUND,
        _ => StatusCode::METHOD_NOT_ALLOWED,
    };
    let (kind, body) = match status {
        StatusCode::OK => (METRICS, metrics()),
        _ => (TEXT, format!("{status}; only GET /metrics is served\n")),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, kind);
    if status == StatusCode::METHOD_NOT_ALLOWED {
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
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

    /// Sends a request, closes the sending side and returns the response.
    async fn exchange(request: &[u8]) -> String {
        let (mut client, server) = tokio::io::duplex(1 << 16);
        client.write_all(request).await.unwrap();
        client.shutdown().await.unwrap();
        serve_connection(server, || "up 1\n".to_owned()).await;
        let mut response = String::new();
        client.read_to_string(&mut response).await.unwrap();
        response
    }

    #[tokio::test]
    async fn request_heads_get_a_status_when_complete() {
        for (head, status) in [
            (&b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"[..], Some("200 OK")),
            (b"GET /metrics?x=1 HTTP/1.0\n\n", Some("200 OK")),
            (b"HEAD /metrics HTTP/1.1\r\n\r\n", Some("200 OK")),
            (b"GET /metrics HTTP/1.1\r\nHost: x\r\n", None),
            (b"GET / HTTP/1.1\r\n\r\n", Some("404 Not Found")),
            (b"GET /metrics/ HTTP/1.1\r\n\r\n", Some("404 Not Found")),
            (b"POST /metrics HTTP/1.1\r\n\r\n", Some("405 Method Not Allowed")),
            (b"GET /metrics\r\n\r\n", Some("400 Bad Request")),
            (b"GET /metrics HTTP/1.1 x\r\n\r\n", Some("400 Bad Request")),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Some("400 Bad Request")),
            (b"\xff\xfe\r\n\r\n", Some("400 Bad Request")),
            (b"", None),
            (&[b'x'; MAX_HEAD - 1], None),
            (&[b'x'; MAX_HEAD + 1], Some("431 Request Header Fields Too Large")),
        ] {
            let response = exchange(head).await;
            let line = response.lines().next().and_then(|line| line.split_once(' '));
            assert_eq!(line.map(|(_, status)| status), status, "{:?}: {response}", String::from_utf8_lossy(head));
        }
    }

    #[tokio::test]
    async fn responses_have_type_length_and_allowed_methods() {
        let get = exchange(b"GET /metrics HTTP/1.1\r\n\r\n").await;
        let (head, body) = get.split_once("\r\n\r\n").unwrap();
        assert!(
            head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
            "{get}"
        );
        assert!(head.contains("\r\nContent-Length: 5\r\n") && head.contains("\r\nConnection: close\r\n"), "{get}");
        assert_eq!(body, "up 1\n");
        let head = exchange(b"HEAD /metrics HTTP/1.1\r\n\r\n").await;
        assert!(head.contains("\r\nContent-Length: 5\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        let post = exchange(b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc").await;
        assert!(post.contains("\r\nAllow: GET, HEAD\r\n"), "{post}");
        assert!(post.ends_with("\r\n\r\n405 Method Not Allowed; only GET /metrics is served\n"), "{post}");
    }
}
