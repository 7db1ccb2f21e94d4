//! `image-builder sbom`.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use firstlight_image_builder::{cache, image::sbom};

/// Options of `sbom`.
#[derive(Debug, Args)]
pub(crate) struct Sbom {
    /// An output directory of build, or its image.json.
    dir: PathBuf,
    /// The format.
    #[arg(long, value_enum, default_value_t = Format::Cyclonedx)]
    format: Format,
    /// The file to write [default: standard output].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    /// CycloneDX 1.6, JSON.
    Cyclonedx,
    /// SPDX 2.3, JSON.
    Spdx,
}

/// The variable with the date of reproducible builds, in seconds since 1970.
const EPOCH: &str = "SOURCE_DATE_EPOCH";

fn epoch(value: Option<&str>) -> Result<Option<i64>> {
    let read =
        |text: &str| text.parse().with_context(|| format!("invalid {EPOCH}={text:?}: expected seconds since 1970"));
    value.filter(|text| !text.is_empty()).map(read).transpose()
}

impl Sbom {
    pub(crate) fn run(&self) -> Result<()> {
        let format = match self.format {
            Format::Cyclonedx => sbom::Format::CycloneDx,
            Format::Spdx => sbom::Format::Spdx,
        };
        let value = std::env::var_os(EPOCH).map(|value| value.to_string_lossy().into_owned());
        let sbom = sbom::write(&self.dir, format, epoch(value.as_deref())?)?;
        match &self.out {
            Some(file) => cache::write_atomically(file, &sbom)?,
            None => io::stdout().lock().write_all(&sbom)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sbom_is_written_to_the_file() {
        use firstlight_image::{ImageRecord, RECORD};
        let dir = tempfile::tempdir().unwrap();
        let image = ImageRecord { name: "x".into(), ..ImageRecord::default() };
        std::fs::write(dir.path().join(RECORD), serde_json::to_vec(&image).unwrap()).unwrap();
        for (format, key) in [(Format::Cyclonedx, "bomFormat"), (Format::Spdx, "spdxVersion")] {
            let out = dir.path().join(key);
            Sbom { dir: dir.path().to_owned(), format, out: Some(out.clone()) }.run().unwrap();
            let sbom: serde_json::Value = serde_json::from_slice(&std::fs::read(out).unwrap()).unwrap();
            assert!(sbom.get(key).is_some(), "{sbom}");
        }
        let error = Sbom { dir: "/none".into(), format: Format::Spdx, out: None }.run().unwrap_err();
        assert!(error.to_string().contains("/none"), "{error}");
    }

    #[test]
    fn epoch_is_a_number_or_absent() {
        assert_eq!(epoch(None).unwrap(), None);
        assert_eq!(epoch(Some("")).unwrap(), None);
        assert_eq!(epoch(Some("1794650238")).unwrap(), Some(1_794_650_238));
        let error = epoch(Some("today")).unwrap_err().to_string();
        assert!(error.contains("SOURCE_DATE_EPOCH") && error.contains("today"), "{error}");
    }
}
