//! `fmctl`: shows and controls the NVLink fabric of a service VM.

mod connect;
mod doctor;
mod exit;
mod inventory;
mod probe;
mod selector;
mod show;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use firstlight_fabric_api::connect::Address;
use firstlight_fabric_api::v1 as api;

use exit::Failure;
use selector::SelectorArgs;

/// Shows and controls the NVLink fabric of a service VM.
///
/// Exit codes: 0 success; 1 other failure; 2 invalid request; 3 no such partition is free; 4 no such partition or
/// GPU; 5 the state of the fabric forbids it; 6 the fabric manager refused; 7 the daemon or the fabric manager does
/// not answer; 8 timeout, a change that was started may still complete; 9 health or doctor has found problems.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// The daemon's address: unix:PATH in the service VM, vsock:CID[:PORT] on its host (or hvsock:PATH[:PORT], where
    /// its monitor exposes vsock as a Unix socket), https://HOST:PORT with a client certificate.
    #[arg(
        long,
        global = true,
        value_name = "ADDRESS",
        env = "FMCTL_CONNECT",
        default_value = "unix:/run/firstlight/fabric.sock"
    )]
    connect: Address,
    /// Client certificate for TLS, PEM.
    #[arg(long, global = true, value_name = "FILE")]
    certificate: Option<PathBuf>,
    /// Private key of the client certificate, PEM.
    #[arg(long, global = true, value_name = "FILE")]
    key: Option<PathBuf>,
    /// CA bundle for the daemon's certificate, PEM.
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    /// Timeout of a request, in seconds.
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List all partitions.
    List,
    /// Show one partition and its GPUs.
    Status {
        /// The partition id.
        partition: u32,
    },
    /// Show which partition a request would get. Changes nothing.
    Plan {
        #[command(flatten)]
        partition_request: SelectorArgs,
        /// Allow several GPUs, or GPUs by address, while the module map is not verified.
        #[arg(long)]
        unverified_map: bool,
    },
    /// Activate a partition for an owner, before its virtual machine starts.
    Activate {
        #[command(flatten)]
        partition_request: SelectorArgs,
        /// The tenant, such as a virtual machine's name.
        #[arg(long)]
        owner: String,
        /// As with plan. A wrong map connects tenants to each other's GPUs.
        #[arg(long)]
        unverified_map: bool,
        /// Idempotency key: a retry with the same id is not executed again.
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
        /// The driver version in the tenant's image: it has to match the fabric manager's.
        #[arg(long, value_name = "VERSION", default_value = "")]
        guest_driver: String,
    },
    /// Deactivate a partition, after its virtual machine has ended.
    Deactivate {
        /// The partition id.
        partition: u32,
        /// Its current owner.
        #[arg(long)]
        owner: String,
        /// Request id, as with activate.
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
    /// Make the active partitions exactly these; deactivate all others.
    Reconcile {
        /// Every partition whose virtual machine runs, with its owner. None: all partitions are deactivated.
        #[arg(value_name = "PARTITION=OWNER", value_parser = selector::desired)]
        desired: Vec<api::DesiredPartition>,
        /// Execute the steps; without it they are only printed.
        #[arg(long)]
        yes: bool,
        /// Request id, as with activate.
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
    /// Exclude a GPU from allocation.
    Quarantine {
        /// The module id.
        gpu: u32,
        /// The reason.
        #[arg(long)]
        reason: String,
    },
    /// Return a GPU to allocation, or clear the fatal error of a switch.
    Release {
        /// A GPU's module id, or a switch's PCI address as health names it.
        target: String,
    },
    /// Show the PCI address of each GPU and its evidence, or update the module map.
    Inventory {
        #[command(subcommand)]
        command: Option<inventory::InventoryCommand>,
    },
    /// Check each component and print remedies.
    Doctor,
    /// Show problems with their remedies.
    Health,
    /// Print metrics in Prometheus' text format, such as for node_exporter's textfile collector.
    Metrics,
    /// Print events, one per line, until interrupted.
    Watch {
        /// Exit after this number of events.
        #[arg(long, value_name = "COUNT")]
        count: Option<u64>,
    },
    /// Print the completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Command::Completions { shell } = args.command {
        clap_complete::generate(shell, &mut Args::command(), "fmctl", &mut io::stdout());
        return ExitCode::SUCCESS;
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::Output(error).report(args.json),
    };
    match runtime.block_on(run(&args, &mut io::stdout().lock())) {
        Ok(code) => code,
        Err(failure) => failure.report(args.json),
    }
}

