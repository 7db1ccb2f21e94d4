//! The way to the daemon.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firstlight_fabric_api::v1::fabric_client::FabricClient;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::exit::Failure;
use crate::{Args, Command};

/// The daemon, or why it is not to be had.
pub(crate) async fn connected(args: &Args) -> Result<FabricClient<Channel>, Failure> {
    let unreachable = |error: &dyn std::error::Error| {
        let cause = std::iter::successors(Some(error), |error| error.source()).last().map(ToString::to_string);
        Failure::Unreachable { address: args.connect.clone(), why: cause.unwrap_or_default() }
    };
    let endpoint = match args.connect.split_once(':') {
        Some(("unix", path)) if path.starts_with('/') => {
            Endpoint::from_shared(format!("unix://{path}")).map_err(|error| unreachable(&error))?
        }
        Some(("https", _)) => {
            let endpoint = Endpoint::from_shared(args.connect.clone()).map_err(|error| unreachable(&error))?;
            endpoint.tls_config(tls(args)?).map_err(|error| unreachable(&error))?
        }
        _ => return Err(Failure::Address { text: args.connect.clone() }),
    };
    let patience = Duration::from_secs(args.timeout);
    let endpoint = endpoint.connect_timeout(patience);
    // What watches is not to end.
    let endpoint = if matches!(args.command, Command::Watch { .. }) { endpoint } else { endpoint.timeout(patience) };
    Ok(FabricClient::new(endpoint.connect().await.map_err(|error| unreachable(&error))?))
}

fn tls(args: &Args) -> Result<ClientTlsConfig, Failure> {
    // Another one that was chosen before does as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let read = |file: &Option<PathBuf>, option: &'static str| {
        let path: &Path = file.as_deref().ok_or(Failure::Missing { option })?;
        std::fs::read(path).map_err(|source| Failure::File { path: path.to_owned(), source })
    };
    let identity = Identity::from_pem(read(&args.certificate, "--certificate")?, read(&args.key, "--key")?);
    Ok(ClientTlsConfig::new().identity(identity).ca_certificate(Certificate::from_pem(read(&args.ca, "--ca")?)))
}
