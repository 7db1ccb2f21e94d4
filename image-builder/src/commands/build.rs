//! `image-builder build` and `image-builder lock`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use firstlight_image_builder::image::locked::{self, Task, Verdict};
use firstlight_image_builder::image::manifest::Variables;
use firstlight_image_builder::{cache, image};
use firstlight_progress::{Progress, megabytes, seconds};

/// Options of both `build` and `lock`.
#[derive(Debug, Args)]
struct Inputs {
    /// The manifest.
    manifest: PathBuf,
    /// Output directory for vmlinux, the image, settings for Kata and image.json.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Cache directory for downloads and unpacked packages [default:
    /// $FIRSTLIGHT_CACHE, else $XDG_CACHE_HOME/firstlight, else
    /// ~/.cache/firstlight].
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// A value for ${NAME} in the manifest; repeatable.
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = assignment)]
    set: Vec<(String, String)>,
}

impl Inputs {
    fn cache(&self) -> Result<PathBuf> {
        Ok(self.cache.clone().map_or_else(cache::root, Ok)?)
    }

    fn variables(&self) -> Variables {
        self.set.iter().cloned().collect()
    }

    fn task<'a>(&'a self, variables: &'a Variables, cache: &'a Path, lock: &'a Path) -> Task<'a> {
        let progress = Progress::stderr("image-builder");
        Task { manifest: &self.manifest, variables, out: &self.out, cache, lock, progress }
    }
}

/// Options of `build`.
#[derive(Debug, Args)]
pub(crate) struct Build {
    #[command(flatten)]
    inputs: Inputs,
    /// Build from exactly the packages in this lock file, and compare the
    /// result with it.
    #[arg(long, value_name = "FILE")]
    lock: Option<PathBuf>,
    /// Print image.json instead of a summary.
    #[arg(long)]
    json: bool,
}

/// Options of `lock`.
#[derive(Debug, Args)]
pub(crate) struct Lock {
    #[command(flatten)]
    inputs: Inputs,
    /// The lock file [default: the manifest's name with .lock].
    #[arg(long, value_name = "FILE")]
    lock: Option<PathBuf>,
    /// Print the lock as JSON instead of a summary.
    #[arg(long)]
    json: bool,
}

fn assignment(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

impl Build {
    pub(crate) fn run(&self) -> Result<()> {
        let started = Instant::now();
        let (cache, variables) = (self.inputs.cache()?, self.inputs.variables());
        let (image, verdict) = match &self.lock {
            None => {
                let Inputs { manifest, out, .. } = &self.inputs;
                (image::build(manifest, &variables, out, &cache, Progress::stderr("image-builder"))?, None)
            }
            Some(lock) => {
                let (image, verdict) = locked::build_locked(&self.inputs.task(&variables, &cache, lock))?;
                (image, Some((lock, verdict)))
            }
        };
        let mut stdout = io::stdout().lock();
        if self.json {
            serde_json::to_writer_pretty(&mut stdout, &image.contents)?;
            writeln!(stdout)?;
            return Ok(());
        }
        let contents = &image.contents;
        writeln!(stdout, "{}: kernel {}, {} entries", contents.name, contents.kernel_release, contents.entries)?;
        for (name, bytes) in &contents.outputs {
            writeln!(stdout, "  {:>8}  {}", megabytes(bytes.size), self.inputs.out.join(name).display())?;
        }
        match verdict {
            None => {}
            Some((lock, Verdict::Same)) => writeln!(stdout, "  identical to {}", lock.display())?,
            Some((lock, Verdict::DifferentInputs(what))) => {
                writeln!(stdout, "  from the packages of {}, not comparable: {what} changed", lock.display())?;
            }
        }
        writeln!(stdout, "  built in {}", seconds(started.elapsed()))?;
        Ok(())
    }
}

impl Lock {
    pub(crate) fn run(&self) -> Result<()> {
        let (cache, variables) = (self.inputs.cache()?, self.inputs.variables());
        let file = self.lock.clone().unwrap_or_else(|| self.inputs.manifest.with_extension("lock"));
        let (_, lock) = locked::lock(&self.inputs.task(&variables, &cache, &file))?;
        let mut stdout = io::stdout().lock();
        if self.json {
            serde_json::to_writer_pretty(&mut stdout, &lock)?;
            writeln!(stdout)?;
            return Ok(());
        }
        writeln!(stdout, "{}: {} packages of {} suites", file.display(), lock.packages.len(), lock.suites.len())?;
        for suite in &lock.suites {
            writeln!(stdout, "  {} of {}, signed by {}", suite.name, suite.date, suite.signed_by.join(", "))?;
        }
        for (name, output) in &lock.outputs {
            writeln!(stdout, "  {} {name}", output.sha256)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments_are_parsed() {
        assert_eq!(assignment("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert!(assignment("A").is_err() && assignment("=x").is_err());
    }
}
