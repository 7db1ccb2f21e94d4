//! The manifest: a TOML file that describes the contents of an image.
//!
//! Strings may contain `${NAME}`, replaced by values of `--set`, so that one
//! manifest serves debug and release builds of `init` and `agent`.

mod archive;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::format::{Compression, FormatSettings, InvalidSetting, Plan};
use crate::tree::closure::rules::Rules;
use crate::{driver, kernel};

pub use crate::format::Format;
pub use archive::{Archive, Part};

/// Values for `${NAME}`.
pub type Variables = BTreeMap<String, String>;

/// Why a manifest is invalid.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read.
    #[error("cannot read manifest {}", file.display())]
    Read {
        /// The manifest.
        file: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file is not TOML, or has unknown or missing keys.
    #[error("cannot parse manifest {}", file.display())]
    Parse {
        /// The manifest.
        file: PathBuf,
        /// Line, column and problem.
        source: Box<toml::de::Error>,
    },
    /// A value is invalid.
    #[error("manifest {}: {key} = {value:?}: {what}", file.display())]
    Value {
        /// The manifest.
        file: PathBuf,
        /// Path of keys.
        key: String,
        /// The value.
        value: String,
        /// The problem.
        what: String,
    },
}

/// A manifest, with every variable replaced and every value checked.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Manifest {
    /// The image itself.
    pub image: Image,
    /// Settings of the dm-verity hash tree, if there is one.
    pub verity: Option<Verity>,
    /// Settings of the results.
    #[serde(default)]
    pub output: Output,
    /// Maximum sizes.
    pub budget: Option<Budget>,
    /// The kernel it boots.
    pub kernel: Kernel,
    /// NVIDIA's driver for that kernel.
    pub driver: Option<driver::DriverSettings>,
    /// Modules built out of the kernel's tree.
    #[serde(default)]
    pub extra_modules: Vec<ExtraModule>,
    /// Dependencies of the image's files that cannot be detected; an image
    /// with this section, packages or archives gets a closure check.
    pub closure: Option<Rules>,
    /// Debian packages whose files are added.
    #[serde(default, rename = "package")]
    pub packages: Vec<Package>,
    /// Archives that the user supplies.
    #[serde(default, rename = "archive")]
    pub archives: Vec<Archive>,
    /// Regular files.
    #[serde(default, rename = "file")]
    pub files: Vec<File>,
    /// Directories that are copied recursively.
    #[serde(default, rename = "tree")]
    pub trees: Vec<SourceTree>,
    /// Symbolic links.
    #[serde(default, rename = "symlink")]
    pub symlinks: Vec<Symlink>,
    /// Empty directories.
    #[serde(default, rename = "directory")]
    pub directories: Vec<Directory>,
}

/// `[image]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// Name of the image, used in messages and file names.
    pub name: String,
    /// Image format.
    pub format: Format,
    /// Compression; choices and default depend on the format.
    pub compression: Option<Compression>,
    /// Compression level, where the compression has one.
    pub level: Option<u32>,
    /// Largest unit of compression, in bytes.
    pub cluster: Option<u32>,
    /// For an extension: name of its mount point below `/run/kata-extensions`
    /// in a guest with another root.
    pub extension: Option<String>,
}

/// `[verity]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verity {
    /// In hexadecimal; default: derived from name and content.
    pub salt: Option<String>,
}

/// `[output]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Output {
    /// Directory of the results on hosts, used in Kata's settings.
    pub directory: String,
    /// Whether settings for Kata are written, if Kata can use the image.
    pub kata: bool,
}

impl Default for Output {
    fn default() -> Self {
        Self { directory: "/opt/firstlight/images".to_owned(), kata: true }
    }
}

/// `[budget]`: maximum sizes; a larger image fails the build.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Maximum size of the root file system image in bytes: it is copied
    /// to hosts and read at every boot.
    pub image: Option<u64>,
    /// Maximum total size of its files, uncompressed: an initial RAM file
    /// system occupies this much guest memory.
    pub files: Option<u64>,
}

