//! Images in the lab's QEMU.

use std::path::Path;

use firstlight_image_builder::boot::Boot;
use firstlight_vm::Accelerator;

use super::Toolbox;

impl Toolbox {
    /// A boot of the image whose results are in `folder`, with nothing beside it.
    #[must_use]
    pub fn boot(&self, folder: &Path) -> Boot {
        Boot {
            folder: folder.to_owned(),
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
