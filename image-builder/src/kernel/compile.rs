//! Builds a kernel from Debian's source, unprivileged and cached.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use firstlight_image::digest;
use firstlight_progress::{Progress, seconds};

use super::recipe::Recipe;
use super::{Error, Facts, Kernel, elf};
use crate::cache::{self, io_error};
use crate::packages::Packages;
use crate::packages::debian::{Candidate, PackageRequest};

/// Version of the build procedure; a change rebuilds cached kernels.
const LAYOUT: u32 = 2;

/// Programs that a build runs, and their Debian packages.
const TOOLS: &[(&str, &str)] = &[
    ("gcc", "gcc"),
    ("make", "make"),
    ("ld", "binutils"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("perl", "perl-base"),
];

/// Interval of progress messages during long builds.
const HEARTBEAT_INTERVAL: Duration = Duration::from_mins(1);

/// Number of last output lines in a build error.
const LAST_LINES: usize = 12;

/// Number of first lines containing `error:` in a build error: parallel jobs keep printing after one fails.
const ERROR_LINES: usize = 3;

impl Kernel {
    /// Builds the kernel of a recipe, unless one with the same source, configuration and compiler is cached.
    ///
    /// # Errors
    /// A tool is missing, the source is unavailable, the kernel does not apply the configuration (with each
    /// symbol), or compilation fails.
    pub fn build(packages: &mut Packages<'_>, recipe: &Recipe) -> Result<Self, Error> {
        let compiler = check_tools()?;
        let pinned = packages.find(&recipe.suite, &recipe.source, PackageRequest::Newest)?;
        let (candidate, progress) = (pinned.candidate(), packages.progress());
        packages.note(&pinned);
        let requested = recipe.requested.text();
        let key = digest::of_bytes(
            format!("{LAYOUT}\n{}\n{}\n{compiler}\n{requested}", candidate.sha256, recipe.name).as_bytes(),
        );
        let dir = packages.cache().join("kernels").join(format!("built-{}", &key[..16]));
        // Outside the cache entry: removing gigabytes is slow, and a kill meanwhile must not lose the kernel.
        let tree = dir.with_extension("tree");
        let clear = || match fs::remove_dir_all(&tree) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(io_error("remove", &tree)(error)),
            _ => Ok(()),
        };
        cache::publish(&dir, &progress, |half| {
            clear()?;
            let job = Job::new(recipe, candidate, half, progress);
            job.unpack(packages, &pinned, &tree, |_| true)?;
            job.compile(&tree)
        })?;
        clear()?;
        Self::open(dir)
    }
}

/// Checks that every tool is installed and returns the compiler's version line.
pub(super) fn check_tools() -> Result<String, Error> {
    let mut compiler = String::new();
    for (tool, package) in TOOLS {
        let output = Command::new(tool).arg("--version").stdin(Stdio::null()).output();
        match output {
            Ok(output) if *tool == "gcc" => {
                compiler = String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned();
            }
            Ok(_) => {}
            Err(_) => return Err(Error::Tool { tool, package }),
        }
    }
    Ok(compiler)
}

/// Headers that one of the kernel's host programs needs.
struct Headers {
    /// The configuration line that requires them.
    setting: &'static str,
    header: &'static str,
    what: &'static str,
    package: &'static str,
}

const HEADERS: &[Headers] = &[
    Headers {
        setting: "CONFIG_SYSTEM_TRUSTED_KEYRING=y",
        header: "openssl/bio.h",
        what: "OpenSSL's headers (it checks signatures of modules)",
        package: "libssl-dev",
    },
    Headers {
        setting: "CONFIG_OBJTOOL=y",
        header: "gelf.h",
        what: "libelf's headers (its objtool reads object files)",
        package: "libelf-dev",
    },
];

