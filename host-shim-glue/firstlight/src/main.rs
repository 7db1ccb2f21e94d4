//! `firstlight`: the host's command-line tool.
#![forbid(unsafe_code)]

mod service_vm;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use firstlight::run::{self, Deadlines, Outputs, Run};
use firstlight_vm::{Accelerator, Device, Machine, Tool, or_interrupted};

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
    /// Print the boot profile of a boot record (boot-record.json, or the report of `run --json`).
    BootProfile {
        /// The file.
        file: PathBuf,
        /// Also write it as SVG to this file.
        #[arg(long)]
        svg: Option<PathBuf>,
    },
    /// Manage the service VM of the NVLink fabric, through libvirt.
    #[command(subcommand)]
    ServiceVm(service_vm::Command),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Uncompressed kernel with a PVH entry.
    #[arg(long)]
    kernel: PathBuf,
    /// Guest image (initramfs).
    #[arg(long)]
    initrd: PathBuf,
    /// Kernel command line.
    #[arg(long, default_value = "console=hvc0 quiet panic=-1")]
    append: String,
    /// OCI image layout of the container image.
    #[arg(long)]
    image: PathBuf,
    /// Attach the device of this vfio-user socket; may be repeated.
    #[arg(long = "vfio-user", value_name = "SOCKET")]
    vfio_user: Vec<PathBuf>,
    /// Pass through this host device by vfio-pci; may be repeated.
    #[arg(long = "vfio", value_name = "PCI-ADDRESS")]
    vfio: Vec<String>,
    /// GPUs that the container requests: indices, PCI addresses or `all`, comma-separated.
    #[arg(long, value_delimiter = ',')]
    request: Vec<String>,
    /// QEMU, 10.1 or newer for vfio-user.
    #[arg(long, default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
    /// vhost-device-vsock.
    #[arg(long, default_value = "vhost-device-vsock")]
    vhost_device_vsock: PathBuf,
    /// virtiofsd.
    #[arg(long, default_value = "/usr/libexec/virtiofsd")]
    virtiofsd: PathBuf,
    /// Guest memory, MiB.
    #[arg(long, default_value_t = 1024)]
    memory: u32,
    /// Virtual processors.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Directory for boot-record.json, boot.svg and console.log.
    #[arg(long, default_value = "out")]
    out: PathBuf,
    /// Write the report as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Keep the guest running after the container has exited.
    #[arg(long)]
    keep: bool,
    /// Exit with 3 instead of 0 if the boot was degraded: a unit or a GPU failed.
    #[arg(long)]
    fail_on_degraded: bool,
    /// Command to run instead of the default probe.
    #[arg(last = true)]
    command: Vec<String>,
}

impl RunArgs {
    fn run(&self, outputs: &Outputs) -> Run {
        let user = self.vfio_user.iter().map(|socket| Device::VfioUser { socket: socket.clone() });
        let host = self.vfio.iter().map(|host| Device::Vfio { host: host.clone() });
        Run {
            machine: Machine {
                qemu: Tool::plain(&self.qemu),
                vhost_vsock: Tool::plain(&self.vhost_device_vsock),
                virtiofsd: Tool::plain(&self.virtiofsd),
                kernel: self.kernel.clone(),
                initrd: Some(self.initrd.clone()),
                command_line: self.append.clone(),
                memory_mib: self.memory,
                cpus: self.cpus,
                spare_cpus: 0,
                spare_memory_mib: 0,
                accelerator: Accelerator::detect(),
                devices: user.chain(host).collect(),
                persistent: Vec::new(),
                iommu: false,
                shares: Vec::new(),
                cid: 3,
                slow_console: None,
            },
            image: self.image.clone(),
            devices: self.request.clone(),
            command: self.command.clone(),
            console_log: outputs.console_log(),
            deadlines: Deadlines::default(),
            keep: self.keep,
        }
    }
}

fn boot(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let outputs = Outputs { dir: args.out.clone(), json: args.json.clone() };
    let _lock = outputs.prepare()?;
    let plan = args.run(&outputs);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start tokio")?;
    let mut progress = |line: &str| eprintln!("firstlight: {line}");
    match runtime.block_on(or_interrupted(run::run(&plan, &mut progress))) {
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
            print!("{}", run::print(&report));
            Ok(ExitCode::from(report.exit_code(args.fail_on_degraded)))
        }
    }
}

fn boot_profile(file: &PathBuf, svg: Option<&PathBuf>) -> anyhow::Result<ExitCode> {
    let text = std::fs::read(file).with_context(|| format!("failed to read {}", file.display()))?;
    let text = String::from_utf8_lossy(&text);
    let record = run::parse_record(&text).with_context(|| file.display().to_string())?;
    print!("{}", firstlight_boot_profile::table(&record));
    if let Some(path) = svg {
        std::fs::write(path, firstlight_boot_profile::svg(&record))
            .with_context(|| format!("failed to write {}", path.display()))?;
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
        Command::Run(args) => boot(&args),
        Command::BootProfile { file, svg } => boot_profile(&file, svg.as_ref()),
        Command::ServiceVm(command) => service_vm::service_vm(&command),
    }
}