/// `[kernel]`: a package with its suite, or a recipe.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// A Debian kernel package, or a metapackage that depends on the newest.
    #[serde(default)]
    pub package: String,
    /// The suite it comes from.
    #[serde(default)]
    pub suite: String,
    /// Instead of a package: the recipe of a kernel to build, relative to the
    /// manifest's directory.
    pub recipe: Option<String>,
    /// Only versions that begin with these numbers.
    pub series: Option<String>,
    /// Modules to include with their dependencies; built-in ones are allowed.
    #[serde(default)]
    pub modules: Vec<String>,
    /// Strip the modules' BTF, and with it their signatures: the kernel then
    /// loads them several times as fast. Not for kernels that require
    /// signatures.
    #[serde(default, rename = "strip-btf")]
    pub strip_btf: bool,
    /// Keep the kernel's in-tree modules compressed as in the package: a smaller
    /// image that takes longer to boot. The guest's kernel must support module
    /// decompression. Conflicts with `strip-btf`, which modifies modules.
    #[serde(default, rename = "keep-packed")]
    pub keep_packed: bool,
}

/// `[[extra-modules]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraModule {
    /// The `.ko` file, relative to the manifest's directory.
    pub path: String,
}

/// `[[package]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// The suite it comes from.
    pub suite: String,
    /// Exact version; default: the suite's newest or the lock's.
    pub version: Option<String>,
    /// Paths of files in the package; `*` and `?` match within a path component.
    /// Each pattern must match.
    pub files: Vec<String>,
    /// Target directory of all files; default: the package's own paths.
    pub into: Option<String>,
}

/// `[[file]]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// Where it goes in the image.
    pub path: String,
    /// The file to copy, relative to the manifest's directory.
    pub source: Option<String>,
    /// The contents themselves, instead of `source`.
    pub content: Option<String>,
    /// Permission bits; `0o644` if not given.
    pub mode: Option<u32>,
}

/// `[[tree]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceTree {
    /// The directory whose files, directories and links are copied to the same
    /// paths below the image's root; relative to the manifest's directory.
    pub source: String,
    /// Paths below `source` to copy; default: everything.
    #[serde(default)]
    pub only: Vec<String>,
}

/// `[[symlink]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Symlink {
    /// Where it goes in the image.
    pub path: String,
    /// Target of the link.
    pub target: String,
}

/// `[[directory]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Directory {
    /// Where it goes in the image.
    pub path: String,
    /// Permission bits; `0o755` if not given.
    pub mode: Option<u32>,
}

impl Manifest {
    /// Reads the manifest at `file`.
    ///
    /// # Errors
    /// Names the file, and the line or the key.
    pub fn read(file: &Path, variables: &Variables) -> Result<Self, Error> {
        let text = std::fs::read_to_string(file).map_err(|source| Error::Read { file: file.to_owned(), source })?;
        Self::parse(&text, file, variables)
    }

    /// Reads a manifest from `text`; `file` is its name in messages, and
    /// relative paths begin in its directory.
    ///
    /// # Errors
    /// Names the file, and the line or the key.
    pub fn parse(text: &str, file: &Path, variables: &Variables) -> Result<Self, Error> {
        let mut manifest = Self::parse_unresolved(text, file)?;
        let check = Check { file, dir: file.parent().unwrap_or(Path::new("")), variables };
        manifest.resolve(&check)?;
        Ok(manifest)
    }

    /// Parses a manifest without replacing `${NAME}`: enough for questions whose answer has no variables.
    ///
    /// # Errors
    /// Names the file, and the line or the key.
    pub fn parse_unresolved(text: &str, file: &Path) -> Result<Self, Error> {
        toml::from_str(text).map_err(|source| Error::Parse { file: file.to_owned(), source: Box::new(source) })
    }

    /// Returns the kernel to prepare.
    #[must_use]
    pub fn kernel_source(&self) -> kernel::Source {
        let Kernel { package, suite, series, recipe, .. } = &self.kernel;
        match recipe {
            Some(recipe) => kernel::Source::Recipe(recipe.into()),
            None => kernel::Source::Package(kernel::Package {
                package: package.clone(),
                suite: suite.clone(),
                series: series.clone(),
            }),
        }
    }

