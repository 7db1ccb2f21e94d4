//! Where modules are compiled: a root file system of packages, entered
//! through a user namespace.
//!
//! The compiler is the one that the kernel was built with, and everything the
//! build runs is the kernel's own suite's: neither the machine's compiler nor
//! its C library matters. Sources and headers are bound to fixed paths, so
//! that no path of the builder ends up in a module. There is no network in
//! it, and when the image builder dies, everything in it does.

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
use crate::debian;
use crate::lock::Pinned;
use crate::packages::Packages;

/// Changes when roots are made differently, so that old ones are made anew.
const LAYOUT: u32 = 1;

/// What a build of kernel modules runs besides the compiler. `libelf1` is for
/// the kernel's own objtool.
const TOOLS: &[&str] =
    &["bash", "coreutils", "dash", "diffutils", "findutils", "grep", "libelf1", "make", "mawk", "sed"];

/// Where a build finds its sources.
pub(super) const BUILD: &str = "/build";
/// Where a build finds the kernel's headers.
pub(super) const HEADERS: &str = "/headers";

/// What a build finds of `/dev`.
const DEVICES: &[&str] = &["null", "zero", "urandom"];

/// A word of life on long builds, this often.
const SIGN_OF_LIFE: Duration = Duration::from_mins(1);

/// Run by the machine's shell in the new namespaces, before the change of
/// root. Read-only is a courtesy to the cache, not a promise: where the file
/// system's own flags forbid to change them, it stays writable.
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

/// Printed when the change of root is next; what fails before is the machine's refusal.
const ENTERED: &str = "image-builder: in the build root";

/// A root file system to compile in.
#[derive(Debug, Clone)]
pub(super) struct BuildRoot {
    root: PathBuf,
    /// The compiler's name, with its prefix.
    pub(super) compiler: String,
    /// The packages it is made of.
    pub(super) packages: Vec<Pinned>,
}

/// What is done in the root.
pub(super) struct Job<'a> {
    /// For messages.
    pub(super) what: &'a str,
    /// Bound to [`BUILD`].
    pub(super) build: &'a Path,
    /// Bound to [`HEADERS`], read-only where that can be had.
    pub(super) headers: &'a Path,
    /// A script for the root's shell.
    pub(super) script: &'a str,
    /// Gets everything that is printed.
    pub(super) log: &'a Path,
}

impl BuildRoot {
    /// Makes the root with `compiler` for kernels of `suite`, unless it is there.
    pub(super) fn prepare(packages: &mut Packages<'_>, suite: &str, compiler: &str) -> Result<Self, Error> {
        let suite = base_of(suite);
        let package = compiler_package(compiler);
        let mut wanted = TOOLS.to_vec();
        wanted.push(package);
        let members = packages.find_tools(suite, &wanted)?;
        let mut key = LAYOUT.to_string();
        members.iter().for_each(|member| key.push_str(&member.sha256));
        // Other packages, another directory.
        let name = format!("{suite}-{package}-{}", &digest::of_bytes(key.as_bytes())[..16]);
        let (root, progress) = (packages.cache().join("build-roots").join(name), packages.progress());
        cache::publish(&root, &progress, |half| {
            let label = format!("build root with {package}");
            let debs = packages.fetch_tools(&label, &members)?;
            progress.say(format_args!("{label} ({suite}): unpacking {} packages", debs.len()));
            for deb in &debs {
                debian::unpack(deb, half, keep)?;
            }
            Ok::<(), Error>(finish(half)?)
        })?;
        Ok(Self { root, compiler: compiler.to_owned(), packages: members })
    }

    /// A root that nothing can run in.
    #[cfg(test)]
    pub(super) fn for_tests(compiler: &str, packages: Vec<Pinned>) -> Self {
        Self { root: PathBuf::new(), compiler: compiler.to_owned(), packages }
    }

