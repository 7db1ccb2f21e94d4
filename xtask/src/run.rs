//! `cargo xtask run`: what a newcomer types first.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use firstlight::run::{Outputs, print};
use firstlight_lab::binaries::Profile;
use firstlight_lab::{Guest, Lab, fail_with, h100};

use crate::guest::{Attach, Boot, Ended, boot};
use crate::steps::{Step, Steps};

/// The code with which `--fail-gpu` lets a GPU fail: the resource manager's "cannot initialise adapter".
const FAILURE: u32 = 0x22;

const PREPARE: Step = Step {
    name: "prepare",
    description: "download QEMU and a kernel (about 100 MB), compile the guest's programs, build its image",
    cold: 240,
};
const BOOT: Step = Step { name: "guest", description: "boot, container, power-off", cold: 20 };

/// Options of `run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Synthetic H100s in the guest.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(0..=8))]
    gpus: u8,
    /// How the guest attaches them.
    #[arg(long, value_enum, default_value_t = Attach::Auto)]
    attach: Attach,
    /// How many GPUs the container asks for: the first N in PCI order [default: 2, or as many as there are].
    #[arg(long, value_name = "N")]
    request: Option<u8>,
    /// What the attach of one GPU costs, ms.
    #[arg(long, default_value_t = 1500)]
    attach_ms: u64,
    /// Let the attach of GPU K (from 0) fail.
    #[arg(long, value_name = "K")]
    fail_gpu: Option<u8>,
    /// OCI image layout of the container [default: Debian's busybox].
    #[arg(long, value_name = "PATH")]
    image: Option<PathBuf>,
    /// Added to the guest's kernel command line; may be repeated.
    #[arg(long = "param", value_name = "NAME=VALUE")]
    parameters: Vec<String>,
    /// Leave the guest running after the container, until Ctrl-C.
    #[arg(long)]
    keep: bool,
    /// Exit with 3 instead of 0 if the boot was degraded: a unit or a GPU failed.
    #[arg(long)]
    fail_on_degraded: bool,
    /// Directory for boot-record.json, boot.svg and console.log.
    #[arg(long, default_value = "out")]
    out: PathBuf,
    /// Write the whole report here.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Build the guest's programs as they ship: smaller, and a minute longer to compile.
    #[arg(long)]
    shipped: bool,
    /// Install missing system packages without asking.
    #[arg(long)]
    yes: bool,
    /// What to run in the container instead of the default probe.
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
            bail!(
                "--request {request} asks for more than the guest's {} GPUs: raise --gpus or ask for fewer",
                self.gpus
            );
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
            command: self.command.clone(),
            image: self.image.clone(),
            keep: self.keep,
        })
    }
}

/// Prepares, boots, shows.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let plan = args.boot()?;
    let mut steps = Steps::announce(&[PREPARE, BOOT]);
    let lab = steps.run(&PREPARE, |_| Ok(Lab::prepare_with(args.yes, args.profile())?))?;
    let outputs = Outputs { dir: args.out.clone(), json: args.json.clone() };
    eprintln!(
        "run: booting kernel {} with {} GPUs; the container asks for {}",
        lab.image.contents.kernel_release,
        args.gpus,
        if plan.devices.is_empty() { "none".to_owned() } else { plan.devices.join(", ") }
    );
    let mut say = |line: &str| eprintln!("run: {line}");
    match steps.run(&BOOT, |_| boot(&lab, &plan, &outputs, &mut say))? {
        Ended::Interrupted(signal) => {
            print!("{}", outputs.interrupted());
            Ok(ExitCode::from(signal.exit_code()))
        }
        Ended::Failed(error) => {
            print!("{}", outputs.failed(&error));
            Err(error.into())
        }
        Ended::Report(report) => {
            outputs.write(&report)?;
            print!("{}", print(&report));
            println!("{}", outputs.written());
            Ok(ExitCode::from(report.exit_code(args.fail_on_degraded)))
        }
    }
}
