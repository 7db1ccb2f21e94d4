//! NVIDIA's driver: kernel modules compiled for exactly one kernel, and the
//! firmware and libraries that go with them, all from Debian's packages.
//!
//! What compiles with what is a table ([`matrix`]), and so are the files of
//! each profile ([`profile`]); a manifest that asks for something else is
//! refused before anything is compiled.

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
use crate::closure::rules::{Firmware, Rules};
use crate::debian;
use crate::kernel::{self, Facts};
use crate::packages::{self, Packages};

pub use compile::{Built, MODULES, Module, Plan, Record};
pub use files::{Files, Kind, Piece};
pub use version::Version;

/// Why a driver could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A package could not be had.
    #[error(transparent)]
    Packages(Box<packages::Error>),
    /// A package could not be unpacked.
    #[error(transparent)]
    Debian(#[from] debian::Error),
    /// The kernel's headers could not be had.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The table of drivers and kernels says no.
    #[error(transparent)]
    Matrix(#[from] matrix::Error),
    /// The source does not take a patch.
    #[error(transparent)]
    Patch(#[from] patch::Error),
    /// The profile makes no sense.
    #[error(transparent)]
    Profile(#[from] profile::Error),
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// A version that is none.
    #[error("NVIDIA driver: {what}")]
    Version {
        /// What is wrong.
        what: String,
    },
    /// A kernel of our own has no packages of headers.
    #[error(
        "kernel {release} is built from a recipe, and the NVIDIA driver is compiled against packages of headers: \
         name a kernel package in the manifest"
    )]
    OwnKernel {
        /// The kernel.
        release: String,
    },
    /// A package does not hold what it should.
    #[error("package {package} has no {what}")]
    Incomplete {
        /// The package file.
        package: String,
        /// What is missing.
        what: &'static str,
    },
    /// The programs that open namespaces are not there.
    #[error(
        "cannot run setpriv and unshare, with which modules are compiled in a root of their own: install the package util-linux"
    )]
    Namespaces(#[source] std::io::Error),
    /// The machine does not allow what the build root needs.
    #[error(
        "cannot enter the build root: {said}. Compiling the driver needs user namespaces for ordinary users: \
         user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1 where that exists, \
         kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu, and in a container a seccomp profile that lets \
         unshare and mount through"
    )]
    NotEntered {
        /// The last line that was printed.
        said: String,
    },
    /// Somebody ended the compiler.
    #[error("{what}: a program of the build was killed ({said}): by a person, or for want of memory; try again")]
    Stopped {
        /// The driver and the kernel.
        what: String,
        /// The last line that was printed.
        said: String,
    },
    /// The compiler refused.
    #[error("{what}: does not compile ({status}): {first}")]
    Compile {
        /// The driver and the kernel.
        what: String,
        /// The first error.
        first: String,
        /// How the build ended.
        status: ExitStatus,
    },
    /// The compiler refused, and its output was kept.
    #[error("{what}: does not compile: {first}; all of the output: {}", log.display())]
    CompileLog {
        /// The driver and the kernel.
        what: String,
        /// The first error.
        first: String,
        /// Everything that was printed.
        log: PathBuf,
    },
    /// The build went well but a module is not there.
    #[error("{what}: the build made no {module}")]
    NoModule {
        /// The driver and the kernel.
        what: String,
        /// The missing file.
        module: String,
    },
    /// Something that is not built was asked for.
    #[error("there is no module {name} of the NVIDIA driver; there are: {}", MODULES.join(", "))]
    UnknownModule {
        /// What was asked for.
        name: String,
    },
    /// A package lacks a file that the table says it has.
    #[error("package {package} has no usable file {file}: the table of profiles does not fit it")]
    NoFile {
        /// The package.
        package: String,
        /// The file.
        file: String,
    },
    /// Two files want one place.
    #[error("the table of profiles has /{path} twice")]
    Twice {
        /// The place.
        path: String,
    },
}

