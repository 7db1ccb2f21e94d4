//! Search paths of the driver's files: the GPU extension, if the guest has one, then the image.

pub mod interpreter;

use std::fs;
use std::io;

use crate::root::Root;

/// The mount point of the GPU extension.
pub const EXTENSION: &str = "/run/kata-extensions/gpu";

/// Prefixes of all paths, in search order: the extension overrides the image.
pub const SEARCH_ROOTS: &[&str] = &[EXTENSION, ""];

/// Library directories of the extension, for the extension's programs.
const LIBRARIES: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/local/nvidia/lib64",
];

/// The kernel's parameter for an additional firmware directory.
const FIRMWARE_PATH: &str = "/sys/module/firmware_class/parameters/path";

/// Returns the first of these files that exists, as a path that starts with its search root.
///
/// # Errors
/// None of the files exists; the text names all of them.
pub fn find_first(root: &Root, paths: &[&str]) -> Result<String, String> {
    let all = SEARCH_ROOTS.iter().flat_map(|place| paths.iter().map(move |path| format!("{place}{path}")));
    all.into_iter()
        .find(|path| root.path(path).is_file())
        .ok_or_else(|| format!("{} is not in the image; add it", paths.join(", or ")))
}

/// Returns the command that starts a program. A program in the extension is started through the
/// extension's loader, or the image's, with `--library-path` set to the extension's libraries;
/// other programs do not use these.
#[must_use]
pub fn command(root: &Root, program: &str) -> Vec<String> {
    let direct = || vec![root.path(program).to_string_lossy().into_owned()];
    if !program.starts_with(EXTENSION) {
        return direct();
    }
    let Some(loader) = interpreter::of(&root.path(program)) else { return direct() };
    let Some(loader) =
        SEARCH_ROOTS.iter().map(|place| format!("{place}{loader}")).find(|path| root.path(path).is_file())
    else {
        return direct();
    };
    let full = |path: &str| root.path(path).to_string_lossy().into_owned();
    let dirs: Vec<String> = LIBRARIES.iter().map(|dir| full(&format!("{EXTENSION}{dir}"))).collect();
    vec![full(&loader), "--library-path".to_owned(), dirs.join(":"), full(program)]
}

/// Returns the search root of the driver's modules for this kernel; the image's if the extension
/// has no modules.
///
/// # Errors
/// The extension has modules for other kernels only.
pub fn modules(root: &Root, release: &str) -> Result<&'static str, String> {
    let entries = fs::read_dir(root.path(&format!("{EXTENSION}/lib/modules"))).into_iter().flatten().flatten();
    let mut there: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    if there.is_empty() {
        return Ok("");
    }
    if there.iter().any(|other| other == release) {
        return Ok(EXTENSION);
    }
    there.sort_unstable();
    Err(format!(
        "the GPU extension has modules for {}, and this kernel is {release}; build it with the kernel of this image",
        there.join(", ")
    ))
}

