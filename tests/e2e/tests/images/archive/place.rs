//! An archive of packages, and a directory where `image-builder` builds from it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use firstlight_image_builder::digest;

use super::deb::{Deb, RELEASE};
use crate::bars::image_builder;

/// The archive's only suite.
pub(super) const SUITE: &str = "trial";
/// Whose key signs the archive, and whose does not.
pub(super) const OURS: &str = "archive@test.invalid";
pub(super) const STRANGER: &str = "stranger@test.invalid";
/// What a manifest may ask for: all of them have to be there.
const COMPONENTS: &[&str] = &["main", "contrib", "non-free", "non-free-firmware"];
const DAY: Duration = Duration::from_hours(24);

/// What the release file says, and who signs it.
#[derive(Debug, Clone)]
pub(super) struct Edition {
    pub(super) date: SystemTime,
    pub(super) valid_until: SystemTime,
    pub(super) signed_by: &'static str,
}

impl Edition {
    /// Of now, for a week.
    pub(super) fn new() -> Self {
        let now = SystemTime::now();
        Self { date: now, valid_until: now + 7 * DAY, signed_by: OURS }
    }
}

/// As release files have it.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let mut command = Command::new("date");
    command.env("LC_ALL", "C").args(["-u", &format!("--date=@{seconds}"), "+%a, %d %b %Y %H:%M:%S UTC"]);
    String::from_utf8(ran(&mut command).stdout).unwrap().trim().to_owned()
}

/// Runs a program that must succeed.
pub(super) fn ran(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn packed(text: &str) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    gzip.finish().unwrap()
}

/// Files below a directory with the hashes of their contents.
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

/// `image-builder`, built once for all.
fn program() -> PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| image_builder().get_program().into()).clone()
}

/// Who owns nothing.
const NOBODY: u32 = 65_534;

/// Whether we may become another user.
pub(super) fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// How a build ended.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) code: Option<i32>,
    pub(super) said: String,
}

impl Outcome {
    pub(super) fn of(output: &Output) -> Self {
        Self { code: output.status.code(), said: String::from_utf8_lossy(&output.stderr).into_owned() }
    }

    /// The line that says why it failed.
    #[track_caller]
    pub(super) fn error(&self) -> &str {
        assert_eq!(self.code, Some(1), "{}", self.said);
        let line = self.said.lines().last().unwrap();
        assert!(line.starts_with("image-builder: ") && !line.contains("panicked"), "{}", self.said);
        line
    }

    /// It failed, and says all of that in one line.
    #[track_caller]
    pub(super) fn says(&self, words: &[&str]) {
        let line = self.error();
        for word in words {
            assert!(line.contains(word), "{word:?} is not in {line:?}");
        }
    }
}

/// An archive, its keys, and where it is built from it.
pub(super) struct Place {
    dir: tempfile::TempDir,
    program: PathBuf,
}

impl Drop for Place {
    fn drop(&mut self) {
        // Else it stays until it finds its directory gone.
        let _ = Command::new("gpgconf").arg("--homedir").arg(self.at("gnupg")).args(["--kill", "all"]).status();
    }
}

