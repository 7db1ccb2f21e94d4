//! Provides the NVIDIA driver: kernel modules compiled for one kernel, and the
//! matching firmware and libraries, all from Debian's packages.
//!
//! The tested combinations of driver and kernel are listed in a table ([`matrix`]), as are the
//! files of each profile ([`profile`]). Unsupported settings are refused before
//! anything is compiled.

mod build_root;
mod compile;
mod files;
pub mod matrix;
mod patch;
pub mod profile;
pub mod report;
pub mod version;

use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use firstlight_progress::Progress;
use serde::Deserialize;

use crate::cache;
use crate::kernel::{self, Facts};
use crate::packages::debian;
use crate::packages::{self, Packages};
use crate::tree::closure::rules::{Firmware, Rules};

pub use compile::{BuiltModules, MODULES, Module, Plan, Record};
pub use files::{DriverEntry, Files, Kind};
pub use version::Version;

/// Why a driver is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A package is not available.
    #[error(transparent)]
    Packages(Box<packages::Error>),
    /// A package could not be unpacked.
    #[error(transparent)]
    Debian(#[from] debian::Error),
    /// The kernel headers are not available.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The combination of driver and kernel is refused.
    #[error(transparent)]
    Matrix(#[from] matrix::Error),
    /// A patch does not apply.
    #[error(transparent)]
    Patch(#[from] patch::Error),
    /// The profile is invalid.
    #[error(transparent)]
    Profile(#[from] profile::Error),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// Invalid driver version.
    #[error("NVIDIA driver: {what}")]
    Version {
        /// The reason.
        what: String,
    },
    /// A kernel that is built from a recipe has no header packages.
    #[error(
        "kernel {release} is built from a recipe, but the NVIDIA driver is compiled against header packages: \
         name a kernel package in the manifest"
    )]
    OwnKernel {
        /// The kernel.
        release: String,
    },
    /// A package lacks a file or directory.
    #[error("package {package} has no {what}")]
    Incomplete {
        /// The package file.
        package: String,
        /// What is missing.
        what: &'static str,
    },
    /// `setpriv` and `unshare` cannot be run.
    #[error(
        "failed to run setpriv and unshare, which create the namespaces of the build root: install the package util-linux"
    )]
    Namespaces(#[source] std::io::Error),
    /// The host does not permit the namespaces or mounts of the build root.
    #[error(
        "failed to enter the build root: {message}; compiling the driver needs unprivileged user namespaces: \
         user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1 where that exists, \
         kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu, and in a container a seccomp profile that allows \
         unshare and mount"
    )]
    EnterBuildRoot {
        /// The last line of output.
        message: String,
    },
    /// A program of the build was killed by a signal.
    #[error("{what}: a program of the build was killed ({message}), possibly by the out-of-memory killer; retry")]
    Killed {
        /// The driver and the kernel.
        what: String,
        /// The last line of output.
        message: String,
    },
    /// Compilation failed.
    #[error("{what}: compilation failed ({status}): {first}")]
    Compile {
        /// The driver and the kernel.
        what: String,
        /// The first error.
        first: String,
        /// The exit status.
        status: ExitStatus,
    },
    /// Compilation failed, and the log was saved.
    #[error("{what}: compilation failed: {first}; log: {}", log.display())]
    CompileLog {
        /// The driver and the kernel.
        what: String,
        /// The first error.
        first: String,
        /// The saved log.
        log: PathBuf,
    },
    /// The build succeeded, but a module is missing.
    #[error("{what}: the build did not create {module}")]
    NoModule {
        /// The driver and the kernel.
        what: String,
        /// The missing file.
        module: String,
    },
    /// An unknown module was requested.
    #[error("unknown module {name} of the NVIDIA driver; available: {}", MODULES.join(", "))]
    UnknownModule {
        /// The requested name.
        name: String,
    },
    /// A package lacks a file of the profile table.
    #[error("package {package} has no regular file {file}: the table of profiles does not match this version")]
    NoFile {
        /// The package.
        package: String,
        /// The file.
        file: String,
    },
    /// Two files have the same path.
    #[error("the table of profiles has the path /{path} twice")]
    DuplicatePath {
        /// The path.
        path: String,
    },
}

impl From<packages::Error> for Error {
    fn from(error: packages::Error) -> Self {
        Self::Packages(Box::new(error))
    }
}

impl Error {
    /// Returns the first error of the compiler, if compilation failed.
    #[must_use]
    pub fn compiler_error(&self) -> Option<&str> {
        match self {
            Self::Compile { first, .. } | Self::CompileLog { first, .. } => Some(first),
            _ => None,
        }
    }
}

/// The selected driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Its version, or a branch: `550` is the newest version of that branch in the suite.
    pub version: Version,
    /// The Debian suite.
    pub suite: String,
}

/// Which combinations of driver and kernel may be compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Only those known to compile.
    Known,
    /// Also untested combinations.
    Untried,
    /// Every combination, to verify the table.
    Open,
}

