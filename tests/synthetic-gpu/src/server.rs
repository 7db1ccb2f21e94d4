//! The sockets: one per function, each served by a thread.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::thread;

use thiserror::Error;
use vfio_user::Server;

use crate::device::Device;
use crate::function::Function;

/// Why devices cannot be served.
#[derive(Debug, Error)]
pub enum ServeError {
    /// More devices than the serial numbers tell apart.
    #[error("{count} devices are too many; the limit is 65535")]
    TooMany {
        /// How many were asked for.
        count: usize,
    },
    /// The memory behind a BAR could not be made.
    #[error("cannot make the memory behind device {index} ({device}); is there room for memory files?")]
    Memory {
        /// Position on the command line.
        index: usize,
        /// The device.
        device: Device,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A socket of an earlier run could not be removed.
    #[error("cannot clear the way for socket {path}; remove it or choose another directory")]
    Stale {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A socket could not be made.
    #[error("cannot listen on {path}: {reason}; does the directory exist, and is the path below 108 bytes?")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the library said.
        reason: String,
    },
    /// A thread could not be started.
    #[error("cannot start the thread that serves {path}")]
    Thread {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// The sockets being served. Dropping it removes them; the threads end with
/// the process.
#[derive(Debug)]
pub struct Sockets {
    paths: Vec<PathBuf>,
}

impl Sockets {
    /// Serves the devices on `directory/0.sock`, `directory/1.sock` and so on. When
    /// it returns, all of them listen. Sockets left by an earlier run are
    /// replaced; anything else of that name is an error.
    ///
    /// # Errors
    /// See [`ServeError`]; sockets made before the error are removed.
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
                .spawn(move || serve_for_ever(&name, &server, &mut function))
                .map_err(|source| ServeError::Thread { path, source })?;
        }
        Ok(sockets)
    }

    /// The sockets in the order of the devices.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for path in &self.paths {
            // Nothing to be done if it is gone already.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// One VMM after the other; a device outlives its guests as hardware does.
fn serve_for_ever(name: &str, server: &Server, function: &mut Function) {
    loop {
        let outcome = server.run(function);
        function.disconnected();
        match outcome {
            Ok(()) => {}
            Err(error @ vfio_user::Error::SocketAccept(_)) => {
                eprintln!("synthetic-gpu: {name}: {error}; the device is no longer served");
                return;
            }
            // A VMM that was killed in the middle of a message.
            Err(error) => eprintln!("synthetic-gpu: {name}: {error}; waiting for the next guest"),
        }
    }
}

fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "something that is not a socket has this name")),
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
    fn a_client_sees_the_device_and_the_next_one_too() {
        let dir = tempfile::tempdir().unwrap();
        let sockets = Sockets::serve(dir.path(), &devices()).unwrap();
        assert_eq!(sockets.paths().len(), 2);
        for _ in 0..2 {
            let mut client = Client::new(&sockets.paths()[0]).unwrap();
            // Not `resettable()`: in this version of the client it says the opposite.
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
    fn stale_sockets_are_replaced_and_files_are_not() {
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
