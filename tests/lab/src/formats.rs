//! Builds one image in every format, to compare their boot times.

use firstlight_image_builder::format::Compression;
use firstlight_image_builder::image::manifest::{Format, Manifest, Variables, Verity};
use firstlight_image_builder::image::{self, Image};
use firstlight_image_builder::packages::Packages;

use crate::binaries::{static_program, workspace};
use crate::lab::{Lab, LabError, output, progress};
use crate::shipped;

/// Format, compression and verification of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Its format.
    pub format: Format,
    /// How it is compressed.
    pub compression: Compression,
    /// Whether its blocks are verified by dm-verity; for disks only.
    pub verity: bool,
}

impl Packing {
    /// Returns its display name: `erofs lz4hc, dm-verity`.
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
    /// Builds an image of the directory `manifests` in another packing, and the
    /// opener if it is a disk.
    ///
    /// # Errors
    /// The manifest is invalid, a package cannot be fetched, or an image fails to build.
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

    /// Returns the manifest of an image of the directory `manifests` in another packing.
    ///
    /// # Errors
    /// The manifest is invalid.
    pub fn manifest_in_format(&self, name: &str, packing: Packing) -> Result<Manifest, LabError> {
        let mut manifest = shipped::manifest(name, &self.programs()?)?;
        if let Some(driver) = &mut manifest.driver {
            driver.untried = true;
        }
        // The budget is that of the release format.
        manifest.budget = None;
        manifest.image.format = packing.format;
        manifest.image.compression = Some(packing.compression);
        manifest.verity = packing.verity.then(Verity::default);
        Ok(manifest)
    }

    /// Builds the release opener with this file system instead of EROFS.
    fn opener_for(&self, format: Format) -> Result<Image, LabError> {
        let program = static_program(&workspace(), "firstlight-opener", "firstlight-opener")?;
        let variables = Variables::from([("OPENER".to_owned(), program.display().to_string())]);
        let file = workspace().join("image-builder/manifests/opener.toml");
        let mut manifest = Manifest::read(&file, &variables).map_err(image::Error::from)?;
        for module in manifest.kernel.modules.iter_mut().filter(|module| *module == "erofs") {
            format.name().clone_into(module);
        }
        let mut packages = Packages::new(&self.cache, None, progress());
        let out = output().join("formats").join(format!("opener-{}", format.name()));
        Ok(image::build_from(&manifest, &mut packages, &out)?)
    }
}
