//! Guests whose driver is in an extension, a disk verified by dm-verity.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use firstlight_boot_record::{BootRecord, GpuPhase, Outcome, State};
use firstlight_e2e::{gpu, lab};
use firstlight_image_builder::image::Image;
use firstlight_lab::h100;
use firstlight_vm::Device;
use tokio::time::timeout;

use crate::gpu_hotplug::container;
use crate::support::{Files, output, ready, refused};
use crate::verity_root::{console_until_power_off, corrupted};

static BASE: LazyLock<Image> = LazyLock::new(|| lab().variant("without-nvidia").unwrap());
static GPU: LazyLock<Image> = LazyLock::new(|| lab().extension().unwrap());

/// Script of a container with the GPU: prints the driver's files and opens the GPU.
const LOOK: &str =
    "cat /usr/lib64/libcuda.so.1; /usr/bin/nvidia-smi; ls -d /run/kata-extensions; : < /dev/nvidia0 && echo opened";

fn parameter() -> String {
    GPU.contents.command_line.clone().unwrap()
}

fn extension(disk: &Path, serial: &str) -> Device {
    Device::Extension { file: disk.to_owned(), serial: serial.to_owned() }
}

/// Returns the extension's unmodified disk.
fn disk() -> PathBuf {
    GPU.disk.clone().unwrap()
}

/// Returns a scenario of an image without a driver, with one GPU and these disks.
fn scenario(files: &Files, disks: Vec<Device>) -> firstlight_e2e::Scenario {
    let mut scenario = files.scenario_of(BASE.initrd.clone(), disks);
    scenario.guest.devices = vec![h100(Duration::from_millis(300))];
    scenario
}

/// Boots a guest that must reject its extension and power off; returns its console output.
fn rejected(disks: Vec<Device>, parameters: &[String]) -> String {
    let files = Files::make();
    let mut scenario = scenario(&files, disks);
    scenario.guest.parameters.extend_from_slice(parameters);
    console_until_power_off(&scenario)
}

#[test]
fn gpu_works_with_the_driver_of_an_extension() {
    let files = Files::make();
    // Another disk precedes it, because the extension is found by its serial number.
    let disks = vec![Device::Disk { file: files.disk("other") }, extension(&disk(), "extension-gpu")];
    let scenario = scenario(&files, disks).parameter(&parameter()).parameter("firstlight.gpu-power-limit=500");
    let (mut record, mut said) = (None, String::new());
    let console = scenario.watched(async |vm| {
        let agent = ready(vm).await;
        let mut request = container(&files, "c1", "0");
        let spec = request.OCI.mut_or_insert_default();
        spec.Process.mut_or_insert_default().Args = ["/bin/sh", "-c", LOOK].map(str::to_owned).into();
        spec.Process.mut_or_insert_default().Env.push("NVIDIA_DRIVER_CAPABILITIES=all".to_owned());
        said = output(&agent, &request).await;
        record = vm.console().record();
    });
    let record: BootRecord = record.unwrap();
    assert_eq!((record.state, gpu(&record, 0).phase), (State::Ready, GpuPhase::Ready), "{console}");
    let root_hash = &GPU.contents.verity.as_ref().unwrap().root_hash;
    let unit = record.unit("extensions").unwrap();
    let expected = format!("gpu: disk vdb, verified by {root_hash}, on /run/kata-extensions/gpu");
    assert!(unit.outcome == Outcome::Ok && unit.detail.starts_with(&expected), "{unit:?}");
    assert_eq!(record.unit("extension-disks").unwrap().outcome, Outcome::Ok);
    assert!(record.unit("modules-nvidia").unwrap().detail.contains("nvidia-uvm "), "{record:?}");
    // A program that links to libraries of the extension and loads another with dlopen.
    assert_eq!(record.unit("gpu-settings").unwrap().outcome, Outcome::Ok, "{record:?}");
    assert!(console.contains("gpu-settings: stand-in NVML: 0000:01:00.0 power 500000"), "{console}");
    let library = "\u{7f}ELF\u{2} libcuda of the extension\n";
    assert_eq!(said, format!("{library}nvidia-smi of the extension\nopened\n"), "{console}");
}

#[test]
fn corrupted_extension_is_rejected_by_name() {
    let verity = GPU.contents.verity.clone().unwrap();
    let dir = tempfile::tempdir().unwrap();
    // The superblock of the file system; the top of the hash tree, which is its first block.
    for at in [verity.data_offset + 1024, verity.hash_offset + 7] {
        let disk = corrupted(&GPU, dir.path(), at);
        let console = rejected(vec![extension(&disk, "extension-gpu")], &[parameter()]);
        for expected in ["extension gpu: cannot mount /dev/dm-0 (disk vda)", "does not match the root hash"] {
            assert!(console.contains(expected), "byte {at}: {expected}: {console}");
        }
    }
}

