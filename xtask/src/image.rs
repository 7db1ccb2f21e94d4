//! `cargo xtask image`: builds the release images of `manifests/`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use firstlight::boot::{self, BootReport};
use firstlight_boot_profile::{TableOptions, table};
use firstlight_image::BootFiles;
use firstlight_image_builder::image::Image;
use firstlight_image_builder::image::locked::{self, Task, Verdict};
use firstlight_lab::binaries::{ServicePrograms, gpu_settings, static_program, workspace};
use firstlight_lab::shipped::Programs;
use firstlight_lab::{Lab, Toolbox, cache_root, shipped};
use firstlight_vm::or_interrupted;

/// Timeout of a boot, for TCG on a busy machine.
const BOOT_TIMEOUT: Duration = Duration::from_mins(2);

/// Options of `image`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Images to build, such as base or gpu-550 [default: all that need no separately supplied archive].
    names: Vec<String>,
    /// A value for ${NAME} in the manifests, such as the path of an archive; may be repeated.
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = assignment)]
    set: Vec<(String, String)>,
    /// Output directory; each image gets a subdirectory of its name.
    #[arg(long, value_name = "DIR", default_value = "out/images")]
    out: PathBuf,
    /// Write a lock file NAME.lock to each image's directory: all inputs, with their hashes.
    #[arg(long, conflicts_with = "locked")]
    lock: bool,
    /// Build from exactly the inputs in DIR/NAME.lock or DIR/NAME/NAME.lock.
    #[arg(long, value_name = "DIR")]
    locked: Option<PathBuf>,
    /// Boot each image in the lab's QEMU and print its boot record.
    #[arg(long)]
    boot: bool,
    /// Install missing system packages without asking.
    #[arg(long)]
    yes: bool,
}

fn assignment(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

/// Builds our programs and the images, and prints the images' sizes.
pub(crate) fn image(args: &Args) -> anyhow::Result<ExitCode> {
    let all = shipped::all().context("list the directory manifests")?;
    if let Some(unknown) = args.names.iter().find(|name| !all.contains(name)) {
        bail!("there is no manifests/{unknown}.toml; there are: {}", all.join(", "));
    }
    let free = shipped::names().context("read the directory manifests")?;
    let names = if args.names.is_empty() { &free } else { &args.names };
    // Reports missing values before the programs are built, which takes minutes.
    let none = Programs {
        init: "/init".into(),
        agent: "/agent".into(),
        gpu_settings: "/gpu-settings".into(),
        service: Some(ServicePrograms { partitiond: "/fm-partitiond".into(), fmctl: "/fmctl".into() }),
    };
    for name in names {
        shipped::manifest_with(name, &none, args.set.iter().cloned().collect())?;
    }
    Lab::install_packages(args.yes)?;
    eprintln!("xtask: building the guest's programs");
    let programs = Programs {
        init: static_program(&workspace(), "firstlight-init", "firstlight-init")?,
        agent: static_program(&workspace(), "firstlight-agent", "firstlight-agent")?,
        gpu_settings: gpu_settings(&workspace())?,
        service: names
            .iter()
            .any(|name| name.starts_with("service-vm"))
            .then(|| ServicePrograms::build(&workspace()))
            .transpose()?,
    };
    let cache = cache_root()?;
    let toolbox = args.boot.then(|| Toolbox::prepare(&cache, shipped::progress())).transpose()?;
    let (mut lines, mut boots) = (Vec::new(), Vec::new());
    for name in names {
        let image = build_image(args, name, &programs, &cache)?;
        let contents = &image.contents;
        let packed = contents.outputs.iter().find(|(file, _)| file.starts_with("initrd") || file.ends_with(".img"));
        let (file, bytes) = packed.map_or(("", 0), |(file, bytes)| (file.as_str(), bytes.size));
        let driver = contents.driver.as_ref().map_or("", |driver| &driver.version);
        let (raw, release) = (contents.file_bytes, &contents.kernel_release);
        if let Some(toolbox) = toolbox.as_ref().filter(|_| contents.extension.is_none()) {
            boots.push((name, boot_image(toolbox, &args.out.join(name))?));
        }
        lines.push(format!("| {name} | {release} | {driver} | `{file}` | {bytes} | {raw} |"));
    }
    println!("| image | kernel | driver | file | bytes | bytes unpacked |");
    println!("|---|---|---|---|---:|---:|");
    for line in &lines {
        println!("{line}");
    }
    let mut all_ready = true;
    for (name, report) in boots {
        println!("\n{name}:");
        match &report.record {
            Some(record) => print!("{}", table(record, TableOptions::stdout(false))),
            None => println!("{}", report.console_tail),
        }
        all_ready &= report.is_ready();
    }
    Ok(if all_ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds an image; writes its lock file, or builds from one, if requested.
fn build_image(args: &Args, name: &str, programs: &Programs, cache: &Path) -> anyhow::Result<Image> {
    let out = args.out.join(name);
    let (progress, file) = (shipped::progress(), format!("{name}.lock"));
    let variables = args.set.iter().cloned().collect();
    if !args.lock && args.locked.is_none() {
        let manifest = shipped::manifest_with(name, programs, variables)?;
        return Ok(shipped::build(&manifest, &out, cache, progress)?);
    }
    let lock = match &args.locked {
        None => out.join(&file),
        Some(dir) => {
            let places = [dir.join(&file), dir.join(name).join(&file)];
            let there = places.iter().find(|place| place.is_file());
            there
                .with_context(|| format!("there is neither {} nor {}", places[0].display(), places[1].display()))?
                .clone()
        }
    };
    let manifest = shipped::path(name);
    let variables = &shipped::with_programs(programs, variables);
    let task = Task { manifest: &manifest, variables, out: &out, cache, lock: &lock, progress };
    if args.locked.is_none() {
        return Ok(locked::lock(&task)?.0);
    }
    let (image, verdict) = locked::build_locked(&task)?;
    match verdict {
        Verdict::Same => {
            progress.say(format_args!("{name}: byte for byte identical to the image of {}", lock.display()))
        }
        Verdict::DifferentInputs(which) => {
            progress.say(format_args!("{name}: differs from the image of {}: {which}", lock.display()))
        }
    }
    Ok(image)
}

fn boot_image(toolbox: &Toolbox, dir: &Path) -> anyhow::Result<BootReport> {
    let machine = toolbox.image_guest(BootFiles::open(dir, None, &[])?).machine()?;
    let log = dir.join("console.log");
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start tokio")?;
    match runtime.block_on(or_interrupted(boot::boot(&machine, BOOT_TIMEOUT, &log))) {
        Err(signal) => bail!("interrupted by signal {}", signal.0),
        Ok(report) => Ok(report?),
    }
}
