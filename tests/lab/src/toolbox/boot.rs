//! Guests of built images with the lab's QEMU.

use firstlight::guest::Guest;
use firstlight_image::BootFiles;
use firstlight_vm::{Accelerator, Tool};

use super::Toolbox;

impl Toolbox {
    /// Returns a guest of an image, without devices.
    #[must_use]
    pub fn image_guest(&self, files: BootFiles) -> Guest {
        Guest {
            files,
            memory_mib: 2048,
            cpus: 2,
            accelerator: Accelerator::detect(),
            qemu: self.qemu.clone(),
            vhost_vsock: self.vhost_device_vsock.clone(),
            // A boot without a container shares no directory.
            virtiofsd: Tool::plain("virtiofsd"),
            devices: Vec::new(),
        }
    }
}
