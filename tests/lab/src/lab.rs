//! Prepares the lab: tools, programs, images.

use std::fs::File;
use std::path::{Path, PathBuf};

use firstlight_image_builder::cache;
use firstlight_image_builder::format::{Compression, Format};
use firstlight_image_builder::image::manifest::{Manifest, Variables, Verity};
use firstlight_image_builder::image::{self, Image};
use firstlight_image_builder::packages::Packages;
use firstlight_progress::Progress;

use crate::agent_tests_bundle::{self, AgentTestsError};
use crate::binaries::{AgentTests, Binaries, BuildError, FabricStandIns, Profile, ServicePrograms, workspace};
use crate::busybox::{self, BusyboxError};
use crate::gpu_bundle::{self, BundleError};
use crate::{StandIn, Toolbox, host_packages, manifest, shipped, stand_in, toolbox};

/// Errors of preparing the lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A system package is missing.
    #[error(transparent)]
    Packages(#[from] host_packages::Error),
    /// The cache directory could not be determined.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// QEMU or a kernel could not be prepared.
    #[error(transparent)]
    Toolbox(#[from] toolbox::Error),
    /// The stand-in driver failed to build.
    #[error(transparent)]
    StandIn(#[from] stand_in::Error),
    /// One of our programs failed to build.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The guest image could not be built.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// The bundle of `gpu-test` could not be created.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The bundle of the agent's tests could not be created.
    #[error(transparent)]
    AgentTests(#[from] AgentTestsError),
    /// The container image could not be created.
    #[error(transparent)]
    Busybox(#[from] BusyboxError),
    /// The lock that serialises builds could not be taken.
    #[error("failed to lock {}: {source}", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The prepared tools, programs and images of the lab's guests.
#[derive(Debug)]
pub struct Lab {
    /// QEMU, its back ends and the kernel.
    pub toolbox: Toolbox,
    /// Our programs.
    pub binaries: Binaries,
    /// The stand-in driver's modules.
    pub stand_in: StandIn,
    /// The guest image.
    pub image: Image,
    /// The container image, an OCI layout.
    pub busybox_image: PathBuf,
    pub(crate) cache: PathBuf,
}

/// The agent's benchmark, and the runtimes that it compares the agent with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentBench {
    /// The program, static.
    pub program: PathBuf,
    /// A directory with crun, runc and their libraries at their usual places.
    pub runtimes: PathBuf,
}

/// Returns the image's directory, one per profile, so that neither replaces the other.
fn image_name(profile: Profile) -> &'static str {
    match profile {
        Profile::Shipped => "image",
        Profile::Development => "image-dev",
    }
}

/// Environment variable of a process whose parent has prepared the lab: packages are installed, programs are built.
const PREPARED: &str = "FIRSTLIGHT_LAB_PREPARED";

/// Takes the lock that serialises builds: scenarios run in parallel, and several build the same files.
fn lock_builds() -> Result<File, LabError> {
    let path = output().join("build.lock");
    let locked = || {
        std::fs::create_dir_all(output())?;
        let file = File::create(&path)?;
        file.lock()?;
        Ok(file)
    };
    locked().map_err(|source| LabError::Lock { path: path.clone(), source })
}

/// Returns the lab's progress output.
pub(crate) fn progress() -> Progress {
    Progress::stderr("lab")
}

impl Lab {
    /// Installs missing system packages; asks for confirmation unless `yes` is set
    /// or in CI.
    ///
    /// # Errors
    /// The system is not Debian, the user declined, or apt failed.
    pub fn install_packages(yes: bool) -> Result<(), LabError> {
        Ok(host_packages::ensure(host_packages::PACKAGES, yes, progress())?)
    }

    /// Like [`Lab::install_packages`], for configuring and compiling a kernel.
    ///
    /// # Errors
    /// As there.
    pub fn install_kernel_packages(yes: bool) -> Result<(), LabError> {
        Ok(host_packages::ensure(host_packages::KERNEL_PACKAGES, yes, progress())?)
    }

    /// Like [`Lab::install_packages`], for running libvirt.
    ///
    /// # Errors
    /// As there.
    pub fn install_libvirt_packages(yes: bool) -> Result<(), LabError> {
        Ok(host_packages::ensure(host_packages::LIBVIRT_PACKAGES, yes, progress())?)
    }

    /// Prepares everything that is missing or outdated, with guest programs of the release profile; fast if nothing
    /// changed.
    ///
    /// # Errors
    /// The first step that failed.
    pub fn prepare(yes: bool) -> Result<Self, LabError> {
        Self::prepare_with(yes, Profile::Shipped)
    }

    /// Like [`Lab::prepare`], with guest programs of `profile`.
    ///
    /// # Errors
    /// As there.
    pub fn prepare_with(yes: bool, profile: Profile) -> Result<Self, LabError> {
        let prepared = std::env::var_os(PREPARED).is_some();
        if !prepared {
            Self::install_packages(yes)?;
        }
        let _lock = lock_builds()?;
        let root = workspace();
        let cache = cache::root()?;
        let toolbox = Toolbox::prepare(&cache, progress())?;
        let source = root.join("tests/stand-in-nvidia");
        let stand_in = stand_in::build(&toolbox, &source, &toolbox.headers.release)?;
        let binaries = if prepared {
            Binaries::built(profile)?
        } else {
            progress().say("building the guest's programs");
            Binaries::build(&root, profile)?
        };
        let busybox_image = output().join("busybox-image");
        busybox::write_layout(&toolbox.busybox, &busybox_image)?;
        let manifest = root.join(manifest::PATH);
        let variables = variables(&binaries, &stand_in, &toolbox);
        let image =
            image::build(&manifest, &variables, &output().join(image_name(profile)), &cache, Progress::quiet())?;
        Ok(Self { toolbox, binaries, stand_in, image, busybox_image, cache })
    }

    /// Builds another guest image, from a manifest of `tests/lab/manifests`.
    ///
    /// # Errors
    /// The manifest is invalid, or a file that it refers to is missing.
    pub fn variant(&self, name: &str) -> Result<Image, LabError> {
        self.variant_with(name, &[])
    }

    /// Builds the guest image that runs the agent's tests with real containers
    /// in the agent's place, and those tests.
    ///
    /// # Errors
    /// The tests or the image fail to build.
    pub fn agent_tests(&self) -> Result<Image, LabError> {
        progress().say("building the agent's tests");
        let tests = AgentTests::build(&workspace())?;
        self.variant_with("agent-tests", &[("TESTS", &tests.program)])
    }

    /// Builds the guest image that runs the agent's tests from their bundle, as on
    /// any machine.
    ///
    /// # Errors
    /// The bundle or the image fails to build.
    pub fn agent_tests_bundle(&self) -> Result<Image, LabError> {
        let _lock = lock_builds()?;
        progress().say("building the agent's tests");
        let (dir, bundle) = (output().join("agent-tests"), output().join("agent-tests.tar"));
        agent_tests_bundle::make(&dir)?;
        gpu_bundle::pack(&dir, &bundle)?;
        self.variant_with("agent-tests-bundle", &[("BUNDLE", &bundle)])
    }

    /// Builds the agent's benchmark and fetches crun and runc.
    ///
    /// # Errors
    /// The program fails to build, or the runtimes cannot be fetched.
    pub fn agent_bench(&self) -> Result<AgentBench, LabError> {
        progress().say("building the agent's benchmark");
        let program = crate::binaries::agent_bench(&workspace())?;
        Ok(AgentBench { program, runtimes: self.toolbox.runtimes()? })
    }

    /// Builds the guest image that runs the benchmark in the agent's place.
    ///
    /// # Errors
    /// The image does not build.
    pub fn agent_bench_image(&self, bench: &AgentBench) -> Result<Image, LabError> {
        self.variant_with("agent-bench", &[("BENCH", &bench.program), ("RUNTIMES", &bench.runtimes)])
    }

    /// Builds the lab's image without the stand-in driver for the lab's own kernel,
    /// which has everything built in; builds that kernel first if it is not in the
    /// cache.
    ///
    /// # Errors
    /// A system package is missing, or the kernel or the image fails to build.
    pub fn own_kernel(&self, yes: bool) -> Result<Image, LabError> {
        Self::install_kernel_packages(yes)?;
        let manifest = workspace().join("tests/lab/manifests/own-kernel.toml");
        let variables = variables(&self.binaries, &self.stand_in, &self.toolbox);
        Ok(image::build(&manifest, &variables, &output().join("image-own-kernel"), &self.cache, progress())?)
    }

    /// Builds the guest image with the packet filter's programs and modules.
    ///
    /// # Errors
    /// The programs cannot be fetched, or the image fails to build.
    pub fn packet_filter(&self) -> Result<Image, LabError> {
        let programs = self.toolbox.iptables()?;
        self.variant_with("packet-filter", &[("IPTABLES", &programs)])
    }

    /// Builds the guest image with a program that leaves orphans to PID 1.
    ///
    /// # Errors
    /// The program or the image does not build.
    pub fn orphans(&self) -> Result<Image, LabError> {
        let _lock = lock_builds()?;
        let program = output().join("orphans");
        gpu_bundle::orphans(&program)?;
        self.variant_with("orphans", &[("ORPHANS", &program)])
    }

    /// Builds the guest image that runs `gpu-test` with the stand-ins for the driver
    /// and libcuda.
    ///
    /// # Errors
    /// The bundle or the image does not build.
    pub fn gpu_test(&self) -> Result<Image, LabError> {
        let _lock = lock_builds()?;
        progress().say("building gpu-test");
        let dir = output().join("gpu-bundle");
        gpu_bundle::make(&dir)?;
        let (bundle, cuda) = (output().join("gpu-bundle.tar"), output().join("libcuda.so"));
        gpu_bundle::stand_in_cuda(&cuda)?;
        gpu_bundle::pack(&dir, &bundle)?;
        self.variant_with("gpu-test", &[("BUNDLE", &bundle), ("LIBCUDA", &cuda)])
    }

    /// Builds the guest image with `firstlight-gpu-settings` and the stand-in for NVML.
    ///
    /// # Errors
    /// The program, the library or the image does not build.
    pub fn settings(&self) -> Result<Image, LabError> {
        self.with_settings("settings")
    }

    /// Builds the disk of an extension with the stand-in driver, and with the additions
    /// of [`Lab::settings`].
    ///
    /// # Errors
    /// As there.
    pub fn extension(&self) -> Result<Image, LabError> {
        self.with_settings("extension-gpu")
    }

    fn with_settings(&self, variant: &str) -> Result<Image, LabError> {
        let _lock = lock_builds()?;
        let program = crate::binaries::gpu_settings(&workspace())?;
        let nvml = output().join("libnvidia-ml.so");
        gpu_bundle::stand_in_nvml(&nvml)?;
        let mut more = vec![("GPU_SETTINGS", program.as_path()), ("NVML", &nvml)];
        let libraries = gpu_bundle::dynamic_libraries()?;
        more.extend(libraries.iter().map(|(name, path)| (*name, path.as_path())));
        self.variant_with(variant, &more)
    }

    /// Builds the guest image of a service VM whose fabric manager is a stand-in: the manager's process, and the
    /// library that the partition daemon opens. It has a shell.
    ///
    /// # Errors
    /// A program or the image does not build.
    pub fn service_vm(&self) -> Result<Image, LabError> {
        progress().say("building the service VM's programs");
        let programs = ServicePrograms::build(&workspace())?;
        let stand_ins = FabricStandIns::build(&workspace())?;
        let mut more = vec![
            ("PARTITIOND", programs.partitiond.as_path()),
            ("FMCTL", &programs.fmctl),
            ("FAKE_FM", &stand_ins.manager),
            ("NVFM", &stand_ins.library),
        ];
        let libraries = gpu_bundle::dynamic_libraries()?;
        more.extend(libraries.iter().map(|(name, path)| (*name, path.as_path())));
        self.variant_with("service-vm", &more)
    }

    /// Builds `fmctl`, the client of the partition daemon, for use on the host.
    ///
    /// # Errors
    /// It fails to build.
    pub fn fmctl(&self) -> Result<PathBuf, LabError> {
        Ok(crate::binaries::static_program(&workspace(), "firstlight-fmctl", "fmctl")?)
    }

    /// Builds the lab's image with a compressed initramfs.
    ///
    /// # Errors
    /// The compressor cannot be fetched, or the image fails to build.
    pub fn packed(&self, compression: Compression) -> Result<Image, LabError> {
        let name = format!("image-{}", compression.name());
        self.lab_image_with(&name, |manifest| manifest.image.compression = Some(compression))
    }

    /// Builds the lab's image as a disk with EROFS and a dm-verity hash tree:
    /// [`Image::disk`] is the disk, and its record has the mount parameters.
    ///
    /// # Errors
    /// mkfs.erofs cannot be fetched, or the image fails to build.
    pub fn disk(&self) -> Result<Image, LabError> {
        self.lab_image_with("image-disk", |manifest| {
            manifest.image.format = Format::Erofs;
            manifest.verity = Some(Verity::default());
        })
    }

    /// Like [`Lab::disk`], uncompressed: the files' bytes can be found on the disk.
    ///
    /// # Errors
    /// As there.
    pub fn plain_disk(&self) -> Result<Image, LabError> {
        self.lab_image_with("image-disk-plain", |manifest| {
            manifest.image.format = Format::Erofs;
            manifest.image.compression = Some(Compression::None);
            manifest.verity = Some(Verity::default());
        })
    }

    /// Builds and returns the programs of release images.
    pub(crate) fn programs(&self) -> Result<shipped::Programs, LabError> {
        let gpu_settings = crate::binaries::gpu_settings(&workspace())?;
        let (init, agent) = (self.binaries.init.clone(), self.binaries.agent.clone());
        // The service VM's programs are useless without archives that only NVIDIA distributes.
        Ok(shipped::Programs { init, agent, gpu_settings, service: None })
    }

    /// Builds a release image of the directory `manifests`, with progress output;
    /// cached files are not compiled or downloaded again.
    ///
    /// Debian's kernel may be newer than the driver matrix: combinations outside of
    /// the matrix are therefore compiled too.
    ///
    /// # Errors
    /// The manifest is invalid, a package cannot be fetched, or the driver fails to
    /// compile.
    pub fn shipped(&self, name: &str) -> Result<Image, LabError> {
        let mut manifest = shipped::manifest(name, &self.programs()?)?;
        if let Some(driver) = &mut manifest.driver {
            driver.untried = true;
        }
        Ok(shipped::build(&manifest, &output().join(format!("image-{name}")), &self.cache, progress())?)
    }

    /// Builds the opener of [`Lab::disk`] from its own manifest, for the lab's kernel.
    ///
    /// # Errors
    /// The program or the image does not build.
    pub fn opener(&self) -> Result<Image, LabError> {
        let program = crate::binaries::static_program(&workspace(), "firstlight-opener", "firstlight-opener")?;
        let variables = Variables::from([("OPENER".to_owned(), program.display().to_string())]);
        let read = |file: &str, variables| Manifest::read(&workspace().join(file), variables);
        let mut manifest = read("image-builder/manifests/opener.toml", &variables).map_err(image::Error::from)?;
        let all = self::variables(&self.binaries, &self.stand_in, &self.toolbox);
        let lab = read(manifest::PATH, &all).map_err(image::Error::from)?;
        manifest.kernel.suite = lab.kernel.suite;
        let mut packages = Packages::new(&self.cache, None, progress());
        Ok(image::build_from(&manifest, &mut packages, &output().join("image-opener"))?)
    }

    fn lab_image_with(&self, name: &str, change: impl FnOnce(&mut Manifest)) -> Result<Image, LabError> {
        let file = workspace().join(manifest::PATH);
        let variables = variables(&self.binaries, &self.stand_in, &self.toolbox);
        let mut manifest = Manifest::read(&file, &variables).map_err(image::Error::from)?;
        change(&mut manifest);
        let mut packages = Packages::new(&self.cache, None, progress());
        Ok(image::build_from(&manifest, &mut packages, &output().join(name))?)
    }

    fn variant_with(&self, name: &str, more: &[(&str, &Path)]) -> Result<Image, LabError> {
        let manifest = workspace().join("tests/lab/manifests").join(format!("{name}.toml"));
        let mut variables = variables(&self.binaries, &self.stand_in, &self.toolbox);
        variables.extend(more.iter().map(|(name, path)| ((*name).to_owned(), path.display().to_string())));
        let out = output().join(format!("image-{name}"));
        Ok(image::build(&manifest, &variables, &out, &self.cache, Progress::quiet())?)
    }
}

fn variables(binaries: &Binaries, stand_in: &StandIn, toolbox: &Toolbox) -> Variables {
    let path = |path: &Path| path.display().to_string();
    Variables::from([
        ("INIT".to_owned(), path(&binaries.init)),
        ("AGENT".to_owned(), path(&binaries.agent)),
        ("NVIDIA_KO".to_owned(), path(&stand_in.nvidia_ko)),
        ("NVIDIA_UVM_KO".to_owned(), path(&stand_in.nvidia_uvm_ko)),
        ("BUSYBOX".to_owned(), path(&toolbox.busybox)),
    ])
}

/// Returns the directory of build results that depend on this checkout.
pub(crate) fn output() -> PathBuf {
    crate::binaries::target().join("lab")
}
