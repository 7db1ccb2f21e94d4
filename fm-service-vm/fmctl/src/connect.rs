//! Connects to the daemon.

use std::path::PathBuf;
use std::time::Duration;

use firstlight_fabric_api::connect::{Address, Credentials};
use firstlight_fabric_api::v1::fabric_client::FabricClient;
use tonic::transport::Channel;

use crate::exit::Failure;
use crate::{Args, Command};

/// Connects to the daemon that the options name.
pub(crate) async fn connect(args: &Args) -> Result<FabricClient<Channel>, Failure> {
    let timeout = Duration::from_secs(args.timeout);
    // A Watch stream has no timeout.
    let answer = Some(timeout).filter(|_| !matches!(args.command, Command::Watch { .. }));
    let credentials = match &args.connect {
        Address::Https(_) => Some(credentials(args)?),
        _ => None,
    };
    Ok(args.connect.connect(credentials.as_ref(), timeout, answer).await?)
}

fn credentials(args: &Args) -> Result<Credentials, Failure> {
    let given = |file: &Option<PathBuf>, option: &'static str| file.clone().ok_or(Failure::Missing { option });
    Ok(Credentials {
        certificate: given(&args.certificate, "--certificate")?,
        key: given(&args.key, "--key")?,
        ca: given(&args.ca, "--ca")?,
    })
}
