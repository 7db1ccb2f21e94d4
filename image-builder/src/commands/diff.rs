//! `image-builder diff`.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use firstlight_image::ImageRecord;
use firstlight_image_builder::image::diff;

/// Options of `diff`.
#[derive(Debug, Args)]
pub(crate) struct Diff {
    /// The first image: an output directory of build, or its image.json.
    a: PathBuf,
    /// The second image.
    b: PathBuf,
    /// Show all changed files, not only the 40 with the largest change of size.
    #[arg(long, conflicts_with = "json")]
    all: bool,
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
}

/// Exit code: the images differ.
const DIFFERENT: u8 = 1;
/// Exit code: the images could not be compared.
const NOT_COMPARED: u8 = 2;

impl Diff {
    /// Prints the differences and returns the exit code: 0 the same image, 1 different, 2 could not be compared.
    pub(crate) fn run(&self) -> ExitCode {
        self.run_to(&mut io::stdout().lock())
    }

    fn run_to(&self, out: &mut dyn Write) -> ExitCode {
        match self.compare(out) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::from(DIFFERENT),
            Err(error) => {
                eprintln!("image-builder: {error:#}");
                ExitCode::from(NOT_COMPARED)
            }
        }
    }

    fn compare(&self, out: &mut dyn Write) -> Result<bool> {
        let diff = diff::Diff::new(&ImageRecord::read(&self.a)?, &ImageRecord::read(&self.b)?);
        if self.json {
            serde_json::to_writer_pretty(&mut *out, &diff)?;
            writeln!(out)?;
        } else {
            write!(out, "{}", diff.text(self.all))?;
        }
        Ok(diff.same)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_image::RECORD;

    #[test]
    fn exit_code_is_0_if_same_1_if_different_2_on_errors() {
        let dir = tempfile::tempdir().unwrap();
        let written = |name: &str, contents: &ImageRecord| {
            let dir = dir.path().join(name);
            std::fs::create_dir(&dir).unwrap();
            std::fs::write(dir.join(RECORD), serde_json::to_vec(contents).unwrap()).unwrap();
            dir
        };
        let a = written("a", &ImageRecord { name: "x".into(), ..ImageRecord::default() });
        let b = written("b", &ImageRecord { name: "y".into(), ..ImageRecord::default() });
        let compared = |a: &std::path::Path, b: &std::path::Path, json| {
            let mut out = Vec::new();
            let diff = Diff { a: a.to_owned(), b: b.to_owned(), all: false, json };
            (diff.run_to(&mut out), String::from_utf8(out).unwrap())
        };
        // A directory, and the path of its record.
        assert_eq!(compared(&a, &a.join(RECORD), false).0, ExitCode::SUCCESS);
        let (code, text) = compared(&a, &b, false);
        assert_eq!((code, text.contains("name: x -> y")), (ExitCode::from(DIFFERENT), true), "{text}");
        let (code, text) = compared(&a, &b, true);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (code, &json["same"], &json["facts"][0]["b"]),
            (ExitCode::from(DIFFERENT), &false.into(), &"y".into())
        );
        assert_eq!(compared(&a, &dir.path().join("none"), false), (ExitCode::from(NOT_COMPARED), String::new()));
        std::fs::write(b.join(RECORD), "what is this").unwrap();
        assert_eq!(compared(&a, &b, true), (ExitCode::from(NOT_COMPARED), String::new()));
    }
}
