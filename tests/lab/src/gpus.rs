//! The process that serves a guest's synthetic GPUs.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use firstlight_synthetic_gpu::Device;

/// Errors of starting synthetic GPUs.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The server could not be started.
    #[error("synthetic GPUs: failed to start {program}: {source}")]
    Spawn {
        /// The server.
        program: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The server exited before it listened on its sockets.
    #[error("synthetic GPUs: the server exited before it was ready: {0}")]
    NotReady(String),
}

/// Running synthetic GPUs; dropping them ends the server.
#[derive(Debug)]
pub struct SyntheticGpus {
    server: Option<Child>,
    sockets: Vec<PathBuf>,
}

impl SyntheticGpus {
    /// Starts a server for `devices` with sockets in `dir`; without devices it starts none.
    ///
    /// # Errors
    /// The server cannot be started, or reports an error.
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
        let mut errors = String::new();
        if let Some(stderr) = gpus.server.as_mut().and_then(|server| server.stderr.take()) {
            let _ = stderr.take(4096).read_to_string(&mut errors);
        }
        Err(GpuError::NotReady(errors.trim().to_owned()))
    }

    /// Returns the sockets, one per device, in the devices' order.
    #[must_use]
    pub fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }
}

impl Drop for SyntheticGpus {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            // The server cleans up and exits at the end of its standard input.
            drop(server.stdin.take());
            let _ = server.wait();
        }
    }
}
