//! The release images of the directory `manifests`.

use std::path::{Path, PathBuf};

use firstlight_image_builder::image::manifest::{Manifest, Variables};
use firstlight_image_builder::image::{Error, Image, build_from};
use firstlight_image_builder::packages::Packages;
use firstlight_progress::Progress;

use crate::binaries::{ServicePrograms, workspace};

/// Returns the manifests' directory.
fn dir() -> PathBuf {
    workspace().join("manifests")
}

/// Returns the names of the images that need no separately supplied archive, sorted.
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

/// Returns the names of all images, sorted.
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

/// Paths of our programs for the images.
#[derive(Debug, Clone)]
pub struct Programs {
    /// PID 1.
    pub init: PathBuf,
    /// The agent.
    pub agent: PathBuf,
    /// Sets clocks, power limits and MIG; only for images with a driver.
    pub gpu_settings: PathBuf,
    /// The partition daemon and its client; only for service VMs.
    pub service: Option<ServicePrograms>,
}

/// Reads a manifest, with these programs as variables.
///
/// # Errors
/// The manifest is invalid or missing.
pub fn manifest(name: &str, programs: &Programs) -> Result<Manifest, Error> {
    manifest_with(name, programs, Variables::new())
}

/// Like [`manifest`], with further variables, such as the paths of supplied archives.
///
/// # Errors
/// The manifest is invalid or missing.
pub fn manifest_with(name: &str, programs: &Programs, variables: Variables) -> Result<Manifest, Error> {
    Ok(Manifest::read(&path(name), &with_programs(programs, variables))?)
}

/// Returns the path of a manifest.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    dir().join(format!("{name}.toml"))
}

/// Adds the variables of our programs to `variables`.
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

/// Returns the progress output of image builds outside of the lab.
#[must_use]
pub fn progress() -> Progress {
    Progress::stderr("image")
}

/// Builds an image into the directory `out`.
///
/// # Errors
/// A package cannot be fetched, the driver fails to compile, or a file cannot be written.
pub fn build(manifest: &Manifest, out: &Path, cache: &Path, progress: Progress) -> Result<Image, Error> {
    build_from(manifest, &mut Packages::new(cache, None, progress), out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_image_builder::driver::{matrix::Table, version::Version};

    #[test]
    fn every_manifest_is_valid_and_has_the_name_of_its_file() {
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

    /// Variables of images with supplied archives.
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
    fn service_vm_manifests_have_all_daemons_and_require_supplied_archives() {
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
            // PID 1 copies this file.
            assert!(places.iter().any(|place| place == "usr/share/nvidia/nvswitch/fabricmanager.cfg"), "{places:?}");
            assert_eq!(read.driver.is_some(), name == "service-vm-nvl4", "NVLink 5 has no switches on the PCI bus");
        }
    }

    #[test]
    fn driver_images_contain_the_base_image() {
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
    fn extension_contains_only_the_driver_for_the_kernel_of_the_base_image() {
        let read = |name: &str| manifest(name, &programs()).unwrap();
        let base = read("base");
        for needed in ["virtio_blk", "dm_verity", "erofs"] {
            assert!(base.kernel.modules.iter().any(|module| module == needed), "{needed}");
        }
        for name in ["gpu-550", "gpu-535"] {
            let (whole, alone) = (read(name), read(&format!("{name}-extension")));
            assert_eq!(alone.image.extension.as_deref(), Some("gpu"), "{name}");
            assert!(alone.verity.is_some(), "{name}: guests mount only verified extensions");
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
    fn drivers_are_in_the_driver_matrix() {
        let table = Table::own().unwrap();
        for name in ["gpu-550", "gpu-535", "gpu-550-extension", "gpu-535-extension"] {
            let driver = manifest(name, &programs()).unwrap().driver.unwrap();
            let there = |version: &Version| *version == driver.version;
            assert!(table.cells.iter().any(|cell| there(&cell.driver) && cell.builds), "{name}");
        }
    }
}