/// Checks that required headers are installed before a long compilation.
fn check_headers(config: &Path) -> Result<(), Error> {
    let text = fs::read_to_string(config).map_err(io_error("read", config))?;
    for Headers { setting, header, what, package } in HEADERS {
        if !text.lines().any(|line| line == *setting) {
            continue;
        }
        let mut gcc = Command::new("gcc");
        gcc.args(["-fsyntax-only", "-include", header, "-x", "c", "/dev/null"]);
        let found = gcc.stdin(Stdio::null()).output().is_ok_and(|output| output.status.success());
        if !found {
            return Err(Error::Tool { tool: what, package });
        }
    }
    Ok(())
}

/// A kernel build in a directory.
pub(super) struct Job<'a> {
    pub(super) recipe: &'a Recipe,
    pub(super) candidate: Candidate,
    pub(super) dir: &'a Path,
    pub(super) progress: Progress,
}

impl<'a> Job<'a> {
    pub(super) fn new(recipe: &'a Recipe, candidate: Candidate, dir: &'a Path, progress: Progress) -> Self {
        Self { recipe, candidate, dir, progress }
    }

    pub(super) fn label(&self) -> String {
        format!("kernel {} {}", self.recipe.name, self.candidate.upstream_version())
    }

    fn compile(&self, tree: &Path) -> Result<(), Error> {
        let config = self.configure(tree, None)?;
        check_headers(&config)?;
        let started = Instant::now();
        let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.progress
            .say(format_args!("{}: compiling with {jobs} jobs, about 25 minutes of processor time", self.label()));
        self.make(tree, &[&format!("-j{jobs}"), "vmlinux"])?;
        self.progress.say(format_args!("{}: compiled in {}", self.label(), seconds(started.elapsed())));
        self.store_artifacts(tree, &config)
    }

    /// Copies the build's results from the source tree into the job's directory.
    fn store_artifacts(&self, tree: &Path, config: &Path) -> Result<(), Error> {
        let release = self.make(tree, &["-s", "kernelrelease"])?;
        let release = release.iter().map(|line| line.trim()).rfind(|line| !line.is_empty());
        let release = release.unwrap_or_default().to_owned();
        let vmlinux = self.dir.join("vmlinux");
        let strip = ["--strip-all", "--remove-section=.comment"];
        let mut objcopy = Command::new("objcopy");
        objcopy.args(strip).arg(tree.join("vmlinux")).arg(&vmlinux);
        run(objcopy, &self.label(), &Progress::quiet())?;
        let bytes = fs::read(&vmlinux).map_err(io_error("read", &vmlinux))?;
        elf::pvh_entry(&bytes).map_err(|what| Error::Payload { file: vmlinux.clone(), what })?;
        fs::copy(config, self.dir.join("config")).map_err(io_error("copy", config))?;
        let modules = self.dir.join("modules");
        fs::create_dir_all(modules.join("kernel")).map_err(io_error("create directory", &modules))?;
        let built_in = tree.join("modules.builtin");
        fs::copy(&built_in, modules.join("modules.builtin")).map_err(io_error("copy", &built_in))?;
        let facts = Facts {
            release,
            package: self.candidate.name.clone(),
            version: self.candidate.version.clone(),
            suite: self.recipe.suite.clone(),
            sha256: self.candidate.sha256.clone(),
            size: self.candidate.size,
            vmlinux_sha256: digest::of_bytes(&bytes),
            vmlinux_size: bytes.len() as u64,
        };
        facts.write(self.dir)
    }

    /// Runs `make` with an environment that is independent of user and time.
    pub(super) fn make(&self, tree: &Path, arguments: &[&str]) -> Result<Vec<String>, Error> {
        let mut make = Command::new("make");
        make.current_dir(tree)
            .args(arguments)
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .env("LC_ALL", "C")
            .env("ARCH", "x86_64")
            .env("LOCALVERSION", format!("-firstlight-{}", self.recipe.name))
            .env("KBUILD_BUILD_USER", "firstlight")
            .env("KBUILD_BUILD_HOST", "image-builder")
            .env("KBUILD_BUILD_TIMESTAMP", "1970-01-01")
            .env("KBUILD_BUILD_VERSION", "1");
        run(make, &self.label(), &self.progress)
    }
}

