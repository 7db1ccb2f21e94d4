//! One image in every format, for the boot cost of each.

use firstlight_image_builder::build::{self, Image};
use firstlight_image_builder::format::Compression;
use firstlight_image_builder::manifest::{Format, Manifest, Variables, Verity};
use firstlight_image_builder::packages::Packages;

use crate::binaries::{static_program, workspace};
use crate::lab::{Lab, LabError, output, progress};
use crate::shipped;

/// A way to pack an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Its format.
    pub format: Format,
    /// How it is compressed.
    pub compression: Compression,
    /// Whether its blocks are verified; a disk's can be.
    pub verity: bool,
}

impl Packing {
    /// In words: `erofs lz4hc, dm-verity`.
    #[must_use]
    pub fn name(&self) -> String {
        let verity = if self.verity { ", dm-verity" } else { "" };
        format!("{} {}{verity}", self.format.name(), self.compression.name())
    }

    fn file_name(&self) -> String {
        let verity = if self.verity { "-verity" } else { "" };
        format!("{}-{}{verity}", self.format.name(), self.compression.name())
    }
}

impl Lab {
    /// An image of the directory `manifests` in another packing; for a disk, the
    /// opener beside it.
    ///
    /// # Errors
    /// The manifest is wrong, a package cannot be had, or an image does not build.
    pub fn in_format(&self, name: &str, packing: Packing) -> Result<(Image, Option<Image>), LabError> {
        let manifest = self.manifest_in_format(name, packing)?;
        let out = output().join("formats").join(format!("{name}-{}", packing.file_name()));
        let image = shipped::build(&manifest, &out, &self.cache, progress())?;
        let opener = match packing.format {
            Format::Initramfs => None,
            Format::Erofs | Format::Squashfs | Format::Ext4 => Some(self.opener_for(packing.format)?),
        };
        Ok((image, opener))
    }

    /// The manifest of an image of the directory `manifests` in another packing.
    ///
    /// # Errors
    /// The manifest is wrong.
    pub fn manifest_in_format(&self, name: &str, packing: Packing) -> Result<Manifest, LabError> {
        let mut manifest = shipped::manifest(name, &self.programs()?)?;
        if let Some(driver) = &mut manifest.driver {
            driver.untried = true;
        }
        // What ships has a budget in its own format.
        manifest.budget = None;
        manifest.image.format = packing.format;
        manifest.image.compression = Some(packing.compression);
        manifest.verity = packing.verity.then(Verity::default);
        Ok(manifest)
    }

    /// The opener as it ships, with this file system instead of EROFS.
    fn opener_for(&self, format: Format) -> Result<Image, LabError> {
        let program = static_program(&workspace(), "firstlight-opener", "firstlight-opener")?;
        let variables = Variables::from([("OPENER".to_owned(), program.display().to_string())]);
        let file = workspace().join("image-builder/manifests/opener.toml");
        let mut manifest = Manifest::read(&file, &variables).map_err(build::Error::from)?;
        for module in manifest.kernel.modules.iter_mut().filter(|module| *module == "erofs") {
            format.name().clone_into(module);
        }
        let mut packages = Packages::new(&self.cache, None, progress());
        let out = output().join("formats").join(format!("opener-{}", format.name()));
        Ok(build::build_from(&manifest, &mut packages, &out)?)
    }
}
