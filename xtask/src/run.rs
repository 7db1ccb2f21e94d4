//! `cargo xtask run`: boots a guest of the lab with synthetic GPUs and runs a container in it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use firstlight::run::{ContainerCommand, Outputs, Progress, print};
use firstlight_boot_profile::TableOptions;
use firstlight_lab::binaries::Profile;
use firstlight_lab::{Guest, Lab, fail_with, h100};

use crate::guest::{Attach, Boot, BootResult, boot};
use crate::steps::{Step, Steps};

/// The adapter status of a GPU that fails with `--fail-gpu`: the resource manager's "cannot initialise adapter".
const FAILURE: u32 = 0x22;

const PREPARE: Step = Step {
    name: "prepare",
    description: "download QEMU and a kernel (about 100 MB), compile the guest's programs, build its image",
    cold_seconds: 240,
};
const BOOT: Step =
    Step { name: "guest", description: "boot the guest, run the container, power off", cold_seconds: 20 };

/// Options of `run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of synthetic H100s in the guest.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(0..=8))]
    gpus: u8,
    /// How the guest attaches them.
    #[arg(long, value_enum, default_value_t = Attach::Auto)]
    attach: Attach,
    /// Number of GPUs that the container requests: the first N in PCI order [default: 2, or all if fewer].
    #[arg(long, value_name = "N")]
    request: Option<u8>,
    /// Duration of the attach of one GPU, ms.
    #[arg(long, default_value_t = 1500)]
    attach_ms: u64,
    /// Make the attach of GPU K (from 0) fail.
    #[arg(long, value_name = "K")]
    fail_gpu: Option<u8>,
    /// OCI image layout of the container [default: Debian's busybox].
    #[arg(long, value_name = "PATH")]
    image: Option<PathBuf>,
    /// A parameter to append to the guest's kernel command line; may be repeated.
    #[arg(long = "param", value_name = "NAME=VALUE")]
    parameters: Vec<String>,
    /// Keep the guest running after the container has exited, until Ctrl-C.
    #[arg(long)]
    keep: bool,
    /// Exit with 3 instead of 0 if the boot was degraded: a unit or a GPU failed.
    #[arg(long)]
    fail_on_degraded: bool,
    /// List skipped units in the boot profile.
    #[arg(long)]
    all: bool,
    /// Directory for boot-record.json, boot.svg and console.log.
    #[arg(long, default_value = "out")]
    out: PathBuf,
    /// Write the whole report to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Build the guest's programs with the release profile: smaller, and a minute longer to compile.
    #[arg(long)]
    shipped: bool,
    /// Install missing system packages without asking.
    #[arg(long)]
    yes: bool,
    /// Command to run in the container [default: a probe that tries to open every GPU; with --image its entry point].
    #[arg(last = true)]
    command: Vec<String>,
}

impl Args {
    fn profile(&self) -> Profile {
        if self.shipped { Profile::Shipped } else { Profile::Development }
    }

    fn boot(&self) -> anyhow::Result<Boot> {
        let request = self.request.unwrap_or(self.gpus.min(2));
        if request > self.gpus {
            bail!("--request {request} exceeds the guest's {} GPUs: raise --gpus or request fewer", self.gpus);
        }
        let mut devices = vec![h100(Duration::from_millis(self.attach_ms)); usize::from(self.gpus)];
        if let Some(at) = self.fail_gpu {
            match devices.get_mut(usize::from(at)) {
                Some(gpu) => fail_with(gpu, FAILURE),
                None => bail!("--fail-gpu {at}: the guest's GPUs are 0 to {}", self.gpus.saturating_sub(1)),
            }
        }
        let mut guest = Guest { devices, ..Guest::default() }.parameter(self.attach.parameter());
        guest.parameters.extend(self.parameters.iter().cloned());
        Ok(Boot {
            guest,
            devices: (0..request).map(|index| index.to_string()).collect(),
            command: match (self.command.as_slice(), &self.image) {
                ([], None) => ContainerCommand::Probe,
                ([], Some(_)) => ContainerCommand::Image,
                (arguments, _) => ContainerCommand::Arguments(arguments.to_vec()),
            },
            image: self.image.clone(),
            keep: self.keep,
        })
    }
}

/// Prepares the lab, boots the guest and prints the report.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let plan = args.boot()?;
    let mut steps = Steps::announce(&[PREPARE, BOOT]);
    let lab = steps.run(&PREPARE, |_| Ok(Lab::prepare_with(args.yes, args.profile())?))?;
    let outputs = Outputs { dir: args.out.clone(), json: args.json.clone() };
    eprintln!(
        "run: booting kernel {} with {} GPUs; the container requests {}",
        lab.image.contents.kernel_release,
        args.gpus,
        if plan.devices.is_empty() { "none".to_owned() } else { plan.devices.join(", ") }
    );
    let mut report = |progress: Progress<'_>| match progress {
        Progress::Step(text) => eprintln!("run: {text}"),
        Progress::Line(..) => println!("{progress}"),
    };
    match steps.run(&BOOT, |_| boot(&lab, &plan, &outputs, &mut report))? {
        BootResult::Interrupted(signal) => {
            print!("{}", outputs.interrupted());
            Ok(ExitCode::from(signal.exit_code()))
        }
        BootResult::Failed(error) => {
            print!("{}", outputs.failed(&error));
            Err(error.into())
        }
        BootResult::Report(report) => {
            outputs.write(&report)?;
            print!("{}", print(&report, TableOptions::stdout(args.all)));
            println!("{}", outputs.written());
            Ok(ExitCode::from(report.exit_code(args.fail_on_degraded)))
        }
    }
}
