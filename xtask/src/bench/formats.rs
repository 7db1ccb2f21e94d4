//! Boot times of one image in each format.
//!
//! All images have the files of `manifests/gpu-550.toml` and boot with one
//! synthetic H100: the real driver is loaded from the image and fails to attach
//! later, which no figure includes. Debian's kernel opens disks with dm-verity by
//! the opener, whose time is included. Formats alternate, so that temporary load
//! on the machine affects all of them.

use std::time::Duration;

use anyhow::{Context as _, bail};
use firstlight::boot::boot;
use firstlight::guest::Guest as ImageGuest;
use firstlight_boot_record::BootRecord;
use firstlight_image::BootFiles;
use firstlight_image_builder::format::Compression;
use firstlight_image_builder::image::Image;
use firstlight_image_builder::image::manifest::Format;
use firstlight_lab::formats::Packing;
use firstlight_lab::{Guest, Lab, h100};
use firstlight_vm::or_interrupted;

use super::{Figure, median};

/// The image whose files are packed.
const IMAGE: &str = "gpu-550";

/// The recommended alternative: this extension with the base image.
const EXTENSION: &str = "gpu-550-extension";

/// Timeout of a boot, for TCG and a driver that waits for a processor which synthetic GPUs lack.
const BOOT_TIMEOUT: Duration = Duration::from_mins(3);

const fn packing(format: Format, compression: Compression, verity: bool) -> Packing {
    Packing { format, compression, verity }
}

/// Formats of the single-file images to measure.
const PACKINGS: &[Packing] = &[
    packing(Format::Initramfs, Compression::Zstd, false),
    packing(Format::Initramfs, Compression::Lz4, false),
    packing(Format::Initramfs, Compression::None, false),
    packing(Format::Erofs, Compression::Lz4hc, true),
    packing(Format::Erofs, Compression::Lz4hc, false),
    packing(Format::Erofs, Compression::Zstd, true),
    packing(Format::Erofs, Compression::None, true),
    packing(Format::Squashfs, Compression::Zstd, true),
    packing(Format::Ext4, Compression::None, true),
];

/// Moments of one boot, ms since the kernel's start.
#[derive(Debug, Clone, Copy)]
struct Moments {
    pid1: f64,
    listening: f64,
    driver: f64,
}

impl Moments {
    fn of(record: &BootRecord) -> anyhow::Result<Self> {
        let listening = record.event("agent-listening").context("the agent did not listen")?.at_us;
        let unit = record.unit("modules-nvidia").context("there is no unit that loads the driver")?;
        let driver = unit.end_us.with_context(|| format!("the driver was not loaded: {}", unit.detail))?;
        let ms = |us| super::millis(0, us);
        Ok(Self { pid1: ms(record.pid1_start_us), listening: ms(listening), driver: ms(driver) })
    }
}

/// A built image and its boots.
struct Case {
    name: String,
    image: Image,
    opener: Option<Image>,
    extension: Option<Image>,
    boots: Vec<Moments>,
}

impl Case {
    fn bytes(&self) -> u64 {
        let packed = |name: &&String| name.starts_with("initrd.") || name.ends_with(".img");
        let images = std::iter::once(&self.image).chain(&self.extension);
        images.flat_map(|image| &image.contents.outputs).filter(|(name, _)| packed(name)).map(|(_, it)| it.size).sum()
    }

    fn median(&self, of: impl Fn(&Moments) -> f64) -> f64 {
        median(self.boots.iter().map(of).collect())
    }
}

fn one_boot(lab: &Lab, case: &Case) -> anyhow::Result<Moments> {
    // Keeps the GPU's server running until the end of the boot.
    let prepared = lab.guest(&Guest { devices: vec![h100(Duration::ZERO)], ..Guest::default() })?;
    let dir = |image: &Image| image.record.parent().map(std::path::Path::to_owned).unwrap_or_default();
    let extensions: Vec<_> = case.extension.iter().map(dir).collect();
    let files = BootFiles::open(&dir(&case.image), case.opener.as_ref().map(dir).as_deref(), &extensions)?;
    let guest = ImageGuest { devices: prepared.machine.devices.clone(), ..lab.toolbox.image_guest(files) };
    let machine = guest.machine()?;
    let logs = tempfile::tempdir()?;
    let log = logs.path().join("console.log");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    let report = match runtime.block_on(or_interrupted(boot(&machine, BOOT_TIMEOUT, &log))) {
        Err(signal) => bail!("interrupted by signal {}", signal.0),
        Ok(report) => report?,
    };
    let record = report
        .record
        .with_context(|| format!("PID 1 reported nothing; end of the console:\n{}", report.console_tail))?;
    Moments::of(&record).with_context(|| format!("end of the console:\n{}", report.console_tail))
}

pub(super) fn figures(lab: &Lab, boots: u8) -> anyhow::Result<Vec<Figure>> {
    let (base, extension) = (lab.shipped("base")?, lab.shipped(EXTENSION)?);
    let name = "base as initramfs zstd, driver as extension erofs lz4hc, dm-verity".to_owned();
    let mut cases = vec![Case { name, image: base, opener: None, extension: Some(extension), boots: Vec::new() }];
    for packing in PACKINGS {
        let (image, opener) = lab.in_format(IMAGE, *packing)?;
        cases.push(Case { name: packing.name(), image, opener, extension: None, boots: Vec::new() });
    }
    for turn in 1..=boots {
        for case in &mut cases {
            let moments = one_boot(lab, case).with_context(|| format!("boot {turn} with {}", case.name))?;
            let name = &case.name;
            let Moments { pid1, listening, driver } = moments;
            eprintln!(
                "bench: {turn} of {boots}: {name}: PID 1 {pid1:.0}, listening {listening:.0}, driver {driver:.0} ms"
            );
            case.boots.push(moments);
        }
    }
    println!("| format | file, MB | PID 1 starts, ms | agent listens, ms | driver loaded, ms |");
    println!("|---|---:|---:|---:|---:|");
    for case in &cases {
        let megabytes = case.bytes().div_ceil(100_000);
        println!(
            "| {} | {}.{} | {:.0} | {:.0} | {:.0} |",
            case.name,
            megabytes / 10,
            megabytes % 10,
            case.median(|boot| boot.pid1),
            case.median(|boot| boot.listening),
            case.median(|boot| boot.driver),
        );
    }
    let Some((recommended, others)) = cases.split_first() else { bail!("no format was measured") };
    let figure = |case: &Case| {
        Figure::shown(
            format!("{}: driver loaded, relative to the recommended format", case.name),
            "x",
            case.median(|boot| boot.driver) / recommended.median(|boot| boot.driver),
        )
    };
    Ok(others.iter().map(figure).collect())
}
