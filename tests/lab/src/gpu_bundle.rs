//! Creates the directory that runs `gpu-test` on a machine without cargo: two
//! static programs and a container image with the CUDA program.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use firstlight_image_builder::cache;
use firstlight_oci::File;
use firstlight_progress::Progress;

use crate::binaries::{BuildError, static_program, workspace};
use crate::busybox::{self, BusyboxError};
use crate::toolbox;

/// Errors of creating the bundle.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// A program failed to build.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A file or directory could not be created.
    #[error("failed to create gpu-test's bundle: {path}: {source}")]
    File {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The C compiler failed.
    #[error("failed to create gpu-test's bundle: gcc (package gcc): {0}")]
    Gcc(String),
    /// The cache directory could not be determined.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// busybox could not be fetched.
    #[error(transparent)]
    Toolbox(#[from] toolbox::Error),
    /// The container image could not be created.
    #[error(transparent)]
    Image(#[from] BusyboxError),
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> BundleError {
    let path = path.to_owned();
    move |source| BundleError::File { path, source }
}

/// Packages and programs that run outside the container.
const PROGRAMS: &[(&str, &str)] = &[("firstlight-gpu-test", "gpu-test"), ("firstlight-agent", "firstlight-agent")];

/// Libraries that libcuda and the CUDA program are linked to.
const C_LIBRARY: &[&str] = &["libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"];

/// The dynamic loader at the path in programs' `PT_INTERP`.
const LOADER: &str = "lib64/ld-linux-x86-64.so.2";

/// The library directory of Debian's loader; other loaders use the links in `lib64`.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// Creates the bundle in `dir`, replacing its contents, and returns its programs.
///
/// # Errors
/// The first step that failed.
pub fn make(dir: &Path) -> Result<Vec<PathBuf>, BundleError> {
    let mut built = Vec::new();
    for (package, program) in PROGRAMS {
        built.push((static_program(&workspace(), package, program)?, dir.join(program)));
    }
    if dir.exists() {
        // Otherwise blobs of an older image would remain.
        std::fs::remove_dir_all(dir).map_err(at(dir))?;
    }
    std::fs::create_dir_all(dir).map_err(at(dir))?;
    for (from, to) in &built {
        std::fs::copy(from, to).map_err(at(to))?;
    }
    image(&dir.join("image"))?;
    Ok(built.into_iter().map(|(_, to)| to).collect())
}

/// Creates the container image: busybox, the CUDA program, and the C library that the program and libcuda need.
fn image(dir: &Path) -> Result<(), BundleError> {
    let work = tempfile::tempdir().map_err(at(dir))?;
    let probe = work.path().join("cuda-probe");
    compile(&workspace().join("tests/gpu-test/cuda-probe.c"), &probe, &[])?;
    let file = |path: String, source: PathBuf| File::Copy { path, source, mode: 0o755 };
    let dirs = ["lib64", "usr", "usr/lib", LIBRARIES];
    let mut files: Vec<File> =
        dirs.iter().map(|path| File::Directory { path: (*path).to_owned(), mode: 0o755 }).collect();
    files.push(file("bin/cuda-probe".to_owned(), probe));
    files.push(file(LOADER.to_owned(), Path::new("/").join(LOADER)));
    for library in C_LIBRARY {
        files.push(file(format!("{LIBRARIES}/{library}"), c_library(library)?));
        files.push(File::Link { path: format!("lib64/{library}"), target: format!("/{LIBRARIES}/{library}") });
    }
    let program = toolbox::busybox(&cache::root()?, Progress::stderr("lab"))?;
    Ok(busybox::write_layout_with(&program, files, dir)?)
}

/// Packs the bundle into a tar archive, for an image.
///
/// # Errors
/// tar cannot be started, or fails.
pub fn pack(dir: &Path, tar: &Path) -> Result<(), BundleError> {
    let mut command = Command::new("tar");
    let status = command.arg("-cf").arg(tar).arg("-C").arg(dir).arg(".").status().map_err(at(tar))?;
    if status.success() { Ok(()) } else { Err(at(tar)(io::Error::other(format!("tar: {status}")))) }
}

/// Compiles the stand-in for libcuda.
///
/// # Errors
/// gcc is not installed, or fails.
pub fn stand_in_cuda(library: &Path) -> Result<(), BundleError> {
    let source = workspace().join("tests/stand-in-cuda/libcuda.c");
    compile(&source, library, &["-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"])
}

/// Compiles the stand-in for NVML.
///
/// # Errors
/// gcc is not installed, or fails.
pub fn stand_in_nvml(library: &Path) -> Result<(), BundleError> {
    let source = workspace().join("tests/stand-in-nvml/libnvidia-ml.c");
    compile(&source, library, &["-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wl,-soname,libnvidia-ml.so.1"])
}

/// Compiles the program that leaves orphans to PID 1.
///
/// # Errors
/// gcc is not installed, or fails.
pub fn orphans(program: &Path) -> Result<(), BundleError> {
    compile(&workspace().join("tests/orphans/orphans.c"), program, &["-static"])
}

/// Returns the libraries of a dynamically linked Rust program: manifest variables, and paths on this machine.
///
/// # Errors
/// gcc does not find a library.
pub fn dynamic_libraries() -> Result<[(&'static str, PathBuf); 3], BundleError> {
    let loader = Path::new("/").join(LOADER);
    Ok([("LOADER", loader), ("LIBC", c_library("libc.so.6")?), ("LIBGCC", c_library("libgcc_s.so.1")?)])
}

fn compile(source: &Path, target: &Path, more: &[&str]) -> Result<(), BundleError> {
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2", "-Wall", "-Wextra", "-Werror"]).args(more).arg("-o").arg(target).arg(source);
    let output = gcc.output().map_err(|error| BundleError::Gcc(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(BundleError::Gcc(format!("{}: {}", source.display(), String::from_utf8_lossy(&output.stderr).trim())))
}

/// Returns the path of the library that gcc would link.
fn c_library(name: &str) -> Result<PathBuf, BundleError> {
    let output = Command::new("gcc").arg(format!("-print-file-name={name}")).output();
    let output = output.map_err(|error| BundleError::Gcc(error.to_string()))?;
    let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    // gcc prints the bare name if it does not find the file.
    if path.is_absolute() && path.exists() {
        return Ok(path);
    }
    Err(BundleError::Gcc(format!("-print-file-name does not find {name}")))
}
