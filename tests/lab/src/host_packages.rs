//! Debian packages that the host must have, each with the reason.

use std::collections::BTreeSet;
use std::io::{self, BufRead, IsTerminal, Write};
use std::process::{Command, Stdio};

use firstlight_progress::Progress;

/// A package and why it is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPackage {
    /// Name in Debian and its relatives.
    pub name: &'static str,
    /// The purpose for which it is needed.
    pub reason: &'static str,
}

const fn needs(name: &'static str, reason: &'static str) -> HostPackage {
    HostPackage { name, reason }
}

/// Everything needed to build the project and run the lab.
pub const PACKAGES: &[HostPackage] = &[
    needs("gcc", "links Rust programs; compiles the stand-in modules"),
    needs("libc6-dev", "has libc.a for the static programs of the guest"),
    needs("binutils", "strips the stand-in modules"),
    needs("make", "builds the stand-in modules"),
    needs("pkg-config", "finds the libseccomp that the container runtime links"),
    needs("libseccomp-dev", "has libseccomp.a, which the container runtime links"),
    needs("xz-utils", "unpacks packages with older versions of dpkg"),
    needs("ca-certificates", "lets cargo and apt verify HTTPS servers"),
    needs("debian-archive-keyring", "verifies the packages of kernel and QEMU"),
    needs("e2fsprogs", "creates the state disk of a service VM"),
    needs("gpgv", "verifies the signatures of archives"),
    needs("gpg", "signs the archives that tests create"),
    needs("gpg-agent", "holds the keys for these signatures"),
];

/// Packages that building a kernel needs in addition to [`PACKAGES`].
pub const KERNEL_PACKAGES: &[HostPackage] = &[
    needs("flex", "reads the kernel's configuration language"),
    needs("bison", "reads the kernel's configuration language"),
    needs("bc", "computes constants of the kernel's timers"),
    needs("libelf-dev", "reads object files in objtool, which the kernel builds for itself"),
];

/// Packages that running libvirt needs in addition to [`PACKAGES`]. Only its programs are
/// used, so it is installed without systemd's units, which would start it.
pub const LIBVIRT_PACKAGES: &[HostPackage] = &[
    needs("libvirt-daemon-system", "has libvirt's schemas and the directories that its daemon expects"),
    needs("libvirt-daemon-system-sysv", "satisfies libvirt's dependency on an init system without systemd"),
    needs("libvirt-daemon-driver-qemu", "is the part of libvirt that runs QEMU"),
    needs("libvirt-clients", "has virsh, which controls libvirt, and virt-xml-validate"),
    needs("libxml2-utils", "has xmllint, which virt-xml-validate runs"),
];

/// Errors of checking or installing packages.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a Debian system.
    #[error(
        "failed to run dpkg-query to list installed packages; on systems other than Debian install the equivalents of:\n{}",
        listed(PACKAGES)
    )]
    NoDpkg(#[source] io::Error),
    /// Packages are missing, and the user did not agree to install them.
    #[error("missing packages:\n{}\nrun: {command}", listed(missing))]
    Missing {
        /// The missing packages.
        missing: Vec<HostPackage>,
        /// The command that installs them.
        command: String,
    },
    /// apt could not be started.
    #[error("failed to run {command}")]
    Start {
        /// The command.
        command: String,
        /// The system's error.
        source: io::Error,
    },
    /// apt failed; it has printed the cause.
    #[error("{command} failed: see its messages above")]
    Failed {
        /// The command.
        command: String,
    },
}

fn listed(packages: &[HostPackage]) -> String {
    let width = packages.iter().map(|package| package.name.len()).max().unwrap_or(0);
    let lines: Vec<String> =
        packages.iter().map(|package| format!("  {:width$}  {}", package.name, package.reason)).collect();
    lines.join("\n")
}

/// Returns the `packages` that are not installed.
///
/// # Errors
/// [`Error::NoDpkg`] when the system has no `dpkg-query`.
pub fn missing(packages: &[HostPackage]) -> Result<Vec<HostPackage>, Error> {
    let output = Command::new("dpkg-query")
        .args(["--show", "--showformat=${Package} ${db:Status-Status}\\n"])
        .args(packages.iter().map(|package| package.name))
        .stdin(Stdio::null())
        .output()
        .map_err(Error::NoDpkg)?;
    // dpkg-query fails if one package is unknown, but still lists the others.
    Ok(missing_from(packages, &String::from_utf8_lossy(&output.stdout)))
}

fn missing_from(packages: &[HostPackage], report: &str) -> Vec<HostPackage> {
    let installed: BTreeSet<&str> = report
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(_, is)| *is == "installed")
        .map(|(name, _)| name)
        .collect();
    packages.iter().filter(|package| !installed.contains(package.name)).copied().collect()
}

/// Installs those of `packages` that are missing. On a terminal the user is asked first, unless
/// `yes` is set or the environment has `CI=true`.
///
/// # Errors
/// [`Error::Missing`], with the command to run, if the user did not agree; otherwise
/// apt's failure.
pub fn ensure(packages: &[HostPackage], yes: bool, progress: Progress) -> Result<(), Error> {
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|package| package.name).collect();
    let install = [&["apt-get", "install", "--yes", "--no-install-recommends"][..], &names].concat();
    let in_ci = std::env::var("CI").is_ok_and(|value| value == "true");
    if !(yes || in_ci || user_agrees(&missing)) {
        let command = as_root(&["apt-get", "update"]).join(" ") + " && " + &as_root(&install).join(" ");
        return Err(Error::Missing { missing, command });
    }
    progress.say(format_args!("installing {}", names.join(", ")));
    run(&as_root(&["apt-get", "update", "-qq"]))?;
    run(&as_root(&install))
}

fn user_agrees(missing: &[HostPackage]) -> bool {
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        return false;
    }
    eprint!("These packages are needed:\n{}\nInstall them now? [y/N] ", listed(missing));
    let _ = io::stderr().flush();
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}

/// Prefixes the command with sudo unless we are root.
fn as_root<'a>(command: &[&'a str]) -> Vec<&'a str> {
    // The owner of our own process directory is our effective user.
    let root = std::fs::metadata("/proc/self").is_ok_and(|data| std::os::unix::fs::MetadataExt::uid(&data) == 0);
    if root { command.to_vec() } else { [&["sudo"], command].concat() }
}

fn run(command: &[&str]) -> Result<(), Error> {
    let text = command.join(" ");
    let Some((program, arguments)) = command.split_first() else { return Ok(()) };
    // apt's output goes to standard error, because standard output is for our results.
    let status = Command::new(program)
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdout(io::stderr())
        .status()
        .map_err(|source| Error::Start { command: text.clone(), source })?;
    if status.success() { Ok(()) } else { Err(Error::Failed { command: text }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_installed_packages_are_not_missing() {
        let all: String = PACKAGES.iter().map(|package| format!("{} installed\n", package.name)).collect();
        assert!(missing_from(PACKAGES, &all).is_empty());
        let removed = all.replace("make installed", "make config-files").replace("gcc installed\n", "");
        let names: Vec<&str> = missing_from(PACKAGES, &removed).iter().map(|package| package.name).collect();
        assert_eq!(names, ["gcc", "make"]);
    }

    #[test]
    fn error_has_reasons_and_the_install_command() {
        let error = Error::Missing { missing: PACKAGES[..2].to_vec(), command: "apt-get install gcc".to_owned() };
        let text = error.to_string();
        assert!(text.contains("gcc        links Rust programs"), "{text}");
        assert!(text.ends_with("run: apt-get install gcc"), "{text}");
    }
}
