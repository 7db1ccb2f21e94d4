//! The images of the directory `manifests`, which are not for the lab.

use std::path::{Path, PathBuf};

use firstlight_image_builder::build::{Error, Image, build_from};
use firstlight_image_builder::manifest::{Manifest, Variables};
use firstlight_image_builder::packages::Packages;
use firstlight_image_builder::progress::Progress;

use crate::binaries::{ServicePrograms, workspace};

/// Where they are.
fn dir() -> PathBuf {
    workspace().join("manifests")
}

/// The names of those that need nothing which is not free, in order.
///
/// # Errors
/// The directory cannot be read.
pub fn names() -> std::io::Result<Vec<String>> {
    let mut names = all()?;
    let mut supplied = Vec::new();
    for name in &names {
        let text = std::fs::read_to_string(dir().join(format!("{name}.toml")))?;
        supplied.extend(text.lines().any(|line| line == "[[archive]]").then(|| name.clone()));
    }
    names.retain(|name| !supplied.contains(name));
    Ok(names)
}

/// The names of all of them, in order.
///
/// # Errors
/// The directory cannot be read.
pub fn all() -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir())? {
        let path = entry?.path();
        if let (Some(name), Some("toml")) = (path.file_stem(), path.extension().and_then(|it| it.to_str())) {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Our programs that go into images.
#[derive(Debug, Clone)]
pub struct Programs {
    /// PID 1.
    pub init: PathBuf,
    /// The agent.
    pub agent: PathBuf,
    /// What sets clocks, power and MIG; beside a driver only.
    pub gpu_settings: PathBuf,
    /// The partition daemon and what asks it; for service VMs only.
    pub service: Option<ServicePrograms>,
}

/// Reads one, with these programs in it.
///
/// # Errors
/// The manifest is wrong or not there.
pub fn manifest(name: &str, programs: &Programs) -> Result<Manifest, Error> {
    manifest_with(name, programs, Variables::new())
}

/// The same with further values, such as where archives are that are supplied.
///
/// # Errors
/// The manifest is wrong or not there.
pub fn manifest_with(name: &str, programs: &Programs, variables: Variables) -> Result<Manifest, Error> {
    Ok(Manifest::read(&path(name), &with_programs(programs, variables))?)
}

/// The manifest's file.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    dir().join(format!("{name}.toml"))
}

/// These values and those for our programs.
#[must_use]
pub fn with_programs(programs: &Programs, mut variables: Variables) -> Variables {
    let Programs { init, agent, gpu_settings, service } = programs;
    let always = [("INIT", init), ("AGENT", agent), ("GPU_SETTINGS", gpu_settings)];
    let service = service.iter().flat_map(|service| [("PARTITIOND", &service.partitiond), ("FMCTL", &service.fmctl)]);
    for (name, path) in always.into_iter().chain(service) {
        variables.insert(name.to_owned(), path.display().to_string());
    }
    variables
}

/// What is said about their long steps outside of the lab.
#[must_use]
pub fn progress() -> Progress {
    Progress::stderr("image")
}

/// Builds it into the directory `out`.
///
/// # Errors
/// A package cannot be had, the driver does not compile, or a file cannot be written.
pub fn build(manifest: &Manifest, out: &Path, cache: &Path, progress: Progress) -> Result<Image, Error> {
    build_from(manifest, &mut Packages::new(cache, None, progress), out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_image_builder::driver::{matrix::Table, version::Version};

    #[test]
    fn every_manifest_is_read_and_says_who_it_is() {
        let names = names().unwrap();
        assert!(["base", "gpu-535", "gpu-550"].iter().all(|name| names.iter().any(|it| it == name)), "{names:?}");
        for name in names {
            let manifest = manifest(&name, &programs()).unwrap();
            assert_eq!(manifest.image.name, name);
            assert!(manifest.budget.is_some(), "{name} has no budget");
            assert_eq!(manifest.driver.is_some(), name.starts_with("gpu"));
        }
    }

    fn programs() -> Programs {
        Programs { init: "/i".into(), agent: "/a".into(), gpu_settings: "/s".into(), service: Some(service()) }
    }

    fn service() -> ServicePrograms {
        ServicePrograms { partitiond: "/p".into(), fmctl: "/f".into() }
    }

    /// Values for those that are supplied with archives.
    fn supplied() -> Variables {
        let mut variables = Variables::new();
        for name in ["FABRICMANAGER", "NVLSM"] {
            variables.insert(name.to_owned(), "/archive.tar".to_owned());
            variables.insert(format!("{name}_SHA256"), "ab".repeat(32));
            variables.insert(format!("{name}_VERSION"), "580.1".to_owned());
        }
        variables
    }

    #[test]
    fn service_vms_have_what_pid_1_starts_there_and_ask_for_what_is_not_free() {
        for (name, there) in [
            ("service-vm-nvl4", &["usr/bin/nv-fabricmanager"][..]),
            ("service-vm-nvl5", &["usr/bin/nv-fabricmanager", "opt/nvidia/nvlsm/sbin/nvlsm"]),
        ] {
            assert!(all().unwrap().iter().any(|one| one == name) && !names().unwrap().iter().any(|one| one == name));
            let error = manifest(name, &programs()).unwrap_err().to_string();
            assert!(error.contains("--set FABRICMANAGER") && error.contains("redistributable archives"), "{error}");
            let read = manifest_with(name, &programs(), supplied()).unwrap();
            assert_eq!(read.image.name, name);
            let parts = read.archives.iter().flat_map(|archive| &archive.files);
            let places: Vec<String> =
                parts.map(|part| format!("{}/{}", part.into, part.from.rsplit('/').next().unwrap())).collect();
            for program in there {
                assert!(places.iter().any(|place| place == program), "{program}: {places:?}");
            }
            for (program, source) in [("usr/bin/fm-partitiond", "/p"), ("usr/bin/fmctl", "/f")] {
                assert!(read.files.iter().any(|file| file.path == program && file.source.as_deref() == Some(source)));
            }
            assert!(read.directories.iter().any(|dir| dir.path == "var/lib/firstlight"), "{name}: PID 1 mounts there");
            // PID 1 copies it from there.
            assert!(places.iter().any(|place| place == "usr/share/nvidia/nvswitch/fabricmanager.cfg"), "{places:?}");
            assert_eq!(read.driver.is_some(), name == "service-vm-nvl4", "the fifth has no switch on the bus");
        }
    }

    #[test]
    fn images_with_a_driver_have_what_the_one_without_has() {
        let read = |name: &str| manifest(name, &programs()).unwrap();
        let base = read("base");
        let rest = |it: &Manifest| {
            let (package, suite) = (&it.kernel.package, &it.kernel.suite);
            format!("{package} {suite} {:?} {:?}", it.symlinks, it.directories)
        };
        for name in ["gpu-550", "gpu-535"] {
            let with = read(name);
            assert_eq!(rest(&with), rest(&base), "{name}");
            let beyond = with.files.iter().filter(|file| !base.files.contains(file));
            let beyond: Vec<_> = beyond.map(|file| (file.path.as_str(), file.source.as_deref())).collect();
            assert_eq!(beyond, [("usr/bin/firstlight-gpu-settings", Some("/s"))], "{name}");
            assert!(base.files.iter().all(|file| with.files.contains(file)), "{name}");
            assert!(with.kernel.modules.starts_with(&base.kernel.modules), "{name}");
        }
    }

    #[test]
    fn an_extension_is_the_driver_alone_for_the_kernel_of_the_base() {
        let read = |name: &str| manifest(name, &programs()).unwrap();
        let base = read("base");
        for needed in ["virtio_blk", "dm_verity", "erofs"] {
            assert!(base.kernel.modules.iter().any(|module| module == needed), "{needed}");
        }
        for name in ["gpu-550", "gpu-535"] {
            let (whole, alone) = (read(name), read(&format!("{name}-extension")));
            assert_eq!(alone.image.extension.as_deref(), Some("gpu"), "{name}");
            assert!(alone.verity.is_some(), "{name}: guests mount nothing unchecked");
            assert_eq!(alone.driver, whole.driver, "{name}");
            let of = |it: &Manifest| format!("{} {} {:?}", it.kernel.package, it.kernel.suite, it.kernel.series);
            assert_eq!(of(&alone), of(&base), "{name}");
            let both = [&base.kernel.modules[..], &alone.kernel.modules].concat();
            assert_eq!(both, whole.kernel.modules, "{name}");
            assert_eq!([&base.files[..], &alone.files].concat(), whole.files, "{name}");
            assert_eq!(format!("{:?}", alone.packages), format!("{:?}", whole.packages), "{name}");
            assert!(alone.symlinks.is_empty() && alone.directories.is_empty(), "{name}");
        }
    }

    #[test]
    fn drivers_are_in_the_table_of_what_compiles() {
        let table = Table::own().unwrap();
        for name in ["gpu-550", "gpu-535", "gpu-550-extension", "gpu-535-extension"] {
            let driver = manifest(name, &programs()).unwrap().driver.unwrap();
            let there = |version: &Version| *version == driver.version;
            assert!(table.cells.iter().any(|cell| there(&cell.driver) && cell.builds), "{name}");
        }
    }
}
