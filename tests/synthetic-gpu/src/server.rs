//! The vfio-user sockets: one per function, each served by a thread.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::thread;

use thiserror::Error;
use vfio_user::Server;

use crate::device::Device;
use crate::function::Function;

/// An error while starting to serve devices.
#[derive(Debug, Error)]
pub enum ServeError {
    /// More devices than distinct serial numbers.
    #[error("{count} devices are too many; the limit is 65535")]
    TooMany {
        /// The number of devices.
        count: usize,
    },
    /// The memfd of a BAR could not be created.
    #[error("failed to create the memory of device {index} ({device}); is there enough memory for memfds?")]
    Memory {
        /// Position on the command line.
        index: usize,
        /// The device.
        device: Device,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A socket of an earlier run could not be removed.
    #[error("failed to remove the stale socket {path}; remove it or choose another directory")]
    Stale {
        /// The socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A socket could not be created.
    #[error("failed to listen on {path}: {reason}; does the directory exist, and is the path below 108 bytes?")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The library's error.
        reason: String,
    },
    /// A thread could not be started.
    #[error("failed to start the thread that serves {path}")]
    Thread {
        /// The socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// The sockets being served. Dropping it removes them; the threads end with the process.
#[derive(Debug)]
pub struct Sockets {
    paths: Vec<PathBuf>,
}

impl Sockets {
    /// Serves the devices on `dir/0.sock`, `dir/1.sock` and so on. All sockets listen when it returns. Stale
    /// sockets are replaced; another file of that name is an error.
    ///
    /// # Errors
    /// See [`ServeError`]; sockets created before the error are removed.
    pub fn serve(dir: &Path, devices: &[Device]) -> Result<Self, ServeError> {
        let mut sockets = Self { paths: Vec::new() };
        for (index, device) in devices.iter().enumerate() {
            let serial = u16::try_from(index).map_err(|_| ServeError::TooMany { count: devices.len() })?;
            let mut function = Function::new(device, serial).map_err(|source| ServeError::Memory {
                index,
                device: *device,
                source,
            })?;
            let path = dir.join(format!("{index}.sock"));
            remove_stale(&path).map_err(|source| ServeError::Stale { path: path.clone(), source })?;
            let server = Server::new(&path, true, function.irqs(), function.regions())
                .map_err(|error| ServeError::Listen { path: path.clone(), reason: error.to_string() })?;
            sockets.paths.push(path.clone());
            let name = path.display().to_string();
            thread::Builder::new()
                .name(format!("device-{index}"))
                .spawn(move || serve_forever(&name, &server, &mut function))
                .map_err(|source| ServeError::Thread { path, source })?;
        }
        Ok(sockets)
    }

    /// Returns the sockets in the order of the devices.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for path in &self.paths {
            // It may have been removed already.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Serves one VMM after another; a device outlives its guests as hardware does.
fn serve_forever(name: &str, server: &Server, function: &mut Function) {
    loop {
        let outcome = server.run(function);
        function.disconnected();
        match outcome {
            Ok(()) => {}
            Err(error @ vfio_user::Error::SocketAccept(_)) => {
                eprintln!("synthetic-gpu: {name}: {error}; the device is no longer served");
                return;
            }
            // The VMM was killed in the middle of a message.
            Err(error) => eprintln!("synthetic-gpu: {name}: {error}; waiting for the next guest"),
        }
    }
}

fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is not a socket has this name")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registers;
    use vfio_user::Client;

    fn devices() -> Vec<Device> {
        ["h100:bar=1G:attach-ms=42", "nvswitch"].iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn successive_clients_see_the_device_in_its_initial_state() {
        let dir = tempfile::tempdir().unwrap();
        let sockets = Sockets::serve(dir.path(), &devices()).unwrap();
        assert_eq!(sockets.paths().len(), 2);
        for _ in 0..2 {
            let mut client = Client::new(&sockets.paths()[0]).unwrap();
            // Not `resettable()`: this version of the client returns the opposite.
            client.reset().unwrap();
            assert_eq!(client.region(2).unwrap().size, 1 << 30);
            assert!(client.region(2).unwrap().file_offset.is_some(), "the memory must come with its descriptor");
            let mut id = [0; 4];
            client.region_read(7, 0, &mut id).unwrap();
            assert_eq!(id, [0xde, 0x10, 0x30, 0x23]);
            let at = registers::LAB_BASE + registers::LAB_ATTACH_MS;
            let mut ms = [0; 4];
            client.region_read(0, at, &mut ms).unwrap();
            assert_eq!(u32::from_le_bytes(ms), 42, "the first guest's write must not be seen by the second");
            client.region_write(0, at, &[0; 4]).unwrap();
            client.shutdown().unwrap();
        }
        drop(sockets);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn stale_sockets_are_replaced_and_other_files_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        drop(Sockets::serve(dir.path(), &devices()).unwrap());
        std::fs::write(dir.path().join("1.sock"), "precious").unwrap();
        let error = Sockets::serve(dir.path(), &devices()).unwrap_err();
        assert!(error.to_string().contains("1.sock"), "{error}");
        assert!(!path.exists(), "the socket made before the error must be gone");
        assert_eq!(std::fs::read(dir.path().join("1.sock")).unwrap(), b"precious");
    }
}
