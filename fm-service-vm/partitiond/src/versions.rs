//! Which versions of NVIDIA's parts are here, and which of a tenant's driver go with them.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use clap::ValueEnum;
use tokio::process::Command;
use tokio::time::timeout;

/// Where the driver says which it is.
pub const DRIVER: &str = "/proc/driver/nvidia/version";

/// How long a program may take to say its version.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is done about a tenant's driver of another version than the fabric manager's. NVIDIA supports only the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum GuestDriver {
    /// Its tenant gets no partition.
    #[default]
    Refuse,
    /// It does, and is told.
    Warn,
    /// Nothing.
    Ignore,
}

/// The versions that are known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Versions {
    /// The fabric manager's.
    pub manager: Option<String>,
    /// The driver's of this machine; with the fifth NVLink generation it has none.
    pub driver: Option<String>,
}

/// The first version number of a text: two to four numbers with points between them.
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
    /// Asks the fabric manager's program, and the driver.
    pub async fn read(program: &Path, driver: &Path) -> Self {
        let mut command = Command::new(program);
        command.arg("--version").env_clear().stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        // One that does not say it is told of as unknown.
        let said = timeout(PATIENCE, command.output()).await.ok().and_then(Result::ok);
        let manager = said.and_then(|output| first(&String::from_utf8_lossy(&output.stdout)));
        let driver = fs::read_to_string(driver).ok().and_then(|text| first(text.lines().next().unwrap_or_default()));
        Self { manager, driver }
    }

    /// What does not fit, and what to do.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        match (&self.manager, &self.driver) {
            (Some(manager), Some(driver)) if manager != driver => Some(format!(
                "the fabric manager is {manager} and the driver {driver}: they have to be of one version; build the service VM's \
                 image with both from one release"
            )),
            _ => None,
        }
    }

    /// What is wrong with a tenant's driver, if something is.
    #[must_use]
    pub fn against(&self, guest: &str) -> Option<String> {
        match &self.manager {
            Some(manager) if manager == guest => None,
            Some(manager) => Some(format!(
                "the tenant's driver is {guest} and the fabric manager {manager}: NVIDIA supports only the same version; use an image \
                 with driver {manager}"
            )),
            None => Some(format!(
                "whether the tenant's driver {guest} fits is not known: the fabric manager does not say its version"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn versions_are_found_in_what_programs_and_drivers_say() {
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
    async fn both_are_asked_and_what_does_not_fit_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let (program, driver) = (dir.path().join("fm"), dir.path().join("version"));
        fs::write(&program, "#!/bin/sh\n[ \"$1\" = --version ] && echo 'Fabric Manager version is : 550.163.01'\n")
            .unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let alone = Versions::read(&program, &driver).await;
        assert_eq!((alone.manager.as_deref(), &alone.driver, alone.trouble()), (Some("550.163.01"), &None, None));
        fs::write(&driver, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  x\nGCC version:  gcc 12.2.0\n")
            .unwrap();
        let both = Versions::read(&program, &driver).await;
        assert!(both.trouble().unwrap().contains("is 550.163.01 and the driver 550.90.07"), "{both:?}");
        assert_eq!(both.against("550.163.01"), None);
        assert!(both.against("550.54.15").unwrap().contains("use an image with driver 550.163.01"));
        let none = Versions::read(&dir.path().join("none"), &dir.path().join("none")).await;
        assert_eq!(none, Versions::default());
        assert!(none.against("1.2").unwrap().contains("not known"));
    }
}
