//! Images with a compressed initramfs, unpacked by a real kernel.

use std::fs;

use firstlight_boot_record::State;
use firstlight_e2e::{Scenario, lab};
use firstlight_image_builder::format::Compression;
use firstlight_lab::Guest;

fn boots(compression: Compression) {
    let image = lab().packed(compression).unwrap();
    let (packed, plain) =
        (fs::metadata(&image.initrd).unwrap().len(), fs::metadata(&lab().image.initrd).unwrap().len());
    assert!(packed < plain * 3 / 4, "{packed} of {plain} bytes");
    assert_eq!(image.contents.files, lab().image.contents.files);
    let report = Scenario::guest(Guest { initrd: Some(image.initrd), ..Guest::default() }).go().unwrap();
    assert_eq!(report.container.exit_code, Some(0), "{:?}", report.container);
    assert_eq!(report.boot_record.state, State::PoweringOff);
}

#[test]
fn guest_boots_from_an_lz4_initramfs() {
    boots(Compression::Lz4);
}

#[test]
fn guest_boots_from_a_zstd_initramfs() {
    boots(Compression::Zstd);
}