impl From<packages::Error> for Error {
    fn from(error: packages::Error) -> Self {
        Self::Packages(Box::new(error))
    }
}

impl Error {
    /// What the compiler said first, if it was the compiler that said no.
    #[must_use]
    pub fn compiler(&self) -> Option<&str> {
        match self {
            Self::Compile { first, .. } | Self::CompileLog { first, .. } => Some(first),
            _ => None,
        }
    }
}

/// Which driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Its version, or the numbers it begins with: `550` is the suite's newest of that branch.
    pub version: Version,
    /// The suite it comes from.
    pub suite: String,
}

/// What may be compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Only what is known to compile.
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
    /// The Debian suite it comes from.
    pub suite: String,
    /// Kernel modules, of [`MODULES`].
    #[serde(default = "usual_modules")]
    pub modules: Vec<String>,
    /// Which libraries, programs and firmware; none of them if it is not given.
    #[serde(default)]
    pub profile: Option<String>,
    /// Groups of files beside those of the profile.
    #[serde(default)]
    pub groups: Vec<String>,
    /// Generations of GPUs that the image has firmware for, if others than the profile's.
    #[serde(default)]
    pub gpus: Vec<String>,
    /// Accepts a kernel that is untested with this driver.
    #[serde(default)]
    pub untried: bool,
}

fn usual_modules() -> Vec<String> {
    vec!["nvidia".to_owned(), "nvidia-uvm".to_owned()]
}

/// A driver that is ready to go into an image.
#[derive(Debug, Clone)]
pub struct Driver {
    /// Its version.
    pub version: Version,
    /// The compiled modules.
    pub built: Built,
    /// The files of those modules that the manifest names.
    pub modules: Vec<PathBuf>,
    /// Firmware, libraries and programs.
    pub files: Option<Files>,
}

impl Driver {
    /// Makes the driver ready for `kernel`; compiles and downloads what is not in the cache.
    ///
    /// # Errors
    /// A combination that is not known to work, packages that cannot be had, or
    /// what the compiler says.
    pub fn prepare(cache: &Path, settings: &DriverSettings, kernel: &Facts, progress: Progress) -> Result<Self, Error> {
        Self::prepare_from(&mut Packages::new(cache, None, progress), settings, kernel)
    }

    /// [`Driver::prepare`] with packages that may be locked.
    ///
    /// # Errors
    /// As [`Driver::prepare`].
    pub fn prepare_from(packages: &mut Packages<'_>, settings: &DriverSettings, kernel: &Facts) -> Result<Self, Error> {
        let (table, catalogue) = (matrix::Table::own()?, profile::Catalogue::own()?);
        if let Some(name) = settings.modules.iter().find(|name| !MODULES.contains(&name.as_str())) {
            return Err(Error::UnknownModule { name: name.clone() });
        }
        // What is wrong with the profile is said before the compiler takes minutes.
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

    /// What the check of the image has to know and cannot see.
    #[must_use]
    pub fn rules(&self) -> Rules {
        let Some(files) = &self.files else { return Rules::default() };
        let mut rules = files.rules.clone();
        if self.modules.iter().any(|module| module.ends_with("nvidia.ko")) {
            let reason = "it names the firmware of all GPUs and loads that of its own".to_owned();
            rules.firmware.push(Firmware { module: "nvidia".to_owned(), reason });
        }
        rules
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifests_part_is_short() {
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
    fn what_cannot_be_is_said_before_anything_is_fetched() {
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
        let refused = |text: &str| {
            let settings = toml::from_str(&format!("version = \"550\"\nsuite = \"trixie\"\n{text}")).unwrap();
            Driver::prepare(cache, &settings, &facts, Progress::quiet()).unwrap_err().to_string()
        };
        assert!(refused("modules = [\"nvidia-drm\"]").contains("nvidia-modeset"));
        assert!(refused("profile = \"huge\"").contains("compute-min"));
        assert!(refused("").contains("built from a recipe"));
    }
}
