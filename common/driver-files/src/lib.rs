//! The files of NVIDIA's user-space driver as CDI devices, one per capability.
//!
//! Files are found by driver version: libraries of another version do not work.
//! The image builder searches them at build time, so that a guest need not; PID 1
//! searches them in images without such a specification.

mod table;

use std::ffi::OsString;

use firstlight_cdi::{Capability, ContainerEdits, DRIVER_KIND, Device, Mount, SPEC_VERSION, Spec};

/// Mount options of the files.
const OPTIONS: &[&str] = &["ro", "nosuid", "nodev", "rbind"];

/// Bytes at the start of a file that identify an ELF file and its class.
pub const HEAD: usize = 5;

/// `EI_CLASS` of an ELF file.
const ELF_32: u8 = 1;
const ELF_64: u8 = 2;

/// A file tree that is searched: a guest's root, or an image tree during its build.
/// Paths are absolute within it, and symbolic links are followed.
pub trait Files {
    /// Lists the names in a directory; empty if it does not exist.
    fn names(&self, dir: &str) -> Vec<OsString>;
    /// Returns whether the path is a regular file.
    fn is_file(&self, path: &str) -> bool;
    /// Reads the first bytes of a file; `None` if it is shorter.
    fn head(&self, path: &str) -> Option<[u8; HEAD]>;
}

/// Returns the path of the specification built into an image, or into an extension
/// (below its mount point), for this driver version. PID 1 looks it up by the
/// version of the loaded driver.
#[must_use]
pub fn spec_path(version: &str) -> String {
    format!("/etc/cdi/nvidia-driver-{version}.json")
}

/// Builds the specification of this driver version's files below `roots` (`""` is
/// the root itself); earlier roots take precedence. `None` if no file is found.
#[must_use]
pub fn spec(files: &impl Files, roots: &[&str], version: &str) -> Option<Spec> {
    let mut devices: Vec<Device> = Vec::new();
    let mut add = |part: Capability, is_32bit: bool, mounts: &[Mount]| {
        let name = part.device(is_32bit);
        let at = devices.iter().position(|device| device.name == name).unwrap_or_else(|| {
            devices.push(Device { name, ..Device::default() });
            devices.len() - 1
        });
        devices[at].container_edits.mounts.extend_from_slice(mounts);
    };
    for (is_32bit, class, dirs, targets) in [
        (false, ELF_64, table::LIB64_DIRS, table::LIB64_TARGETS),
        (true, ELF_32, table::LIB32_DIRS, table::LIB32_TARGETS),
    ] {
        let libraries = Listing::of(files, roots, dirs);
        for library in table::LIBRARIES {
            let file = format!("{}.so.{}", library.stem, library.fixed.unwrap_or(version));
            let Some(host) = libraries.find(&file, |path| elf_class(files, path) == Some(class)) else { continue };
            let other = library.names.iter().map(|ending| format!("{}{ending}", library.stem));
            let names: Vec<String> = std::iter::once(file.clone()).chain(other).collect();
            let targets = targets.iter().flat_map(|dir| names.iter().map(move |name| format!("{dir}/{name}")));
            let mounts: Vec<Mount> = targets.map(|target| mount(&host, &target)).collect();
            library.parts.iter().for_each(|part| add(*part, is_32bit, &mounts));
        }
    }
    let programs = Listing::of(files, roots, table::BIN_DIRS);
    for (tool, part) in table::TOOLS {
        if let Some(host) = programs.find(tool, |path| files.is_file(path)) {
            add(*part, false, &[mount(&host, &format!("{}/{tool}", table::BIN_TARGET))]);
        }
    }
    for (file, part) in table::DATA {
        let all = roots.iter().map(|root| format!("{root}{file}"));
        if let Some(host) = all.into_iter().find(|path| files.is_file(path)) {
            add(*part, false, &[mount(&host, file)]);
        }
    }
    if devices.is_empty() {
        return None;
    }
    Some(Spec {
        cdi_version: SPEC_VERSION.to_owned(),
        kind: DRIVER_KIND.to_owned(),
        devices,
        container_edits: ContainerEdits::default(),
    })
}

