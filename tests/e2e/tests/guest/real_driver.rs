//! The images of `manifests/` with NVIDIA's real driver, in guests of the lab.
//!
//! The lab has no real GPU. A synthetic GPU has only the PCI identity of one:
//! the real driver loads, binds to it as an H100, and fails when it waits for
//! the GPU's processors. Everything that PID 1 depends on happens before that:
//! modules, nodes, the non-blocking open, its result, the driver's messages in
//! the kernel log.
//!
//! The first run on a machine compiles two drivers and reports it.

use std::fs;
use std::sync::LazyLock;

use firstlight_boot_record::{BootRecord, Gpu, GpuPhase, Outcome, State};
use firstlight_e2e::{gpu, lab};
use firstlight_image_builder::image::Image;
use firstlight_vm::Device;

use crate::gpu_hotplug::container;
use crate::support::{Files, output, ready, refused};

/// Script of a container without GPUs: prints the loaded driver.
const LOOK: &str = "cd /sys/module/nvidia 2>/dev/null || { echo no driver; exit 0; }; \
    cat version srcversion coresize; test -d /sys/module/nvidia_uvm && echo with uvm; ls /dev | grep nvidia; echo end";

/// Minimum size of the real module in memory; the stand-in has a few thousand bytes.
const REAL_BYTES: u64 = 4_000_000;

static BASE: LazyLock<Image> = LazyLock::new(|| built("base"));
static GPU_550: LazyLock<Image> = LazyLock::new(|| built("gpu-550"));
static GPU_535: LazyLock<Image> = LazyLock::new(|| built("gpu-535"));
static GPU_550_EXTENSION: LazyLock<Image> = LazyLock::new(|| built("gpu-550-extension"));
static GPU_535_EXTENSION: LazyLock<Image> = LazyLock::new(|| built("gpu-535-extension"));

fn built(name: &str) -> Image {
    let image = lab().shipped(name).unwrap();
    let packed = fs::metadata(image.disk.as_ref().unwrap_or(&image.initrd)).unwrap().len();
    println!("  {name}: {packed} bytes, {} in files", image.contents.file_bytes);
    image
}

/// What was observed of a guest that has booted.
struct Boot {
    image: &'static Image,
    record: BootRecord,
    /// Standard output of a container without GPUs.
    seen: String,
    /// The error of a request for the first GPU.
    refusal: String,
    console: String,
}

fn boot(image: &'static Image, devices: &[&str], state: State) -> Boot {
    boot_with(image, None, devices, state)
}

fn boot_with(image: &'static Image, extension: Option<&'static Image>, devices: &[&str], state: State) -> Boot {
    let files = Files::make();
    let disk =
        |image: &Image| Device::Extension { file: image.disk.clone().unwrap(), serial: "extension-gpu".to_owned() };
    let mut scenario = files.scenario_of(image.initrd.clone(), extension.map(disk).into_iter().collect());
    let parameter = extension.and_then(|image| image.contents.command_line.clone());
    scenario.guest.parameters.extend(parameter);
    scenario.guest.kernel = Some(image.kernel.clone());
    scenario.guest.devices = devices.iter().map(|device| device.parse().unwrap()).collect();
    let (mut record, mut seen, mut refusal) = (None, String::new(), String::new());
    let console = scenario.watched(async |vm| {
        let agent = ready(vm).await;
        seen = output(&agent, &files.request("c1", LOOK, &[])).await;
        refusal = refused(&agent, &container(&files, "c2", "0")).await;
        record = vm.console().record();
    });
    let record = record.unwrap();
    assert_eq!(record.state, state, "{console}");
    Boot { image: extension.unwrap_or(image), record, seen, refusal, console }
}

