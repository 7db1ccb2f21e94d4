//! Building a kernel from Debian's source, as an ordinary user, cached.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::recipe::Recipe;
use super::{Error, Facts, Kernel, elf};
use crate::cache::{self, io_error};
use crate::debian::{Candidate, Wish};
use crate::digest;
use crate::packages::Packages;
use crate::progress::{Progress, seconds};

/// Changes when kernels are built differently, so that old ones are made anew.
const LAYOUT: u32 = 1;

/// Programs that a build starts, and the Debian packages that have them.
const TOOLS: &[(&str, &str)] = &[
    ("gcc", "gcc"),
    ("make", "make"),
    ("ld", "binutils"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("perl", "perl-base"),
];

/// A word of life on long builds, this often.
const SIGN_OF_LIFE: Duration = Duration::from_mins(1);

/// A failed build shows this many of the last lines.
const LAST_LINES: usize = 12;

/// And as many of the first that name an error: with several jobs, others go on
/// talking until they notice.
const ERROR_LINES: usize = 3;

impl Kernel {
    /// Builds the kernel of a recipe, unless the very same one is in the cache:
    /// same source, same configuration, same compiler.
    ///
    /// # Errors
    /// A tool is missing, the source cannot be had, the kernel does not take the
    /// configuration (with each symbol), or it does not compile.
    pub fn build(packages: &mut Packages<'_>, recipe: &Recipe) -> Result<Self, Error> {
        let compiler = tools()?;
        let pinned = packages.find(&recipe.suite, &recipe.source, Wish::Newest)?;
        let (candidate, progress) = (pinned.candidate(), packages.progress());
        packages.note(&pinned);
        let wanted = recipe.wishes.text();
        let key = digest::of_bytes(
            format!("{LAYOUT}\n{}\n{}\n{compiler}\n{wanted}", candidate.sha256, recipe.name).as_bytes(),
        );
        let dir = packages.cache().join("kernels").join(format!("built-{}", &key[..16]));
        // Beside the entry: taking gigabytes away takes its time, and who is
        // killed in the middle of that should not lose the kernel.
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

/// The compiler's name, after a look at every tool.
pub(super) fn tools() -> Result<String, Error> {
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

/// Headers of a program that the kernel builds for itself.
struct Headers {
    /// The line of a configuration that needs them.
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

/// Says early what would be missing late.
fn headers(config: &Path) -> Result<(), Error> {
    let text = fs::read_to_string(config).map_err(io_error("read", config))?;
    for Headers { setting, header, what, package } in HEADERS {
        if !text.lines().any(|line| line == *setting) {
            continue;
        }
        let mut gcc = Command::new("gcc");
        gcc.args(["-fsyntax-only", "-include", header, "-x", "c", "/dev/null"]);
        let is_there = gcc.stdin(Stdio::null()).output().is_ok_and(|output| output.status.success());
        if !is_there {
            return Err(Error::Tool { tool: what, package });
        }
    }
    Ok(())
}

/// One kernel, being made in a directory.
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

    pub(super) fn what(&self) -> String {
        format!("kernel {} {}", self.recipe.name, self.candidate.upstream_version())
    }

    fn compile(&self, tree: &Path) -> Result<(), Error> {
        let config = self.configure(tree, None)?;
        headers(&config)?;
        let started = Instant::now();
        let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.progress
            .say(format_args!("{}: compiling with {jobs} jobs, about 25 minutes of processor time", self.what()));
        self.make(tree, &[&format!("-j{jobs}"), "vmlinux"])?;
        self.progress.say(format_args!("{}: compiled in {}", self.what(), seconds(started.elapsed())));
        self.keep(tree, &config)
    }

    /// Takes what is wanted out of the tree.
    fn keep(&self, tree: &Path, config: &Path) -> Result<(), Error> {
        let release = self.make(tree, &["-s", "kernelrelease"])?;
        let release = release.iter().map(|line| line.trim()).rfind(|line| !line.is_empty());
        let release = release.unwrap_or_default().to_owned();
        let vmlinux = self.dir.join("vmlinux");
        let strip = ["--strip-all", "--remove-section=.comment"];
        let mut objcopy = Command::new("objcopy");
        objcopy.args(strip).arg(tree.join("vmlinux")).arg(&vmlinux);
        run(objcopy, &self.what(), &Progress::quiet())?;
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

    /// `make` with an environment that does not depend on who builds, or when.
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
        run(make, &self.what(), &self.progress)
    }
}

/// Runs a command to its end and returns the last lines that it printed. The
/// lines of a long one are counted aloud.
fn run(mut command: Command, what: &str, progress: &Progress) -> Result<Vec<String>, Error> {
    let program = PathBuf::from(command.get_program()).display().to_string();
    let arguments: Vec<_> = command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect();
    let text = format!("{program} {}", arguments.join(" "));
    let failed = |said: String| Error::Build { what: what.to_owned(), command: text.clone(), said };
    let system = |error: std::io::Error| failed(error.to_string());
    // One pipe for both: the last lines before a failure are those that count.
    let (reader, writer) = std::io::pipe().map_err(system)?;
    let second = writer.try_clone().map_err(system)?;
    let mut child = command.stdin(Stdio::null()).stdout(writer).stderr(second).spawn().map_err(system)?;
    // It holds the pipe's other end, which would stay open for ever.
    drop(command);
    let bar = progress.steps(what);
    let (started, mut said) = (Instant::now(), Instant::now());
    let (mut lines, mut last, mut line) = (0_usize, VecDeque::new(), Vec::new());
    let mut errors: Vec<String> = Vec::new();
    let mut reader = BufReader::new(reader);
    while reader.by_ref().take(1 << 16).read_until(b'\n', &mut line).map_err(system)? > 0 {
        lines += 1;
        bar.add(1);
        let words = String::from_utf8_lossy(&line).trim_end().to_owned();
        line.clear();
        if errors.len() < ERROR_LINES && words.contains("error:") {
            errors.push(words.clone());
        }
        last.push_back(words);
        if last.len() > LAST_LINES {
            last.pop_front();
        }
        if !bar.is_shown() && said.elapsed() >= SIGN_OF_LIFE {
            said = Instant::now();
            progress.say(format_args!("{what}: {lines} steps after {}", seconds(started.elapsed())));
        }
    }
    let status = child.wait().map_err(system)?;
    if status.success() {
        return Ok(last.into());
    }
    // Those that are among the last ones are not said twice.
    let last = Vec::from(last);
    errors.retain(|error| !last.contains(error));
    Err(failed(format!("{status}: {}", [errors, last].concat().join(" / "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_command_shows_its_last_lines() {
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
        let (_, said) = error.split_once("exit status").unwrap();
        assert_eq!(said.matches("y.c:2").count(), 1, "{error}");
        let error = run(Command::new("/no/such/make"), "kernel x", &Progress::quiet()).unwrap_err().to_string();
        assert!(error.contains("/no/such/make"), "{error}");
    }

    #[test]
    fn missing_headers_fail_before_compilation() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config");
        fs::write(&config, "# CONFIG_SYSTEM_TRUSTED_KEYRING is not set\n# CONFIG_OBJTOOL is not set\n").unwrap();
        headers(&config).unwrap();
        for Headers { setting, package, .. } in HEADERS {
            fs::write(&config, format!("{setting}\n")).unwrap();
            // Whether this machine has them or not: nothing else may be said.
            if let Err(error) = headers(&config) {
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
