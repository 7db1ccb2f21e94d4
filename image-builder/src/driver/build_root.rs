//! The build root: a root file system of packages in which kernel modules are
//! compiled, in its own user, mount, PID and network namespaces.
//!
//! It contains the compiler that the kernel was built with, and tools of the
//! kernel's suite, so the result does not depend on the host's compiler and C
//! library. Sources and headers are bind-mounted at fixed paths, so that modules do
//! not contain paths of the host. The build has no network, and its processes are
//! killed when image-builder exits.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use firstlight_image::digest;
use firstlight_progress::{Progress, seconds};

use super::Error;
use crate::cache::{self, io_error};
use crate::packages::Packages;
use crate::packages::debian;
use crate::packages::lock::Pinned;

/// Layout version of build roots; increment it to invalidate cached ones.
const LAYOUT: u32 = 1;

/// Packages needed to build kernel modules besides the compiler. `libelf1` is for
/// the kernel's objtool.
const TOOLS: &[&str] =
    &["bash", "coreutils", "dash", "diffutils", "findutils", "grep", "libelf1", "make", "mawk", "sed"];

/// Mount point of the driver's source in the build root.
pub(super) const BUILD: &str = "/build";
/// Mount point of the kernel headers in the build root.
pub(super) const HEADERS: &str = "/headers";

/// Device nodes in the build root.
const DEVICES: &[&str] = &["null", "zero", "urandom"];

/// Interval of progress lines during long builds without a terminal.
const PROGRESS_INTERVAL: Duration = Duration::from_mins(1);

/// Script that the host's shell runs in the new namespaces before chroot. Read-only
/// remounts are best effort, to protect the cache: they fail if the file system has
/// locked mount flags.
const ENTER: &str = r#"
root=$1 build=$2 headers=$3 script=$4
mount --bind "$root" "$root"
mount --bind "$build" "$root/build"
mount --bind "$headers" "$root/headers"
mount -o remount,bind,ro "$root/headers" 2>/dev/null || :
for device in null zero urandom; do mount --bind "/dev/$device" "$root/dev/$device"; done
mount -t tmpfs tmpfs "$root/tmp"
mount -o remount,bind,ro "$root" 2>/dev/null || :
echo "$5"
exec chroot "$root" /bin/sh -euc "$script"
"#;

/// Printed before chroot; an earlier failure means that the host does not permit the
/// namespaces or mounts.
const ENTERED: &str = "image-builder: in the build root";

/// An unpacked build root.
#[derive(Debug, Clone)]
pub(super) struct BuildRoot {
    root: PathBuf,
    /// The compiler's name, including its prefix.
    pub(super) compiler: String,
    /// The packages of the root.
    pub(super) packages: Vec<Pinned>,
}

/// A command to run in a build root.
pub(super) struct Job<'a> {
    /// Description for messages.
    pub(super) name: &'a str,
    /// Bind-mounted at [`BUILD`].
    pub(super) build: &'a Path,
    /// Bind-mounted at [`HEADERS`], read-only if possible.
    pub(super) headers: &'a Path,
    /// A script for the shell of the root.
    pub(super) script: &'a str,
    /// The file for stdout and stderr.
    pub(super) log: &'a Path,
}

impl BuildRoot {
    /// Creates the build root with `compiler` for kernels of `suite`, unless cached.
    pub(super) fn prepare(packages: &mut Packages<'_>, suite: &str, compiler: &str) -> Result<Self, Error> {
        let suite = base_of(suite);
        let compiler_name = compiler_package(compiler);
        let mut names = TOOLS.to_vec();
        names.push(compiler_name);
        let pinned = packages.find_tools(suite, &names)?;
        let mut key = LAYOUT.to_string();
        pinned.iter().for_each(|one| key.push_str(&one.sha256));
        // Each set of packages has its own directory.
        let name = format!("{suite}-{compiler_name}-{}", &digest::of_bytes(key.as_bytes())[..16]);
        let (root, progress) = (packages.cache().join("build-roots").join(name), packages.progress());
        cache::publish(&root, &progress, |staging| {
            let label = format!("build root with {compiler_name}");
            let debs = packages.fetch_tools(&label, &pinned)?;
            progress.say(format_args!("{label} ({suite}): unpacking {} packages", debs.len()));
            for deb in &debs {
                debian::unpack(deb, staging, is_needed)?;
            }
            Ok::<(), Error>(finish(staging)?)
        })?;
        Ok(Self { root, compiler: compiler.to_owned(), packages: pinned })
    }

