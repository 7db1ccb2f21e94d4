//! `firstlight`: the host's command-line tool.
#![forbid(unsafe_code)]

mod guest_args;
mod pull_command;
mod service_vm;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use firstlight::boot;
use firstlight::run::{self, ContainerCommand, Outputs, Progress, Run};
use firstlight_boot_profile::{TableOptions, svg, table};
use firstlight_vm::or_interrupted;

use guest_args::GuestArgs;

/// The host side of Firstlight.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot a guest in QEMU, run one container in it, print the boot profile.
    Run(Box<RunArgs>),
    /// Boot a guest in QEMU without a container, print the boot profile. The exit code is 0 if every unit succeeded, 3 if
    /// the boot was degraded, 1 if it failed.
    Boot(Box<GuestArgs>),
    /// Print the boot profile of a boot record (boot-record.json, the report of `run --json`, or a console.log).
    BootProfile {
        /// The file.
        file: PathBuf,
        /// Also write it as SVG to this file.
        #[arg(long)]
        svg: Option<PathBuf>,
        /// List skipped units.
        #[arg(long)]
        all: bool,
    },
    /// Pull a container image from a registry, an image layout or an archive of `docker save`, as an OCI image layout for
    /// `run --image`.
    Pull(pull_command::PullArgs),
    /// Manage the service VM of the NVLink fabric, through libvirt.
    #[command(subcommand)]
    ServiceVm(service_vm::Command),
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    guest: GuestArgs,
    /// OCI image layout of the container image.
    #[arg(long, value_name = "DIR")]
    image: PathBuf,
    /// GPUs that the container requests: indices, PCI addresses or `all`, comma-separated.
    #[arg(long, value_delimiter = ',')]
    request: Vec<String>,
    /// Run a script that lists the container's GPUs and tries to open all others, instead of the image's entry point.
    #[arg(long, conflicts_with = "command")]
    probe: bool,
    /// Write the report as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Keep the guest running after the container has exited.
    #[arg(long)]
    keep: bool,
    /// Exit with 3 instead of 0 if the boot was degraded: a unit or a GPU failed.
    #[arg(long)]
    fail_on_degraded: bool,
    /// Command to run instead of the image's entry point.
    #[arg(last = true)]
    command: Vec<String>,
}

/// Exit code of a degraded boot.
const DEGRADED: u8 = 3;

impl RunArgs {
    fn run(&self, outputs: &Outputs) -> anyhow::Result<Run> {
        check_request(&self.request, self.guest.devices())?;
        Ok(Run {
            machine: self.guest.machine()?,
            image: self.image.clone(),
            devices: self.request.clone(),
            command: match (self.probe, self.command.as_slice()) {
                (true, _) => ContainerCommand::Probe,
                (false, []) => ContainerCommand::Image,
                (false, arguments) => ContainerCommand::Arguments(arguments.to_vec()),
            },
            console_log: outputs.console_log(),
            deadlines: self.guest.deadlines(),
            keep: self.keep,
        })
    }
}

/// Refuses requests for more GPUs than there are devices.
fn check_request(request: &[String], devices: usize) -> anyhow::Result<()> {
    let attached = || format!("{devices} devices are attached (--vfio, --vfio-user)");
    for name in request {
        match name.parse::<usize>() {
            Ok(index) if index >= devices => bail!("--request {index}: {}; the first GPU is 0", attached()),
            Err(_) if devices == 0 => bail!("--request {name}: {}", attached()),
            _ => {}
        }
    }
    Ok(())
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start tokio")
}

