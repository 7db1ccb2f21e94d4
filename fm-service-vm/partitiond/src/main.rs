//! `fm-partitiond`: the partition daemon of a service VM.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use firstlight_partitiond::fabric::{BoxedFabric, Nvfm};
use firstlight_partitiond::journal::Journal;
use firstlight_partitiond::listen::{self, Tls};
use firstlight_partitiond::logging::LogOptions;
use firstlight_partitiond::options::Options;
use firstlight_partitiond::service::Service;
use firstlight_partitiond::versions::{self, DriverMismatchPolicy, Versions};
use firstlight_partitiond::{Engine, actor, kernel_log, manager, metrics};
use firstlight_sys::nvfm::Address;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

/// The sole interface to this machine's NVLink fabric.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// The journal file.
    #[arg(long, value_name = "FILE", default_value = "/var/lib/firstlight/fabric.journal")]
    journal: PathBuf,
    /// Unix socket to listen on; only root can open it.
    #[arg(long, value_name = "PATH", default_value = "/run/firstlight/fabric.sock")]
    listen: PathBuf,
    /// Also listen on this vsock port, for the host of this virtual machine only.
    #[arg(long, value_name = "PORT")]
    listen_vsock: Option<u32>,
    /// Also listen on this address and port, with mutual TLS.
    #[arg(long, value_name = "ADDRESS:PORT", requires_all = ["certificate", "key", "client_ca"])]
    listen_tls: Option<SocketAddr>,
    /// The daemon's certificate for TLS, PEM.
    #[arg(long, value_name = "FILE", requires = "listen_tls")]
    certificate: Option<PathBuf>,
    /// The private key of the certificate, PEM; readable by root only.
    #[arg(long, value_name = "FILE", requires = "listen_tls")]
    key: Option<PathBuf>,
    /// Client CA bundle, PEM.
    #[arg(long, value_name = "FILE", requires = "listen_tls")]
    client_ca: Option<PathBuf>,
    /// PID 1's control socket, which reports starts and exits of the fabric manager.
    #[arg(long, value_name = "PATH")]
    init_socket: Option<PathBuf>,
    /// The kernel log, read for SXids and Xids.
    #[arg(long, value_name = "FILE", default_value = "/dev/kmsg")]
    kernel_log: PathBuf,
    /// Do not read the kernel log.
    #[arg(long)]
    no_kernel_log: bool,
    /// The fabric manager's program, run with --version.
    #[arg(long, value_name = "FILE", default_value = "/usr/bin/nv-fabricmanager")]
    fabric_manager_program: PathBuf,
    /// Policy for a tenant whose driver version differs from the fabric manager's.
    #[arg(long, value_name = "POLICY", default_value = "refuse")]
    guest_driver_mismatch: DriverMismatchPolicy,
    /// Where the fabric manager listens: HOST[:PORT], unix:PATH or vsock:CID:PORT.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = address)]
    fabric_manager: Address,
    /// Path of libnvfm; found by the loader if not given.
    #[arg(long, value_name = "FILE")]
    libnvfm: Option<PathBuf>,
    /// Timeout for a connection to the fabric manager, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    connect_timeout: Duration,
    /// Timeout for a request, in seconds; a change that was started continues after it.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    timeout: Duration,
    /// Interval between polls of the fabric manager while there are no requests, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    poll_interval: Duration,
    #[command(flatten)]
    more: Options,
    #[command(flatten)]
    log: LogOptions,
}

impl Args {
    /// The TLS listener's options, if it is enabled.
    fn tls(&self) -> anyhow::Result<Option<Tls>> {
        let Some(address) = self.listen_tls else { return Ok(None) };
        let file =
            |file: &Option<PathBuf>| file.clone().context("--listen-tls needs --certificate, --key and --client-ca");
        let (certificate, key, client_ca) = (file(&self.certificate)?, file(&self.key)?, file(&self.client_ca)?);
        Ok(Some(Tls { address, certificate, key, client_ca }))
    }
}

fn address(text: &str) -> Result<Address, String> {
    match text.split_once(':') {
        Some(("unix", path)) if path.starts_with('/') => Ok(Address::Unix(path.to_owned())),
        Some(("unix", _)) => Err("a Unix socket's path begins with /".to_owned()),
        Some(("vsock", rest)) => {
            match rest.split_once(':').map(|(cid, port)| (cid.parse::<u32>(), port.parse::<u32>())) {
                Some((Ok(_), Ok(_))) => Ok(Address::Vsock(rest.to_owned())),
                _ => Err("it is vsock:CID:PORT, both numbers".to_owned()),
            }
        }
        _ if text.is_empty() => Err("it is empty".to_owned()),
        _ => Ok(Address::Inet(text.to_owned())),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "it is a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err("it has to be more than 0".to_owned()),
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    args.log.install();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let tls = args.tls()?;
    let opened = Journal::open(&args.journal)?;
    let fabric = Nvfm::open(args.libnvfm.as_ref(), args.fabric_manager.clone(), args.connect_timeout)?;
    let engine = Engine::new(Box::new(fabric) as BoxedFabric, opened).with(args.more.module_map(&args.journal));
    let engine = actor::start(engine, args.poll_interval, args.timeout).context("start a thread")?;
    if !args.no_kernel_log
        && let Err(error) = kernel_log::follow(&args.kernel_log, engine.clone())
    {
        // The daemon serves requests without the kernel log.
        warn!(path = %args.kernel_log.display(), %error, "SXids are not monitored: failed to follow the kernel log");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    runtime.block_on(async {
        let versions = Versions::read(&args.fabric_manager_program, Path::new(versions::DRIVER)).await;
        let service = Service::new(engine.clone(), versions, args.guest_driver_mismatch);
        if let Some(socket) = args.init_socket.clone() {
            tokio::spawn(manager::follow(socket, engine.clone()));
        }
        let unix = listen::unix(&args.listen)?;
        let vsock = args.listen_vsock.map(listen::vsock).transpose()?;
        let port = match &tls {
            Some(tls) => Some(tls.open(&service).await?),
            None => None,
        };
        if let Some(address) = &args.more.metrics {
            tokio::spawn(metrics::serve(address.open().await?, engine.clone()));
        }
        let mut places = vec![args.listen.display().to_string()];
        places.extend(args.listen_vsock.map(|port| format!("vsock port {port}")));
        places.extend(tls.map(|tls| tls.address.to_string()));
        info!(addresses = %places.join(", "), fabric_manager = %args.fabric_manager, "listening");
        let on_vsock = async {
            match vsock {
                Some(vsock) => listen::serve_vsock(vsock, &service).await,
                None => std::future::pending().await,
            }
        };
        let on_port = async {
            match port {
                Some(port) => listen::serve_tls(port).await,
                None => std::future::pending().await,
            }
        };
        let (mut ended, mut stopped) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        // The journal has the change in progress, so there is nothing to wait for; a graceful shutdown would wait for
        // Watch streams.
        tokio::select! {
            served = listen::serve_unix(unix, &service) => served.context("serve"),
            served = on_vsock => served.context("serve"),
            served = on_port => served.context("serve"),
            _ = ended.recv() => Ok(()),
            _ = stopped.recv() => Ok(()),
        }
    })
}
