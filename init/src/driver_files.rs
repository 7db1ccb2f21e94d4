//! The driver's files as CDI devices, one per capability.
//!
//! Files are found by the version of the driver that runs: a library of another
//! one is of no use. Nothing is run to find them.

mod table;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read as _;

use firstlight_cdi::{Capability, ContainerEdits, DRIVER_KIND, Device, Mount, SPEC_VERSION, Spec};

use crate::places::PLACES;
use crate::root::Root;

/// Where the driver says its version.
pub const VERSION_FILE: &str = "/proc/driver/nvidia/version";

/// How files are mounted.
const OPTIONS: &[&str] = &["ro", "nosuid", "nodev", "rbind"];

/// `EI_CLASS` of an ELF file.
const ELF_32: u8 = 1;
const ELF_64: u8 = 2;

/// The version of the driver that runs, such as `580.159.04`.
#[must_use]
pub fn version(root: &Root) -> Option<String> {
    version_in(&fs::read_to_string(root.path(VERSION_FILE)).ok()?)
}

fn version_in(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?;
    let number = |word: &&str| {
        let mut parts = word.split('.');
        let digits = |part: &str| !part.is_empty() && part.len() < 8 && part.bytes().all(|byte| byte.is_ascii_digit());
        word.contains('.') && parts.clone().count() < 5 && parts.all(digits)
    };
    line.split_whitespace().find(number).map(str::to_owned)
}

