//! Builds the kernel modules that stand in for NVIDIA's driver.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use firstlight_image::digest;
use firstlight_image_builder::cache;

use crate::toolbox::Toolbox;

/// Errors of building the modules.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Modules for another kernel than the toolbox's were requested.
    #[error(
        "the toolbox has headers of kernel {have}, but modules for {want} are requested: prepare the toolbox again"
    )]
    OtherKernel {
        /// The kernel of the headers.
        have: String,
        /// The requested kernel.
        want: String,
    },
    /// The directory has no sources of kernel modules.
    #[error("{} contains no Kbuild file and no Makefile: it is not a source directory of kernel modules", dir.display())]
    NoSources {
        /// The directory.
        dir: PathBuf,
    },
    /// A program could not be started.
    #[error("failed to run {program}: install the packages gcc, make and binutils")]
    Start {
        /// The program.
        program: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The compiler or linker failed.
    #[error("failed to build the modules in {} for {release}; the last lines were:\n{output}", dir.display())]
    Build {
        /// The source directory.
        dir: PathBuf,
        /// The kernel.
        release: String,
        /// The end of what `make` printed.
        output: String,
    },
    /// The build succeeded without creating a module.
    #[error("the build of the sources in {} created no {module}", dir.display())]
    NoModule {
        /// The source directory.
        dir: PathBuf,
        /// The missing file.
        module: &'static str,
    },
    /// The cache could not be used.
    #[error(transparent)]
    Cache(#[from] cache::Error),
}

/// The built modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StandIn {
    /// Stands in for `nvidia.ko`.
    pub nvidia_ko: PathBuf,
    /// Stands in for `nvidia-uvm.ko`.
    pub nvidia_uvm_ko: PathBuf,
}

/// Version of the build, part of the cache key: increase it to rebuild cached modules.
const LAYOUT: u32 = 2;
/// Number of lines of a failed build's output in the error.
const SHOWN: usize = 20;

/// Builds the modules in `source` for the kernel `release`, unless the cache has
/// them.
///
/// # Errors
/// `release` is not the toolbox's kernel, or the compiler failed.
pub fn build(toolbox: &Toolbox, source: &Path, release: &str) -> Result<StandIn, Error> {
    const NVIDIA: &str = "nvidia.ko";
    const UVM: &str = "nvidia-uvm.ko";
    let dir = build_modules(toolbox, source, release, &[NVIDIA, UVM])?;
    Ok(StandIn { nvidia_ko: dir.join(NVIDIA), nvidia_uvm_ko: dir.join(UVM) })
}

/// Builds `modules` from `source`; returns the directory of the results.
fn build_modules(toolbox: &Toolbox, source: &Path, release: &str, modules: &[&'static str]) -> Result<PathBuf, Error> {
    let headers = &toolbox.headers;
    if headers.release != release {
        return Err(Error::OtherKernel { have: headers.release.clone(), want: release.to_owned() });
    }
    let sources = sources_of(source)?;
    let key = key_of(&sources, &toolbox.kernel.facts.version);
    let target = toolbox.cache.join("modules").join(format!("{release}-{}", &key[..16]));
    cache::publish(&target, &toolbox.progress, |half| {
        toolbox.progress.say(format_args!("stand-in modules for {release}: building"));
        let copy = half.join("build");
        for (name, bytes) in &sources {
            let path = copy.join(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent).map_err(io_error("create directory", parent))?;
            }
            fs::write(&path, bytes).map_err(io_error("write", &path))?;
        }
        make(&headers.build, &copy, source, release)?;
        for module in modules {
            let built = copy.join(module);
            if !built.exists() {
                return Err(Error::NoModule { dir: source.to_owned(), module });
            }
            // Debug information is ten times the size of the code, in every
            // guest's memory.
            run("strip", Command::new("strip").arg("--strip-debug").arg(&built), source, release)?;
            fs::rename(&built, half.join(module)).map_err(io_error("move", &built))?;
        }
        fs::remove_dir_all(&copy).map_err(io_error("remove", &copy))?;
        Ok(())
    })?;
    Ok(target)
}

