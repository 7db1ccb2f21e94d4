//! The command line of image-builder.
#![forbid(unsafe_code)]

mod commands;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use firstlight_image_builder::format::verity::Params;
use firstlight_image_builder::kernel::recipe::Recipe;
use firstlight_image_builder::kernel::{Kernel, Source};
use firstlight_image_builder::{cache, format::list, image::verify, packages};
use firstlight_progress::{Progress, megabytes};

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
    Build(commands::build::Build),
    /// Build the image from the suites' current packages, and write a lock file.
    Lock(commands::build::Lock),
    /// Manage the store of downloaded files.
    Store {
        #[command(subcommand)]
        command: StoreCommand,
    },
    /// Build and check kernels.
    Kernel {
        #[command(subcommand)]
        command: KernelCommand,
    },
    /// Verify an image against its record: file hashes, and every block of a
    /// disk against its dm-verity hash tree.
    Verify {
        /// The output directory of build, or with --params a disk image.
        dir: PathBuf,
        /// Verify only a disk image, with its dm-verity parameters.
        #[arg(long, value_name = "root_hash=...,salt=...")]
        params: Option<Params>,
        /// Print the report as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Compare two images by their records. The exit code is 0 if they are the
    /// same, 1 if not, 2 on errors.
    Diff(commands::diff::Diff),
    /// Write an image's SBOM: packages, files, kernel, driver.
    Sbom(commands::sbom::Sbom),
    /// Print the sizes in an image by package.
    Size(commands::sizes::Size),
    /// Print which NVIDIA driver compiles for which kernel.
    Matrix(commands::matrix::Matrix),
    /// Print which files of the NVIDIA driver are in which profile, and why.
    Profiles(commands::matrix::Profiles),
    /// List the entries of an initial RAM file system (compressed or not), an
    /// EROFS image, or a disk with one.
    Ls {
        /// The image.
        image: PathBuf,
        /// Print a JSON array.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
enum StoreCommand {
    /// Add a file to the store, such as a package that the archive no longer has.
    Add {
        /// The file.
        file: PathBuf,
        /// Cache directory [default: as for build].
        #[arg(long, value_name = "DIR")]
        cache: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
enum KernelCommand {
    /// Build a kernel from Debian's source and configuration fragments.
    Build {
        /// The recipe, such as kernel-configs/lab.toml.
        recipe: PathBuf,
        /// Directory for vmlinux and config.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Directory for sources and built kernels [default: as for build].
        #[arg(long, value_name = "DIR")]
        cache: Option<PathBuf>,
        /// Only generate and check the configuration; compile nothing.
        #[arg(long, conflicts_with = "json")]
        config_only: bool,
        /// Print the facts about the kernel as JSON instead of a summary.
        #[arg(long)]
        json: bool,
    },
    /// Check an existing kernel against the requirements. The exit code is 0 if
    /// it meets them, 1 if not, 2 on errors.
    Check(commands::kernel_check::Arguments),
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            // One line with all causes.
            eprintln!("image-builder: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Kernel { command: KernelCommand::Check(arguments) } => {
            return Ok(commands::kernel_check::run(&arguments));
        }
        Command::Diff(diff) => return Ok(diff.run()),
        Command::Verify { dir, params, json } => run_verify(&dir, params.as_ref(), json),
        Command::Build(build) => build.run(),
        Command::Size(size) => size.run(),
        Command::Lock(lock) => lock.run(),
        Command::Store { command: StoreCommand::Add { file, cache } } => {
            let cache = cache.map_or_else(cache::root, Ok)?;
            let (sha256, _) = packages::add(&cache, &file)?;
            writeln!(io::stdout().lock(), "{sha256}  {}", file.display())?;
            Ok(())
        }
        Command::Kernel { command: KernelCommand::Build { recipe, out, cache, config_only, json } } => {
            let cache = cache.map_or_else(cache::root, Ok)?;
            match config_only {
                true => run_kernel_configure(&recipe, out.as_deref(), &cache),
                false => run_kernel_build(&recipe, out.as_deref(), &cache, json),
            }
        }
        Command::Sbom(sbom) => sbom.run(),
        Command::Matrix(matrix) => matrix.run(),
        Command::Profiles(profiles) => profiles.run(),
        Command::Ls { image, json } => {
            run_list(&image, json).with_context(|| format!("failed to list {}", image.display()))
        }
    }?;
    Ok(ExitCode::SUCCESS)
}

fn run_kernel_configure(recipe: &Path, out: Option<&Path>, cache: &Path) -> Result<()> {
    let mut config = Kernel::configure(cache, &Recipe::read(recipe)?, Progress::stderr("image-builder"))?;
    if let Some(out) = out {
        std::fs::create_dir_all(out).with_context(|| format!("failed to create {}", out.display()))?;
        let to = out.join("config");
        std::fs::copy(&config, &to).with_context(|| format!("failed to write {}", to.display()))?;
        config = to;
    }
    writeln!(io::stdout(), "every symbol has its requested value: {}", config.display())?;
    Ok(())
}

fn run_kernel_build(recipe: &Path, out: Option<&Path>, cache: &Path, json: bool) -> Result<()> {
    let kernel = Kernel::prepare(cache, &Source::Recipe(recipe.to_owned()), Progress::stderr("image-builder"))?;
    let mut files = vec![kernel.vmlinux(), kernel.config()];
    if let Some(out) = out {
        std::fs::create_dir_all(out).with_context(|| format!("failed to create {}", out.display()))?;
        for file in &mut files {
            let to = out.join(file.file_name().unwrap_or_default());
            std::fs::copy(&*file, &to).with_context(|| format!("failed to write {}", to.display()))?;
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

fn run_verify(path: &Path, params: Option<&Params>, json: bool) -> Result<()> {
    let report = match params {
        Some(params) => verify::verify_disk(path, params)?,
        None => verify::verify(path)?,
    };
    let mut stdout = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut stdout, &report)?;
        writeln!(stdout)?;
    } else if report.problems.is_empty() {
        let verify::Report { name, files, verified_blocks, .. } = &report;
        writeln!(stdout, "{name}: {files} files match the record; {verified_blocks} blocks verified by dm-verity")?;
    }
    if report.problems.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = report.problems.iter().map(|one| format!("{}: {}", one.file, one.what)).collect();
    anyhow::bail!("{} does not match its record: {}", path.display(), lines.join("; "))
}

fn run_list(image: &Path, json: bool) -> Result<()> {
    let mut stdout = io::BufWriter::new(io::stdout().lock());
    if json {
        let mut entries = Vec::new();
        list::list(image, |entry| {
            entries.push(entry);
            Ok::<_, list::Error>(())
        })?;
        serde_json::to_writer_pretty(&mut stdout, &entries)?;
        writeln!(stdout)?;
    } else {
        list::list(image, |entry| Ok::<_, list::Error>(writeln!(stdout, "{entry}")?))?;
    }
    Ok(stdout.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
