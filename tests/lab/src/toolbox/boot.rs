//! Boots of images in the lab's QEMU.

use std::path::Path;

use firstlight_image_builder::boot::Boot;
use firstlight_vm::Accelerator;

use super::Toolbox;

impl Toolbox {
    /// Returns a boot of the image whose build results are in `dir`, without extensions or devices.
    #[must_use]
    pub fn boot(&self, dir: &Path) -> Boot {
        Boot {
            dir: dir.to_owned(),
            opener: None,
            extensions: Vec::new(),
            append: String::new(),
            memory_mib: 2048,
            cpus: 2,
            accelerator: Accelerator::detect(),
            qemu: self.qemu.clone(),
            vhost_vsock: self.vhost_device_vsock.clone(),
            devices: Vec::new(),
        }
    }
}