    /// Returns a build root without files.
    #[cfg(test)]
    pub(super) fn for_tests(compiler: &str, packages: Vec<Pinned>) -> Self {
        Self { root: PathBuf::new(), compiler: compiler.to_owned(), packages }
    }

    /// Runs `job` until it exits.
    pub(super) fn run(&self, job: &Job<'_>, progress: &Progress) -> Result<(), Error> {
        let log = File::create(job.log).map_err(io_error("create", job.log))?;
        let stderr = log.try_clone().map_err(io_error("open", job.log))?;
        let mut command = self.command(job);
        let mut child = command.stdin(Stdio::null()).stdout(log).stderr(stderr).spawn().map_err(Error::Namespaces)?;
        let (started, mut reported) = (Instant::now(), Instant::now());
        let bar = progress.steps(job.name);
        let status = loop {
            if let Some(status) = child.try_wait().map_err(Error::Namespaces)? {
                break status;
            }
            thread::sleep(Duration::from_millis(100));
            if bar.is_shown() {
                bar.set(count_lines(job.log));
            } else if reported.elapsed() >= PROGRESS_INTERVAL {
                reported = Instant::now();
                let (lines, after) = (count_lines(job.log), seconds(started.elapsed()));
                progress.say(format_args!("{}: {lines} lines of output after {after}", job.name));
            }
        };
        drop(bar);
        if status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&fs::read(job.log).map_err(io_error("read", job.log))?).into_owned();
        match text.split_once(ENTERED) {
            Some((_, log)) if was_killed(log) => {
                Err(Error::Killed { what: job.name.to_owned(), message: last_line(log) })
            }
            Some((_, log)) => Err(Error::Compile { what: job.name.to_owned(), first: first_error(log), status }),
            None => Err(Error::EnterBuildRoot { message: last_line(&text) }),
        }
    }

    fn command(&self, job: &Job<'_>) -> Command {
        let mut command = Command::new("setpriv");
        // If this process exits, unshare is killed by --pdeathsig, then its child by
        // --kill-child, which is PID 1 of the namespace, so all others are killed too.
        command.args(["--pdeathsig", "KILL", "--", "unshare", "--user", "--map-root-user", "--mount", "--net"]);
        command.args(["--pid", "--fork", "--kill-child", "--", "sh", "-euc", ENTER, "sh"]);
        command.arg(&self.root).arg(job.build).arg(job.headers).arg(job.script).arg(ENTERED);
        // A fixed environment, so that modules do not contain the user, host or time.
        command.env_clear().envs([
            ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            ("LC_ALL", "C"),
            ("HOME", BUILD),
            ("KBUILD_BUILD_USER", "firstlight"),
            ("KBUILD_BUILD_HOST", "image-builder"),
            ("KBUILD_BUILD_TIMESTAMP", "1970-01-01"),
            ("KBUILD_BUILD_VERSION", "1"),
            ("SOURCE_DATE_EPOCH", "0"),
        ]);
        command
    }
}

/// Returns the base suite: suites such as `trixie-backports` have no compilers.
fn base_of(suite: &str) -> &str {
    ["-backports", "-backports-sloppy", "-security", "-updates", "-proposed-updates"]
        .iter()
        .find_map(|suffix| suite.strip_suffix(suffix))
        .unwrap_or(suite)
}