fn mount(host: &str, target: &str) -> Mount {
    Mount {
        host_path: host.to_owned(),
        container_path: target.to_owned(),
        options: OPTIONS.iter().map(|option| (*option).to_owned()).collect(),
        mount_type: None,
    }
}

/// Listings of directories below each root, each read once: hundreds of names are
/// looked up, and most images have few of them.
struct Listing(Vec<(String, Vec<OsString>)>);

impl Listing {
    fn of(files: &impl Files, roots: &[&str], dirs: &[&str]) -> Self {
        let all = roots.iter().flat_map(|root| dirs.iter().map(move |dir| format!("{root}{dir}")));
        let names = |dir: String| {
            let mut names = files.names(&dir);
            names.sort_unstable();
            (dir, names)
        };
        Self(all.map(names).collect())
    }

    /// Finds the first file of that name that passes the check.
    fn find(&self, file: &str, is_valid: impl Fn(&str) -> bool) -> Option<String> {
        let there =
            self.0.iter().filter(|(_, names)| names.binary_search_by(|name| (**name).cmp(file.as_ref())).is_ok());
        there.map(|(dir, _)| format!("{dir}/{file}")).find(|path| is_valid(path))
    }
}

/// Returns the ELF class of a library (32 or 64 bits): distributions disagree on the directories.
fn elf_class(files: &impl Files, path: &str) -> Option<u8> {
    files.head(path).filter(|head| head.starts_with(b"\x7fELF")).map(|head| head[4])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    const VERSION: &str = "580.159.04";

    /// Files and their first bytes.
    #[derive(Default)]
    struct Planted(BTreeMap<String, &'static [u8]>);

    impl Files for Planted {
        fn names(&self, dir: &str) -> Vec<OsString> {
            let below = format!("{dir}/");
            let names = self.0.keys().filter_map(|path| path.strip_prefix(&below)?.split('/').next());
            names.collect::<BTreeSet<_>>().into_iter().map(OsString::from).collect()
        }

        fn is_file(&self, path: &str) -> bool {
            self.0.contains_key(path)
        }

        fn head(&self, path: &str) -> Option<[u8; HEAD]> {
            self.0.get(path)?.get(..HEAD)?.try_into().ok()
        }
    }

    fn planted(files: &[&str]) -> Planted {
        Planted(files.iter().map(|file| ((*file).to_owned(), &b"\x7fELF\x02..."[..])).collect())
    }

    const PLACES: &[&str] = &["/run/kata-extensions/gpu", ""];

    fn found(files: &Planted) -> Spec {
        spec(files, PLACES, VERSION).unwrap()
    }

    fn places(spec: &Spec, device: &str) -> Vec<(String, String)> {
        let mounts = spec.device(device).map(|device| device.container_edits.mounts.clone()).unwrap_or_default();
        mounts.into_iter().map(|mount| (mount.host_path, mount.container_path)).collect()
    }

    #[test]
    fn library_is_found_by_version_in_any_directory_and_mounted_under_all_its_names() {
        for dir in table::LIB64_DIRS {
            let library = format!("{dir}/libcuda.so.580.159.04");
            let files = planted(&[&library, "/usr/lib64/libcuda.so.535.1", "/usr/lib64/libcuda.so.1"]);
            let found = places(&found(&files), "compute");
            assert_eq!(found.len(), 6, "{found:?}");
            assert!(found.iter().all(|(host, _)| *host == library), "{found:?}");
            for inside in table::LIB64_TARGETS {
                for name in ["libcuda.so.1", "libcuda.so", "libcuda.so.580.159.04"] {
                    assert!(found.iter().any(|(_, place)| *place == format!("{inside}/{name}")), "{name}");
                }
            }
        }
    }

    #[test]
    fn files_of_an_extension_are_mounted_at_their_standard_paths() {
        let place = |path: &str| format!("/run/kata-extensions/gpu{path}");
        let (library, icd) = ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "/etc/OpenCL/vendors/nvidia.icd");
        let spec = found(&planted(&[&place(library), &place(icd), &place("/usr/bin/nvidia-smi")]));
        let compute = places(&spec, "compute");
        assert!(compute.contains(&(place(library), "/usr/lib/x86_64-linux-gnu/libcuda.so.1".to_owned())), "{spec:?}");
        assert_eq!(compute.last().unwrap(), &(place(icd), icd.to_owned()));
        assert_eq!(places(&spec, "utility"), [(place("/usr/bin/nvidia-smi"), "/usr/bin/nvidia-smi".to_owned())]);
        // The extension's file takes precedence; the image's is used if only the image has it.
        let ml = "/usr/lib64/libnvidia-ml.so.580.159.04";
        let spec = found(&planted(&[&place(library), library, ml]));
        assert!(places(&spec, "compute").iter().all(|(host, _)| *host == place(library)));
        assert!(places(&spec, "utility").iter().all(|(host, _)| host == ml));
    }

    #[test]
    fn files_are_grouped_by_capability() {
        let mut files = planted(&[
            "/usr/lib64/libnvidia-ml.so.580.159.04",
            "/usr/lib64/libnvidia-nvvm70.so.4",
            "/usr/lib64/libnvidia-gpucomp.so.580.159.04",
            "/usr/lib64/libnvidia-not-in-the-table.so.580.159.04",
            "/usr/bin/nvidia-smi",
            "/usr/share/nvidia/nvoptix.bin",
        ]);
        for narrow in ["/usr/lib/libnvidia-ml.so.580.159.04", "/usr/lib64/libcuda.so.580.159.04"] {
            files.0.insert(narrow.to_owned(), b"\x7fELF\x01");
        }
        let spec = found(&files);
        let mut names: Vec<&str> = spec.devices.iter().map(|device| device.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["compute", "display", "graphics", "utility", "utility-32", "video"]);
        let hosts = |device: &str| {
            let mut hosts: Vec<String> = places(&spec, device).into_iter().map(|(host, _)| host).collect();
            hosts.dedup();
            hosts
        };
        assert_eq!(hosts("utility"), ["/usr/lib64/libnvidia-ml.so.580.159.04", "/usr/bin/nvidia-smi"]);
        assert_eq!(hosts("utility-32"), ["/usr/lib/libnvidia-ml.so.580.159.04"]);
        assert_eq!(
            hosts("compute"),
            ["/usr/lib64/libnvidia-nvvm70.so.4", "/usr/lib64/libnvidia-gpucomp.so.580.159.04"],
            "a 32-bit libcuda is not for 64-bit programs"
        );
        assert_eq!(hosts("graphics").last().unwrap(), "/usr/share/nvidia/nvoptix.bin");
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(Spec::from_json(&text, "x".as_ref()).unwrap(), spec);
    }

    #[test]
    fn no_files_make_no_specification() {
        assert_eq!(spec(&Planted::default(), PLACES, VERSION), None);
        assert_eq!(spec(&planted(&["/usr/lib64/libcuda.so.535.1"]), PLACES, VERSION), None);
    }

    #[test]
    fn table_has_unique_libraries_each_with_a_capability() {
        for (at, library) in table::LIBRARIES.iter().enumerate() {
            assert!(!library.parts.is_empty() && !library.parts.contains(&Capability::Compat32), "{}", library.stem);
            assert!(table::LIBRARIES[..at].iter().all(|other| other.stem != library.stem), "{}", library.stem);
        }
    }

    proptest! {
        /// Only existing files are mounted, and no target has two sources.
        #[test]
        fn only_existing_files_are_mounted(chosen in prop::collection::vec((0..2_usize, 0..table::LIB64_DIRS.len(), 0..table::LIBRARIES.len()), 0..8)) {
            let paths: Vec<String> = chosen.iter().map(|&(place, dir, library)| {
                let library = &table::LIBRARIES[library];
                let version = library.fixed.unwrap_or(VERSION);
                format!("{}{}/{}.so.{version}", PLACES[place], table::LIB64_DIRS[dir], library.stem)
            }).collect();
            let files = planted(&paths.iter().map(String::as_str).collect::<Vec<_>>());
            let spec = spec(&files, PLACES, VERSION);
            prop_assert_eq!(spec.is_none(), paths.is_empty());
            let mut from = BTreeMap::new();
            for mount in spec.iter().flat_map(|spec| &spec.devices).flat_map(|device| &device.container_edits.mounts) {
                prop_assert!(files.is_file(&mount.host_path));
                let first = from.entry(&mount.container_path).or_insert(&mount.host_path);
                prop_assert_eq!(*first, &mount.host_path);
            }
        }
    }
}
