//! The command line of the image builder.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use firstlight_image_builder::cpio::{Entry, Reader, file_type};
use firstlight_image_builder::kernel::{Kernel, Source};
use firstlight_image_builder::manifest::Variables;
use firstlight_image_builder::progress::{Progress, megabytes, seconds};
use firstlight_image_builder::{build, cache};

/// Builds guest images from a manifest.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Build the image that a manifest describes.
    Build {
        /// The manifest.
        manifest: PathBuf,
        /// Folder for vmlinux, initrd.cpio and image.json.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Folder for what is downloaded and unpacked [default:
        /// $FIRSTLIGHT_CACHE, else $XDG_CACHE_HOME/firstlight, else
        /// ~/.cache/firstlight].
        #[arg(long, value_name = "DIR")]
        cache: Option<PathBuf>,
        /// A value for ${NAME} in the manifest; may be given again.
        #[arg(long = "set", value_name = "NAME=VALUE", value_parser = assignment)]
        set: Vec<(String, String)>,
        /// Print image.json instead of a summary.
        #[arg(long)]
        json: bool,
    },
    /// Kernels of our own.
    Kernel {
        #[command(subcommand)]
        command: KernelCommand,
    },
    /// List what is in an initial RAM file system.
    Ls {
        /// The archive.
        image: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum KernelCommand {
    /// Build a kernel from Debian's source and fragments of configuration.
    Build {
        /// The recipe, such as kernel-configs/lab.toml.
        recipe: PathBuf,
        /// Folder for vmlinux and config.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Folder for sources and built kernels [default: as for build].
        #[arg(long, value_name = "DIR")]
        cache: Option<PathBuf>,
        /// Print what is known of the kernel as JSON instead of a summary.
        #[arg(long)]
        json: bool,
    },
}

fn assignment(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line with the causes: what a user can act on.
            eprintln!("image-builder: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    match Arguments::parse().command {
        Command::Build { manifest, out, cache, set, json } => {
            let cache = cache.map_or_else(cache::root, Ok)?;
            run_build(&manifest, &out, &cache, &set.into_iter().collect(), json)
        }
        Command::Kernel { command: KernelCommand::Build { recipe, out, cache, json } } => {
            let cache = cache.map_or_else(cache::root, Ok)?;
            run_kernel_build(&recipe, out.as_deref(), &cache, json)
        }
        Command::Ls { image } => list(&image).with_context(|| format!("cannot list {}", image.display())),
    }
}

fn run_build(manifest: &Path, out: &Path, cache: &Path, variables: &Variables, json: bool) -> Result<()> {
    let started = Instant::now();
    let image = build::build(manifest, variables, out, cache, Progress::stderr("image-builder"))?;
    let mut stdout = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut stdout, &image.contents)?;
        writeln!(stdout)?;
        return Ok(());
    }
    let contents = &image.contents;
    writeln!(stdout, "{}: kernel {}, {} entries", contents.name, contents.kernel_release, contents.entries)?;
    for (name, bytes) in &contents.outputs {
        writeln!(stdout, "  {:>8}  {}", megabytes(bytes.size), out.join(name).display())?;
    }
    writeln!(stdout, "  built in {}", seconds(started.elapsed()))?;
    Ok(())
}

fn run_kernel_build(recipe: &Path, out: Option<&Path>, cache: &Path, json: bool) -> Result<()> {
    let kernel = Kernel::prepare(cache, &Source::Recipe(recipe.to_owned()), Progress::stderr("image-builder"))?;
    let mut files = vec![kernel.vmlinux(), kernel.config()];
    if let Some(out) = out {
        std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
        for file in &mut files {
            let to = out.join(file.file_name().unwrap_or_default());
            std::fs::copy(&*file, &to).with_context(|| format!("cannot write {}", to.display()))?;
            *file = to;
        }
    }
    let mut stdout = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut stdout, &kernel.facts)?;
        writeln!(stdout)?;
        return Ok(());
    }
    let facts = &kernel.facts;
    writeln!(stdout, "kernel {} from {} {} ({})", facts.release, facts.package, facts.version, facts.suite)?;
    for file in files {
        let size = std::fs::metadata(&file).map_or(0, |data| data.len());
        writeln!(stdout, "  {:>8}  {}", megabytes(size), file.display())?;
    }
    Ok(())
}

fn list(image: &Path) -> Result<()> {
    let reader = Reader::new(BufReader::new(File::open(image)?));
    let mut stdout = io::stdout().lock();
    for entry in reader {
        writeln!(stdout, "{}", line(&entry?))?;
    }
    Ok(())
}

/// One entry as `ls -l` shows it.
fn line(entry: &Entry) -> String {
    let (letter, size) = match entry.mode & file_type::MASK {
        file_type::DIRECTORY => ('d', String::new()),
        file_type::SYMLINK => ('l', String::new()),
        file_type::CHARACTER => ('c', format!("{},{}", entry.device.0, entry.device.1)),
        _ => ('-', entry.data.len().to_string()),
    };
    let target = match letter {
        'l' => format!(" -> {}", String::from_utf8_lossy(&entry.data)),
        _ => String::new(),
    };
    format!("{letter}{:04o} {size:>10} /{}{target}", entry.mode & !file_type::MASK, entry.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments() {
        assert_eq!(assignment("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert!(assignment("A").is_err() && assignment("=x").is_err());
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
