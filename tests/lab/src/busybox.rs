//! The container image of the lab: Debian's static busybox as an OCI layout.

use std::path::Path;
use std::process::Command;

use firstlight_oci::{File, NewImage, OciError};

/// Errors of creating the image.
#[derive(Debug, thiserror::Error)]
pub enum BusyboxError {
    /// busybox cannot be executed.
    #[error("busybox image: failed to run {0} --list")]
    List(String),
    /// The layout could not be written.
    #[error(transparent)]
    Layout(#[from] OciError),
}

const DIRECTORIES: &[(&str, u32)] = &[
    ("bin", 0o755),
    ("dev", 0o755),
    ("etc", 0o755),
    ("proc", 0o755),
    ("root", 0o700),
    ("sys", 0o755),
    ("tmp", 0o1777),
];

const FILES: &[(&str, &str)] = &[("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"), ("etc/group", "root:x:0:\n")];

/// Writes the layout into `dir`.
///
/// # Errors
/// busybox cannot list its applets, or a file cannot be written.
pub(crate) fn write_layout(busybox: &Path, dir: &Path) -> Result<(), BusyboxError> {
    write_layout_with(busybox, Vec::new(), dir)
}

/// Writes the layout into `dir`, with additional files.
///
/// # Errors
/// busybox cannot list its applets, or a file cannot be read or written.
pub(crate) fn write_layout_with(busybox: &Path, more: Vec<File>, dir: &Path) -> Result<(), BusyboxError> {
    let list = || BusyboxError::List(busybox.display().to_string());
    let output = Command::new(busybox).arg("--list").output().map_err(|_| list())?;
    if !output.status.success() {
        return Err(list());
    }
    let applets = String::from_utf8(output.stdout).map_err(|_| list())?;
    let mut files: Vec<File> =
        DIRECTORIES.iter().map(|(path, mode)| File::Directory { path: (*path).into(), mode: *mode }).collect();
    files.push(File::Copy { path: "bin/busybox".into(), source: busybox.to_owned(), mode: 0o755 });
    let links = applets.lines().filter(|name| !name.is_empty() && *name != "busybox" && !name.contains('/'));
    files.extend(links.map(|name| File::Link { path: format!("bin/{name}"), target: "busybox".into() }));
    files.extend(FILES.iter().map(|(path, text)| File::Text { path: (*path).into(), text: (*text).into() }));
    files.extend(more);
    let image = NewImage { files, env: vec!["PATH=/bin".into(), "HOME=/root".into()], command: vec!["/bin/sh".into()] };
    Ok(image.write(dir)?)
}
