//! Where the daemon can be asked: a Unix socket, vsock for the host, and TCP for who has a certificate.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use firstlight_fabric_api::v1::fabric_server::FabricServer;
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::Stream;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockAddr, VsockListener, VsockStream};
use tonic::transport::server::Router;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use crate::service::Service;

/// Requests of one connection at once; a change waits for the one before anyway.
const AT_ONCE: usize = 32;

/// A port for who has a certificate.
#[derive(Debug, Clone)]
pub struct Tls {
    /// Where.
    pub address: SocketAddr,
    /// The daemon's own certificate, and those between it and its authority; PEM.
    pub certificate: PathBuf,
    /// Its key, which only root may read; PEM.
    pub key: PathBuf,
    /// Whose certificates callers have to have; PEM.
    pub client_ca: PathBuf,
}

/// Why it cannot be asked there.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refuses.
    #[error("cannot {what} {object}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// With what.
        object: String,
        /// The system's answer.
        source: io::Error,
    },
    /// Others can read the key.
    #[error("{} may be read by others (mode {mode:o}): chmod 600, or make a new key if it was so for long", path.display())]
    KeyIsOpen {
        /// The key.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The certificates are none, or do not fit.
    #[error(
        "{address}: {why}; --certificate, --key and --client-ca have to be PEM files, and the key that of the certificate"
    )]
    Certificates {
        /// For which port.
        address: SocketAddr,
        /// What is wrong.
        why: String,
    },
}

fn system(what: &'static str, object: impl ToString) -> impl FnOnce(io::Error) -> Error {
    let object = object.to_string();
    move |source| Error::System { what, object, source }
}

fn server(service: &Service, tls: Option<ServerTlsConfig>) -> Result<Router, tonic::transport::Error> {
    let mut server = Server::builder().concurrency_limit_per_connection(AT_ONCE);
    if let Some(tls) = tls {
        server = server.tls_config(tls)?;
    }
    Ok(server.add_service(FabricServer::new(service.clone())))
}

/// Who may open a socket may do everything: root alone may.
///
/// # Errors
/// There can be no socket.
pub fn unix(path: &Path) -> Result<UnixListener, Error> {
    let failed = || system("listen on", path.display());
    // One that a dead daemon has left; the journal's lock says that it is dead.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed()(error)),
        _ => {}
    }
    // It is nobody's but root's from the moment on which it is there.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    listener.map_err(failed())
}

/// Answers on the Unix socket.
///
/// # Errors
/// It cannot go on.
pub async fn serve_unix(listener: UnixListener, service: &Service) -> Result<(), tonic::transport::Error> {
    server(service, None)?.serve_with_incoming(UnixListenerStream::new(listener)).await
}

/// A port of the machine's vsock.
///
/// # Errors
/// There is no vsock, or the port is taken.
pub fn vsock(port: u32) -> Result<VsockListener, Error> {
    VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port)).map_err(system("listen on", format!("vsock port {port}")))
}

/// Answers the host on that port. Nobody else: a process of this machine that may not open
/// the Unix socket may not do by vsock what it may not do there.
///
/// # Errors
/// It cannot go on.
pub async fn serve_vsock(listener: VsockListener, service: &Service) -> Result<(), tonic::transport::Error> {
    server(service, None)?.serve_with_incoming(hosts(listener)).await
}

fn hosts(listener: VsockListener) -> impl Stream<Item = io::Result<VsockStream>> {
    tokio_stream::StreamExt::filter(listener.incoming(), |stream| match stream.as_ref().map(VsockStream::peer_addr) {
        Ok(Ok(peer)) if peer.cid() != VMADDR_CID_HOST => {
            eprintln!(
                "fm-partitiond: hung up on vsock CID {}: only the host, CID {VMADDR_CID_HOST}, may ask",
                peer.cid()
            );
            false
        }
        // A peer that is gone already is seen to be.
        _ => true,
    })
}

impl Tls {
    fn read(path: &Path) -> Result<Vec<u8>, Error> {
        fs::read(path).map_err(system("read", path.display()))
    }

    fn config(&self) -> Result<ServerTlsConfig, Error> {
        // Another one that was chosen before does as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mode = fs::metadata(&self.key).map_err(system("read", self.key.display()))?.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(Error::KeyIsOpen { path: self.key.clone(), mode: mode & 0o777 });
        }
        let identity = Identity::from_pem(Self::read(&self.certificate)?, Self::read(&self.key)?);
        let client_ca = Certificate::from_pem(Self::read(&self.client_ca)?);
        Ok(ServerTlsConfig::new().identity(identity).client_ca_root(client_ca).client_auth_optional(false))
    }

    /// The port, and what answers there.
    ///
    /// # Errors
    /// The certificates do not fit, or the port is taken.
    pub async fn open(&self, service: &Service) -> Result<(TcpListener, Router), Error> {
        let certificates =
            |error: tonic::transport::Error| Error::Certificates { address: self.address, why: causes(&error) };
        let router = server(service, Some(self.config()?)).map_err(certificates)?;
        let listener = TcpListener::bind(self.address).await.map_err(system("listen on", self.address))?;
        Ok((listener, router))
    }
}

/// Answers on the port.
///
/// # Errors
/// It cannot go on.
pub async fn serve_tls((listener, router): (TcpListener, Router)) -> Result<(), tonic::transport::Error> {
    router.serve_with_incoming(TcpListenerStream::new(listener)).await
}

/// An error with what caused it.
fn causes(error: &dyn std::error::Error) -> String {
    let all = std::iter::successors(Some(error), |error| error.source());
    all.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