impl Boot {
    fn only_gpu(&self) -> &Gpu {
        assert_eq!(self.record.gpus.len(), 1);
        let gpu = gpu(&self.record, 0);
        assert_eq!(gpu.phase, GpuPhase::Failed, "{gpu:?}");
        assert!(gpu.detail.starts_with("0000:01:00.0: "), "{gpu:?}");
        println!("  {}", gpu.detail);
        // A request for the GPU returns the same detail.
        let refusal = self.refusal.replace(r#"\""#, "\"");
        assert!(refusal.contains(&gpu.detail), "{refusal}");
        gpu
    }

    /// Asserts that the loaded driver is the real one of this version, not the stand-in.
    fn assert_driver(&self, version: &str) {
        assert_eq!(self.image.contents.driver.as_ref().unwrap().version, version);
        let driver = self.record.unit("modules-nvidia").unwrap();
        assert_eq!(driver.outcome, Outcome::Ok, "{driver:?}");
        assert!(!driver.detail.contains("no module"), "no dependency is missing: {driver:?}");
        let hello = format!("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {version}  ");
        assert!(self.console.contains(&hello), "{hello} in\n{}", self.console);
        // The driver's files come from the image's own CDI file, not from a search.
        let place = self.image.contents.extension.as_ref().map_or("", |_| "/run/kata-extensions/gpu");
        let nodes = self.record.unit("nodes").unwrap();
        let said = format!("the driver's files as {place}/etc/cdi/nvidia-driver-{version}.json has them");
        assert!(nodes.detail.contains(&said), "{said} in {nodes:?}");
        let seen: Vec<&str> = self.seen.lines().collect();
        assert_eq!(seen.len(), 5, "{seen:?}");
        let (source, bytes) = (seen[1], seen[2]);
        assert_eq!((seen[0], &seen[3..]), (version, &["with uvm", "end"][..]), "{seen:?}");
        assert!(bytes.parse::<u64>().unwrap() > REAL_BYTES, "{seen:?}");
        let stand_in = fs::read(&lab().stand_in.nvidia_ko).unwrap();
        assert!(!stand_in.windows(source.len()).any(|part| part == source.as_bytes()), "{source} is the stand-in's");
    }
}

#[test]
fn guest_without_a_gpu_does_not_load_the_driver_and_runs_containers() {
    let boot = boot(&GPU_550, &[], State::Ready);
    let record = &boot.record;
    let mode = record.mode.as_ref().unwrap();
    assert_eq!((mode.name.as_str(), mode.reason.as_str()), ("cpu", "GPUs on the PCI bus: 0, NVSwitches: 0"));
    assert_eq!(record.unit("modules-nvidia").unwrap().outcome, Outcome::Skipped);
    assert!(record.gpus.is_empty() && !boot.console.contains("NVRM"), "{}", boot.console);
    assert_eq!(boot.seen, "no driver\n");
}

#[test]
fn driver_550_fails_its_non_blocking_open_and_its_message_is_reported() {
    let boot = boot(&GPU_550, &["h100"], State::Degraded);
    boot.assert_driver("550.163.01");
    let gpu = boot.only_gpu();
    assert_eq!((gpu.step.as_str(), gpu.attempts), ("wait-open-complete", 2), "{gpu:?}");
    let driver = gpu.driver.unwrap();
    assert!(driver.rc < 0 && driver.adapter_status != 0, "{gpu:?}");
    for part in ["driver's last message", "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x"] {
        assert!(gpu.detail.contains(part), "{part} in {gpu:?}");
    }
}

#[test]
fn driver_550_in_an_extension_fails_as_in_an_image() {
    let boot = boot_with(&BASE, Some(&GPU_550_EXTENSION), &["h100"], State::Degraded);
    boot.assert_driver("550.163.01");
    let gpu = boot.only_gpu();
    assert_eq!((gpu.step.as_str(), gpu.attempts), ("wait-open-complete", 2), "{gpu:?}");
    assert!(gpu.detail.contains("RmInitAdapter failed! (0x"), "{gpu:?}");
    assert!(!boot.console.contains("Direct firmware load for nvidia/"), "{}", boot.console);
}

#[test]
fn driver_535_fails_its_blocking_open_and_its_message_is_reported() {
    let boot = boot(&GPU_535, &["h100"], State::Degraded);
    boot.assert_driver("535.261.03");
    let gpu = boot.only_gpu();
    assert_eq!((gpu.step.as_str(), gpu.attempts, gpu.driver), ("open", 2, None), "{gpu:?}");
    for part in ["the driver could not initialise the GPU", "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x"] {
        assert!(gpu.detail.contains(part), "{part} in {gpu:?}");
    }
}

#[test]
fn driver_535_in_an_extension_fails_as_in_an_image() {
    let boot = boot_with(&BASE, Some(&GPU_535_EXTENSION), &["h100"], State::Degraded);
    boot.assert_driver("535.261.03");
    let gpu = boot.only_gpu();
    assert_eq!((gpu.step.as_str(), gpu.attempts, gpu.driver), ("open", 2, None), "{gpu:?}");
}

#[test]
fn gpu_unsupported_by_the_open_modules_is_reported_with_the_drivers_message() {
    let boot = boot(&GPU_550, &["p100"], State::Degraded);
    assert_eq!(boot.record.unit("modules-nvidia").unwrap().outcome, Outcome::Failed);
    let gpu = boot.only_gpu();
    assert_eq!((gpu.step.as_str(), gpu.attempts), ("module", 0), "{gpu:?}");
    assert!(gpu.detail.contains("modules-nvidia failed"), "{gpu:?}");
    let expected =
        "0000:01:00.0 (PCI ID: 10de:15f8) installed in this system is not supported by open nvidia.ko because";
    assert!(gpu.detail.contains(expected), "{expected} in {gpu:?}");
    assert_eq!(boot.seen, "no driver\n");
}

#[test]
fn image_without_a_driver_is_small_and_runs_containers() {
    let boot = boot(&BASE, &[], State::Ready);
    let packed = fs::metadata(&boot.image.initrd).unwrap().len();
    assert!(packed <= 12_000_000, "{packed} bytes");
    assert_eq!(boot.image.contents.driver, None);
}
