//! An HTTP server for tests, which also sends malformed, truncated and wrong responses.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Returns the first byte of the requested range.
    pub(crate) fn offset(&self) -> usize {
        let range = self.header("range").and_then(|range| range.strip_prefix("bytes="));
        range.map_or(0, |range| range.trim_end_matches('-').parse().unwrap())
    }
}

/// A response.
#[derive(Debug, Clone, Default)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// Closes the connection after so many bytes of the body.
    pub(crate) truncate_at: Option<usize>,
    /// Sends no Content-Length; the body ends with the connection.
    pub(crate) without_length: bool,
}

impl Response {
    pub(crate) fn new(status: u16, body: &[u8]) -> Self {
        Self { status, body: body.to_vec(), ..Self::default() }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

type Handler = dyn Fn(&Request, usize) -> Response + Send + Sync;

/// A server that runs until the process exits.
pub(crate) struct Server {
    pub(crate) port: u16,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Starts a server; `respond` receives a request and the number of earlier requests of its path.
    pub(crate) fn start(respond: impl Fn(&Request, usize) -> Response + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (respond, log): (Arc<Handler>, _) = (Arc::new(respond), requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                // An error means that the client has closed the connection, as some tests intend.
                let _ = serve(stream, &*respond, &log);
            }
        });
        Self { port, requests }
    }

    /// Returns the source of a repository of this server.
    pub(crate) fn source(&self, rest: &str) -> String {
        format!("docker://127.0.0.1:{}/{rest}", self.port)
    }

    /// Returns the paths of all requests in order.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.requests.lock().unwrap().iter().map(|request| request.path.clone()).collect()
    }

    /// Returns the number of requests with `part` in their path.
    pub(crate) fn count(&self, part: &str) -> usize {
        self.paths().iter().filter(|path| path.contains(part)).count()
    }
}

fn serve(mut stream: TcpStream, respond: &Handler, log: &Mutex<Vec<Request>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(':') else { break };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let request = Request { path, headers };
    let before = {
        let mut log = log.lock().unwrap();
        let before = log.iter().filter(|one| one.path == request.path).count();
        log.push(request.clone());
        before
    };
    let response = respond(&request, before);
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", response.status);
    if !response.without_length {
        head.push_str(&format!("Content-Length: {}\r\n", response.body.len()));
    }
    for (name, value) in &response.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    stream.write_all(head.as_bytes())?;
    stream.write_all(b"\r\n")?;
    stream.write_all(&response.body[..response.truncate_at.unwrap_or(response.body.len())])?;
    stream.flush()?;
    stream.shutdown(Shutdown::Write)
}