/// Runs a command and returns its last output lines. Reports the line count of long ones as progress.
fn run(mut command: Command, what: &str, progress: &Progress) -> Result<Vec<String>, Error> {
    let program = PathBuf::from(command.get_program()).display().to_string();
    let arguments: Vec<_> = command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect();
    let text = format!("{program} {}", arguments.join(" "));
    let failed = |output: String| Error::Build { what: what.to_owned(), command: text.clone(), output };
    let system = |error: std::io::Error| failed(error.to_string());
    // One pipe for stdout and stderr preserves the order of lines before a failure.
    let (reader, writer) = std::io::pipe().map_err(system)?;
    let second = writer.try_clone().map_err(system)?;
    let mut child = command.stdin(Stdio::null()).stdout(writer).stderr(second).spawn().map_err(system)?;
    // The command holds the pipe's write end, which would prevent end of file.
    drop(command);
    let bar = progress.steps(what);
    let (started, mut reported) = (Instant::now(), Instant::now());
    let (mut lines, mut last, mut line) = (0_usize, VecDeque::new(), Vec::new());
    let mut errors: Vec<String> = Vec::new();
    let mut reader = BufReader::new(reader);
    while reader.by_ref().take(1 << 16).read_until(b'\n', &mut line).map_err(system)? > 0 {
        lines += 1;
        bar.add(1);
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        line.clear();
        if errors.len() < ERROR_LINES && text.contains("error:") {
            errors.push(text.clone());
        }
        last.push_back(text);
        if last.len() > LAST_LINES {
            last.pop_front();
        }
        if !bar.is_shown() && reported.elapsed() >= HEARTBEAT_INTERVAL {
            reported = Instant::now();
            progress.say(format_args!("{what}: {lines} steps after {}", seconds(started.elapsed())));
        }
    }
    let status = child.wait().map_err(system)?;
    if status.success() {
        return Ok(last.into());
    }
    // Errors among the last lines are not repeated.
    let last = Vec::from(last);
    errors.retain(|error| !last.contains(error));
    Err(failed(format!("{status}: {}", [errors, last].concat().join(" / "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_command_reports_last_lines_and_first_errors() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "seq 1 40; echo broken >&2; exit 3"]);
        let error = run(shell, "kernel x", &Progress::quiet()).unwrap_err().to_string();
        for words in ["kernel x", "exit status: 3", "40 / broken"] {
            assert!(error.contains(words), "{error}");
        }
        assert!(!error.contains("/ 28 /"), "{error}");
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo 'x.c:1: fatal error: no gelf.h'; seq 1 40; echo 'y.c:2: error: late'; exit 2"]);
        let error = run(shell, "kernel x", &Progress::quiet()).unwrap_err().to_string();
        assert!(error.contains("status: 2: x.c:1: fatal error: no gelf.h / 30 /"), "{error}");
        let (_, output) = error.split_once("exit status").unwrap();
        assert_eq!(output.matches("y.c:2").count(), 1, "{error}");
        let error = run(Command::new("/no/such/make"), "kernel x", &Progress::quiet()).unwrap_err().to_string();
        assert!(error.contains("/no/such/make"), "{error}");
    }

    #[test]
    fn missing_headers_fail_before_compilation() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config");
        fs::write(&config, "# CONFIG_SYSTEM_TRUSTED_KEYRING is not set\n# CONFIG_OBJTOOL is not set\n").unwrap();
        check_headers(&config).unwrap();
        for Headers { setting, package, .. } in HEADERS {
            fs::write(&config, format!("{setting}\n")).unwrap();
            // The machine may or may not have the headers; no other error is allowed.
            if let Err(error) = check_headers(&config) {
                assert!(error.to_string().ends_with(&format!("install the package {package}")), "{error}");
            }
        }
    }

    #[test]
    fn command_output_is_returned() {
        let mut echo = Command::new("echo");
        echo.arg("6.12.95-firstlight-lab");
        assert_eq!(run(echo, "x", &Progress::quiet()).unwrap(), ["6.12.95-firstlight-lab"]);
    }
}
