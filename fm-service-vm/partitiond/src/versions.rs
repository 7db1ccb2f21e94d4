//! The versions of fabric manager, driver and tenants' drivers, and whether they match.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use clap::ValueEnum;
use tokio::process::Command;
use tokio::time::timeout;

/// Where the kernel driver reports its version.
pub const DRIVER: &str = "/proc/driver/nvidia/version";

/// Timeout of `nv-fabricmanager --version`.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Policy for a tenant's driver of another version than the fabric manager's. NVIDIA supports only equal versions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum DriverMismatchPolicy {
    /// The activation is refused.
    #[default]
    Refuse,
    /// The partition is activated, with a warning.
    Warn,
    /// No check.
    Ignore,
}

/// The versions of NVIDIA's components; `None` if unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Versions {
    /// The fabric manager's.
    pub manager: Option<String>,
    /// The driver of this machine; with the fifth NVLink generation there is none.
    pub driver: Option<String>,
}

/// Returns the first version number of a text: two to four numbers separated by dots.
#[must_use]
pub fn first(text: &str) -> Option<String> {
    let is = |word: &&str| {
        let parts: Vec<&str> = word.split('.').collect();
        let number = |part: &&str| (1..=6).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit());
        (2..=4).contains(&parts.len()) && parts.iter().all(number)
    };
    text.split(|letter: char| letter.is_whitespace() || letter == ',').find(is).map(str::to_owned)
}

impl Versions {
    /// Reads the versions of the fabric manager's program and of the driver.
    pub async fn read(program: &Path, driver: &Path) -> Self {
        let mut command = Command::new(program);
        command.arg("--version").env_clear().stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        // A program that fails has an unknown version.
        let said = timeout(TIMEOUT, command.output()).await.ok().and_then(Result::ok);
        let manager = said.and_then(|output| first(&String::from_utf8_lossy(&output.stdout)));
        let driver = fs::read_to_string(driver).ok().and_then(|text| first(text.lines().next().unwrap_or_default()));
        Self { manager, driver }
    }

    /// Returns the mismatch between fabric manager and driver, and what to do.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        match (&self.manager, &self.driver) {
            (Some(manager), Some(driver)) if manager != driver => Some(format!(
                "the fabric manager is {manager} and the driver {driver}: they have to be of one version; build the service VM's \
                 image with both from one release"
            )),
            _ => None,
        }
    }

    /// Returns the mismatch between a tenant's driver and the fabric manager.
    #[must_use]
    pub fn mismatch_with(&self, guest: &str) -> Option<String> {
        match &self.manager {
            Some(manager) if manager == guest => None,
            Some(manager) => Some(format!(
                "the tenant's driver is {guest} and the fabric manager {manager}: NVIDIA supports only the same version; use an image \
                 with driver {manager}"
            )),
            None => {
                Some(format!("the tenant's driver {guest} cannot be checked: the fabric manager's version is unknown"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn versions_are_parsed_from_program_and_driver_output() {
        for (text, version) in [
            ("Fabric Manager version is : 550.163.01\n", Some("550.163.01")),
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023",
                Some("535.129.03"),
            ),
            ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", Some("580.95.05")),
            ("nothing 5 of 1..2 or 1.2.3.4.5", None),
            ("", None),
        ] {
            assert_eq!(first(text).as_deref(), version, "{text}");
        }
    }

    #[tokio::test]
    async fn version_mismatch_of_fm_and_driver_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let (program, driver) = (dir.path().join("fm"), dir.path().join("version"));
        fs::write(&program, "#!/bin/sh\n[ \"$1\" = --version ] && echo 'Fabric Manager version is : 550.163.01'\n")
            .unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let alone = Versions::read(&program, &driver).await;
        assert_eq!((alone.manager.as_deref(), &alone.driver, alone.problem()), (Some("550.163.01"), &None, None));
        fs::write(&driver, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  x\nGCC version:  gcc 12.2.0\n")
            .unwrap();
        let both = Versions::read(&program, &driver).await;
        assert!(both.problem().unwrap().contains("is 550.163.01 and the driver 550.90.07"), "{both:?}");
        assert_eq!(both.mismatch_with("550.163.01"), None);
        assert!(both.mismatch_with("550.54.15").unwrap().contains("use an image with driver 550.163.01"));
        let none = Versions::read(&dir.path().join("none"), &dir.path().join("none")).await;
        assert_eq!(none, Versions::default());
        assert!(none.mismatch_with("1.2").unwrap().contains("cannot be checked"));
    }
}