impl Place {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Other users may read it.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let place = Self { dir, program: program() };
        fs::create_dir(place.at("gnupg")).unwrap();
        fs::set_permissions(place.at("gnupg"), fs::Permissions::from_mode(0o700)).unwrap();
        let made = SystemTime::now() - 30 * DAY;
        for who in [OURS, STRANGER] {
            ran(place.gpg(made).args(["--quick-generate-key", who, "ed25519", "sign", "never"]));
        }
        let keys = ran(place.gpg(made).args(["--export", OURS])).stdout;
        fs::write(place.at("keys.gpg"), keys).unwrap();
        // Nothing of what this machine's apt is set to, which may let old archives pass.
        fs::write(place.at("apt.conf"), "Dir::Etc::main \"/dev/null\";\nDir::Etc::parts \"/dev/null\";\n").unwrap();
        place.manifest(super::deb::HELLO, &["usr/bin/*", "usr/share/hello/*"]);
        place
    }

    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// gpg at that time: what is signed twice at one time has the same signature.
    fn gpg(&self, time: SystemTime) -> Command {
        let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let mut command = Command::new("gpg");
        command.arg(format!("--faked-system-time={seconds}"));
        command.args(["--batch", "--yes", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback", "--homedir"]);
        command.arg(self.at("gnupg"));
        command
    }

    /// The image: a kernel, and these files of a package.
    pub(super) fn manifest(&self, package: &str, files: &[&str]) {
        let text = format!(
            "[image]\nname = \"trial\"\nformat = \"initramfs\"\n\
             [kernel]\npackage = \"linux-image-{RELEASE}\"\nsuite = \"{SUITE}\"\n\
             [[package]]\nname = \"{package}\"\nsuite = \"{SUITE}\"\nfiles = {files:?}\n"
        );
        fs::write(self.at("m.toml"), text).unwrap();
    }

    /// A file of the suite, such as its release file.
    pub(super) fn dists(&self, name: &str) -> PathBuf {
        self.at("debian/dists").join(SUITE).join(name)
    }

    /// The archive has these packages and no others, and says so.
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
        ran(command.arg(signed).arg(&release));
        fs::remove_file(release).unwrap();
    }

    /// As if the package lists of a cache were from the day before yesterday.
    pub(super) fn age(&self, cache: &str) {
        for tree in fs::read_dir(self.at(cache).join("apt")).unwrap() {
            let stamp = tree.unwrap().path().join("refreshed");
            if let Ok(stamp) = fs::File::options().write(true).open(stamp) {
                stamp.set_modified(SystemTime::now() - 2 * DAY).unwrap();
            }
        }
    }

    /// `image-builder` with this archive.
    pub(super) fn builder(&self, cache: &str) -> Command {
        self.with_archive(Command::new(&self.program), cache)
    }

    /// Any program that will run it.
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

    /// A build that must succeed; what it wrote.
    #[track_caller]
    pub(super) fn built(&self, cache: &str, out: &str) -> BTreeMap<PathBuf, String> {
        let outcome = self.build(cache, out);
        assert_eq!(outcome.code, Some(0), "{}", outcome.said);
        self.sound(cache, out)
    }

    /// The results are whole and nothing else is there, and so is the store.
    #[track_caller]
    pub(super) fn sound(&self, cache: &str, out: &str) -> BTreeMap<PathBuf, String> {
        let verified = self.builder(cache).args(["verify", out]).output().unwrap();
        assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
        self.store_is_sound(cache);
        let results: BTreeMap<PathBuf, String> = contents(&self.at(out))
            .into_iter()
            .map(|(path, sha256)| (path.strip_prefix(self.at(out)).unwrap().to_owned(), sha256))
            .collect();
        let names: Vec<&str> = results.keys().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(names, ["image.json", "initrd.cpio", "kata.toml", "vmlinux"]);
        results
    }

    /// A directory of the user with the least rights, or of ours where we have none.
    pub(super) fn for_anybody(&self, dir: &str) {
        fs::create_dir(self.at(dir)).unwrap();
        if is_root() {
            chown(self.at(dir), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        // The directory that it is built in may be closed to others.
        fs::copy(&self.program, self.at("image-builder")).unwrap();
    }

    /// [`Place::build`] as that user.
    pub(super) fn as_anybody(&self, cache: &str, out: &str) -> Outcome {
        let program = self.at("image-builder");
        let mut command = Command::new(if is_root() { Path::new("setpriv") } else { &program });
        if is_root() {
            let id = NOBODY.to_string();
            command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]).arg(&program);
        }
        let mut command = self.with_archive(command, cache);
        Outcome::of(&command.env("HOME", "/").args(["build", "m.toml", "--out", out]).output().unwrap())
    }

    /// Every file of the store is what it is called.
    #[track_caller]
    pub(super) fn store_is_sound(&self, cache: &str) {
        self.sound_store(&format!("{cache}/store"));
    }

    /// The same of a store by itself.
    #[track_caller]
    pub(super) fn sound_store(&self, store: &str) {
        for (path, sha256) in contents(&self.at(store)) {
            let name = path.parent().and_then(Path::file_name).unwrap();
            assert_eq!(name.to_str(), Some(sha256.as_str()), "{}", path.display());
        }
    }

    /// A build fails and says that. Neither the results of the build before nor
    /// the store have changed.
    #[track_caller]
    pub(super) fn refused(&self, cache: &str, out: &str, words: &[&str]) {
        let before = contents(&self.at(out));
        self.build(cache, out).says(words);
        assert_eq!(contents(&self.at(out)), before);
        self.store_is_sound(cache);
        // Nor into a new directory.
        self.build(cache, "new").says(words);
        assert_eq!(contents(&self.at("new")), BTreeMap::new());
    }
}
