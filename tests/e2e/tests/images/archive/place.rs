//! A Debian package archive, and a directory where `image-builder` builds from it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use firstlight_image::digest;

use super::deb::{Deb, RELEASE};
use crate::bars::image_builder;

/// The archive's only suite.
pub(super) const SUITE: &str = "trial";
/// The key that the builder trusts, and one that it does not.
pub(super) const TRUSTED_KEY: &str = "archive@test.invalid";
pub(super) const UNTRUSTED_KEY: &str = "stranger@test.invalid";
/// Archive components that the builder requests: all must exist.
const COMPONENTS: &[&str] = &["main", "contrib", "non-free", "non-free-firmware"];
const DAY: Duration = Duration::from_hours(24);

/// Dates and signing key of a release file.
#[derive(Debug, Clone)]
pub(super) struct Edition {
    pub(super) date: SystemTime,
    pub(super) valid_until: SystemTime,
    pub(super) signed_by: &'static str,
}

impl Edition {
    /// Dated now, valid for a week.
    pub(super) fn new() -> Self {
        let now = SystemTime::now();
        Self { date: now, valid_until: now + 7 * DAY, signed_by: TRUSTED_KEY }
    }
}

/// Formats a time as release files have it.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let mut command = Command::new("date");
    command.env("LC_ALL", "C").args(["-u", &format!("--date=@{seconds}"), "+%a, %d %b %Y %H:%M:%S UTC"]);
    String::from_utf8(run_checked(&mut command).stdout).unwrap().trim().to_owned()
}

/// Runs a program and panics if it fails.
pub(super) fn run_checked(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn packed(text: &str) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    gzip.finish().unwrap()
}

/// Returns the files below a directory with the SHA-256 of their contents.
pub(super) fn contents(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.is_symlink() {
                dirs.push(path);
            } else {
                let sha256 = digest::of_file(&path).map_or_else(|error| error.to_string(), |(sha256, _)| sha256);
                found.insert(path, sha256);
            }
        }
    }
    found
}

/// Path of `image-builder`, built once per test process.
fn program() -> PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| image_builder().get_program().into()).clone()
}

/// User and group id of the unprivileged user.
const UNPRIVILEGED_ID: u32 = 65_534;

/// Returns whether the test runs as root and can switch users.
pub(super) fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Exit code and stderr of a build.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) code: Option<i32>,
    pub(super) stderr: String,
}

impl Outcome {
    pub(super) fn of(output: &Output) -> Self {
        Self { code: output.status.code(), stderr: String::from_utf8_lossy(&output.stderr).into_owned() }
    }

    /// Asserts that the build failed, and returns its error line.
    #[track_caller]
    pub(super) fn error(&self) -> &str {
        assert_eq!(self.code, Some(1), "{}", self.stderr);
        let line = self.stderr.lines().last().unwrap();
        assert!(line.starts_with("image-builder: ") && !line.contains("panicked"), "{}", self.stderr);
        line
    }

    /// Asserts that the build failed and that its error line contains all of `words`.
    #[track_caller]
    pub(super) fn assert_error_contains(&self, words: &[&str]) {
        let line = self.error();
        for word in words {
            assert!(line.contains(word), "{word:?} is not in {line:?}");
        }
    }
}

/// An archive, its keys, and a working directory for builds.
pub(super) struct Place {
    dir: tempfile::TempDir,
    program: PathBuf,
}

impl Drop for Place {
    fn drop(&mut self) {
        // Otherwise gpg-agent runs until it notices that its directory is gone.
        let _ = Command::new("gpgconf").arg("--homedir").arg(self.at("gnupg")).args(["--kill", "all"]).status();
    }
}

