//! The driver's files as a CDI specification: the one in the image, or generated from the files
//! found.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read as _;

use firstlight_driver_files::{Files, HEAD, spec, spec_path};

use crate::driver_paths::{EXTENSION, SEARCH_ROOTS};
use crate::root::Root;

/// Path of the file with the loaded driver's version.
pub const VERSION_FILE: &str = "/proc/driver/nvidia/version";

/// Maximum size of a specification, bytes; the specification of a complete driver has about 100
/// KiB.
const LONGEST: u64 = 1 << 20;

/// Returns the version of the loaded driver, such as `580.159.04`.
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

/// The CDI specification of the driver's files, with its source.
#[derive(Debug, PartialEq, Eq)]
pub enum DriverSpec {
    /// No driver is loaded, or none of its files was found.
    None,
    /// The specification was read from this file of the image or extension.
    FromImage {
        /// The file's path.
        path: String,
        /// The text of the specification.
        text: Vec<u8>,
    },
    /// The specification was generated from the files found.
    Generated(Vec<u8>),
}

/// Returns the specification of the loaded driver's files.
///
/// # Errors
/// The specification could not be encoded.
pub fn driver_spec(root: &Root) -> Result<DriverSpec, serde_json::Error> {
    let Some(version) = version(root) else { return Ok(DriverSpec::None) };
    if let Some((path, text)) = of_image(root, &version) {
        return Ok(DriverSpec::FromImage { path, text });
    }
    let found = spec(&Guest(root), SEARCH_ROOTS, &version);
    found.map_or(Ok(DriverSpec::None), |spec| serde_json::to_vec(&spec).map(DriverSpec::Generated))
}

/// Returns the path and the text of the extension's specification if there is an extension,
/// otherwise of the image's: the image's specification does not cover an extension's files.
fn of_image(root: &Root, version: &str) -> Option<(String, Vec<u8>)> {
    let place = if root.path(EXTENSION).is_dir() { EXTENSION } else { "" };
    let path = format!("{place}{}", spec_path(version));
    let mut text = Vec::new();
    let file = File::open(root.path(&path)).ok()?;
    let whole = file.take(LONGEST + 1).read_to_end(&mut text).ok()? as u64 <= LONGEST;
    (whole && text.starts_with(b"{")).then_some((path, text))
}

/// The files of the guest, from which a specification is generated.
struct Guest<'a>(&'a Root);

impl Files for Guest<'_> {
    fn names(&self, dir: &str) -> Vec<OsString> {
        let entries = fs::read_dir(self.0.path(dir)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name()).collect()
    }

    fn is_file(&self, path: &str) -> bool {
        self.0.path(path).is_file()
    }

    fn head(&self, path: &str) -> Option<[u8; HEAD]> {
        let mut head = [0; HEAD];
        File::open(self.0.path(path)).ok()?.read_exact(&mut head).ok()?;
        Some(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_cdi::Spec;
    use proptest::prelude::*;

    const VERSION: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@y)  Thu\n\
        GCC version:  gcc version 13.2.0 (Debian 13.2.0-1)\n";
    const LIBRARY: &str = "/usr/lib64/libcuda.so.580.159.04";

    fn plant(root: &Root, path: &str, bytes: &[u8]) {
        let path = root.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn guest() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        plant(&root, VERSION_FILE, VERSION.as_bytes());
        plant(&root, LIBRARY, b"\x7fELF\x02...");
        (dir, root)
    }

    #[test]
    fn version_is_that_of_the_driver_not_of_the_compiler() {
        assert_eq!(version_in(VERSION).as_deref(), Some("580.159.04"));
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Mon\n";
        assert_eq!(version_in(closed).as_deref(), Some("535.261.03"));
        for wrong in ["", "GCC version: 13.2.0", "NVRM version: NVIDIA", "NVRM version: 1..2", "NVRM version: ../5.1"] {
            assert_eq!(version_in(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn missing_specification_is_generated_from_files() {
        let (_directory, root) = guest();
        let DriverSpec::Generated(text) = driver_spec(&root).unwrap() else { panic!("the image has no list") };
        let spec = Spec::from_json(std::str::from_utf8(&text).unwrap(), "x".as_ref()).unwrap();
        assert_eq!(spec.device("compute").unwrap().container_edits.mounts[0].host_path, LIBRARY);
        // A 32-bit library in a directory of 64-bit libraries is skipped.
        plant(&root, LIBRARY, b"\x7fELF\x01...");
        assert_eq!(driver_spec(&root).unwrap(), DriverSpec::None);
        // Without a loaded driver no specification is generated.
        let dir = tempfile::tempdir().unwrap();
        plant(&Root::at(dir.path()), LIBRARY, b"\x7fELF\x02");
        assert_eq!(driver_spec(&Root::at(dir.path())).unwrap(), DriverSpec::None);
    }

    #[test]
    fn specification_for_the_loaded_driver_is_used_unchanged() {
        let (_directory, root) = guest();
        let (path, other) = (spec_path("580.159.04"), spec_path("580.159.05"));
        plant(&root, &other, b"{}");
        assert!(matches!(driver_spec(&root).unwrap(), DriverSpec::Generated(_)), "that is for another driver");
        let long = vec![b'{'; usize::try_from(LONGEST).unwrap() + 1];
        for wrong in [&b""[..], b"\0\0\0", &long] {
            plant(&root, &path, wrong);
            assert!(matches!(driver_spec(&root).unwrap(), DriverSpec::Generated(_)), "{} bytes", wrong.len());
        }
        plant(&root, &path, b"{\"of\": \"the image\"}");
        assert_eq!(
            driver_spec(&root).unwrap(),
            DriverSpec::FromImage { path: path.clone(), text: b"{\"of\": \"the image\"}".into() }
        );
        // With an extension, only the extension's specification is used.
        fs::create_dir_all(root.path(EXTENSION)).unwrap();
        assert!(matches!(driver_spec(&root).unwrap(), DriverSpec::Generated(_)));
        let path = format!("{EXTENSION}{path}");
        plant(&root, &path, b"{}");
        assert_eq!(driver_spec(&root).unwrap(), DriverSpec::FromImage { path, text: b"{}".into() });
    }

    proptest! {
        #[test]
        fn version_cannot_escape_its_directory(text in "\\PC{0,60}") {
            if let Some(version) = version_in(&format!("NVRM version: {text}")) {
                prop_assert!(!version.contains('/') && !version.contains("..") && version.contains('.'));
            }
        }
    }
}
