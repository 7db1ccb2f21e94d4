//! Connects to the daemon: from the service VM, its host, or another machine.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tonic::codegen::http::Uri;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tower::service_fn;

use crate::VSOCK_PORT;
use crate::v1::fabric_client::FabricClient;

/// A URI is required but not used: the connector opens the stream.
const NOWHERE: &str = "http://service-vm";

/// The daemon's address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket: `unix:PATH`.
    Unix(PathBuf),
    /// A virtual machine of this host: `vsock:CID[:PORT]`.
    Vsock {
        /// The vsock context id.
        cid: u32,
        /// The vsock port.
        port: u32,
    },
    /// A virtual machine whose monitor exposes vsock as a Unix socket with `CONNECT PORT`: `hvsock:PATH[:PORT]`.
    Hvsock {
        /// The monitor's socket.
        path: PathBuf,
        /// The vsock port.
        port: u32,
    },
    /// Another machine: `https://HOST:PORT`.
    Https(String),
}

/// An invalid address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid address {text:?}: expected unix:PATH, vsock:CID[:PORT], hvsock:PATH[:PORT] or https://HOST:PORT; a path begins with /, \
     and without a port it is {VSOCK_PORT}"
)]
pub struct NoAddress {
    text: String,
}

impl FromStr for Address {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        let none = || NoAddress { text: text.chars().take(200).collect() };
        let (kind, rest) = text.split_once(':').ok_or_else(none)?;
        let port = |text: &str| text.parse().map_err(|_| none());
        match kind {
            "unix" if rest.starts_with('/') => Ok(Self::Unix(rest.into())),
            "vsock" => {
                let (cid, port) = match rest.split_once(':') {
                    Some((cid, text)) => (cid, port(text)?),
                    None => (rest, VSOCK_PORT),
                };
                Ok(Self::Vsock { cid: cid.parse().map_err(|_| none())?, port })
            }
            "hvsock" if rest.starts_with('/') => {
                // The text after the last colon is a port, or part of the path.
                let (path, port) = match rest.rsplit_once(':').map(|(path, text)| (path, text.parse())) {
                    Some((path, Ok(port))) => (path, port),
                    _ => (rest, VSOCK_PORT),
                };
                Ok(Self::Hvsock { path: path.into(), port })
            }
            "https" if rest.len() > 2 => Ok(Self::Https(text.to_owned())),
            _ => Err(none()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
            Self::Hvsock { path, port } => write!(f, "hvsock:{}:{port}", path.display()),
            Self::Https(text) => f.write_str(text),
        }
    }
}

/// TLS credentials of the client: PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The client certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// CA bundle for the daemon's certificate.
    pub ca: PathBuf,
}

impl Credentials {
    fn config(&self) -> Result<ClientTlsConfig, Error> {
        // A provider that is already installed is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let read = |path: &Path| std::fs::read(path).map_err(|source| Error::File { path: path.to_owned(), source });
        let identity = Identity::from_pem(read(&self.certificate)?, read(&self.key)?);
        Ok(ClientTlsConfig::new().identity(identity).ca_certificate(Certificate::from_pem(read(&self.ca)?)))
    }
}