/// The specification of the files that are found; `None` if no driver runs or none of its files is there.
#[must_use]
pub fn spec(root: &Root) -> Option<Spec> {
    let version = version(root)?;
    let mut devices: Vec<Device> = Vec::new();
    let mut add = |part: Capability, narrow: bool, mounts: &[Mount]| {
        let name = part.device(narrow);
        let at = devices.iter().position(|device| device.name == name).unwrap_or_else(|| {
            devices.push(Device { name, ..Device::default() });
            devices.len() - 1
        });
        devices[at].container_edits.mounts.extend_from_slice(mounts);
    };
    for (narrow, class, folders, inside) in
        [(false, ELF_64, table::WIDE, table::WIDE_INSIDE), (true, ELF_32, table::NARROW, table::NARROW_INSIDE)]
    {
        let libraries = Listing::of(root, folders);
        for library in table::LIBRARIES {
            let file = format!("{}.so.{}", library.stem, library.fixed.unwrap_or(&version));
            let Some(host) = libraries.find(&file, |path| elf_class(root, path) == Some(class)) else { continue };
            let other = library.names.iter().map(|ending| format!("{}{ending}", library.stem));
            let names: Vec<String> = std::iter::once(file.clone()).chain(other).collect();
            let places = inside.iter().flat_map(|folder| names.iter().map(move |name| format!("{folder}/{name}")));
            let mounts: Vec<Mount> = places.map(|place| mount(&host, &place)).collect();
            library.parts.iter().for_each(|part| add(*part, narrow, &mounts));
        }
    }
    let programs = Listing::of(root, table::PROGRAMS);
    for (tool, part) in table::TOOLS {
        if let Some(host) = programs.find(tool, |path| root.path(path).is_file()) {
            add(*part, false, &[mount(&host, &format!("{}/{tool}", table::PROGRAMS_INSIDE))]);
        }
    }
    for (file, part) in table::DATA {
        let all = PLACES.iter().map(|place| format!("{place}{file}"));
        if let Some(host) = all.into_iter().find(|path| root.path(path).is_file()) {
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

fn mount(host: &str, inside: &str) -> Mount {
    Mount {
        host_path: host.to_owned(),
        container_path: inside.to_owned(),
        options: OPTIONS.iter().map(|option| (*option).to_owned()).collect(),
        mount_type: None,
    }
}

/// What is in some folders of each place, each read once: hundreds of names are
/// looked for, and most images have few of them.
struct Listing(Vec<(String, Vec<OsString>)>);

impl Listing {
    fn of(root: &Root, folders: &[&str]) -> Self {
        let all = PLACES.iter().flat_map(|place| folders.iter().map(move |folder| format!("{place}{folder}")));
        let names = |folder: String| {
            let entries = fs::read_dir(root.path(&folder)).into_iter().flatten().flatten();
            let mut names: Vec<OsString> = entries.map(|entry| entry.file_name()).collect();
            names.sort_unstable();
            (folder, names)
        };
        Self(all.map(names).collect())
    }

    /// The first that has the file, if it is the right one.
    fn find(&self, file: &str, right: impl Fn(&str) -> bool) -> Option<String> {
        let there =
            self.0.iter().filter(|(_, names)| names.binary_search_by(|name| (**name).cmp(file.as_ref())).is_ok());
        there.map(|(folder, _)| format!("{folder}/{file}")).find(|path| right(path))
    }
}

/// Whether a library is of 32 or of 64 bits; systems disagree on which folder has which.
fn elf_class(root: &Root, path: &str) -> Option<u8> {
    let file = File::open(root.path(path)).ok()?;
    let mut head = [0; 5];
    file.take(5).read_exact(&mut head).ok()?;
    (head[..4] == *b"\x7fELF").then_some(head[4])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VERSION: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@y)  Thu\n\
        GCC version:  gcc version 13.2.0 (Debian 13.2.0-1)\n";

    fn plant(root: &tempfile::TempDir, path: &str, bytes: &[u8]) {
        let path = root.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn guest(files: &[&str]) -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().unwrap();
        plant(&folder, VERSION_FILE, VERSION.as_bytes());
        files.iter().for_each(|file| plant(&folder, file, b"\x7fELF\x02..."));
        let root = Root::at(folder.path());
        (folder, root)
    }

    fn places(spec: &Spec, device: &str) -> Vec<(String, String)> {
        let mounts = spec.device(device).map(|device| device.container_edits.mounts.clone()).unwrap_or_default();
        mounts.into_iter().map(|mount| (mount.host_path, mount.container_path)).collect()
    }

    #[test]
    fn the_version_is_the_drivers_and_not_the_compilers() {
        assert_eq!(version_in(VERSION).as_deref(), Some("580.159.04"));
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Mon\n";
        assert_eq!(version_in(closed).as_deref(), Some("535.261.03"));
        for wrong in ["", "GCC version: 13.2.0", "NVRM version: NVIDIA", "NVRM version: 1..2", "NVRM version: ../5.1"] {
            assert_eq!(version_in(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_library_is_found_by_version_in_any_folder_and_goes_under_all_its_names() {
        for folder in table::WIDE {
            let library = format!("{folder}/libcuda.so.580.159.04");
            let (_folder, root) = guest(&[&library, "/usr/lib64/libcuda.so.535.1", "/usr/lib64/libcuda.so.1"]);
            let found = places(&spec(&root).unwrap(), "compute");
            assert_eq!(found.len(), 6, "{found:?}");
            assert!(found.iter().all(|(host, _)| *host == library), "{found:?}");
            for inside in table::WIDE_INSIDE {
                for name in ["libcuda.so.1", "libcuda.so", "libcuda.so.580.159.04"] {
                    assert!(found.iter().any(|(_, place)| *place == format!("{inside}/{name}")), "{name}");
                }
            }
        }
    }

    #[test]
    fn files_of_an_extension_are_mounted_from_there_to_their_plain_places() {
        let place = |path: &str| format!("/run/kata-extensions/gpu{path}");
        let (library, icd) = ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "/etc/OpenCL/vendors/nvidia.icd");
        let files = [library, icd, "/usr/bin/nvidia-smi"];
        let (_folder, root) = guest(&files.map(place).each_ref().map(String::as_str));
        let spec = spec(&root).unwrap();
        let found = places(&spec, "compute");
        assert!(found.contains(&(place(library), "/usr/lib/x86_64-linux-gnu/libcuda.so.1".to_owned())), "{found:?}");
        assert_eq!(found.last().unwrap(), &(place(icd), icd.to_owned()));
        assert_eq!(places(&spec, "utility"), [(place("/usr/bin/nvidia-smi"), "/usr/bin/nvidia-smi".to_owned())]);
        // Of a file that both have the extension's is taken, and the image's serves for what only it has.
        let ml = "/usr/lib64/libnvidia-ml.so.580.159.04";
        let (_folder, root) = guest(&[&place(library), library, ml]);
        let spec = super::spec(&root).unwrap();
        assert!(places(&spec, "compute").iter().all(|(host, _)| *host == place(library)));
        assert!(places(&spec, "utility").iter().all(|(host, _)| host == ml));
    }

    #[test]
    fn files_are_grouped_by_what_they_are_for() {
        let (folder, root) = guest(&[
            "/usr/lib64/libnvidia-ml.so.580.159.04",
            "/usr/lib64/libnvidia-nvvm70.so.4",
            "/usr/lib64/libnvidia-gpucomp.so.580.159.04",
            "/usr/lib64/libnvidia-not-in-the-table.so.580.159.04",
            "/usr/bin/nvidia-smi",
            "/usr/share/nvidia/nvoptix.bin",
        ]);
        plant(&folder, "/usr/lib/libnvidia-ml.so.580.159.04", b"\x7fELF\x01");
        plant(&folder, "/usr/lib64/libcuda.so.580.159.04", b"\x7fELF\x01");
        let spec = spec(&root).unwrap();
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
    fn without_a_driver_or_its_files_there_is_nothing() {
        let (_folder, root) = guest(&[]);
        assert_eq!(spec(&root), None);
        let folder = tempfile::tempdir().unwrap();
        plant(&folder, "/usr/lib64/libcuda.so.580.159.04", b"\x7fELF\x02");
        assert_eq!(spec(&Root::at(folder.path())), None);
    }

    #[test]
    fn the_table_has_no_library_twice_and_none_for_nothing() {
        for (at, library) in table::LIBRARIES.iter().enumerate() {
            assert!(!library.parts.is_empty() && !library.parts.contains(&Capability::Compat32), "{}", library.stem);
            assert!(table::LIBRARIES[..at].iter().all(|other| other.stem != library.stem), "{}", library.stem);
        }
    }

    proptest! {
        #[test]
        fn a_version_never_leaves_its_folder(text in "\\PC{0,60}") {
            if let Some(version) = version_in(&format!("NVRM version: {text}")) {
                prop_assert!(!version.contains('/') && !version.contains("..") && version.contains('.'));
            }
        }
    }
}
