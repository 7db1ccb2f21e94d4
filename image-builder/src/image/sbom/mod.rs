//! Writes software bills of materials (SBOMs) from an image's record.
//!
//! The output depends on the record only, not on the clock, random numbers or the
//! network, so it is reproducible.

mod cyclonedx;
mod purl;
mod spdx;
mod view;

use std::path::{Path, PathBuf};

use firstlight_image::{ImageRecord, RECORD, RecordError, digest};

use crate::packages::date;

/// An SBOM format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// CycloneDX 1.6, JSON.
    CycloneDx,
    /// SPDX 2.3, JSON.
    Spdx,
}

/// Why an SBOM could not be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The record is missing or invalid.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The record has an invalid value.
    #[error("invalid image record {}: {what}", record.display())]
    InvalidRecord {
        /// The record.
        record: PathBuf,
        /// The reason.
        what: String,
    },
    /// The record was written by an earlier builder.
    #[error(
        "{} has no SHA-1 of /{file}, which SPDX requires for every file: build the image again, \
         or use --format cyclonedx",
        record.display()
    )]
    NoSha1 {
        /// The record.
        record: PathBuf,
        /// A file without SHA-1.
        file: String,
    },
    /// The date is before 1970 or after 9999.
    #[error("invalid SOURCE_DATE_EPOCH {seconds}: set it to a time in the years 1970 to 9999, in seconds since 1970")]
    Date {
        /// The requested time, in seconds since 1970.
        seconds: i64,
    },
    /// Serialization failed.
    #[error("failed to serialize the SBOM")]
    Json(#[from] serde_json::Error),
}

/// The creation date of an SBOM.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Created {
    /// The date in ISO 8601; `None` if unknown.
    date: Option<String>,
    /// A sentence that describes the source of the date.
    date_source: &'static str,
}

impl Created {
    fn of(contents: &ImageRecord, epoch: Option<i64>) -> Result<Self, Error> {
        if let Some(seconds) = epoch {
            let date = Some(date::iso8601(seconds).ok_or(Error::Date { seconds })?);
            return Ok(Self { date, date_source: "The date is SOURCE_DATE_EPOCH." });
        }
        let newest = contents.suites.iter().filter_map(|suite| date::seconds(&suite.date)).max();
        Ok(match newest.and_then(date::iso8601) {
            Some(date) => {
                let date_source = "The date is that of the newest release file of the suites.";
                Self { date: Some(date), date_source }
            }
            None => Self { date: None, date_source: "The record has no suite with a date, so the date is 1970." },
        })
    }
}

/// Returns the SBOM of the image at `path` (an output directory of a build, or its
/// `image.json`), ending in a newline. Its date is `epoch`, in seconds since 1970, or
/// else that of the newest release file in the record.
///
/// # Errors
/// The record is missing or invalid, or lacks a field that the format requires.
pub fn write(path: &Path, format: Format, epoch: Option<i64>) -> Result<Vec<u8>, Error> {
    let contents = ImageRecord::read(path)?;
    let record = || if path.is_dir() { path.join(RECORD) } else { path.to_owned() };
    view::check(&contents).map_err(|what| Error::InvalidRecord { record: record(), what })?;
    let created = Created::of(&contents, epoch)?;
    let view = view::View::of(&contents);
    let mut text = match format {
        Format::CycloneDx => {
            let uuid = uuid("cyclonedx", &contents, &created)?;
            serde_json::to_vec_pretty(&cyclonedx::bom(&view, &created, &uuid))?
        }
        Format::Spdx => {
            let document = spdx::document(&view, &created, &uuid("spdx", &contents, &created)?);
            serde_json::to_vec_pretty(&document.map_err(|file| Error::NoSha1 { record: record(), file })?)?
        }
    };
    text.push(b'\n');
    Ok(text)
}

/// Returns a UUID (RFC 9562, version 8: custom) derived from all inputs of an SBOM.
fn uuid(format: &str, contents: &ImageRecord, created: &Created) -> Result<String, serde_json::Error> {
    let mut text =
        format!("{format}\n{}\n{}\n", env!("CARGO_PKG_VERSION"), created.date.as_deref().unwrap_or_default());
    text.push_str(&serde_json::to_string(contents)?);
    let hash = digest::of_bytes(text.as_bytes());
    // One digit is replaced with the version, another with the variant, 8 to b.
    let variant = match hash.as_bytes()[16] {
        b'0'..=b'3' => '8',
        b'4'..=b'7' => '9',
        b'8' | b'9' | b'a' | b'b' => 'a',
        _ => 'b',
    };
    Ok(format!("{}-{}-8{}-{variant}{}-{}", &hash[..8], &hash[8..12], &hash[13..16], &hash[17..20], &hash[20..32]))
}

#[cfg(test)]
mod tests;