/// Why the connection failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The daemon cannot be reached.
    #[error("failed to connect to fm-partitiond on {address}: {why}; {hint}")]
    Unreachable {
        /// The address.
        address: Address,
        /// The cause.
        why: String,
        /// What to check.
        hint: &'static str,
    },
    /// TCP requires a client certificate.
    #[error("{address} needs a certificate, its key, and the CA bundle of the daemon")]
    Anonymous {
        /// The address.
        address: Address,
    },
    /// A certificate or key cannot be read.
    #[error("failed to read {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Address {
    fn hint(&self) -> &'static str {
        match self {
            Self::Unix(_) => "is it running, and do you have permission to open its socket?",
            Self::Vsock { .. } => {
                "does the service VM run with that CID, does the host have /dev/vhost-vsock, and what does the guest's console say?"
            }
            Self::Hvsock { .. } => "does the service VM run, is that its vsock socket, and what does its console say?",
            Self::Https(_) => "does it run with --listen-tls, and does it accept the certificate?",
        }
    }

    fn endpoint(&self, credentials: Option<&Credentials>) -> Result<Endpoint, Error> {
        let Self::Https(text) = self else { return Ok(Endpoint::from_static(NOWHERE)) };
        let credentials = credentials.ok_or_else(|| Error::Anonymous { address: self.clone() })?;
        let endpoint = Endpoint::from_shared(text.clone()).map_err(|error| self.unreachable(&error))?;
        endpoint.tls_config(credentials.config()?).map_err(|error| self.unreachable(&error))
    }

    fn unreachable(&self, error: &(dyn std::error::Error + 'static)) -> Error {
        let first = std::iter::successors(Some(error), |error| error.source()).last();
        let why = first.map(ToString::to_string).unwrap_or_default();
        Error::Unreachable { address: self.clone(), why, hint: self.hint() }
    }

    /// Connects to the daemon. `connect` limits the connection, `answer` each response; Watch streams have no limit.
    ///
    /// # Errors
    /// The daemon cannot be reached, or the credentials are missing.
    pub async fn connect(
        &self,
        credentials: Option<&Credentials>,
        connect: Duration,
        answer: Option<Duration>,
    ) -> Result<FabricClient<Channel>, Error> {
        let mut endpoint = self.endpoint(credentials)?.connect_timeout(connect);
        if let Some(answer) = answer {
            endpoint = endpoint.timeout(answer);
        }
        let channel = match self.clone() {
            Self::Https(_) => endpoint.connect().await,
            Self::Unix(path) => {
                let opener = move |_: Uri| {
                    let path = path.clone();
                    async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
                };
                endpoint.connect_with_connector(service_fn(opener)).await
            }
            Self::Vsock { cid, port } => {
                let opener = move |_: Uri| async move {
                    let stream = tokio_vsock::VsockStream::connect(tokio_vsock::VsockAddr::new(cid, port)).await;
                    stream.map(TokioIo::new)
                };
                endpoint.connect_with_connector(service_fn(opener)).await
            }
            Self::Hvsock { path, port } => {
                let opener = move |_: Uri| {
                    let path = path.clone();
                    async move { firstlight_vsock::try_connect(&path, port).await.map(TokioIo::new) }
                };
                endpoint.connect_with_connector(service_fn(opener)).await
            }
        };
        Ok(FabricClient::new(channel.map_err(|error| self.unreachable(&error))?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for (text, written) in [
            ("unix:/run/firstlight/fabric.sock", None),
            ("vsock:7", Some("vsock:7:1030")),
            ("vsock:7:99", None),
            ("hvsock:/vm/vsock", Some("hvsock:/vm/vsock:1030")),
            ("hvsock:/vm/vsock:99", None),
            ("hvsock:/vm:x/vsock", Some("hvsock:/vm:x/vsock:1030")),
            ("https://host:7000", None),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), written.unwrap_or(text));
            assert_eq!(address.to_string().parse::<Address>().unwrap(), address);
        }
    }

    #[test]
    fn invalid_address_is_reported_with_the_valid_forms() {
        for text in
            ["", "7", "unix:relative", "vsock:", "vsock:host", "vsock:7:port", "hvsock:x", "http://host", "https:"]
        {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("hvsock:PATH[:PORT]") && error.contains(&format!("{text:?}")), "{error}");
        }
    }

    #[tokio::test]
    async fn failed_connection_is_reported_with_address_and_hint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().display();
        let second = Duration::from_secs(1);
        for (address, hint) in [
            (format!("unix:{path}/none"), "permission to open its socket?"),
            (format!("hvsock:{path}/none"), "its vsock socket"),
        ] {
            let address: Address = address.parse().unwrap();
            let error = address.connect(None, second, None).await.unwrap_err().to_string();
            assert!(
                error.contains(&address.to_string()) && error.contains("No such file") && error.contains(hint),
                "{error}"
            );
        }
        let address: Address = "https://localhost:1".parse().unwrap();
        let error = address.connect(None, second, None).await.unwrap_err();
        assert!(error.to_string().contains("needs a certificate"), "{error}");
    }
}