    /// Returns the format with its defaults.
    ///
    /// # Errors
    /// Conflicting values; reading the manifest has excluded them.
    pub fn plan(&self) -> Result<Plan, InvalidSetting> {
        let Image { name, format, compression, level, cluster, extension } = &self.image;
        Plan::new(&FormatSettings {
            name,
            format: *format,
            compression: *compression,
            level: *level,
            cluster: *cluster,
            extension: extension.as_deref(),
            verity: self.verity.as_ref().map(|verity| verity.salt.as_deref()),
        })
    }

    /// Replaces variables and checks every value.
    fn resolve(&mut self, check: &Check<'_>) -> Result<(), Error> {
        check.name("image.name", &self.image.name)?;
        self.plan().map_err(|InvalidSetting { key, value, what }| check.wrong(key, &value, what))?;
        check.expand("output.directory", &mut self.output.directory)?;
        if !self.output.directory.starts_with('/') || self.output.directory.contains(char::is_control) {
            return Err(check.wrong(
                "output.directory",
                &self.output.directory,
                "the directory of a host begins with /",
            ));
        }
        match &mut self.kernel {
            Kernel { recipe: Some(recipe), package, suite, series: None, .. }
                if package.is_empty() && suite.is_empty() =>
            {
                check.source("kernel.recipe", recipe)?;
            }
            Kernel { recipe: Some(recipe), .. } => {
                return Err(check.wrong(
                    "kernel.recipe",
                    recipe,
                    "either a recipe or a package with its suite is needed",
                ));
            }
            Kernel { package, suite, .. } => {
                check.name("kernel.package", package)?;
                check.name("kernel.suite", suite)?;
            }
        }
        for module in &self.kernel.modules {
            check.name("kernel.modules", module)?;
        }
        if self.kernel.keep_packed && self.kernel.strip_btf {
            return Err(check.wrong(
                "kernel.keep-packed",
                "true",
                "conflicts with strip-btf, which modifies modules; set only one of them",
            ));
        }
        if let Some(driver) = &self.driver {
            check.name("driver.suite", &driver.suite)?;
        }
        for module in &mut self.extra_modules {
            check.source("extra-modules.path", &mut module.path)?;
        }
        for package in &mut self.packages {
            check.package(package)?;
        }
        for archive in &mut self.archives {
            archive.resolve(check)?;
        }
        for file in &mut self.files {
            check.place("file.path", &mut file.path)?;
            let key = format!("file[{}]", file.path);
            match (&mut file.source, &mut file.content) {
                (Some(source), None) => check.source(&format!("{key}.source"), source)?,
                (None, Some(content)) => check.expand(&format!("{key}.content"), content)?,
                _ => return Err(check.wrong(&key, "", "exactly one of source and content is needed")),
            }
            check.mode(
                &key,
                file.mode,
                0o777,
                "permission bits are written as 0o755, without set-uid, set-gid and sticky bits",
            )?;
        }
        for tree in &mut self.trees {
            check.source("tree.source", &mut tree.source)?;
            for part in &mut tree.only {
                let mut place = format!("/{part}");
                check.place("tree.only", &mut place)?;
                *part = place;
            }
        }
        for link in &mut self.symlinks {
            check.place("symlink.path", &mut link.path)?;
            check.expand("symlink.target", &mut link.target)?;
            if link.target.is_empty() || link.target.contains('\0') {
                return Err(check.wrong("symlink.target", &link.target, "invalid target of a link"));
            }
        }
        for directory in &mut self.directories {
            check.place("directory.path", &mut directory.path)?;
            let key = format!("directory[{}]", directory.path);
            check.mode(&key, directory.mode, 0o1777, "permission bits are written as 0o755")?;
        }
        Ok(())
    }
}

/// Checks values and names the key of an invalid one.
struct Check<'a> {
    file: &'a Path,
    dir: &'a Path,
    variables: &'a Variables,
}