/// Returns the package of a compiler: `gcc-14` for `x86_64-linux-gnu-gcc-14`.
fn compiler_package(compiler: &str) -> &str {
    compiler.strip_prefix("x86_64-linux-gnu-").unwrap_or(compiler)
}

/// Returns whether a file is unpacked: programs and libraries, but not documentation
/// and C library headers.
fn is_needed(path: &Path) -> bool {
    const EXCLUDED: &[&str] = &["usr/share", "usr/include", "usr/lib/debug", "var", "etc"];
    !EXCLUDED.iter().any(|dir| path.starts_with(dir))
}

/// Creates the links that package scripts would create, and the mount points.
fn finish(root: &Path) -> Result<(), cache::Error> {
    let link = |target: &str, name: &str| {
        let path = root.join(name);
        if path.symlink_metadata().is_ok() {
            return Ok(());
        }
        std::os::unix::fs::symlink(target, &path).map_err(io_error("create link", &path))
    };
    for dir in ["bin", "sbin", "lib", "lib64"] {
        link(&format!("usr/{dir}"), dir)?;
    }
    link("mawk", "usr/bin/awk")?;
    for dir in [BUILD, HEADERS, "/tmp", "/dev"] {
        let path = root.join(dir.trim_start_matches('/'));
        fs::create_dir_all(&path).map_err(io_error("create directory", &path))?;
    }
    for device in DEVICES {
        let path = root.join("dev").join(device);
        File::create(&path).map_err(io_error("create", &path))?;
    }
    Ok(())
}

fn count_lines(log: &Path) -> u64 {
    fs::read(log).map_or(0, |text| text.iter().filter(|byte| **byte == b'\n').count() as u64)
}

/// Returns whether a program of the build was killed by a signal, in which case the
/// failure is not a compile error.
fn was_killed(log: &str) -> bool {
    ["Killed", "Terminated"].iter().any(|signal| {
        log.lines().any(|line| line == *signal || line.contains(&format!("{signal} signal terminated program")))
    })
}

/// Returns the first error in a build log. Later errors are often consequences of
/// it, and with parallel jobs the last line may belong to any job.
fn first_error(log: &str) -> String {
    let is_error =
        |line: &&&str| [": error: ", ": fatal error: ", "ERROR: "].iter().any(|marker| line.contains(marker));
    let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    // Without a compiler error, the two lines before the failure message of make.
    let make_failure = || lines.iter().position(|line| line.contains("***"));
    let mut text = match lines.iter().find(is_error) {
        Some(error) => (*error).to_owned(),
        None => make_failure().map_or_else(|| last_line(log), |at| lines[at.saturating_sub(2)..=at].join(" / ")),
    };
    if let Some((end, _)) = text.char_indices().nth(400) {
        text.truncate(end);
        let _ = write!(text, "...");
    }
    text.trim().to_owned()
}