impl Place {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Readable for the unprivileged user.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let place = Self { dir, program: program() };
        fs::create_dir(place.at("gnupg")).unwrap();
        fs::set_permissions(place.at("gnupg"), fs::Permissions::from_mode(0o700)).unwrap();
        let made = SystemTime::now() - 30 * DAY;
        for who in [TRUSTED_KEY, UNTRUSTED_KEY] {
            run_checked(place.gpg(made).args(["--quick-generate-key", who, "ed25519", "sign", "never"]));
        }
        let keys = run_checked(place.gpg(made).args(["--export", TRUSTED_KEY])).stdout;
        fs::write(place.at("keys.gpg"), keys).unwrap();
        // Ignore the host's apt configuration, which may accept expired archives.
        fs::write(place.at("apt.conf"), "Dir::Etc::main \"/dev/null\";\nDir::Etc::parts \"/dev/null\";\n").unwrap();
        place.manifest(super::deb::HELLO, &["usr/bin/*", "usr/share/hello/*"]);
        place
    }

    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns a gpg command with a fixed clock: equal inputs then give equal signatures.
    fn gpg(&self, time: SystemTime) -> Command {
        let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let mut command = Command::new("gpg");
        command.arg(format!("--faked-system-time={seconds}"));
        command.args(["--batch", "--yes", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback", "--homedir"]);
        command.arg(self.at("gnupg"));
        command
    }

    /// Writes a manifest with a kernel and these files of a package.
    pub(super) fn manifest(&self, package: &str, files: &[&str]) {
        let text = format!(
            "[image]\nname = \"trial\"\nformat = \"initramfs\"\n\
             [kernel]\npackage = \"linux-image-{RELEASE}\"\nsuite = \"{SUITE}\"\n\
             [[package]]\nname = \"{package}\"\nsuite = \"{SUITE}\"\nfiles = {files:?}\n"
        );
        fs::write(self.at("m.toml"), text).unwrap();
    }

    /// Returns the path of a file of the suite, such as its release file.
    pub(super) fn dists(&self, name: &str) -> PathBuf {
        self.at("debian/dists").join(SUITE).join(name)
    }

    /// Publishes an archive with exactly these packages.
    pub(super) fn publish(&self, debs: &[Deb], edition: &Edition) {
        let _ = fs::remove_dir_all(self.at("debian"));
        fs::create_dir_all(self.at("debian/pool")).unwrap();
        let mut listed = String::new();
        for deb in debs {
            let (name, size, sha256) = (deb.file_name(), deb.bytes.len(), digest::of_bytes(&deb.bytes));
            fs::write(self.at("debian/pool").join(&name), &deb.bytes).unwrap();
            listed.push_str(&format!("{}Filename: pool/{name}\nSize: {size}\nSHA256: {sha256}\n\n", deb.control()));
        }
        let mut sums = String::new();
        for component in COMPONENTS {
            let text = if *component == "main" { listed.as_str() } else { "" };
            let dir = format!("{component}/binary-amd64");
            fs::create_dir_all(self.dists(&dir)).unwrap();
            let gz = packed(text);
            fs::write(self.dists(&format!("{dir}/Packages.gz")), &gz).unwrap();
            for (name, bytes) in [("Packages", text.as_bytes()), ("Packages.gz", &gz)] {
                sums.push_str(&format!(" {} {} {dir}/{name}\n", digest::of_bytes(bytes), bytes.len()));
            }
        }
        self.sign(edition, &sums);
    }

    fn sign(&self, edition: &Edition, sums: &str) {
        let text = format!(
            "Origin: Test\nLabel: Test\nSuite: {SUITE}\nCodename: {SUITE}\nDate: {}\nValid-Until: {}\n\
             Architectures: amd64\nComponents: {}\nSHA256:\n{sums}",
            date(edition.date),
            date(edition.valid_until),
            COMPONENTS.join(" ")
        );
        let (release, signed) = (self.dists("Release"), self.dists("InRelease"));
        fs::write(&release, text).unwrap();
        let mut command = self.gpg(edition.date);
        command.args(["--local-user", edition.signed_by, "--clear-sign", "--output"]);
        run_checked(command.arg(signed).arg(&release));
        fs::remove_file(release).unwrap();
    }

    /// Sets the age of a cache's package lists to two days.
    pub(super) fn age(&self, cache: &str) {
        for tree in fs::read_dir(self.at(cache).join("apt")).unwrap() {
            let stamp = tree.unwrap().path().join("refreshed");
            if let Ok(stamp) = fs::File::options().write(true).open(stamp) {
                stamp.set_modified(SystemTime::now() - 2 * DAY).unwrap();
            }
        }
    }

    /// Returns an `image-builder` command that uses this archive.
    pub(super) fn builder(&self, cache: &str) -> Command {
        self.with_archive(Command::new(&self.program), cache)
    }

    /// Sets the archive, keyring and cache in the environment of a command.
    pub(super) fn with_archive(&self, mut command: Command, cache: &str) -> Command {
        command
            .env("FIRSTLIGHT_DEBIAN_MIRROR", format!("file:{}", self.at("debian").display()))
            .env("FIRSTLIGHT_DEBIAN_KEYRING", self.at("keys.gpg"))
            .env("FIRSTLIGHT_CACHE", self.at(cache))
            .env("APT_CONFIG", self.at("apt.conf"))
            .current_dir(self.dir.path())
            .stdin(Stdio::null());
        command
    }

    pub(super) fn build(&self, cache: &str, out: &str) -> Outcome {
        Outcome::of(&self.builder(cache).args(["build", "m.toml", "--out", out]).output().unwrap())
    }

    /// Builds, panics on failure, and returns the hashes of the results.
    #[track_caller]
    pub(super) fn built(&self, cache: &str, out: &str) -> BTreeMap<PathBuf, String> {
        let outcome = self.build(cache, out);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        self.assert_complete(cache, out)
    }

    /// Asserts that the results and the store are complete, without extra files.
    #[track_caller]
    pub(super) fn assert_complete(&self, cache: &str, out: &str) -> BTreeMap<PathBuf, String> {
        let verified = self.builder(cache).args(["verify", out]).output().unwrap();
        assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
        self.assert_cache_store(cache);
        let results: BTreeMap<PathBuf, String> = contents(&self.at(out))
            .into_iter()
            .map(|(path, sha256)| (path.strip_prefix(self.at(out)).unwrap().to_owned(), sha256))
            .collect();
        let names: Vec<&str> = results.keys().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(names, ["image.json", "initrd.cpio", "kata.toml", "vmlinux"]);
        results
    }

    /// Creates a directory owned by the unprivileged user, or by us if we are not root.
    pub(super) fn make_unprivileged_dir(&self, dir: &str) {
        fs::create_dir(self.at(dir)).unwrap();
        if is_root() {
            chown(self.at(dir), Some(UNPRIVILEGED_ID), Some(UNPRIVILEGED_ID)).unwrap();
        }
        // The build directory may not be accessible to that user.
        fs::copy(&self.program, self.at("image-builder")).unwrap();
    }

    /// Runs [`Place::build`] as the unprivileged user.
    pub(super) fn build_unprivileged(&self, cache: &str, out: &str) -> Outcome {
        let program = self.at("image-builder");
        let mut command = Command::new(if is_root() { Path::new("setpriv") } else { &program });
        if is_root() {
            let id = UNPRIVILEGED_ID.to_string();
            command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]).arg(&program);
        }
        let mut command = self.with_archive(command, cache);
        Outcome::of(&command.env("HOME", "/").args(["build", "m.toml", "--out", out]).output().unwrap())
    }

    /// Asserts that every file of a cache's store has the SHA-256 in its path.
    #[track_caller]
    pub(super) fn assert_cache_store(&self, cache: &str) {
        self.assert_store_hashes(&format!("{cache}/store"));
    }

    /// Asserts that every file of a store directory has the SHA-256 in its path.
    #[track_caller]
    pub(super) fn assert_store_hashes(&self, store: &str) {
        for (path, sha256) in contents(&self.at(store)) {
            let name = path.parent().and_then(Path::file_name).unwrap();
            assert_eq!(name.to_str(), Some(sha256.as_str()), "{}", path.display());
        }
    }

    /// Asserts that a build fails with `words` in its error and changes neither
    /// the previous results nor the store.
    #[track_caller]
    pub(super) fn assert_refused(&self, cache: &str, out: &str, words: &[&str]) {
        let before = contents(&self.at(out));
        self.build(cache, out).assert_error_contains(words);
        assert_eq!(contents(&self.at(out)), before);
        self.assert_cache_store(cache);
        // A new output directory stays empty.
        self.build(cache, "new").assert_error_contains(words);
        assert_eq!(contents(&self.at("new")), BTreeMap::new());
    }
}