impl Check<'_> {
    fn wrong(&self, key: &str, value: &str, what: impl Into<String>) -> Error {
        Error::Value { file: self.file.to_owned(), key: key.to_owned(), value: value.to_owned(), what: what.into() }
    }

    /// Checks a name of a package, suite, module or image.
    fn name(&self, key: &str, value: &str) -> Result<(), Error> {
        let starts = value.starts_with(|c: char| c.is_ascii_alphanumeric());
        if starts && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-._".contains(&b)) {
            return Ok(());
        }
        Err(self.wrong(key, value, "a name has letters, digits and + - . _ only"))
    }

    /// Checks that a path in the image is absolute and normalized, and strips its leading slash.
    fn place(&self, key: &str, value: &mut String) -> Result<(), Error> {
        self.expand(key, value)?;
        let Some(rest) = value.strip_prefix('/') else {
            return Err(self.wrong(key, value, "a path in the image begins with /"));
        };
        if rest.contains('\0') || rest.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(self.wrong(key, value, "a path in the image has no empty part, no . and no .."));
        }
        *value = rest.to_owned();
        Ok(())
    }

    /// Resolves a path on the host, relative to the manifest.
    fn source(&self, key: &str, value: &mut String) -> Result<(), Error> {
        self.expand(key, value)?;
        if value.is_empty() {
            return Err(self.wrong(key, value, "the path is empty"));
        }
        if let Some(path) = self.dir.join(&*value).to_str() {
            *value = path.to_owned();
        }
        Ok(())
    }

    fn package(&self, package: &mut Package) -> Result<(), Error> {
        let key = |field: &str| format!("package[{}].{field}", package.name);
        self.name("package.name", &package.name)?;
        self.name(&key("suite"), &package.suite)?;
        if let Some(version) = &package.version
            && !crate::packages::debian::is_plain(version)
        {
            return Err(self.wrong(&key("version"), version, "invalid version of a Debian package"));
        }
        if package.files.is_empty() {
            return Err(self.wrong(&key("files"), "[]", "list the files to add; * matches within a path component"));
        }
        for file in &package.files {
            if glob::Pattern::new(file).is_err() || file.starts_with('/') || file.contains("..") {
                return Err(self.wrong(&key("files"), file, "a path in a package has no leading / and no .."));
            }
        }
        let into_key = key("into");
        package.into.as_mut().map_or(Ok(()), |into| self.place(&into_key, into))
    }

    fn mode(&self, key: &str, mode: Option<u32>, most: u32, why: &str) -> Result<(), Error> {
        match mode.filter(|mode| *mode > most) {
            Some(mode) => Err(self.wrong(&format!("{key}.mode"), &format!("{mode:#o}"), why)),
            None => Ok(()),
        }
    }

    /// Replaces every `${NAME}`.
    fn expand(&self, key: &str, value: &mut String) -> Result<(), Error> {
        let mut expanded = String::new();
        let mut rest = value.as_str();
        while let Some((before, after)) = rest.split_once("${") {
            let Some((name, tail)) = after.split_once('}') else {
                return Err(self.wrong(key, value, "a ${ has no closing }"));
            };
            let Some(replacement) = self.variables.get(name) else {
                return Err(self.wrong(key, value, format!("no value for {name}: give one with --set {name}=...")));
            };
            expanded.push_str(before);
            expanded.push_str(replacement);
            rest = tail;
        }
        expanded.push_str(rest);
        *value = expanded;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "[image]\nname = \"x\"\nformat = \"initramfs\"\n\
                        [kernel]\npackage = \"linux-image-amd64\"\nsuite = \"sid\"\n";

    fn parse(tail: &str) -> Result<Manifest, Error> {
        let variables = Variables::from([("INIT".to_owned(), "/build/init".to_owned())]);
        Manifest::parse(&format!("{HEAD}{tail}"), Path::new("dir/m.toml"), &variables)
    }

    fn message(tail: &str) -> String {
        let error = parse(tail).unwrap_err();
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        format!("{error}: {}", cause.unwrap_or_default())
    }

    #[test]
    fn variables_and_relative_paths_are_resolved() {
        let manifest = parse(
            "[[file]]\npath = \"/init\"\nsource = \"${INIT}\"\nmode = 0o755\n\
             [[file]]\npath = \"/etc/x\"\nsource = \"files/x\"\n[[file]]\npath = \"/y\"\ncontent = \"<${INIT}>\"\n",
        )
        .unwrap();
        let [init, x, y] = &manifest.files[..] else { panic!("three files") };
        assert_eq!((init.path.as_str(), init.source.as_deref(), init.mode), ("init", Some("/build/init"), Some(0o755)));
        assert_eq!(x.source.as_deref(), Some("dir/files/x"));
        assert_eq!(y.content.as_deref(), Some("</build/init>"));
    }

    #[test]
    fn every_error_names_the_file_and_the_key() {
        for (tail, words) in [
            ("colour = 1\n", ["dir/m.toml", "colour"]),
            ("[[file]]\npath = \"/a\"\nsource = \"${WHAT}\"\n", ["file[a].source", "--set WHAT="]),
            ("[[file]]\npath = \"/a\"\nsource = \"${WHAT\"\n", ["file[a].source", "no closing }"]),
            ("[[file]]\npath = \"/a\"\n", ["file[a]", "exactly one"]),
            ("[[file]]\npath = \"/a\"\nsource = \"b\"\ncontent = \"c\"\n", ["file[a]", "exactly one"]),
            ("[[file]]\npath = \"a\"\ncontent = \"\"\n", ["file.path", "begins with /"]),
            ("[[file]]\npath = \"/a/../b\"\ncontent = \"\"\n", ["file.path", "no .."]),
            ("[[file]]\npath = \"/a\"\ncontent = \"\"\nmode = 75500\n", ["file[a].mode", "0o755"]),
            ("[[directory]]\npath = \"/a/\"\n", ["directory.path", "empty part"]),
            ("[[symlink]]\npath = \"/a\"\ntarget = \"\"\n", ["symlink.target", "target"]),
            ("modules = [\"-x\"]\n", ["kernel.modules", "letters"]),
            ("[[tree]]\nsource = \"\"\n", ["tree.source", "empty"]),
            ("[verity]\n", ["verity", "disk images"]),
            ("[verity]\nsalted = 1\n", ["salted", "unknown field"]),
            ("[output]\ndirectory = \"a\"\n", ["output.directory", "begins with /"]),
            ("[[tree]]\nsource = \"a\"\nonly = [\"../b\"]\n", ["tree.only", "no .."]),
        ] {
            let text = message(tail);
            for word in words {
                assert!(text.contains(word), "{word:?} is not in {text:?}");
            }
            assert!(text.contains("dir/m.toml"), "{text}");
        }
    }

    #[test]
    fn format_settings_are_parsed_and_checked() {
        let of = |image: &str| {
            let text = format!("[image]\nname = \"x\"\n{image}\n[kernel]\npackage = \"k\"\nsuite = \"sid\"");
            Manifest::parse(&text, Path::new("dir/m.toml"), &Variables::new())
        };
        let manifest = of("format = \"erofs\"\ncompression = \"zstd\"\nlevel = 5\ncluster = 32768\n\
                           extension = \"gpu\"\n[verity]\nsalt = \"00ff\"\n[output]\ndirectory = \"/srv\"");
        let manifest = manifest.unwrap();
        let plan = manifest.plan().unwrap();
        assert_eq!(plan.summary(), "erofs, zstd 5, clusters of 32 KiB, dm-verity");
        assert_eq!((plan.file_name(), plan.verity.unwrap().salt), ("extension-gpu.img".into(), Some(vec![0, 255])));
        assert_eq!(manifest.output.directory, "/srv");
        let error = of("format = \"ext4\"\ncompression = \"lz4\"").unwrap_err().to_string();
        assert!(error.contains("dir/m.toml: image.compression = \"lz4\""), "{error}");
    }

    #[test]
    fn kernel_is_a_package_or_a_recipe() {
        let of = |kernel: &str| {
            let text = format!("[image]\nname = \"x\"\nformat = \"initramfs\"\n[kernel]\n{kernel}");
            Manifest::parse(&text, Path::new("dir/m.toml"), &Variables::new())
        };
        let source = of("recipe = \"../k/lab.toml\"").unwrap().kernel_source();
        assert_eq!(source, kernel::Source::Recipe("dir/../k/lab.toml".into()));
        for (kernel, word) in [
            ("", "kernel.package"),
            ("package = \"a\"", "kernel.suite"),
            ("recipe = \"k.toml\"\npackage = \"a\"\nsuite = \"sid\"", "either a recipe or"),
        ] {
            let error = of(kernel).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