/// Adds the extension's firmware directory to the kernel's search path, before the kernel's own
/// directories. No mount point is needed, and the image's firmware stays visible.
///
/// # Errors
/// The kernel lacks the parameter, or another directory is already set.
pub fn offer_firmware(root: &Root) -> Result<(), String> {
    let dir = format!("{EXTENSION}/lib/firmware");
    if !root.path(&dir).is_dir() {
        return Ok(());
    }
    let failed = |error: io::Error| {
        format!(
            "firmware in {dir} cannot be offered to the kernel: {FIRMWARE_PATH}: {error}; the kernel needs \
             CONFIG_FW_LOADER"
        )
    };
    let setting = root.path(FIRMWARE_PATH);
    let old = fs::read_to_string(&setting).map_err(failed)?;
    match old.trim() {
        old if old == dir => Ok(()),
        "" => fs::write(&setting, &dir).map_err(failed),
        old => Err(format!(
            "firmware in {dir} cannot be offered to the kernel: {FIRMWARE_PATH} is {old:?} already; leave \
             firmware_class.path= out of the kernel command line"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        for (path, text) in files {
            let path = root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (dir, root)
    }

    #[test]
    fn extension_precedes_image() {
        let (_directory, root) = guest(&[("/usr/bin/a", ""), ("/opt/b", ""), ("/run/kata-extensions/gpu/opt/b", "")]);
        assert_eq!(find_first(&root, &["/usr/bin/a"]).unwrap(), "/usr/bin/a");
        assert_eq!(find_first(&root, &["/usr/bin/a", "/opt/b"]).unwrap(), "/run/kata-extensions/gpu/opt/b");
        assert_eq!(find_first(&root, &["/x", "/y"]).unwrap_err(), "/x, or /y is not in the image; add it");
    }

    #[test]
    fn program_in_an_extension_is_started_with_the_extensions_libraries() {
        let (own, ours) = ("/usr/bin/p", "/run/kata-extensions/gpu/usr/bin/p");
        let (dir, root) = guest(&[(own, ""), (ours, ""), ("/run/kata-extensions/gpu/usr/bin/static", "#!")]);
        for program in [own, ours] {
            fs::write(root.path(program), interpreter::sample(b"/lib64/ld-linux-x86-64.so.2\0")).unwrap();
        }
        let at = |path: &str| format!("{}{path}", dir.path().display());
        assert_eq!(command(&root, own), [at(own)]);
        assert_eq!(command(&root, ours), [at(ours)], "without a loader it is the kernel who says so");
        let script = "/run/kata-extensions/gpu/usr/bin/static";
        assert_eq!(command(&root, script), [at(script)]);
        for (loader, place) in [("/lib64/ld-linux-x86-64.so.2", ""), ("/lib64/ld-linux-x86-64.so.2", EXTENSION)] {
            let loader = format!("{place}{loader}");
            fs::create_dir_all(root.path(&loader).parent().unwrap()).unwrap();
            fs::write(root.path(&loader), "").unwrap();
            let words = command(&root, ours);
            assert_eq!((&words[0], &words[1][..], &words[3]), (&at(&loader), "--library-path", &at(ours)));
            assert!(words[2].starts_with(&at("/run/kata-extensions/gpu/usr/lib/x86_64-linux-gnu:")), "{words:?}");
        }
    }

    #[test]
    fn extension_modules_must_match_kernel() {
        let (_directory, root) = guest(&[("/lib/modules/6.12/modules.dep", "")]);
        assert_eq!(modules(&root, "6.12"), Ok(""));
        fs::create_dir_all(root.path("/run/kata-extensions/gpu/lib/modules/6.1")).unwrap();
        let error = modules(&root, "6.12").unwrap_err();
        assert!(error.contains("for 6.1, and this kernel is 6.12; build"), "{error}");
        fs::create_dir_all(root.path("/run/kata-extensions/gpu/lib/modules/6.12")).unwrap();
        assert_eq!(modules(&root, "6.12"), Ok(EXTENSION));
    }

    #[test]
    fn firmware_path_is_set_once_and_never_overwritten() {
        let (_directory, root) = guest(&[]);
        assert_eq!(offer_firmware(&root), Ok(()), "there is none");
        fs::create_dir_all(root.path("/run/kata-extensions/gpu/lib/firmware/nvidia")).unwrap();
        assert!(offer_firmware(&root).unwrap_err().contains("CONFIG_FW_LOADER"));
        let setting = root.path(FIRMWARE_PATH);
        fs::create_dir_all(setting.parent().unwrap()).unwrap();
        fs::write(&setting, "\n").unwrap();
        for _ in 0..2 {
            assert_eq!(offer_firmware(&root), Ok(()));
            assert_eq!(fs::read_to_string(&setting).unwrap(), "/run/kata-extensions/gpu/lib/firmware");
        }
        fs::write(&setting, "/other\n").unwrap();
        let error = offer_firmware(&root).unwrap_err();
        assert!(error.contains("\"/other\" already") && error.contains("firmware_class.path="), "{error}");
    }
}