#[test]
fn corrupted_driver_module_is_not_loaded() {
    let (module, bytes) = (fs::read(&lab().stand_in.nvidia_ko).unwrap(), fs::read(disk()).unwrap());
    // The disk is compressed; strings that occur for the first time are stored literally, so the module can be located.
    let mut parts = module.chunks_exact(12).filter(|part| part.iter().all(u8::is_ascii_graphic));
    let at = parts.find_map(|part| bytes.windows(part.len()).position(|bytes| bytes == part));
    let at = u64::try_from(at.unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let disk = corrupted(&GPU, dir.path(), at);
    let files = Files::make();
    let scenario = scenario(&files, vec![extension(&disk, "extension-gpu")]).parameter(&parameter());
    let mut record = None;
    let console = scenario.watched(async |vm| {
        let agent = ready(vm).await;
        let refusal = refused(&agent, &container(&files, "c1", "0")).await;
        assert!(refusal.contains("modules-nvidia failed"), "{refusal}");
        record = vm.console().record();
    });
    let record: BootRecord = record.unwrap();
    let unit = record.unit("modules-nvidia").unwrap();
    assert!(
        unit.outcome == Outcome::Failed && unit.detail.contains("/run/kata-extensions/gpu/lib/modules"),
        "{unit:?}"
    );
    assert!(console.contains("device-mapper: verity"), "the kernel names the block: {console}");
}

#[test]
fn extension_with_a_wrong_root_hash_is_rejected_by_name() {
    let hash = GPU.contents.verity.as_ref().unwrap().root_hash.clone();
    let other = if hash.starts_with('0') { "1" } else { "0" };
    let parameter = parameter().replace(&hash, &format!("{other}{}", &hash[1..]));
    let console = rejected(vec![extension(&disk(), "extension-gpu")], &[parameter]);
    assert!(console.contains("extension gpu: cannot mount /dev/dm-0 (disk vda)"), "{console}");
    assert!(console.contains("does not match the root hash"), "{console}");
}

#[test]
fn extension_without_disk_or_without_parameters_is_rejected() {
    let console = rejected(Vec::new(), &[parameter()]);
    let expected = "extension gpu: no disk with the serial number extension-gpu appeared within 10 s; disks are: none";
    assert!(console.contains(expected), "{console}");

    let console = rejected(vec![extension(&disk(), "extension-gpu")], &[]);
    assert!(
        console.contains("disk vda says that it is extension \"gpu\", and the kernel command line has no"),
        "{console}"
    );
}

#[test]
fn invalid_parameters_and_a_disk_without_hash_tree_are_rejected() {
    let bare = vec![extension(&disk(), "extension-gpu")];
    let good = parameter();
    let console = rejected(bare.clone(), &[good.replace("extension.gpu.", "extension.GPU.")]);
    assert!(
        console.contains(
            "kernel parameter \"kata.extension.GPU.verity_params\": invalid extension name; expected 1 to 10 of"
        ),
        "{console}"
    );
    let console = rejected(bare, &["kata.extension.gpu.verity_params=root_hash=x".to_owned()]);
    assert!(console.contains("extension gpu: invalid dm-verity parameters: root_hash:"), "{console}");

    let files = Files::make();
    let half = files.path("half");
    let mut bytes = fs::read(disk()).unwrap();
    // The partition table's second entry.
    bytes[446 + 16..446 + 32].fill(0);
    fs::write(&half, bytes).unwrap();
    let console = rejected(vec![extension(&half, "extension-gpu")], &[good]);
    assert!(console.contains("extension gpu: disk vda has no partition 2 (the hash tree)"), "{console}");
}

#[test]
fn guest_held_after_a_rejected_extension_loads_no_driver() {
    let files = Files::make();
    let mut scenario = scenario(&files, vec![extension(&disk(), "extension-gpu")]);
    scenario.guest.parameters.push("firstlight.on-failure=hold".to_owned());
    let mut held = false;
    let console = scenario.watched(async |vm| {
        let failed = |record: &BootRecord| record.state == State::Failed;
        held = timeout(Duration::from_secs(90), vm.console().wait_for(failed)).await.is_ok_and(|seen| seen);
    });
    assert!(held, "{console}");
    assert!(!console.contains("NVRM:"), "no driver is loaded: {console}");
}
