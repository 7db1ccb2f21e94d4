//! From a manifest to a bootable image.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cache::{self, io_error};
use crate::closure::{self, Finding};
use crate::content;
use crate::digest::{self, Hashing};
use crate::driver::{self, Driver};
use crate::format::{self, Made, Plan, kata, opened};
use crate::kernel::modules::{self, Extra, Form, TypeInformation};
use crate::kernel::{self, Kernel};
use crate::lock::Pinned;
use crate::manifest::{self, Manifest, Variables};
use crate::output::Output;
use crate::packages::Packages;
use crate::progress::Progress;
use crate::tree::{self, Content, Node, Tree};

pub use crate::digest::Bytes;

/// The kernel among the results.
pub const KERNEL: &str = "vmlinux";
/// What the results are, among them.
pub const RECORD: &str = "image.json";
/// Settings for Kata among the results.
const DROP_IN: &str = "kata.toml";

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The manifest is wrong.
    #[error(transparent)]
    Manifest(#[from] manifest::Error),
    /// A package or its files could not be had.
    #[error(transparent)]
    Content(Box<content::Error>),
    /// The image could not be judged.
    #[error(transparent)]
    Closure(#[from] closure::Error),
    /// Its files need what is not there.
    #[error("the image is not complete:\n{}", lines(.0))]
    Incomplete(Vec<Finding>),
    /// The kernel or its modules could not be had.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The driver or its files could not be had.
    #[error(transparent)]
    Driver(#[from] driver::Error),
    /// Two entries of the manifest do not fit together.
    #[error(transparent)]
    Tree(#[from] tree::Error),
    /// The image could not be made.
    #[error(transparent)]
    Format(Box<format::Error>),
    /// The format's options do not go together.
    #[error(transparent)]
    Plan(#[from] format::Wrong),
    /// A file could not be read or written.
    #[error(transparent)]
    Cache(#[from] cache::Error),
}

impl From<content::Error> for Error {
    fn from(error: content::Error) -> Self {
        Self::Content(Box::new(error))
    }
}

impl From<format::Error> for Error {
    fn from(error: format::Error) -> Self {
        match error {
            format::Error::Cache(error) => Self::Cache(error),
            error => Self::Format(Box::new(error)),
        }
    }
}

/// A built image: files of one folder, and what they hold.
#[derive(Debug, Clone)]
pub struct Image {
    /// The kernel, an ELF file with a PVH note.
    pub kernel: PathBuf,
    /// The initial RAM file system; empty where the image is a disk.
    pub initrd: PathBuf,
    /// The disk, where the image is one.
    pub disk: Option<PathBuf>,
    /// The record, as JSON.
    pub record: PathBuf,
    /// What the record says.
    pub contents: Contents,
}

/// What `image.json` says. It holds no path of the building machine and no
/// time, so it is as reproducible as the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// Version of this record's shape.
    pub schema: u32,
    /// The manifest's name for the image.
    pub name: String,
    /// The image's format.
    pub format: String,
    /// How it is packed.
    #[serde(default)]
    pub packing: String,
    /// The folder below `/run/kata-extensions` where a guest mounts it, if it is no root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extension: Option<String>,
    /// How its blocks are verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verity: Option<VerityRecord>,
    /// What a kernel that mounts it without help has to be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_line: Option<String>,
    /// `uname -r`.
    pub kernel_release: String,
    /// Wanted modules that the kernel has built in.
    pub built_in_modules: Vec<String>,
    /// Every package something was taken from.
    pub packages: Vec<PackageRecord>,
    /// Every package of the programs that made the format.
    #[serde(default)]
    pub tools: Vec<PackageRecord>,
    /// SHA-256 over path, kind, mode and content of all that is neither a
    /// package's nor the kernel's.
    pub own_files_sha256: String,
    /// Libraries that no program of the image needs, with their sizes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unused: BTreeMap<String, u64>,
    /// The files beside this record.
    pub outputs: BTreeMap<String, Bytes>,
    /// Every file in the image, by path.
    pub files: BTreeMap<String, Bytes>,
    /// Entries of any kind in the image.
    pub entries: usize,
    /// Bytes of all files in the image together.
    pub file_bytes: u64,
}

/// A package that contributed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackageRecord {
    /// Package name.
    pub name: String,
    /// Full version.
    pub version: String,
    /// The suite it came from.
    pub suite: String,
    /// SHA-256 of the package file.
    pub sha256: String,
}

/// A dm-verity hash tree, in the second partition of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerityRecord {
    /// The disk.
    pub file: String,
    /// Lower-case hexadecimal.
    pub root_hash: String,
    /// All parameters, as Kata's settings have them.
    pub params: String,
    /// Where the first partition begins, in bytes.
    pub data_offset: u64,
    /// Where the second partition begins, in bytes.
    pub hash_offset: u64,
    /// Bytes of hashes.
    pub hash_size: u64,
}

/// Nodes the kernel and PID 1 use before devtmpfs is mounted.
const EARLY_DEVICES: &[(&str, u32, u32, u32)] = &[("dev/console", 0o600, 5, 1), ("dev/null", 0o666, 1, 3)];

/// Builds the image that `manifest` describes into the folder `out`: `vmlinux`,
/// the file with the root, settings for Kata, and `image.json`.
///
/// # Errors
/// A wrong manifest, a package that cannot be had, or a failed file operation.
pub fn build(
    manifest: &Path,
    variables: &Variables,
    out: &Path,
    cache: &Path,
    progress: Progress,
) -> Result<Image, Error> {
    let manifest = Manifest::read(manifest, variables)?;
    build_from(&manifest, &mut Packages::new(cache, None, progress), out)
}

/// [`build`] with a manifest that was read already, and packages that may be locked.
///
/// # Errors
/// As [`build`].
pub fn build_from(manifest: &Manifest, packages: &mut Packages<'_>, out: &Path) -> Result<Image, Error> {
    let kernel = Kernel::prepare_from(packages, &manifest.kernel_source())?;
    build_with(manifest, &kernel, packages, out)
}

/// [`build_from`] with a kernel that is prepared already.
///
/// # Errors
/// As [`build`].
pub fn build_with(
    manifest: &Manifest,
    kernel: &Kernel,
    packages: &mut Packages<'_>,
    out: &Path,
) -> Result<Image, Error> {
    let plan = manifest.plan()?;
    let driver = match &manifest.driver {
        Some(wanted) => Some(Driver::prepare_from(packages, wanted, &kernel.facts)?),
        None => None,
    };
    let built = manifest.extra_modules.iter().map(|module| Extra::built(PathBuf::from(&module.path)));
    let drivers = driver.iter().flat_map(|driver| driver.modules.iter().cloned().map(Extra::update));
    let extra: Vec<Extra> = built.chain(drivers).collect();
    let types = if manifest.kernel.strip_btf { TypeInformation::Drop } else { TypeInformation::Keep };
    let form = if manifest.kernel.keep_packed { Form::AsPackaged } else { Form::Plain(types) };
    let modules = modules::select(&kernel.facts.release, &kernel.modules(), &manifest.kernel.modules, &extra, form)?;
    let mut tree = own_tree(manifest)?;
    let compiled_here = manifest.kernel.recipe.as_ref().map(|_| kernel.facts.vmlinux_sha256.as_str());
    let own_files_sha256 = digest_of(&tree, &manifest.extra_modules, compiled_here)?;
    for package in &manifest.packages {
        for (path, node) in content::entries(packages, package)? {
            tree.add(&path, node)?;
        }
    }
    for (path, node) in driver.iter().filter_map(|driver| driver.files.as_ref()).flat_map(driver::Files::entries) {
        tree.add(path, node)?;
    }
    add_modules(&mut tree, &kernel.facts.release, &kernel.modules(), &modules)?;
    let unused = judged(&tree, manifest, driver.as_ref())?;

    let mut output = Output::begin(out, packages.progress())?;
    let made = format::make(&plan, &tree, packages, output.half())?;
    let root = output.add(&made.root.file);
    let mut outputs = BTreeMap::from([(made.root.file.clone(), measured(&root)?)]);
    let facts = &kernel.facts;
    let vmlinux = Bytes { size: facts.vmlinux_size, sha256: facts.vmlinux_sha256.clone() };
    if !is_there(&out.join(KERNEL), &vmlinux) {
        let (from, to) = (kernel.vmlinux(), output.add(KERNEL));
        fs::copy(&from, &to).map_err(io_error("copy", &from))?;
    }
    outputs.insert(KERNEL.to_owned(), vmlinux);
    if let Some(text) = kata::drop_in(&plan, &made.root, &manifest.output.folder) {
        let path = output.add(DROP_IN);
        fs::write(&path, &text).map_err(io_error("write", &path))?;
        outputs.insert(DROP_IN.to_owned(), measured(&path)?);
    }
    let contents = Contents {
        kernel_release: facts.release.clone(),
        built_in_modules: modules.built_in.into_iter().collect(),
        packages: records(packages, facts),
        own_files_sha256,
        unused,
        outputs,
        entries: tree.iter().count(),
        ..described(&plan, made)
    };
    let record = output.add(RECORD);
    let text = serde_json::to_vec_pretty(&contents).map_err(io::Error::other).map_err(io_error("write", &record))?;
    fs::write(&record, text).map_err(io_error("write", &record))?;
    let stale = stale(&out.join(RECORD), &contents);
    output.finish(&stale)?;
    let root = out.join(plan.file_name());
    let (initrd, disk) = match contents.format.as_str() {
        "initramfs" => (root, None),
        _ => (PathBuf::new(), Some(root)),
    };
    Ok(Image { kernel: out.join(KERNEL), initrd, disk, record: out.join(RECORD), contents })
}

/// What the format and the files in it say of an image.
fn described(plan: &Plan, made: Made) -> Contents {
    let disk = made.root.disk.as_ref();
    let verity = disk.and_then(|disk| Some((disk.data, disk.verity.as_ref()?)));
    let verity = verity.map(|(data, (hashes, params))| VerityRecord {
        file: made.root.file.clone(),
        root_hash: format::verity::hex(&params.root_hash),
        params: params.to_string(),
        data_offset: data.start,
        hash_offset: hashes.start,
        hash_size: hashes.size,
    });
    let params = made.root.verity();
    let command_line = match &plan.extension {
        Some(name) => Some(kata::extension_parameter(name, params)),
        None => disk.map(|_| kata::command_line(plan.format, params)),
    };
    Contents {
        schema: 1,
        name: plan.name.clone(),
        format: plan.format.name().to_owned(),
        packing: plan.summary(),
        extension: plan.extension.clone(),
        verity,
        command_line,
        kernel_release: String::new(),
        built_in_modules: Vec::new(),
        packages: Vec::new(),
        tools: made.tools.iter().map(record).collect(),
        own_files_sha256: String::new(),
        unused: BTreeMap::new(),
        outputs: BTreeMap::new(),
        entries: 0,
        file_bytes: made.files.values().map(|file| file.size).sum(),
        files: made.files,
    }
}

fn measured(path: &Path) -> Result<Bytes, cache::Error> {
    let (sha256, size) = digest::of_file(path).map_err(io_error("read", path))?;
    Ok(Bytes { size, sha256 })
}

/// The kernel is the largest file, and the one that changes least.
fn is_there(path: &Path, wanted: &Bytes) -> bool {
    fs::metadata(path).is_ok_and(|data| data.len() == wanted.size)
        && digest::of_file(path).is_ok_and(|(sha256, _)| sha256 == wanted.sha256)
}

/// What an earlier build of another format has left: files of ours that the
/// earlier record names and the new one does not.
fn stale(record: &Path, contents: &Contents) -> Vec<String> {
    let old: Option<Contents> = fs::read(record).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let ours = |name: &String| name == DROP_IN || name.starts_with("initrd.cpio") || name.ends_with(".img");
    let names = old.into_iter().flat_map(|old| old.outputs.into_keys());
    names.filter(|name| ours(name) && !name.contains('/') && !contents.outputs.contains_key(name)).collect()
}

fn record(one: &Pinned) -> PackageRecord {
    PackageRecord {
        name: one.name.clone(),
        version: one.version.clone(),
        suite: one.suite.clone(),
        sha256: one.sha256.clone(),
    }
}

/// Every package that gave something, by name; the kernel's where it was prepared by somebody else.
fn records(packages: &Packages<'_>, kernel: &kernel::Facts) -> Vec<PackageRecord> {
    let mut records: Vec<PackageRecord> = packages.used().iter().map(record).collect();
    if !records.iter().any(|one| one.sha256 == kernel.sha256) {
        records.push(PackageRecord {
            name: kernel.package.clone(),
            version: kernel.version.clone(),
            suite: kernel.suite.clone(),
            sha256: kernel.sha256.clone(),
        });
    }
    records.sort_by(|a, b| (&a.name, &a.suite).cmp(&(&b.name, &b.suite)));
    records
}

fn lines(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("  {finding}")).collect::<Vec<_>>().join("\n")
}

/// Whether an image has what its files need; what nobody in it does.
fn judged(tree: &Tree, manifest: &Manifest, driver: Option<&Driver>) -> Result<BTreeMap<String, u64>, Error> {
    let driver = driver.filter(|driver| driver.files.is_some());
    if manifest.closure.is_none() && manifest.packages.is_empty() && driver.is_none() {
        return Ok(BTreeMap::new());
    }
    let mut rules = manifest.closure.clone().unwrap_or_default();
    if let Some(driver) = driver {
        rules = rules.and(&driver.rules());
    }
    let (faults, rest): (Vec<_>, Vec<_>) = closure::check(tree, &rules)?.into_iter().partition(Finding::is_fault);
    if !faults.is_empty() {
        return Err(Error::Incomplete(faults));
    }
    let unused = rest.into_iter().filter_map(|finding| match finding {
        Finding::Unused { file, size } => Some((file, size)),
        _ => None,
    });
    Ok(unused.collect())
}

/// One hash for what no package decides: the manifest's own entries, the
/// modules that were built out of the kernel's tree, and a kernel that was
/// compiled on this machine, by whatever compiler that has.
fn digest_of(tree: &Tree, extra: &[manifest::ExtraModule], kernel: Option<&str>) -> Result<String, Error> {
    let mut hashing = Hashing::new(io::sink());
    let mut say = |text: String| hashing.write_all(text.as_bytes()).map_err(io_error("hash", Path::new("")));
    for (path, node) in tree.iter() {
        match node {
            Node::Directory { mode } => say(format!("{path}\0d{mode:o}\0"))?,
            Node::Symlink { target } => say(format!("{path}\0l{target}\0"))?,
            Node::Character { mode, major, minor } => say(format!("{path}\0c{mode:o} {major} {minor}\0"))?,
            Node::File { mode, content } => {
                let (mut data, size) = opened(content)?;
                let mut file = Hashing::new(io::sink());
                io::copy(&mut data, &mut file).map_err(io_error("read", Path::new(path)))?;
                say(format!("{path}\0f{mode:o} {size} {}\0", file.finish().0))?;
            }
        }
    }
    // No path of a tree begins like these.
    for module in extra {
        let path = Path::new(&module.path);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let Bytes { size, sha256 } = measured(path)?;
        say(format!("//extra-modules/{name}\0f {size} {sha256}\0"))?;
    }
    if let Some(sha256) = kernel {
        say(format!("//vmlinux\0f {sha256}\0"))?;
    }
    Ok(hashing.finish().0)
}

/// What the manifest itself names.
fn own_tree(manifest: &Manifest) -> Result<Tree, Error> {
    let mut image = Tree::default();
    for directory in &manifest.directories {
        image.add(&directory.path, Node::Directory { mode: directory.mode.unwrap_or(0o755) })?;
    }
    for file in &manifest.files {
        let content = match (&file.source, &file.content) {
            (Some(source), _) => Content::File(source.into()),
            (None, text) => Content::Bytes(text.clone().unwrap_or_default().into_bytes()),
        };
        image.add(&file.path, Node::File { mode: file.mode.unwrap_or(0o644), content })?;
    }
    for folder in &manifest.trees {
        let root = Path::new(&folder.source);
        if folder.only.is_empty() {
            copy_tree(&mut image, root, Path::new(""))?;
        }
        for part in &folder.only {
            copy_tree(&mut image, root, Path::new(part))?;
        }
    }
    for link in &manifest.symlinks {
        image.add(&link.path, Node::Symlink { target: link.target.clone() })?;
    }
    for &(path, mode, major, minor) in EARLY_DEVICES {
        image.add(path, Node::Character { mode, major, minor })?;
    }
    Ok(image)
}

/// The kernel's modules, and the lists by which they are found.
fn add_modules(image: &mut Tree, release: &str, tree: &Path, modules: &modules::Set) -> Result<(), Error> {
    let place = format!("lib/modules/{release}");
    let plain = |bytes: Vec<u8>| Node::File { mode: 0o644, content: Content::Bytes(bytes) };
    for module in modules.iter() {
        image.add(&format!("{place}/{}", module.path), plain(module.data.clone()))?;
    }
    image.add(&format!("{place}/modules.dep"), plain(modules.dependency_file().into_bytes()))?;
    image.add(&format!("{place}/modules.alias"), plain(modules.alias_file().into_bytes()))?;
    image.add(&format!("{place}/modules.softdep"), plain(modules.company_file().into_bytes()))?;
    let built_in = Content::File(tree.join("modules.builtin"));
    image.add(&format!("{place}/modules.builtin"), Node::File { mode: 0o644, content: built_in })?;
    Ok(())
}

/// Adds `part` of the folder `root`, with everything below it, at the same place.
fn copy_tree(image: &mut Tree, root: &Path, part: &Path) -> Result<(), Error> {
    let path = root.join(part);
    let data = fs::symlink_metadata(&path).map_err(io_error("copy", &path))?;
    let odd = |what: &str| Error::from(io_error("copy", &path)(io::Error::other(what)));
    let place = part.to_str().ok_or_else(|| odd("its name is not UTF-8"))?;
    let mode = data.permissions().mode() & 0o7777;
    if data.is_dir() {
        if !place.is_empty() {
            image.add(place, Node::Directory { mode })?;
        }
        let mut names: Vec<_> = fs::read_dir(&path)
            .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.file_name())).collect())
            .map_err(io_error("list", &path))?;
        names.sort();
        return names.into_iter().try_for_each(|name| copy_tree(image, root, &part.join(name)));
    }
    let node = if data.is_symlink() {
        let target = fs::read_link(&path).map_err(io_error("read link", &path))?;
        Node::Symlink { target: target.to_str().ok_or_else(|| odd("its target is not UTF-8"))?.to_owned() }
    } else if data.is_file() {
        Node::File { mode, content: Content::File(path.clone()) }
    } else {
        return Err(odd("neither a file, nor a folder, nor a symbolic link"));
    };
    Ok(image.add(place, node)?)
}

#[cfg(test)]
mod tests;
