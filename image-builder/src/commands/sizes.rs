//! `image-builder size`.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use firstlight_image::ImageRecord;
use firstlight_image_builder::image::sizes::{Share, shares};
use firstlight_progress::megabytes;

/// Options of `size`.
#[derive(Debug, Args)]
pub(crate) struct Size {
    /// An output directory of build, or its image.json.
    dir: PathBuf,
    /// Print a JSON array.
    #[arg(long)]
    json: bool,
}

impl Size {
    pub(crate) fn run(&self) -> Result<()> {
        let shares = shares(&ImageRecord::read(&self.dir)?);
        let mut out = io::stdout().lock();
        if self.json {
            serde_json::to_writer_pretty(&mut out, &shares)?;
            writeln!(out)?;
            return Ok(());
        }
        Ok(table(&mut out, &shares)?)
    }
}

fn table(out: &mut dyn Write, shares: &[Share]) -> io::Result<()> {
    writeln!(out, "{:>10} {:>6}  FROM", "SIZE", "FILES")?;
    for share in shares {
        // The record is untrusted: names must not contain terminal escape sequences.
        let printable = |text: &str| text.replace(char::is_control, "?");
        let (from, largest) = (printable(&share.from), printable(&share.largest));
        let mut notes = vec![format!("largest {largest} {}", megabytes(share.largest_bytes))];
        if share.unused > 0 {
            notes.push(format!("unused libraries {}", megabytes(share.unused)));
        }
        writeln!(out, "{:>10} {:>6}  {from} ({})", megabytes(share.bytes), share.files, notes.join("; "))?;
    }
    let bytes = shares.iter().fold(0_u64, |sum, share| sum.saturating_add(share.bytes));
    let files: u64 = shares.iter().map(|share| share.files).sum();
    writeln!(out, "{:>10} {files:>6}  all files, uncompressed", megabytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_lists_sizes_and_escapes_control_characters() {
        let share = |from: &str, bytes, unused| Share {
            from: from.to_owned(),
            bytes,
            files: 2,
            unused,
            largest: "/lib/\u{1b}x".to_owned(),
            largest_bytes: bytes / 2,
        };
        let mut out = Vec::new();
        table(&mut out, &[share("sid/a=1", 4_000_000, 1_000_000), share("own", 100, 0)]).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(
            lines[1].contains("4.0 MB") && lines[1].contains("sid/a=1") && lines[1].contains("unused libraries 1.0 MB")
        );
        assert!(lines[3].contains("all files, uncompressed") && lines[3].contains(" 4 "), "{text}");
        assert!(!text.contains('\u{1b}'));
    }
}
