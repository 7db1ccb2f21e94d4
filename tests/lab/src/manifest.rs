//! The manifest of the lab's image.

use std::path::Path;

use firstlight_image_builder::image::manifest::{Error, Manifest};
use firstlight_image_builder::kernel::Source;

/// Its path in the workspace.
pub(crate) const PATH: &str = "tests/lab/manifests/lab.toml";

/// Its text.
pub(crate) const TEXT: &str = include_str!("../manifests/lab.toml");

/// Returns the kernel of the lab's image, which needs no variables.
///
/// # Errors
/// The manifest is invalid.
pub(crate) fn kernel() -> Result<Source, Error> {
    Ok(Manifest::parse_unresolved(TEXT, Path::new(PATH))?.kernel_source())
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_image_builder::image::manifest::Format;

    #[test]
    fn lab_manifest_is_valid() {
        let names = ["INIT", "AGENT", "NVIDIA_KO", "NVIDIA_UVM_KO"];
        let variables = names.iter().map(|name| ((*name).to_owned(), "/x".to_owned())).collect();
        let manifest = Manifest::parse(TEXT, Path::new(PATH), &variables).unwrap();
        assert_eq!(manifest.image.format, Format::Initramfs);
        assert_eq!(kernel().unwrap(), manifest.kernel_source());
        assert!(manifest.files.iter().any(|file| file.path == "init" && file.mode == Some(0o755)));
    }
}
