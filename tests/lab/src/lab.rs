//! The lab, ready: tools, programs, images.

use std::fs::File;
use std::path::{Path, PathBuf};

use firstlight_image_builder::build::{self, Image};
use firstlight_image_builder::cache;
use firstlight_image_builder::format::{Compression, Format};
use firstlight_image_builder::manifest::{Manifest, Variables, Verity};
use firstlight_image_builder::packages::Packages;
use firstlight_image_builder::progress::Progress;

use crate::agent_tests_bundle::{self, AgentTestsError};
use crate::binaries::{AgentTests, Binaries, BuildError, FabricStandIns, Profile, ServicePrograms, workspace};
use crate::busybox::{self, BusyboxError};
use crate::gpu_bundle::{self, BundleError};
use crate::{StandIn, Toolbox, host_packages, shipped, stand_in, toolbox};

/// Why the lab is not ready.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A system package is missing.
    #[error(transparent)]
    Packages(#[from] host_packages::Error),
    /// There is no place for the cache.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// QEMU or a kernel could not be prepared.
    #[error(transparent)]
    Toolbox(#[from] toolbox::Error),
    /// The stand-in driver does not build.
    #[error(transparent)]
    StandIn(#[from] stand_in::Error),
    /// Our programs do not build.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The guest image could not be built.
    #[error(transparent)]
    Image(#[from] build::Error),
    /// `gpu-test` could not be packed up.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The agent's tests could not be packed up.
    #[error(transparent)]
    AgentTests(#[from] AgentTestsError),
    /// The container image could not be made.
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

/// Everything that a guest of the lab is made from.
#[derive(Debug)]
pub struct Lab {
    /// QEMU and its daemons.
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

/// A program that measures the agent, and what it measures it beside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentBench {
    /// The program, static.
    pub program: PathBuf,
    /// A directory with crun, runc and their libraries at their usual places.
    pub runtimes: PathBuf,
}

/// The image's directory. One for each profile, so that neither replaces the other.
fn image_name(profile: Profile) -> &'static str {
    match profile {
        Profile::Shipped => "image",
        Profile::Development => "image-dev",
    }
}

/// Set for a process whose parent has just prepared the lab: packages are installed and programs are built.
const PREPARED: &str = "FIRSTLIGHT_LAB_PREPARED";

/// Held while programs or images are built: scenarios run at the same time, and several need the same files.
fn alone() -> Result<File, LabError> {
    let path = output().join("build.lock");
    let locked = || {
        std::fs::create_dir_all(output())?;
        let file = File::create(&path)?;
        file.lock()?;
        Ok(file)
    };
    locked().map_err(|source| LabError::Lock { path: path.clone(), source })
}

/// What the lab says about long steps.
pub(crate) fn progress() -> Progress {
    Progress::stderr("lab")
}

impl Lab {
    /// Installs the system packages that are missing, asking first unless
    /// `yes` or in CI.
    ///
    /// # Errors
    /// This is no Debian, the user said no, or apt failed.
    pub fn install_packages(yes: bool) -> Result<(), LabError> {
        Ok(host_packages::ensure(host_packages::PACKAGES, yes, progress())?)
    }

    /// [`Lab::install_packages`] for what configures and compiles a kernel.
    ///
    /// # Errors
    /// As there.
    pub fn install_kernel_packages(yes: bool) -> Result<(), LabError> {
        Ok(host_packages::ensure(host_packages::KERNEL_PACKAGES, yes, progress())?)
    }

    /// [`Lab::install_packages`] for what runs libvirt.
    ///
    /// # Errors
    /// As there.
    pub fn install_libvirt_packages(yes: bool) -> Result<(), LabError> {
        Ok(host_packages::ensure(host_packages::LIBVIRT_PACKAGES, yes, progress())?)
    }

    /// Makes everything ready that is not, with guest programs as they ship; quick when nothing changed.
    ///
    /// # Errors
    /// The first step that failed.
    pub fn prepare(yes: bool) -> Result<Self, LabError> {
        Self::prepare_with(yes, Profile::Shipped)
    }

    /// [`Lab::prepare`] with guest programs of that profile.
    ///
    /// # Errors
    /// As there.
    pub fn prepare_with(yes: bool, profile: Profile) -> Result<Self, LabError> {
        let prepared = std::env::var_os(PREPARED).is_some();
        if !prepared {
            Self::install_packages(yes)?;
        }
        let _alone = alone()?;
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
        let manifest = root.join("image-builder/manifests/lab.toml");
        let variables = variables(&binaries, &stand_in, &toolbox);
        let image =
            build::build(&manifest, &variables, &output().join(image_name(profile)), &cache, Progress::quiet())?;
        Ok(Self { toolbox, binaries, stand_in, image, busybox_image, cache })
    }

    /// Builds another guest image, from a manifest of `tests/lab/manifests`.
    ///
    /// # Errors
    /// The manifest is wrong, or a file it names is not there.
    pub fn variant(&self, name: &str) -> Result<Image, LabError> {
        self.variant_with(name, &[])
    }

    /// Builds the guest image that runs the agent's tests with real containers
    /// in the agent's place, and those tests.
    ///
    /// # Errors
    /// The tests do not build, or the image does not.
    pub fn agent_tests(&self) -> Result<Image, LabError> {
        progress().say("building the agent's tests");
        let tests = AgentTests::build(&workspace())?;
        self.variant_with("agent-tests", &[("TESTS", &tests.program)])
    }

    /// Builds the guest image that runs those tests from a directory, as on any
    /// machine.
    ///
    /// # Errors
    /// The bundle or the image does not build.
    pub fn agent_tests_bundle(&self) -> Result<Image, LabError> {
        let _alone = alone()?;
        progress().say("building the agent's tests");
        let (dir, bundle) = (output().join("agent-tests"), output().join("agent-tests.tar"));
        agent_tests_bundle::make(&dir)?;
        gpu_bundle::pack(&dir, &bundle)?;
        self.variant_with("agent-tests-bundle", &[("BUNDLE", &bundle)])
    }

    /// What measures the agent beside crun and runc.
    ///
    /// # Errors
    /// The program does not build, or the runtimes cannot be had.
    pub fn agent_bench(&self) -> Result<AgentBench, LabError> {
        progress().say("building the agent's bench");
        let program = crate::binaries::agent_bench(&workspace())?;
        Ok(AgentBench { program, runtimes: self.toolbox.runtimes()? })
    }

    /// Builds the guest image that runs that bench in the agent's place.
    ///
    /// # Errors
    /// The image does not build.
    pub fn agent_bench_image(&self, bench: &AgentBench) -> Result<Image, LabError> {
        self.variant_with("agent-bench", &[("BENCH", &bench.program), ("RUNTIMES", &bench.runtimes)])
    }

    /// Builds the lab's image once more, without the stand-in driver, for the
    /// lab's own kernel, which has everything built in; builds that kernel first
    /// if the cache does not have it.
    ///
    /// # Errors
    /// A system package is missing, or the kernel or the image does not build.
    pub fn own_kernel(&self, yes: bool) -> Result<Image, LabError> {
        Self::install_kernel_packages(yes)?;
        let manifest = workspace().join("tests/lab/manifests/own-kernel.toml");
        let variables = variables(&self.binaries, &self.stand_in, &self.toolbox);
        Ok(build::build(&manifest, &variables, &output().join("image-own-kernel"), &self.cache, progress())?)
    }

    /// Builds the guest image with the packet filter's programs and modules.
    ///
    /// # Errors
    /// The programs cannot be had, or the image does not build.
    pub fn packet_filter(&self) -> Result<Image, LabError> {
        let programs = self.toolbox.iptables()?;
        self.variant_with("packet-filter", &[("IPTABLES", &programs)])
    }

    /// Builds the guest image with a program that leaves processes to process 1.
    ///
    /// # Errors
    /// The program or the image does not build.
    pub fn orphans(&self) -> Result<Image, LabError> {
        let _alone = alone()?;
        let program = output().join("orphans");
        gpu_bundle::orphans(&program)?;
        self.variant_with("orphans", &[("ORPHANS", &program)])
    }

    /// Builds the guest image that runs `gpu-test` beside the stand-in driver,
    /// with a library that stands in for libcuda.
    ///
    /// # Errors
    /// The bundle or the image does not build.
    pub fn gpu_test(&self) -> Result<Image, LabError> {
        let _alone = alone()?;
        progress().say("building gpu-test");
        let dir = output().join("gpu-bundle");
        gpu_bundle::make(&dir)?;
        let (bundle, cuda) = (output().join("gpu-bundle.tar"), output().join("libcuda.so"));
        gpu_bundle::stand_in_cuda(&cuda)?;
        gpu_bundle::pack(&dir, &bundle)?;
        self.variant_with("gpu-test", &[("BUNDLE", &bundle), ("LIBCUDA", &cuda)])
    }

    /// Builds the guest image with the program that makes settings of GPUs, and
    /// a library that stands in for NVML.
    ///
    /// # Errors
    /// The program, the library or the image does not build.
    pub fn settings(&self) -> Result<Image, LabError> {
        self.with_settings("settings")
    }

    /// Builds the disk of an extension with the stand-in driver, and with what
    /// [`Lab::settings`] has.
    ///
    /// # Errors
    /// As there.
    pub fn extension(&self) -> Result<Image, LabError> {
        self.with_settings("extension-gpu")
    }

    fn with_settings(&self, variant: &str) -> Result<Image, LabError> {
        let _alone = alone()?;
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

    /// What asks the partition daemon of a service VM, on its host.
    ///
    /// # Errors
    /// It does not build.
    pub fn fmctl(&self) -> Result<PathBuf, LabError> {
        Ok(crate::binaries::static_program(&workspace(), "firstlight-fmctl", "fmctl")?)
    }

    /// Builds the lab's image once more with its initial RAM file system packed.
    ///
    /// # Errors
    /// The program that packs cannot be had, or the image does not build.
    pub fn packed(&self, compression: Compression) -> Result<Image, LabError> {
        let name = format!("image-{}", compression.name());
        self.changed(&name, |manifest| manifest.image.compression = Some(compression))
    }

    /// Builds the lab's image once more as a disk with EROFS and a dm-verity
    /// hash tree: [`Image::disk`] is the disk, and its record says how it is
    /// mounted.
    ///
    /// # Errors
    /// The program that makes it cannot be had, or the image does not build.
    pub fn disk(&self) -> Result<Image, LabError> {
        self.changed("image-disk", |manifest| {
            manifest.image.format = Format::Erofs;
            manifest.verity = Some(Verity::default());
        })
    }

    /// [`Lab::disk`] with files as they are: their bytes can be found on it.
    ///
    /// # Errors
    /// As for that.
    pub fn plain_disk(&self) -> Result<Image, LabError> {
        self.changed("image-disk-plain", |manifest| {
            manifest.image.format = Format::Erofs;
            manifest.image.compression = Some(Compression::None);
            manifest.verity = Some(Verity::default());
        })
    }

    /// The programs of images that ship.
    pub(crate) fn programs(&self) -> Result<shipped::Programs, LabError> {
        let gpu_settings = crate::binaries::gpu_settings(&workspace())?;
        let (init, agent) = (self.binaries.init.clone(), self.binaries.agent.clone());
        // What a service VM has is of no use without what NVIDIA alone gives away.
        Ok(shipped::Programs { init, agent, gpu_settings, service: None })
    }

    /// Builds an image of the directory `manifests`, as it ships; what takes long
    /// is told, and what the cache has is not compiled or downloaded again.
    ///
    /// Debian's kernel may be newer than the table of drivers and kernels: that
    /// it compiles is then for the compiler to say.
    ///
    /// # Errors
    /// The manifest is wrong, a package cannot be had, or the driver does not
    /// compile.
    pub fn shipped(&self, name: &str) -> Result<Image, LabError> {
        let mut manifest = shipped::manifest(name, &self.programs()?)?;
        if let Some(driver) = &mut manifest.driver {
            driver.untried = true;
        }
        Ok(shipped::build(&manifest, &output().join(format!("image-{name}")), &self.cache, progress())?)
    }

    /// Builds what opens [`Lab::disk`]: the opener's own manifest, for the lab's kernel.
    ///
    /// # Errors
    /// The program or the image does not build.
    pub fn opener(&self) -> Result<Image, LabError> {
        let program = crate::binaries::static_program(&workspace(), "firstlight-opener", "firstlight-opener")?;
        let variables = Variables::from([("OPENER".to_owned(), program.display().to_string())]);
        let read = |file: &str, variables| Manifest::read(&workspace().join(file), variables);
        let mut manifest = read("image-builder/manifests/opener.toml", &variables).map_err(build::Error::from)?;
        let all = self::variables(&self.binaries, &self.stand_in, &self.toolbox);
        let lab = read("image-builder/manifests/lab.toml", &all).map_err(build::Error::from)?;
        manifest.kernel.suite = lab.kernel.suite;
        let mut packages = Packages::new(&self.cache, None, progress());
        Ok(build::build_from(&manifest, &mut packages, &output().join("image-opener"))?)
    }

    fn changed(&self, name: &str, change: impl FnOnce(&mut Manifest)) -> Result<Image, LabError> {
        let file = workspace().join("image-builder/manifests/lab.toml");
        let variables = variables(&self.binaries, &self.stand_in, &self.toolbox);
        let mut manifest = Manifest::read(&file, &variables).map_err(build::Error::from)?;
        change(&mut manifest);
        let mut packages = Packages::new(&self.cache, None, progress());
        Ok(build::build_from(&manifest, &mut packages, &output().join(name))?)
    }

    fn variant_with(&self, name: &str, more: &[(&str, &Path)]) -> Result<Image, LabError> {
        let manifest = workspace().join("tests/lab/manifests").join(format!("{name}.toml"));
        let mut variables = variables(&self.binaries, &self.stand_in, &self.toolbox);
        variables.extend(more.iter().map(|(name, path)| ((*name).to_owned(), path.display().to_string())));
        let out = output().join(format!("image-{name}"));
        Ok(build::build(&manifest, &variables, &out, &self.cache, Progress::quiet())?)
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

/// Where what depends on this checkout is put.
pub(crate) fn output() -> PathBuf {
    crate::binaries::target().join("lab")
}