    /// Runs `job` to its end.
    pub(super) fn run(&self, job: &Job<'_>, progress: &Progress) -> Result<(), Error> {
        let log = File::create(job.log).map_err(io_error("create", job.log))?;
        let second = log.try_clone().map_err(io_error("open", job.log))?;
        let mut command = self.command(job);
        let mut child = command.stdin(Stdio::null()).stdout(log).stderr(second).spawn().map_err(Error::Namespaces)?;
        let (started, mut said) = (Instant::now(), Instant::now());
        let bar = progress.steps(job.what);
        let status = loop {
            if let Some(status) = child.try_wait().map_err(Error::Namespaces)? {
                break status;
            }
            thread::sleep(Duration::from_millis(100));
            if bar.is_shown() {
                bar.set(lines(job.log));
            } else if said.elapsed() >= SIGN_OF_LIFE {
                said = Instant::now();
                let (lines, after) = (lines(job.log), seconds(started.elapsed()));
                progress.say(format_args!("{}: {lines} lines of output after {after}", job.what));
            }
        };
        drop(bar);
        if status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&fs::read(job.log).map_err(io_error("read", job.log))?).into_owned();
        match text.split_once(ENTERED) {
            Some((_, log)) if was_killed(log) => {
                Err(Error::Stopped { what: job.what.to_owned(), said: last_line(log) })
            }
            Some((_, log)) => Err(Error::Compile { what: job.what.to_owned(), first: first_error(log), status }),
            None => Err(Error::NotEntered { said: last_line(&text) }),
        }
    }

    fn command(&self, job: &Job<'_>) -> Command {
        let mut command = Command::new("setpriv");
        // When this process dies, unshare does; then its child, the first
        // process of its namespace; then all others in it.
        command.args(["--pdeathsig", "KILL", "--", "unshare", "--user", "--map-root-user", "--mount", "--net"]);
        command.args(["--pid", "--fork", "--kill-child", "--", "sh", "-euc", ENTER, "sh"]);
        command.arg(&self.root).arg(job.build).arg(job.headers).arg(job.script).arg(ENTERED);
        // Neither the builder, nor the machine, nor the time shows.
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

/// `trixie-backports` has no compilers of its own.
fn base_of(suite: &str) -> &str {
    ["-backports", "-backports-sloppy", "-security", "-updates", "-proposed-updates"]
        .iter()
        .find_map(|tail| suite.strip_suffix(tail))
        .unwrap_or(suite)
}

/// The package of `x86_64-linux-gnu-gcc-14`, which is `gcc-14`.
fn compiler_package(compiler: &str) -> &str {
    compiler.strip_prefix("x86_64-linux-gnu-").unwrap_or(compiler)
}

/// Programs and libraries; no documents, no headers of the C library.
fn keep(path: &Path) -> bool {
    const NOT: &[&str] = &["usr/share", "usr/include", "usr/lib/debug", "var", "etc"];
    !NOT.iter().any(|dir| path.starts_with(dir))
}

/// What installing the packages would have done, and the places for mounts.
fn finish(root: &Path) -> Result<(), cache::Error> {
    let link = |target: &str, name: &str| {
        let path = root.join(name);
        if path.symlink_metadata().is_ok() {
            return Ok(());
        }
        std::os::unix::fs::symlink(target, &path).map_err(io_error("make link", &path))
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

fn lines(log: &Path) -> u64 {
    fs::read(log).map_or(0, |text| text.iter().filter(|byte| **byte == b'\n').count() as u64)
}

/// Whether somebody ended a program of the build, which says nothing about the
/// source.
fn was_killed(log: &str) -> bool {
    ["Killed", "Terminated"].iter().any(|word| {
        log.lines().any(|line| line == *word || line.contains(&format!("{word} signal terminated program")))
    })
}

/// The line of a build's log that says what is wrong: what follows are its
/// consequences, and with several jobs the last line may be anybody's.
fn first_error(log: &str) -> String {
    let is_error = |line: &&&str| [": error: ", ": fatal error: ", "ERROR: "].iter().any(|mark| line.contains(mark));
    let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    // Where nothing looks like an error, the two lines before make gave up may say why.
    let gave_up = || lines.iter().position(|line| line.contains("***"));
    let mut text = match lines.iter().find(is_error) {
        Some(error) => (*error).to_owned(),
        None => gave_up().map_or_else(|| last_line(log), |at| lines[at.saturating_sub(2)..=at].join(" / ")),
    };
    if let Some((end, _)) = text.char_indices().nth(400) {
        text.truncate(end);
        let _ = write!(text, "...");
    }
    text.trim().to_owned()
}

fn last_line(text: &str) -> String {
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it printed nothing").trim().to_owned()
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
    fn the_first_error_is_found_among_its_consequences() {
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
        assert_eq!(first_error(""), "it printed nothing");
        assert_eq!(first_error(&format!("x: error: {}", "ä".repeat(900))).chars().count(), 403);
    }

    #[test]
    fn a_killed_compiler_is_no_verdict() {
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
    fn a_root_is_finished_once_and_for_both_layouts() {
        let dir = tempfile::tempdir().unwrap();
        // As up to Debian 12: programs in /bin too.
        fs::create_dir_all(dir.path().join("bin")).unwrap();
        fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        finish(dir.path()).unwrap();
        finish(dir.path()).unwrap();
        assert!(dir.path().join("bin").symlink_metadata().unwrap().is_dir());
        assert_eq!(fs::read_link(dir.path().join("lib64")).unwrap(), Path::new("usr/lib64"));
        assert_eq!(fs::read_link(dir.path().join("usr/bin/awk")).unwrap(), Path::new("mawk"));
        for place in ["build", "headers", "tmp", "dev/null", "dev/urandom"] {
            assert!(dir.path().join(place).exists(), "{place}");
        }
    }

    /// A root in which nothing can run: the way in is what is looked at.
    fn hollow(dir: &Path) -> BuildRoot {
        let root = dir.join("root");
        fs::create_dir_all(root.join("usr/bin")).unwrap();
        finish(&root).unwrap();
        BuildRoot { root, compiler: "gcc-14".to_owned(), packages: Vec::new() }
    }

    #[test]
    fn a_machine_that_refuses_is_told_from_a_build_that_fails() {
        let dir = tempfile::tempdir().unwrap();
        let root = hollow(dir.path());
        let run = |headers: &Path| {
            let job = Job { what: "x", build: dir.path(), headers, script: "true", log: &dir.path().join("log") };
            root.run(&job, &Progress::quiet()).unwrap_err()
        };
        // Whether or not namespaces are allowed here, a mount of nothing fails before the change of root.
        let refused = run(&dir.path().join("missing"));
        assert!(matches!(refused, Error::NotEntered { .. }), "{refused}");
        assert!(refused.to_string().contains("user namespaces"), "{refused}");
    }

    #[test]
    fn the_environment_is_the_same_everywhere() {
        let dir = tempfile::tempdir().unwrap();
        let root = hollow(dir.path());
        let job =
            Job { what: "x", build: dir.path(), headers: dir.path(), script: "true", log: &dir.path().join("log") };
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
