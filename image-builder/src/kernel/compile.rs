//! Building a kernel from Debian's source, as an ordinary user, cached.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::recipe::Recipe;
use super::{Error, Facts, Kernel, elf};
use crate::cache::{self, io_error};
use crate::debian::{self, Apt, Candidate, Wish};
use crate::digest;
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

impl Kernel {
    /// Builds the kernel of a recipe, unless the very same one is in the cache:
    /// same source, same configuration, same compiler.
    ///
    /// # Errors
    /// A tool is missing, the source cannot be had, the kernel does not take the
    /// configuration (with each symbol), or it does not compile.
    pub fn build(cache: &Path, recipe: &Recipe, progress: Progress) -> Result<Self, Error> {
        let compiler = tools()?;
        let candidate = Apt::open(cache, &recipe.suite, progress)?.candidate(&recipe.source, Wish::Newest)?;
        let wanted = recipe.wishes.text();
        let key = digest::of_bytes(
            format!("{LAYOUT}\n{}\n{}\n{compiler}\n{wanted}", candidate.sha256, recipe.name).as_bytes(),
        );
        let folder = cache.join("kernels").join(format!("built-{}", &key[..16]));
        cache::publish(&folder, &progress, |half| {
            let job = Job { recipe, candidate: &candidate, folder: half, progress };
            let tree = half.join("tree");
            job.unpack(cache, &tree)?;
            job.compile(&tree)?;
            fs::remove_dir_all(&tree).map_err(io_error("remove", &tree))?;
            Ok::<(), Error>(())
        })?;
        Self::open(folder)
    }
}

/// The compiler's name, after a look at every tool.
fn tools() -> Result<String, Error> {
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

struct Job<'a> {
    recipe: &'a Recipe,
    candidate: &'a Candidate,
    folder: &'a Path,
    progress: Progress,
}

impl Job<'_> {
    fn what(&self) -> String {
        format!("kernel {} {}", self.recipe.name, self.candidate.upstream_version())
    }

    /// The package holds the source as one compressed archive.
    fn unpack(&self, cache: &Path, tree: &Path) -> Result<(), Error> {
        let apt = Apt::open(cache, &self.recipe.suite, self.progress)?;
        let package = apt
            .fetch(&format!("source of {}", self.what()), std::slice::from_ref(self.candidate))?
            .pop()
            .ok_or(Error::Incomplete { package: self.candidate.file_name(), what: "file" })?;
        self.progress.say(format_args!("{}: unpacking the source", self.what()));
        let outer = self.folder.join("package");
        fs::create_dir_all(&outer).map_err(io_error("create folder", &outer))?;
        let name = format!("usr/src/{}.tar.xz", self.recipe.source);
        let name = Path::new(&name);
        debian::unpack(&package.deb, &outer, |path| name.starts_with(path))?;
        let archive = outer.join(name);
        let file = File::open(&archive).map_err(|_| Error::Incomplete {
            package: self.candidate.file_name(),
            what: "usr/src/*.tar.xz named as the package is",
        })?;
        let plain = lzma_rust2::XzReader::new(BufReader::new(file), true);
        let inner = self.folder.join("source");
        tar::Archive::new(plain).unpack(&inner).map_err(io_error("unpack", &archive))?;
        let top = super::only_child(&inner)
            .ok_or(Error::Incomplete { package: self.candidate.file_name(), what: "single folder of source" })?;
        fs::rename(&top, tree).map_err(io_error("move", &top))?;
        for folder in [&outer, &inner] {
            fs::remove_dir_all(folder).map_err(io_error("remove", folder))?;
        }
        Ok(())
    }

    fn compile(&self, tree: &Path) -> Result<(), Error> {
        let wanted = self.folder.join("wanted.config");
        fs::write(&wanted, self.recipe.wishes.text()).map_err(io_error("write", &wanted))?;
        self.make(tree, &[&format!("KCONFIG_ALLCONFIG={}", wanted.display()), "allnoconfig"])?;
        let config = tree.join(".config");
        let text = fs::read_to_string(&config).map_err(io_error("read", &config))?;
        self.recipe.wishes.check(&text).map_err(|source| Error::Configuration { kernel: self.what(), source })?;

        let started = Instant::now();
        let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.progress
            .say(format_args!("{}: compiling with {jobs} jobs, about 10 minutes of processor time", self.what()));
        self.make(tree, &[&format!("-j{jobs}"), "vmlinux"])?;
        self.progress.say(format_args!("{}: compiled in {}", self.what(), seconds(started.elapsed())));
        self.keep(tree, &config)
    }

    /// Takes what is wanted out of the tree.
    fn keep(&self, tree: &Path, config: &Path) -> Result<(), Error> {
        let release = self.make(tree, &["-s", "kernelrelease"])?;
        let release = release.iter().map(|line| line.trim()).rfind(|line| !line.is_empty());
        let release = release.unwrap_or_default().to_owned();
        let vmlinux = self.folder.join("vmlinux");
        let strip = ["--strip-all", "--remove-section=.comment"];
        let mut objcopy = Command::new("objcopy");
        objcopy.args(strip).arg(tree.join("vmlinux")).arg(&vmlinux);
        run(objcopy, &self.what(), &Progress::quiet())?;
        let bytes = fs::read(&vmlinux).map_err(io_error("read", &vmlinux))?;
        elf::pvh_entry(&bytes).map_err(|what| Error::Payload { file: vmlinux.clone(), what })?;
        fs::copy(config, self.folder.join("config")).map_err(io_error("copy", config))?;
        let modules = self.folder.join("modules");
        fs::create_dir_all(modules.join("kernel")).map_err(io_error("create folder", &modules))?;
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
        facts.write(self.folder)
    }

    /// `make` with an environment that does not depend on who builds, or when.
    fn make(&self, tree: &Path, arguments: &[&str]) -> Result<Vec<String>, Error> {
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
    let (started, mut said) = (Instant::now(), Instant::now());
    let (mut lines, mut last, mut line) = (0_usize, VecDeque::new(), Vec::new());
    let mut reader = BufReader::new(reader);
    while reader.by_ref().take(1 << 16).read_until(b'\n', &mut line).map_err(system)? > 0 {
        lines += 1;
        last.push_back(String::from_utf8_lossy(&line).trim_end().to_owned());
        line.clear();
        if last.len() > LAST_LINES {
            last.pop_front();
        }
        if said.elapsed() >= SIGN_OF_LIFE {
            said = Instant::now();
            progress.say(format_args!("{what}: {lines} steps after {}", seconds(started.elapsed())));
        }
    }
    let status = child.wait().map_err(system)?;
    if status.success() {
        return Ok(last.into());
    }
    Err(failed(format!("{status}: {}", Vec::from(last).join(" / "))))
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
        let error = run(Command::new("/no/such/make"), "kernel x", &Progress::quiet()).unwrap_err().to_string();
        assert!(error.contains("/no/such/make"), "{error}");
    }

    #[test]
    fn what_a_command_prints_is_returned() {
        let mut echo = Command::new("echo");
        echo.arg("6.12.95-firstlight-lab");
        assert_eq!(run(echo, "x", &Progress::quiet()).unwrap(), ["6.12.95-firstlight-lab"]);
    }
}
