//! A server process on the host's loopback interface, killed on drop.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::Error;
use super::tree::io_error;

/// Timeout of its start.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A listening server.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    pub(super) port: u16,
    /// Its files, removed on drop.
    dir: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a port that is currently unused.
pub(super) fn free_port() -> Result<u16, Error> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    Ok(free.map_err(|error| io_error("find a port on", Path::new("127.0.0.1"), error))?.port())
}

impl Server {
    /// Starts a server and waits until it listens on `port`; its files are in `dir`.
    pub(super) fn start(name: &'static str, mut command: Command, port: u16, dir: TempDir) -> Result<Self, Error> {
        let path = dir.path().join("log");
        let failed = |error| Error::from(io_error("write", &path, error));
        let log = File::create(&path).map_err(failed)?;
        let errors = log.try_clone().map_err(failed)?;
        firstlight_sys::child::die_with_parent(&mut command);
        let child = command.stdin(Stdio::null()).stdout(log).stderr(errors).spawn();
        let child = child.map_err(|error| Error::from(io_error("run", Path::new(command.get_program()), error)))?;
        let mut server = Self { child, port, dir };
        let begin = Instant::now();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        while TcpStream::connect(address).is_err() {
            let exited = server.child.try_wait().ok().flatten().is_some();
            if exited || begin.elapsed() > START_TIMEOUT {
                return Err(Error::Server { name, port, what: server.log_tail() });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    fn log_tail(&self) -> String {
        let log = fs::read(self.dir.path().join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let last: Vec<&str> = log.lines().rev().take(8).collect();
        last.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}