/// Returns the given request id, or a random one.
fn request_id_or_new(given: Option<&String>) -> Result<String, Failure> {
    match given {
        Some(given) => Ok(given.clone()),
        None => std::fs::read_to_string("/proc/sys/kernel/random/uuid")
            .map(|text| text.trim().to_owned())
            .map_err(Failure::Output),
    }
}

async fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    if matches!(args.command, Command::Doctor) {
        return doctor::examine(args, out).await;
    }
    let mut client = connect::connect(args).await?;
    let json = args.json;
    match &args.command {
        Command::List => {
            let list = client.list(api::ListRequest {}).await?.into_inner();
            show::list(out, &list, json)?;
            if !list.error.is_empty() {
                eprintln!("fmctl: this list is {} s old; since then: {}", list.age_ms / 1000, list.error);
            }
        }
        Command::Status { partition } => {
            let partition = client.get(api::GetRequest { id: *partition }).await?.into_inner();
            show::partition(out, &partition, json)?;
        }
        Command::Plan { partition_request, unverified_map } => {
            let request = api::PlanRequest {
                partition_request: Some(partition_request.partition_request()),
                unverified_map: *unverified_map,
            };
            let plan = client.plan(request).await?.into_inner();
            show::plan(out, &plan, json)?;
        }
        Command::Activate { partition_request, owner, unverified_map, request_id, guest_driver } => {
            let (request_id, partition_request) =
                (request_id_or_new(request_id.as_ref())?, Some(partition_request.partition_request()));
            let (owner, guest_driver, unverified_map) = (owner.clone(), guest_driver.clone(), *unverified_map);
            let request = api::ActivateRequest { request_id, partition_request, owner, guest_driver, unverified_map };
            let activated = client.activate(request).await?.into_inner();
            show::activated(out, &activated, json)?;
            activated.warnings.iter().for_each(|warning| eprintln!("fmctl: {warning}"));
        }
        Command::Deactivate { partition, owner, request_id } => {
            let request_id = request_id_or_new(request_id.as_ref())?;
            let request = api::DeactivateRequest { request_id, partition: *partition, owner: owner.clone() };
            show::deactivated(out, *partition, &client.deactivate(request).await?.into_inner(), json)?;
        }
        Command::Reconcile { desired, yes, request_id } => {
            let request_id = request_id_or_new(request_id.as_ref())?;
            let request = api::ReconcileRequest { request_id, desired: desired.clone(), dry_run: !yes };
            show::steps(out, &client.reconcile(request).await?.into_inner(), *yes, json)?;
        }
        Command::Quarantine { gpu, reason } => {
            client.quarantine(api::QuarantineRequest { gpu: *gpu, reason: reason.clone() }).await?;
            show::line(out, json, "quarantined", &format!("GPU {gpu} is quarantined"))?;
        }
        Command::Release { target } => {
            use api::release_request::Target;
            let (of, name) = match target.parse() {
                Ok(gpu) => (Target::Gpu(gpu), format!("GPU {gpu}")),
                Err(_) => (Target::Switch(target.to_ascii_lowercase()), format!("NVSwitch {target}")),
            };
            let was = client.release(api::ReleaseRequest { target: Some(of) }).await?.into_inner().was_quarantined;
            let (word, text) = match was {
                true => ("released", format!("{name} is available again")),
                false => ("unchanged", format!("{name} was not quarantined")),
            };
            show::line(out, json, word, &text)?;
        }
        Command::Health => {
            let health = client.health(api::HealthRequest {}).await?.into_inner();
            show::health(out, &health, json)?;
            return Ok(if health.ok { ExitCode::SUCCESS } else { ExitCode::from(exit::PROBLEMS) });
        }
        Command::Metrics => {
            let text = client.metrics(api::MetricsRequest {}).await?.into_inner().text;
            out.write_all(text.as_bytes())?;
        }
        Command::Watch { count } => {
            let mut events = client.watch(api::WatchRequest {}).await?.into_inner();
            let mut left = count.unwrap_or(u64::MAX);
            while left > 0 {
                let Some(event) = events.message().await? else { break };
                show::event(out, &event, json)?;
                left -= 1;
            }
        }
        Command::Inventory { command } => inventory::run(&mut client, command.as_ref(), out, json).await?,
        Command::Completions { .. } | Command::Doctor => {}
    }
    Ok(ExitCode::SUCCESS)
}
