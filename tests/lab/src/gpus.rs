//! The process that serves a guest's synthetic GPUs.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use firstlight_synthetic_gpu::Device;

/// Why the GPUs are not there.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The server could not be started.
    #[error("synthetic GPUs: cannot start {program}: {source}")]
    Spawn {
        /// The server.
        program: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The server ended before its sockets listened.
    #[error("synthetic GPUs: the server ended before it was ready: {0}")]
    NotReady(String),
}

/// Running synthetic GPUs; dropping them ends the server.
#[derive(Debug)]
pub struct SyntheticGpus {
    server: Option<Child>,
    sockets: Vec<PathBuf>,
}

impl SyntheticGpus {
    /// Serves `devices` from sockets in `directory`; none need no server.
    ///
    /// # Errors
    /// The server cannot be started, or says what it does not like.
    pub fn start(program: &Path, dir: &Path, devices: &[Device]) -> Result<Self, GpuError> {
        if devices.is_empty() {
            return Ok(Self { server: None, sockets: Vec::new() });
        }
        let mut command = Command::new(program);
        command.arg(dir).args(devices.iter().map(ToString::to_string));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        firstlight_sys::child::die_with_parent(&mut command);
        let mut server = command.spawn().map_err(|source| GpuError::Spawn { program: program.to_owned(), source })?;
        let mut line = String::new();
        if let Some(stdout) = server.stdout.take() {
            let _ = BufReader::new(stdout).read_line(&mut line);
        }
        let sockets = (0..devices.len()).map(|at| dir.join(format!("{at}.sock"))).collect();
        let mut gpus = Self { server: Some(server), sockets };
        if line.trim() == "ready" {
            return Ok(gpus);
        }
        let mut words = String::new();
        if let Some(stderr) = gpus.server.as_mut().and_then(|server| server.stderr.take()) {
            let _ = stderr.take(4096).read_to_string(&mut words);
        }
        Err(GpuError::NotReady(words.trim().to_owned()))
    }

    /// A socket per device, in their order.
    #[must_use]
    pub fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }
}

impl Drop for SyntheticGpus {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            // The end of its standard input is its sign to clean up and end.
            drop(server.stdin.take());
            let _ = server.wait();
        }
    }
}
