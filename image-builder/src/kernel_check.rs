//! `image-builder kernel check`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use firstlight_image_builder::cache;
use firstlight_image_builder::kernel::check::{Rules, Subject, Verdict, judge, table};
use firstlight_image_builder::kernel::dot_config::{self, DotConfig};
use firstlight_image_builder::kernel::kconfig::Tree;
use firstlight_image_builder::kernel::{self, Package};
use firstlight_image_builder::progress::Progress;

/// A kernel is no longer than this.
const LONGEST_KERNEL: u64 = 1 << 30;
/// What a kernel's first bytes are enough for.
const HEAD: u64 = 4096;

/// What `kernel check` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// A .config, /boot/config-RELEASE, /proc/config.gz, vmlinux or bzImage.
    #[arg(required_unless_present_any = ["package", "host", "print_tables"])]
    config: Option<PathBuf>,
    /// What the kernel is for; may be given again. An unknown name lists all.
    #[arg(long = "for", value_name = "PURPOSE")]
    purposes: Vec<String>,
    /// Judge a kernel package of Debian instead, such as linux-image-cloud-amd64.
    #[arg(long, value_name = "NAME", requires = "suite", conflicts_with = "config")]
    package: Option<String>,
    /// The package's suite, such as bookworm.
    #[arg(long, requires = "package")]
    suite: Option<String>,
    /// Only versions of the package that begin with these numbers.
    #[arg(long, requires = "package")]
    series: Option<String>,
    /// Judge the kernel that runs here, as a GPU host if nothing else is said.
    #[arg(long, conflicts_with_all = ["config", "package"])]
    host: bool,
    /// The kernel's version, where the configuration does not have it.
    #[arg(long, value_name = "VERSION")]
    kernel: Option<String>,
    /// The unpacked source of that kernel: it tells why a symbol is off.
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
/// It could not be judged.
const NOT_JUDGED: u8 = 2;

/// Judges, prints, and says by the exit code what came of it: 0 fits, 1 does not, 2 could not be judged.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    run_to(arguments, &mut io::stdout().lock())
}

fn run_to(arguments: &Arguments, out: &mut dyn Write) -> ExitCode {
    match check(arguments, out) {
        Ok(Verdict::Fits) => ExitCode::SUCCESS,
        Ok(Verdict::DoesNotFit) => ExitCode::from(DOES_NOT_FIT),
        Err(error) => {
            eprintln!("image-builder: {error:#}");
            ExitCode::from(NOT_JUDGED)
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
    let report = judge(&rules, &purposes, Subject { origin: &origin, config: &config, source: source.as_ref() })?;
    if arguments.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", report.text())?;
    }
    Ok(report.verdict)
}

/// The configuration, and what to call it.
fn subject(arguments: &Arguments) -> Result<(String, DotConfig)> {
    if let (Some(package), Some(suite)) = (&arguments.package, &arguments.suite) {
        let cache = arguments.cache.clone().map_or_else(cache::root, Ok)?;
        let source = Package { package: package.clone(), suite: suite.clone(), series: arguments.series.clone() };
        let (candidate, file) = kernel::package_config(&cache, &source, Progress::stderr("image-builder"))?;
        return Ok((format!("{} {} ({suite})", candidate.name, candidate.version), read(&file)?));
    }
    let file = match &arguments.config {
        Some(file) => file.clone(),
        None => running()?,
    };
    Ok((file.display().to_string(), read(&file)?))
}

/// Where the kernel that runs here has its configuration.
fn running() -> Result<PathBuf> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").context("cannot read the kernel's release")?;
    let release = release.trim();
    let places =
        ["/proc/config.gz".to_owned(), format!("/boot/config-{release}"), format!("/lib/modules/{release}/config")];
    match places.iter().find(|place| Path::new(place).exists()) {
        Some(place) => Ok(place.into()),
        None => bail!(
            "the configuration of this kernel ({release}) is in none of {}: load the module configs, or name a file",
            places.join(", ")
        ),
    }
}

fn read(file: &Path) -> Result<DotConfig> {
    let failed = || format!("cannot read {}", file.display());
    let mut opened = File::open(file).with_context(failed)?;
    let mut bytes = Vec::new();
    Read::by_ref(&mut opened).take(HEAD).read_to_end(&mut bytes).with_context(failed)?;
    let longest = if dot_config::is_kernel(&bytes) { LONGEST_KERNEL } else { dot_config::LONGEST };
    opened.take(longest).read_to_end(&mut bytes).with_context(failed)?;
    DotConfig::read(&bytes).with_context(|| format!("cannot judge {}", file.display()))
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
        assert_eq!(run_with(&[&fine, "--for", "gpus"]), ExitCode::from(NOT_JUDGED));
        assert_eq!(run_with(&[&broken]), ExitCode::from(NOT_JUDGED));
        assert_eq!(run_with(&["/no/such/file"]), ExitCode::from(NOT_JUDGED));
        // Endless, and read to a bound only.
        assert_eq!(run_with(&["/dev/zero"]), ExitCode::from(NOT_JUDGED));
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
