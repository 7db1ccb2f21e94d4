//! `fmctl`: shows and steers the NVLink fabric of a service VM.

mod ask;
mod connect;
mod doctor;
mod exit;
mod inventory;
mod probe;
mod show;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use firstlight_fabric_api::connect::Address;
use firstlight_fabric_api::v1 as api;

use ask::AskArgs;
use exit::Failure;

/// Shows and steers the NVLink fabric of a service VM.
///
/// Exit codes: 0 done; 1 another failure; 2 a request that cannot be; 3 nothing is free; 4 there is no such partition or GPU;
/// 5 the fabric is not in a state for it; 6 the fabric manager has refused; 7 the daemon or the fabric manager does not
/// answer; 8 it has not answered in time, and what was begun may still come to be; 9 health or doctor has found trouble.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Where the daemon is: unix:PATH in the service VM, vsock:CID[:PORT] on its host (or hvsock:PATH[:PORT], where its monitor
    /// has its vsock behind a Unix socket), https://HOST:PORT with a certificate.
    #[arg(
        long,
        global = true,
        value_name = "ADDRESS",
        env = "FMCTL_CONNECT",
        default_value = "unix:/run/firstlight/fabric.sock"
    )]
    connect: Address,
    /// Who we are over TCP: a certificate, PEM.
    #[arg(long, global = true, value_name = "FILE")]
    certificate: Option<PathBuf>,
    /// Its key, PEM.
    #[arg(long, global = true, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Whose certificate the daemon has to have, PEM.
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    /// How long to wait for an answer, in seconds.
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// All partitions.
    List,
    /// The GPUs of one partition.
    Status {
        /// Its number.
        partition: u32,
    },
    /// Which partition a request would get. Changes nothing.
    Plan {
        #[command(flatten)]
        ask: AskArgs,
        /// Several GPUs, or GPUs by address, also while the module map is not verified.
        #[arg(long)]
        unverified_map: bool,
    },
    /// Activate a partition for an owner, before its virtual machine starts.
    Activate {
        #[command(flatten)]
        ask: AskArgs,
        /// Who gets it, such as a virtual machine's name.
        #[arg(long)]
        owner: String,
        /// As with plan. A wrong map connects tenants to each other's GPUs.
        #[arg(long)]
        unverified_map: bool,
        /// The same id again is the same request: give one to what may be sent again.
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
        /// The version of the driver in that machine's image: it has to be the fabric manager's.
        #[arg(long, value_name = "VERSION", default_value = "")]
        guest_driver: String,
    },
    /// Deactivate a partition, when its virtual machine is gone.
    Deactivate {
        /// Its number.
        partition: u32,
        /// Whose it has to be.
        #[arg(long)]
        owner: String,
        /// As with activate.
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
    /// Make the fabric exactly this: what is not named is switched off.
    Reconcile {
        /// Every partition whose virtual machine runs, and whose it is. None: everything is switched off.
        #[arg(value_name = "PARTITION=OWNER", value_parser = ask::wanted)]
        wanted: Vec<api::Wanted>,
        /// Do it; without, what would be done is printed.
        #[arg(long)]
        yes: bool,
        /// As with activate.
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
    /// Keep a GPU from everybody.
    Quarantine {
        /// Its module id.
        gpu: u32,
        /// Why.
        #[arg(long)]
        reason: String,
    },
    /// Let a GPU be given again, or rely again on a switch that had a fatal error.
    Release {
        /// A GPU's module id, or a switch's PCI address as health names it.
        what: String,
    },
    /// Which GPU has which PCI address, and how that is known.
    Inventory {
        #[command(subcommand)]
        what: Option<inventory::What>,
    },
    /// Looks at one thing after the other, and says what to do where something is not well.
    Doctor,
    /// Whether all is well, and if not what to do.
    Health,
    /// Figures as Prometheus reads them, such as for a file of node_exporter's textfile collector.
    Metrics,
    /// What happens, a line each, until interrupted.
    Watch {
        /// End after so many events.
        #[arg(long, value_name = "COUNT")]
        count: Option<u64>,
    },
    /// Print what completes these commands in a shell.
    Completions {
        /// Which shell.
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
        Err(error) => return Failure::Output(error).told(args.json),
    };
    match runtime.block_on(run(&args, &mut io::stdout().lock())) {
        Ok(code) => code,
        Err(failure) => failure.told(args.json),
    }
}

/// An identifier that nobody else has, for who gives none.
fn identified(given: Option<&String>) -> Result<String, Failure> {
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
    let mut client = connect::connected(args).await?;
    let json = args.json;
    match &args.command {
        Command::List => {
            let list = client.list(api::ListRequest {}).await?.into_inner();
            show::list(out, &list, json)?;
            if !list.trouble.is_empty() {
                eprintln!("fmctl: that was so {} s ago; since then: {}", list.age_ms / 1000, list.trouble);
            }
        }
        Command::Status { partition } => {
            let partition = client.get(api::GetRequest { id: *partition }).await?.into_inner();
            show::partition(out, &partition, json)?;
        }
        Command::Plan { ask, unverified_map } => {
            let request = api::PlanRequest { ask: Some(ask.ask()), unverified_map: *unverified_map };
            let plan = client.plan(request).await?.into_inner();
            show::plan(out, &plan, json)?;
        }
        Command::Activate { ask, owner, unverified_map, request_id, guest_driver } => {
            let (request_id, ask) = (identified(request_id.as_ref())?, Some(ask.ask()));
            let (owner, guest_driver, unverified_map) = (owner.clone(), guest_driver.clone(), *unverified_map);
            let request = api::ActivateRequest { request_id, ask, owner, guest_driver, unverified_map };
            let activated = client.activate(request).await?.into_inner();
            show::activated(out, &activated, json)?;
            activated.warnings.iter().for_each(|warning| eprintln!("fmctl: {warning}"));
        }
        Command::Deactivate { partition, owner, request_id } => {
            let request_id = identified(request_id.as_ref())?;
            let request = api::DeactivateRequest { request_id, partition: *partition, owner: owner.clone() };
            show::deactivated(out, *partition, &client.deactivate(request).await?.into_inner(), json)?;
        }
        Command::Reconcile { wanted, yes, request_id } => {
            let request_id = identified(request_id.as_ref())?;
            let request = api::ReconcileRequest { request_id, wanted: wanted.clone(), dry_run: !yes };
            show::steps(out, &client.reconcile(request).await?.into_inner(), *yes, json)?;
        }
        Command::Quarantine { gpu, reason } => {
            client.quarantine(api::QuarantineRequest { gpu: *gpu, reason: reason.clone() }).await?;
            show::line(out, json, "quarantined", &format!("GPU {gpu} is in quarantine"))?;
        }
        Command::Release { what } => {
            use api::release_request::What;
            let (of, name) = match what.parse() {
                Ok(gpu) => (What::Gpu(gpu), format!("GPU {gpu}")),
                Err(_) => (What::Switch(what.to_ascii_lowercase()), format!("NVSwitch {what}")),
            };
            let was = client.release(api::ReleaseRequest { what: Some(of) }).await?.into_inner().was_quarantined;
            let (word, text) = match was {
                true => ("released", format!("{name} can be given again")),
                false => ("unchanged", format!("{name} was not in quarantine")),
            };
            show::line(out, json, word, &text)?;
        }
        Command::Health => {
            let health = client.health(api::HealthRequest {}).await?.into_inner();
            show::health(out, &health, json)?;
            return Ok(if health.ok { ExitCode::SUCCESS } else { ExitCode::from(exit::TROUBLE) });
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
        Command::Inventory { what } => inventory::run(&mut client, what.as_ref(), out, json).await?,
        Command::Completions { .. } | Command::Doctor => {}
    }
    Ok(ExitCode::SUCCESS)
}
