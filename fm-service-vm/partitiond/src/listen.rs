//! The listeners: a Unix socket, vsock for the host, and TCP with mutual TLS.

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

/// Concurrent requests of one connection; changes are serialised anyway.
const MAX_CONCURRENT_REQUESTS: usize = 32;

/// The options of the TLS listener.
#[derive(Debug, Clone)]
pub struct Tls {
    /// The address to listen on.
    pub address: SocketAddr,
    /// The daemon's certificate chain, PEM.
    pub certificate: PathBuf,
    /// Its private key, which only root may read, PEM.
    pub key: PathBuf,
    /// Client CA bundle, PEM.
    pub client_ca: PathBuf,
}

/// Why a listener cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("failed to {what} {object}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// Its object.
        object: String,
        /// The system's error.
        source: io::Error,
    },
    /// The private key is readable by others.
    #[error("{} may be read by others (mode {mode:o}): chmod 600, or make a new key if it was so for long", path.display())]
    KeyIsOpen {
        /// The key file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The certificates or the key are invalid, or do not match.
    #[error(
        "{address}: {reason}; --certificate, --key and --client-ca have to be PEM files, and the key that of the certificate"
    )]
    Certificates {
        /// The address of the listener.
        address: SocketAddr,
        /// The cause.
        reason: String,
    },
}

fn system(what: &'static str, object: impl ToString) -> impl FnOnce(io::Error) -> Error {
    let object = object.to_string();
    move |source| Error::System { what, object, source }
}

fn server(service: &Service, tls: Option<ServerTlsConfig>) -> Result<Router, tonic::transport::Error> {
    let mut server = Server::builder().concurrency_limit_per_connection(MAX_CONCURRENT_REQUESTS);
    if let Some(tls) = tls {
        server = server.tls_config(tls)?;
    }
    Ok(server.add_service(FabricServer::new(service.clone())))
}

/// Opens the Unix socket. It gives full access, so only root may open it.
///
/// # Errors
/// The socket cannot be created.
pub fn unix(path: &Path) -> Result<UnixListener, Error> {
    let failed = || system("listen on", path.display());
    // A dead daemon's socket; the journal's lock proves that it is dead.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed()(error)),
        _ => {}
    }
    // The umask restricts the socket to root from its creation on.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    listener.map_err(failed())
}

/// Serves the Unix socket.
///
/// # Errors
/// The listener failed.
pub async fn serve_unix(listener: UnixListener, service: &Service) -> Result<(), tonic::transport::Error> {
    server(service, None)?.serve_with_incoming(UnixListenerStream::new(listener)).await
}

/// Opens a vsock port.
///
/// # Errors
/// There is no vsock, or the port is in use.
pub fn vsock(port: u32) -> Result<VsockListener, Error> {
    VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port)).map_err(system("listen on", format!("vsock port {port}")))
}

/// Serves the vsock port, for the host only: a local process that may not open the Unix socket must not get the same
/// access by vsock.
///
/// # Errors
/// The listener failed.
pub async fn serve_vsock(listener: VsockListener, service: &Service) -> Result<(), tonic::transport::Error> {
    server(service, None)?.serve_with_incoming(host_connections(listener)).await
}

fn host_connections(listener: VsockListener) -> impl Stream<Item = io::Result<VsockStream>> {
    tokio_stream::StreamExt::filter(listener.incoming(), |stream| match stream.as_ref().map(VsockStream::peer_addr) {
        Ok(Ok(peer)) if peer.cid() != VMADDR_CID_HOST => {
            tracing::warn!(
                cid = peer.cid(),
                "rejected a vsock connection: only the host, CID {VMADDR_CID_HOST}, may connect"
            );
            false
        }
        // An error of a closed connection surfaces when it is read.
        _ => true,
    })
}

impl Tls {
    fn read(path: &Path) -> Result<Vec<u8>, Error> {
        fs::read(path).map_err(system("read", path.display()))
    }

    fn config(&self) -> Result<ServerTlsConfig, Error> {
        // A provider that is already installed is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mode = fs::metadata(&self.key).map_err(system("read", self.key.display()))?.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(Error::KeyIsOpen { path: self.key.clone(), mode: mode & 0o777 });
        }
        let identity = Identity::from_pem(Self::read(&self.certificate)?, Self::read(&self.key)?);
        let client_ca = Certificate::from_pem(Self::read(&self.client_ca)?);
        Ok(ServerTlsConfig::new().identity(identity).client_ca_root(client_ca).client_auth_optional(false))
    }

    /// Opens the TCP listener and configures TLS.
    ///
    /// # Errors
    /// The certificates are invalid, or the port is in use.
    pub async fn open(&self, service: &Service) -> Result<(TcpListener, Router), Error> {
        let certificates =
            |error: tonic::transport::Error| Error::Certificates { address: self.address, reason: causes(&error) };
        let router = server(service, Some(self.config()?)).map_err(certificates)?;
        let listener = TcpListener::bind(self.address).await.map_err(system("listen on", self.address))?;
        Ok((listener, router))
    }
}

/// Serves the TLS port.
///
/// # Errors
/// The listener failed.
pub async fn serve_tls((listener, router): (TcpListener, Router)) -> Result<(), tonic::transport::Error> {
    router.serve_with_incoming(TcpListenerStream::new(listener)).await
}

/// Formats an error with its causes.
fn causes(error: &dyn std::error::Error) -> String {
    let all = std::iter::successors(Some(error), |error| error.source());
    all.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