fn make(headers: &Path, copy: &Path, source: &Path, release: &str) -> Result<(), Error> {
    // Paths are part of messages and debug information, and through the latter of
    // the build id: the mapping makes the result independent of them.
    let mut map = OsString::from("KCFLAGS=-ffile-prefix-map=");
    map.push(copy);
    map.push("=.");
    if let Some(all_headers) = headers.parent() {
        map.push(" -ffile-prefix-map=");
        map.push(all_headers);
        map.push("=/usr/src");
    }
    let mut place = OsString::from("M=");
    place.push(copy);
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut command = Command::new("make");
    command.arg("-C").arg(headers).arg(place).arg(map).arg(format!("-j{jobs}")).arg("modules");
    // Reproducible: the result must not depend on user, host or time.
    command.envs([("KBUILD_BUILD_USER", "firstlight"), ("KBUILD_BUILD_HOST", "lab"), ("SOURCE_DATE_EPOCH", "0")]);
    // Debian's kernel requests the compiler that it was built with. Without it, the
    // host's own is good enough for plain modules.
    if !on_path("x86_64-linux-gnu-gcc-12") {
        command.arg("CC=gcc");
    }
    // Flags of an outer make must not be inherited.
    command.env_remove("MAKEFLAGS").env_remove("MFLAGS");
    run("make", &mut command, source, release)
}

fn run(program: &'static str, command: &mut Command, source: &Path, release: &str) -> Result<(), Error> {
    let output = command
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Error::Start { program, source })?;
    if output.status.success() {
        return Ok(());
    }
    // Errors are on stderr, but the name of the compiled file is on stdout.
    let both = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&both);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let output = lines[lines.len().saturating_sub(SHOWN)..].join("\n");
    Err(Error::Build { dir: source.to_owned(), release: release.to_owned(), output })
}

fn on_path(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// Returns the files that the kernel's build reads, by relative path, without
/// documents and results of an earlier build in the same directory.
fn sources_of(dir: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>, Error> {
    let mut sources = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(current) = dirs.pop() {
        for entry in fs::read_dir(&current).map_err(io_error("list", &current))? {
            let entry = entry.map_err(io_error("list", &current))?;
            let path = entry.path();
            let kind = entry.file_type().map_err(io_error("inspect", &path))?;
            if kind.is_dir() {
                dirs.push(path);
            } else if is_source(&path) {
                let bytes = fs::read(&path).map_err(io_error("read", &path))?;
                let name = path.strip_prefix(dir).unwrap_or(&path).to_owned();
                sources.push((name, bytes));
            }
        }
    }
    sources.sort();
    if !sources.iter().any(|(name, _)| name == Path::new("Kbuild") || name == Path::new("Makefile")) {
        return Err(Error::NoSources { dir: dir.to_owned() });
    }
    Ok(sources)
}

fn is_source(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let suffix = path.extension().and_then(|suffix| suffix.to_str());
    let made = name.ends_with(".mod.c") || name.starts_with('.');
    !made && (matches!(name, "Kbuild" | "Makefile") || matches!(suffix, Some("c" | "h" | "S" | "lds")))
}

fn key_of(sources: &[(PathBuf, Vec<u8>)], kernel_version: &str) -> String {
    let mut text = format!("{LAYOUT}\n{kernel_version}\n");
    for (name, bytes) in sources {
        text.push_str(&format!("{} {}\n", digest::of_bytes(bytes), name.display()));
    }
    digest::of_bytes(text.as_bytes())
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> cache::Error {
    let path = path.to_owned();
    move |source| cache::Error::Io { what, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_key_depends_on_sources_only() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(sources_of(dir.path()), Err(Error::NoSources { .. })));
        fs::create_dir(dir.path().join("sub")).unwrap();
        for name in ["Kbuild", "a.c", "sub/b.h", "a.o", "a.mod.c", ".a.o.cmd", "README.md", "nvidia.ko"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let sources = sources_of(dir.path()).unwrap();
        let names: Vec<_> = sources.iter().map(|(name, _)| name.to_str().unwrap()).collect();
        assert_eq!(names, ["Kbuild", "a.c", "sub/b.h"]);

        let before = key_of(&sources, "6.12.95-1");
        fs::write(dir.path().join("README.md"), "changed").unwrap();
        assert_eq!(key_of(&sources_of(dir.path()).unwrap(), "6.12.95-1"), before);
        fs::write(dir.path().join("a.c"), "changed").unwrap();
        assert_ne!(key_of(&sources_of(dir.path()).unwrap(), "6.12.95-1"), before);
        assert_ne!(key_of(&sources, "6.12.95-2"), before);
    }

    #[test]
    fn error_of_a_failed_program_has_its_last_lines() {
        let mut command = Command::new("sh");
        command.args(["-c", "for i in $(seq 40); do echo line $i; done; echo the error >&2; exit 2"]);
        let error = run("make", &mut command, Path::new("src"), "6.12").unwrap_err().to_string();
        assert!(error.contains("line 40\nthe error") && !error.contains("line 20\n"), "{error}");
    }
}