/// `[driver]` of a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriverSettings {
    /// The driver's version, or its branch: `550.163.01`, `550`.
    pub version: Version,
    /// The Debian suite.
    pub suite: String,
    /// The kernel modules, a subset of [`MODULES`].
    #[serde(default = "default_modules")]
    pub modules: Vec<String>,
    /// The profile of libraries, programs and firmware; none if absent.
    #[serde(default)]
    pub profile: Option<String>,
    /// Groups of files in addition to those of the profile.
    #[serde(default)]
    pub groups: Vec<String>,
    /// GPU generations for which the image has firmware; those of the profile if empty.
    #[serde(default)]
    pub gpus: Vec<String>,
    /// Accepts a kernel that is untested with this driver.
    #[serde(default)]
    pub untried: bool,
}

fn default_modules() -> Vec<String> {
    vec!["nvidia".to_owned(), "nvidia-uvm".to_owned()]
}

/// A driver that is ready for an image.
#[derive(Debug, Clone)]
pub struct Driver {
    /// Its version.
    pub version: Version,
    /// The compiled modules.
    pub built: BuiltModules,
    /// Paths of the modules that the manifest lists.
    pub modules: Vec<PathBuf>,
    /// Firmware, libraries and programs.
    pub files: Option<Files>,
}

impl Driver {
    /// Prepares the driver for `kernel`; compiles and downloads what is not cached.
    ///
    /// # Errors
    /// An unsupported combination, an unavailable package, or a compile error.
    pub fn prepare(cache: &Path, settings: &DriverSettings, kernel: &Facts, progress: Progress) -> Result<Self, Error> {
        Self::prepare_from(&mut Packages::new(cache, None, progress), settings, kernel)
    }

    /// Prepares the driver as [`Driver::prepare`], with packages that may be locked.
    ///
    /// # Errors
    /// As [`Driver::prepare`].
    pub fn prepare_from(packages: &mut Packages<'_>, settings: &DriverSettings, kernel: &Facts) -> Result<Self, Error> {
        let (table, catalogue) = (matrix::Table::own()?, profile::Catalogue::own()?);
        if let Some(name) = settings.modules.iter().find(|name| !MODULES.contains(&name.as_str())) {
            return Err(Error::UnknownModule { name: name.clone() });
        }
        // Check the profile first, as compilation takes minutes.
        if let Some(profile) = &settings.profile {
            catalogue.select(profile, &settings.groups, &settings.gpus, &settings.version)?;
        }
        let choice = Choice { version: settings.version.clone(), suite: settings.suite.clone() };
        let gate = if settings.untried { Gate::Untried } else { Gate::Known };
        let plan = Plan::new(packages, &table, &choice, kernel, gate)?;
        let built = plan.build(packages)?;
        let modules = settings.modules.iter().map(|name| built.module(name)).collect::<Result<_, _>>()?;
        let files = match &settings.profile {
            Some(profile) => {
                let selected = catalogue.select(profile, &settings.groups, &settings.gpus, &plan.driver)?;
                Some(Files::prepare(packages, &settings.suite, &selected)?)
            }
            None => None,
        };
        Ok(Self { version: plan.driver, built, modules, files })
    }

    /// Returns the rules for the closure check of the image.
    #[must_use]
    pub fn rules(&self) -> Rules {
        let Some(files) = &self.files else { return Rules::default() };
        let mut rules = files.rules.clone();
        if self.modules.iter().any(|module| module.ends_with("nvidia.ko")) {
            let reason = "it lists the firmware of all GPUs and loads only that of the present GPU".to_owned();
            rules.firmware.push(Firmware { module: "nvidia".to_owned(), reason });
        }
        rules
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_settings_have_defaults_and_unknown_keys_are_refused() {
        let settings: DriverSettings = toml::from_str("version = \"550\"\nsuite = \"trixie\"\n").unwrap();
        assert_eq!(settings.modules, ["nvidia", "nvidia-uvm"]);
        assert!(settings.profile.is_none() && !settings.untried);
        for odd in
            ["version = \"new\"\nsuite = \"x\"", "version = \"550\"\nsuite = \"x\"\ncolour = 1", "version = \"550\""]
        {
            assert!(toml::from_str::<DriverSettings>(odd).is_err(), "{odd}");
        }
    }

    #[test]
    fn invalid_settings_then_error_before_any_download() {
        // The cache cannot even be created here.
        let cache = Path::new("/proc/none");
        let facts = Facts {
            release: "6.12.95-firstlight-lab".to_owned(),
            package: "linux-source-6.12".to_owned(),
            version: "6.12.95-1".to_owned(),
            suite: "sid".to_owned(),
            sha256: String::new(),
            size: 0,
            vmlinux_sha256: String::new(),
            vmlinux_size: 0,
        };
        let error_for = |text: &str| {
            let settings = toml::from_str(&format!("version = \"550\"\nsuite = \"trixie\"\n{text}")).unwrap();
            Driver::prepare(cache, &settings, &facts, Progress::quiet()).unwrap_err().to_string()
        };
        assert!(error_for("modules = [\"nvidia-drm\"]").contains("nvidia-modeset"));
        assert!(error_for("profile = \"huge\"").contains("compute-min"));
        assert!(error_for("").contains("built from a recipe"));
    }
}
