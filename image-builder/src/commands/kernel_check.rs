//! `image-builder kernel check`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use firstlight_image_builder::cache;
use firstlight_image_builder::kernel::check::{Rules, Subject, Verdict, check_config, table};
use firstlight_image_builder::kernel::dot_config::{self, DotConfig};
use firstlight_image_builder::kernel::kconfig::Tree;
use firstlight_image_builder::kernel::{self, Package};
use firstlight_progress::Progress;

/// Maximum size of a kernel file.
const MAX_KERNEL_SIZE: u64 = 1 << 30;
/// Number of bytes that identify a kernel file.
const HEAD_SIZE: u64 = 4096;

/// Arguments of `kernel check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// A .config, /boot/config-RELEASE, /proc/config.gz, vmlinux or bzImage.
    #[arg(required_unless_present_any = ["package", "host", "print_tables"])]
    config: Option<PathBuf>,
    /// Purpose of the kernel; repeatable. An unknown name lists all.
    #[arg(long = "for", value_name = "PURPOSE")]
    purposes: Vec<String>,
    /// Check a Debian kernel package instead, such as linux-image-cloud-amd64.
    #[arg(long, value_name = "NAME", requires = "suite", conflicts_with = "config")]
    package: Option<String>,
    /// The package's suite, such as bookworm.
    #[arg(long, requires = "package")]
    suite: Option<String>,
    /// Version prefix of the package, such as 6.12.
    #[arg(long, requires = "package")]
    series: Option<String>,
    /// Check the running kernel; the default purpose is host.
    #[arg(long, conflicts_with_all = ["config", "package"])]
    host: bool,
    /// The kernel's version, if the configuration does not state it.
    #[arg(long, value_name = "VERSION")]
    kernel: Option<String>,
    /// The kernel's unpacked source, to explain why symbols are off.
    #[arg(long, value_name = "DIR")]
    source: Option<PathBuf>,
    /// Directory for downloaded packages [default: as for build].
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    /// Print the tables of docs/kernel-configs.md.
    #[arg(long, hide = true)]
    print_tables: bool,
}

/// The kernel does not fit.
const DOES_NOT_FIT: u8 = 1;
/// The kernel could not be checked.
const CHECK_FAILED: u8 = 2;

/// Checks a kernel and prints the report. Returns 0 if it fits, 1 if it does not, 2 if the check failed.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    run_to(arguments, &mut io::stdout().lock())
}

fn run_to(arguments: &Arguments, out: &mut dyn Write) -> ExitCode {
    match check(arguments, out) {
        Ok(Verdict::Fits) => ExitCode::SUCCESS,
        Ok(Verdict::DoesNotFit) => ExitCode::from(DOES_NOT_FIT),
        Err(error) => {
            eprintln!("image-builder: {error:#}");
            ExitCode::from(CHECK_FAILED)
        }
    }
}

fn check(arguments: &Arguments, out: &mut dyn Write) -> Result<Verdict> {
    let rules = Rules::built_in()?;
    if arguments.print_tables {
        write!(out, "{}", table::markdown(&rules))?;
        return Ok(Verdict::Fits);
    }
    let purposes = match arguments.purposes.as_slice() {
        [] => vec![if arguments.host { "host" } else { "gpu-guest" }.to_owned()],
        named => named.to_vec(),
    };
    // Before anything is downloaded.
    rules.purposes_of(&purposes)?;
    let (origin, mut config) = subject(arguments)?;
    if arguments.kernel.is_some() {
        config.kernel.clone_from(&arguments.kernel);
    }
    let source = arguments.source.as_deref().map(Tree::read).transpose()?;
    let report =
        check_config(&rules, &purposes, Subject { origin: &origin, config: &config, source: source.as_ref() })?;
    if arguments.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", report.text())?;
    }
    Ok(report.verdict)
}

/// Reads the configuration and returns it with its displayed source.
fn subject(arguments: &Arguments) -> Result<(String, DotConfig)> {
    if let (Some(package), Some(suite)) = (&arguments.package, &arguments.suite) {
        let cache = arguments.cache.clone().map_or_else(cache::root, Ok)?;
        let source = Package { package: package.clone(), suite: suite.clone(), series: arguments.series.clone() };
        let (candidate, file) = kernel::package_config(&cache, &source, Progress::stderr("image-builder"))?;
        return Ok((format!("{} {} ({suite})", candidate.name, candidate.version), read(&file)?));
    }
    let file = match &arguments.config {
        Some(file) => file.clone(),
        None => running_config()?,
    };
    Ok((file.display().to_string(), read(&file)?))
}

/// Returns the path of the running kernel's configuration.
fn running_config() -> Result<PathBuf> {
    let release =
        std::fs::read_to_string("/proc/sys/kernel/osrelease").context("failed to read /proc/sys/kernel/osrelease")?;
    let release = release.trim();
    let paths =
        ["/proc/config.gz".to_owned(), format!("/boot/config-{release}"), format!("/lib/modules/{release}/config")];
    match paths.iter().find(|path| Path::new(path).exists()) {
        Some(path) => Ok(path.into()),
        None => bail!(
            "no configuration of the running kernel {release} found in {}: load the module configs, or pass a file",
            paths.join(", ")
        ),
    }
}

fn read(file: &Path) -> Result<DotConfig> {
    let failed = || format!("failed to read {}", file.display());
    let mut opened = File::open(file).with_context(failed)?;
    let mut bytes = Vec::new();
    Read::by_ref(&mut opened).take(HEAD_SIZE).read_to_end(&mut bytes).with_context(failed)?;
    let longest = if dot_config::is_kernel(&bytes) { MAX_KERNEL_SIZE } else { dot_config::MAX_SIZE };
    opened.take(longest).read_to_end(&mut bytes).with_context(failed)?;
    DotConfig::read(&bytes).with_context(|| format!("failed to check {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn run_with(arguments: &[&str]) -> ExitCode {
        run_to(&Command::try_parse_from([&["check"], arguments].concat()).unwrap().arguments, &mut Vec::new())
    }

    #[test]
    fn exit_code_reflects_verdict() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let file = dir.path().join(name);
            std::fs::write(&file, text).unwrap();
            file.display().to_string()
        };
        let fine = file("fine", "# Linux/x86 6.12.1 Kernel Configuration\nCONFIG_A=y\n");
        let broken = file("broken", "CONFIG_A=y\nwhat is this\n");
        assert_eq!(run_with(&[&fine, "--for", "debug"]), ExitCode::SUCCESS);
        assert_eq!(run_with(&[&fine, "--json"]), ExitCode::from(DOES_NOT_FIT));
        assert_eq!(run_with(&[&fine, "--for", "gpus"]), ExitCode::from(CHECK_FAILED));
        assert_eq!(run_with(&[&broken]), ExitCode::from(CHECK_FAILED));
        assert_eq!(run_with(&["/no/such/file"]), ExitCode::from(CHECK_FAILED));
        // Endless: reading is bounded.
        assert_eq!(run_with(&["/dev/zero"]), ExitCode::from(CHECK_FAILED));
    }

    #[test]
    fn missing_subject_is_rejected() {
        for arguments in
            [&["check"][..], &["check", "--package", "a"], &["check", "x", "--host"], &["check", "--suite", "sid"]]
        {
            assert!(Command::try_parse_from(arguments).is_err(), "{arguments:?}");
        }
        assert!(Command::try_parse_from(["check", "--host"]).is_ok());
    }
}