fn last_line(text: &str) -> String {
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no output").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilers_come_from_the_base_suite() {
        for (suite, base) in
            [("bookworm-backports", "bookworm"), ("trixie-security", "trixie"), ("trixie", "trixie"), ("sid", "sid")]
        {
            assert_eq!(base_of(suite), base);
        }
        assert_eq!(compiler_package("x86_64-linux-gnu-gcc-14"), "gcc-14");
        assert_eq!(compiler_package("gcc-12"), "gcc-12");
    }

    #[test]
    fn first_error_is_extracted_from_the_log() {
        let log = "  CC [M]  /build/nvidia/nv.o\n\
                   /build/nvidia/nv-pci.c:237:9: error: too few arguments to function 'pci_resize_resource'\n\
                   /build/nvidia/nv-pci.c:250:9: error: another\nmake[3]: *** [x] Error 1\nmake: done waiting\n";
        assert_eq!(
            first_error(log),
            "/build/nvidia/nv-pci.c:237:9: error: too few arguments to function 'pci_resize_resource'"
        );
        let modpost = "x\nERROR: modpost: \"follow_pfn\" [/build/nvidia.ko] undefined!\nmake: *** [y] Error 1\n";
        assert_eq!(first_error(modpost), "ERROR: modpost: \"follow_pfn\" [/build/nvidia.ko] undefined!");
        assert_eq!(
            first_error("a\nscript: nm failed\nTerminated\nmake: *** [a.o] Error 143\nb\n"),
            "script: nm failed / Terminated / make: *** [a.o] Error 143"
        );
        assert_eq!(first_error("make: *** no rule\nb\n"), "make: *** no rule");
        assert_eq!(first_error("a\nKilled\n\n"), "Killed");
        assert_eq!(first_error(""), "no output");
        assert_eq!(first_error(&format!("x: error: {}", "ä".repeat(900))).chars().count(), 403);
    }

    #[test]
    fn killed_compiler_is_distinguished_from_compile_error() {
        for log in [
            "Killed\nmake: *** [x] Error 137",
            "make: *** [x] Error 143\nTerminated\n",
            "gcc-12: fatal error: Killed signal terminated program cc1\ncompilation terminated.\n",
        ] {
            assert!(was_killed(log), "{log}");
        }
        assert!(!was_killed("a.c:1: error: b\ncompilation terminated.\nmake: *** [a.o] Error 1\n"));
    }

    #[test]
    fn finish_is_idempotent_and_supports_both_usr_layouts() {
        let dir = tempfile::tempdir().unwrap();
        // Until Debian 12, /bin is a directory.
        fs::create_dir_all(dir.path().join("bin")).unwrap();
        fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        finish(dir.path()).unwrap();
        finish(dir.path()).unwrap();
        assert!(dir.path().join("bin").symlink_metadata().unwrap().is_dir());
        assert_eq!(fs::read_link(dir.path().join("lib64")).unwrap(), Path::new("usr/lib64"));
        assert_eq!(fs::read_link(dir.path().join("usr/bin/awk")).unwrap(), Path::new("mawk"));
        for path in ["build", "headers", "tmp", "dev/null", "dev/urandom"] {
            assert!(dir.path().join(path).exists(), "{path}");
        }
    }

    /// Creates a build root without programs.
    fn empty_root(dir: &Path) -> BuildRoot {
        let root = dir.join("root");
        fs::create_dir_all(root.join("usr/bin")).unwrap();
        finish(&root).unwrap();
        BuildRoot { root, compiler: "gcc-14".to_owned(), packages: Vec::new() }
    }

    #[test]
    fn namespaces_or_mounts_not_permitted_then_distinct_error() {
        let dir = tempfile::tempdir().unwrap();
        let root = empty_root(dir.path());
        let run = |headers: &Path| {
            let job = Job { name: "x", build: dir.path(), headers, script: "true", log: &dir.path().join("log") };
            root.run(&job, &Progress::quiet()).unwrap_err()
        };
        // Whether or not namespaces are permitted here, mounting a missing directory fails before chroot.
        let refused = run(&dir.path().join("missing"));
        assert!(matches!(refused, Error::EnterBuildRoot { .. }), "{refused}");
        assert!(refused.to_string().contains("user namespaces"), "{refused}");
    }

    #[test]
    fn environment_of_the_build_is_fixed() {
        let dir = tempfile::tempdir().unwrap();
        let root = empty_root(dir.path());
        let job =
            Job { name: "x", build: dir.path(), headers: dir.path(), script: "true", log: &dir.path().join("log") };
        let command = root.command(&job);
        let names: Vec<_> = command.get_envs().map(|(name, _)| name.to_string_lossy().into_owned()).collect();
        assert!(
            names.contains(&"SOURCE_DATE_EPOCH".to_owned()) && !names.contains(&"MAKEFLAGS".to_owned()),
            "{names:?}"
        );
        let arguments: Vec<_> = command.get_args().map(|argument| argument.to_string_lossy()).collect();
        assert!(arguments.iter().any(|one| one == "--kill-child") && arguments.iter().any(|one| one == "--net"));
    }
}
