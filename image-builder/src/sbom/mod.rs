//! Software bills of materials, from an image's record.
//!
//! Nothing but the record decides what is written: no clock, no random number,
//! no network. The same record gives the same bytes.

mod cyclonedx;
mod purl;
mod spdx;
mod view;

use std::path::{Path, PathBuf};

use firstlight_image::{ImageRecord, RECORD, RecordError, digest};

use crate::date;

/// How a bill is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// CycloneDX 1.6, JSON.
    CycloneDx,
    /// SPDX 2.3, JSON.
    Spdx,
}

/// Why there is no bill.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The record says what cannot be.
    #[error("{} is no record of an image: {what}", record.display())]
    NotOne {
        /// The record.
        record: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The record was written by an earlier builder.
    #[error(
        "{} has no SHA-1 of /{file}, which SPDX demands of every file: build the image again, \
         or take --format cyclonedx",
        record.display()
    )]
    NoSha1 {
        /// The record.
        record: PathBuf,
        /// A file without.
        file: String,
    },
    /// A date has more than four digits for its year, or is before 1970.
    #[error(
        "{seconds} seconds since 1970 are no date that a bill can have: SOURCE_DATE_EPOCH has to be a time until 9999"
    )]
    Date {
        /// The time that was asked for.
        seconds: i64,
    },
    /// It could not be written as JSON.
    #[error("cannot write the bill as JSON")]
    Json(#[from] serde_json::Error),
}

/// When a bill says that it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Created {
    /// ISO 8601; nothing where nobody knows.
    date: Option<String>,
    /// Where the date is from, as a sentence.
    why: &'static str,
}

impl Created {
    fn of(contents: &ImageRecord, epoch: Option<i64>) -> Result<Self, Error> {
        if let Some(seconds) = epoch {
            let date = Some(date::iso8601(seconds).ok_or(Error::Date { seconds })?);
            return Ok(Self { date, why: "The date is SOURCE_DATE_EPOCH." });
        }
        let newest = contents.suites.iter().filter_map(|suite| date::seconds(&suite.date)).max();
        Ok(match newest.and_then(date::iso8601) {
            Some(date) => {
                let why =
                    "The date is that of the newest release file among the suites that packages were chosen from.";
                Self { date: Some(date), why }
            }
            None => Self { date: None, why: "The record names no suite with a date; 1970 stands for that." },
        })
    }
}

/// The bill of what the record at `path` describes (a directory that `build` wrote,
/// or its `image.json`), ending in a newline. It is dated `epoch`, in seconds
/// since 1970, or else with the date of the newest release file that the record
/// names.
///
/// # Errors
/// There is no record, or it lacks what the format demands.
pub fn write(path: &Path, format: Format, epoch: Option<i64>) -> Result<Vec<u8>, Error> {
    let contents = ImageRecord::read(path)?;
    let record = || if path.is_dir() { path.join(RECORD) } else { path.to_owned() };
    view::check(&contents).map_err(|what| Error::NotOne { record: record(), what })?;
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

/// A UUID (of version 8, RFC 9562: made as one likes) out of everything that
/// decides a bill.
fn uuid(format: &str, contents: &ImageRecord, created: &Created) -> Result<String, serde_json::Error> {
    let mut text =
        format!("{format}\n{}\n{}\n", env!("CARGO_PKG_VERSION"), created.date.as_deref().unwrap_or_default());
    text.push_str(&serde_json::to_string(contents)?);
    let hash = digest::of_bytes(text.as_bytes());
    // The version in the place of one digit; the variant, 8 to b, in that of another.
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