fn run_container(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let outputs = Outputs { dir: args.guest.out.clone(), json: args.json.clone() };
    let plan = args.run(&outputs)?;
    let _lock = outputs.prepare()?;
    let mut report = |progress: Progress<'_>| match progress {
        Progress::Step(text) => eprintln!("firstlight: {text}"),
        Progress::Line(..) => println!("{progress}"),
    };
    match runtime()?.block_on(or_interrupted(run::run(&plan, &mut report))) {
        Err(signal) => {
            print!("{}", outputs.interrupted());
            Ok(ExitCode::from(signal.exit_code()))
        }
        Ok(Err(error)) => {
            print!("{}", outputs.failed(&error));
            Err(error.into())
        }
        Ok(Ok(report)) => {
            outputs.write(&report)?;
            print!("{}", run::print(&report, TableOptions::stdout(args.guest.all)));
            Ok(ExitCode::from(report.exit_code(args.fail_on_degraded)))
        }
    }
}

fn boot_guest(args: &GuestArgs) -> anyhow::Result<ExitCode> {
    let outputs = Outputs { dir: args.out.clone(), json: None };
    let machine = args.machine()?;
    let _lock = outputs.prepare()?;
    let console_log = outputs.console_log();
    let work = boot::boot(&machine, args.deadlines().boot, &console_log);
    let report = match runtime()?.block_on(or_interrupted(work)) {
        Err(signal) => {
            print!("{}", outputs.interrupted());
            return Ok(ExitCode::from(signal.exit_code()));
        }
        Ok(report) => report?,
    };
    let mut problems = Vec::new();
    if let Some(record) = &report.record {
        outputs.write_record(record)?;
        problems = run::problems(record);
        println!("{}\n{}", table(record, TableOptions::stdout(args.all)), outputs.written());
    }
    if let Some(failure) = report.failure() {
        bail!("{failure}");
    }
    if report.is_ready() {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("firstlight: the boot was degraded:");
    problems.iter().for_each(|problem| eprintln!("  - {problem}"));
    Ok(ExitCode::from(DEGRADED))
}

fn boot_profile(file: &PathBuf, to: Option<&PathBuf>, all: bool) -> anyhow::Result<ExitCode> {
    let text = std::fs::read(file).with_context(|| format!("failed to read {}", file.display()))?;
    let text = String::from_utf8_lossy(&text);
    let record = run::parse_record(&text).with_context(|| file.display().to_string())?;
    print!("{}", table(&record, TableOptions::stdout(all)));
    if let Some(path) = to {
        std::fs::write(path, svg(&record)).with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    // Causes, but no backtrace, which does not help the user.
    execute().unwrap_or_else(|error| {
        eprintln!("firstlight: {}", firstlight::explain(error.as_ref()));
        ExitCode::FAILURE
    })
}

fn execute() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Run(args) => run_container(&args),
        Command::Boot(args) => boot_guest(&args),
        Command::BootProfile { file, svg, all } => boot_profile(&file, svg.as_ref(), all),
        Command::Pull(args) => pull_command::pull(&args).map(|()| ExitCode::SUCCESS),
        Command::ServiceVm(command) => service_vm::service_vm(&command),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn guest_is_a_directory_or_a_kernel_with_an_initramfs() {
        let parse = |options: &str| Cli::try_parse_from(format!("firstlight boot {options}").split_ascii_whitespace());
        assert!(parse("--guest dir --extension a --extension b --opener c").is_ok());
        assert!(parse("--kernel k --initrd i").is_ok());
        for bad in
            ["", "--kernel k", "--initrd i", "--guest d --kernel k --initrd i", "--kernel k --initrd i --opener o"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn request_beyond_the_devices_is_refused() {
        let check = |request: &[&str], devices| {
            check_request(&request.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), devices)
        };
        assert!(check(&["0", "1"], 2).is_ok() && check(&["all"], 1).is_ok() && check(&[], 0).is_ok());
        assert!(check(&["0000:01:00.0"], 1).is_ok());
        let error = check(&["0", "2"], 2).unwrap_err().to_string();
        assert!(error.contains("--request 2: 2 devices are attached"), "{error}");
        assert!(check(&["all"], 0).unwrap_err().to_string().contains("--request all: 0 devices"));
    }
}
