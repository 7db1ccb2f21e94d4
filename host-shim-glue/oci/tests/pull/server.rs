//! A stand-in for a registry: it answers what a test says, also wrongly.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// What was asked.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Where the rest is wanted from.
    pub(crate) fn from(&self) -> usize {
        let range = self.header("range").and_then(|range| range.strip_prefix("bytes="));
        range.map_or(0, |range| range.trim_end_matches('-').parse().unwrap())
    }
}

/// What is answered.
#[derive(Debug, Clone, Default)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    pub(crate) cut: Option<usize>,
    /// No length is told; the end of the connection is the end.
    pub(crate) endless: bool,
}

impl Answer {
    pub(crate) fn of(status: u16, body: &[u8]) -> Self {
        Self { status, body: body.to_vec(), ..Self::default() }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

type Handler = dyn Fn(&Request, usize) -> Answer + Send + Sync;

/// Runs until the test ends.
pub(crate) struct Server {
    pub(crate) port: u16,
    asked: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// `answer` gets a request and how often its path was asked before.
    pub(crate) fn start(answer: impl Fn(&Request, usize) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (answer, log): (Arc<Handler>, _) = (Arc::new(answer), asked.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                // A client that goes away in the middle is no fault of the test.
                let _ = serve(stream, &*answer, &log);
            }
        });
        Self { port, asked }
    }

    pub(crate) fn source(&self, rest: &str) -> String {
        format!("docker://127.0.0.1:{}/{rest}", self.port)
    }

    /// Paths that were asked, in order.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.asked.lock().unwrap().iter().map(|request| request.path.clone()).collect()
    }

    /// How often something with this in its path was asked.
    pub(crate) fn count(&self, part: &str) -> usize {
        self.paths().iter().filter(|path| path.contains(part)).count()
    }
}

fn serve(mut stream: TcpStream, answer: &Handler, log: &Mutex<Vec<Request>>) -> std::io::Result<()> {
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
    let answer = answer(&request, before);
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", answer.status);
    if !answer.endless {
        head.push_str(&format!("Content-Length: {}\r\n", answer.body.len()));
    }
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    stream.write_all(head.as_bytes())?;
    stream.write_all(b"\r\n")?;
    stream.write_all(&answer.body[..answer.cut.unwrap_or(answer.body.len())])?;
    stream.flush()?;
    stream.shutdown(Shutdown::Write)
}
