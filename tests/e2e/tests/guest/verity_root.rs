//! Guests whose root is a dm-verity disk, which `firstlight-opener` opens before PID 1 starts.

use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::Duration;

use firstlight_boot_record::State;
use firstlight_e2e::{Scenario, lab};
use firstlight_image_builder::image::Image;
use firstlight_lab::Guest;
use firstlight_vm::Device;
use tokio::time::timeout;

/// Timeout for a guest that powers off by itself.
const TIMEOUT: Duration = Duration::from_mins(2);

/// Returns a scenario with this disk and the command line from the image's record.
fn scenario(image: &Image, disk: &Path) -> Scenario {
    let opener = lab().opener().unwrap();
    let guest = Guest {
        initrd: Some(opener.initrd),
        hardware: vec![Device::ReadOnlyDisk { file: disk.to_owned() }],
        ..Guest::default()
    };
    Scenario::guest(guest).parameter(image.contents.command_line.as_ref().unwrap())
}

/// Copies the disk and flips one bit of the byte at `at`.
pub(crate) fn corrupted(image: &Image, dir: &Path, at: u64) -> std::path::PathBuf {
    let copy = dir.join(format!("disk-{at}"));
    fs::copy(image.disk.as_ref().unwrap(), &copy).unwrap();
    let mut file = fs::File::options().read(true).write(true).open(&copy).unwrap();
    let mut byte = [0];
    file.seek(SeekFrom::Start(at)).unwrap();
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte[0] ^ 1]).unwrap();
    copy
}

/// Boots the guest until it powers off by itself; returns its console output.
pub(crate) fn console_until_power_off(scenario: &Scenario) -> String {
    let mut ended = false;
    let console = scenario.watched(async |vm| ended = timeout(TIMEOUT, vm.wait()).await.is_ok());
    assert!(ended, "the guest powers off by itself: {console}");
    console
}

#[test]
fn container_runs_on_a_verity_root() {
    let image = lab().disk().unwrap();
    let (report, console) = scenario(&image, image.disk.as_ref().unwrap()).go_with_console();
    let report = report.unwrap_or_else(|error| unreachable!("{error}: {console}"));
    assert_eq!(report.container.exit_code, Some(0), "{:?}", report.container);
    assert_eq!(report.boot_record.state, State::PoweringOff);
    let root_hash = &image.contents.verity.as_ref().unwrap().root_hash;
    assert!(console.contains(&format!("root /dev/dm-0 (erofs, verified by {root_hash}) after ")), "{console}");
}

#[test]
fn corrupted_superblock_or_hash_tree_is_rejected() {
    let image = lab().disk().unwrap();
    let verity = image.contents.verity.clone().unwrap();
    let dir = tempfile::tempdir().unwrap();
    // The superblock of the file system; the top of the hash tree, which is its first block.
    for at in [verity.data_offset + 1024, verity.hash_offset + 7] {
        let disk = corrupted(&image, dir.path(), at);
        let console = console_until_power_off(&scenario(&image, &disk));
        for expected in
            ["firstlight-opener: cannot mount /dev/dm-0 as erofs", "does not match the root hash", "powering off"]
        {
            assert!(console.contains(expected), "byte {at}: {expected}: {console}");
        }
        assert!(!console.contains("firstlight: "), "PID 1 was not started: {console}");
    }
}

/// Returns the offset of a file's first block on the image's disk.
fn offset_of(image: &Image, file: &Path) -> u64 {
    let (disk, file) = (fs::read(image.disk.as_ref().unwrap()).unwrap(), fs::read(file).unwrap());
    // Files start at block boundaries, and the first block of a program is unique.
    let found = disk.chunks_exact(4096).position(|block| block == &file[..4096]).unwrap();
    (found * 4096) as u64
}

#[test]
fn corrupted_program_is_detected_when_read() {
    let image = lab().plain_disk().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let at = offset_of(&image, &lab().binaries.agent);
    let block = (at - image.contents.verity.as_ref().unwrap().data_offset) / 4096;
    let disk = corrupted(&image, dir.path(), at + 4000);
    let console = console_until_power_off(&scenario(&image, &disk));
    // The kernel's message, and PID 1's with the object, the step, and the next thing to check.
    let kernel = format!("data block {block} is corrupted");
    let ours = "unit agent: cannot start /usr/bin/firstlight-agent: Input/output error (os error 5); its disk cannot be \
                read or is not what its hash tree says";
    for expected in [&kernel[..], ours, "image-builder verify", "poweroff"] {
        assert!(console.contains(expected), "{expected}: {console}");
    }
}

#[test]
fn wrong_root_hash_and_missing_disk_are_reported() {
    let image = lab().disk().unwrap();
    let disk = image.disk.clone().unwrap();
    let hash = image.contents.verity.as_ref().unwrap().root_hash.clone();
    let other = if hash.starts_with('0') { "1" } else { "0" };
    let mut scenario = scenario(&image, &disk);
    for parameter in &mut scenario.guest.parameters {
        *parameter = parameter.replace(&hash, &format!("{other}{}", &hash[1..]));
    }
    let console = console_until_power_off(&scenario);
    assert!(console.contains("does not match the root hash"), "{console}");

    scenario.guest.hardware.clear();
    let console = console_until_power_off(&scenario);
    assert!(
        console.contains("firstlight-opener: /dev/vda1 did not appear within 10 s; block devices are: none"),
        "{console}"
    );
}
