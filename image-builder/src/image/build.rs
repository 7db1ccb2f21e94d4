//! Builds a bootable image from a manifest.

mod budget;
mod driver_cdi;
mod own;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::{
    DriverRecord, FileDigest, ImageRecord, KERNEL, Origin, PackageRecord, RECORD, VerityRecord, digest, package_id,
};
use firstlight_progress::Progress;

use crate::cache::{self, io_error};
use crate::driver::{self, Driver};
use crate::format::{self, BuiltImage, Plan, kata};
use crate::image::archive;
use crate::image::content;
use crate::image::manifest::{self, Manifest, Variables};
use crate::image::output::Output;
use crate::kernel::modules::{self, Extra, Form, TypeInformation};
use crate::kernel::{self, Kernel};
use crate::packages::Packages;
use crate::packages::lock::{Pinned, Release};
use crate::tree::closure::{self, Finding};
use crate::tree::{self, Content, Node, Tree};

/// File name of the settings for Kata in the output directory.
const DROP_IN: &str = "kata.toml";

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The manifest is invalid.
    #[error(transparent)]
    Manifest(#[from] manifest::Error),
    /// A package or its files are not available.
    #[error(transparent)]
    Content(Box<content::Error>),
    /// An archive or its files are not available.
    #[error(transparent)]
    Archive(Box<archive::Error>),
    /// The closure check failed to run.
    #[error(transparent)]
    Closure(#[from] closure::Error),
    /// Dependencies of its files are missing.
    #[error("dependencies of the image's files are missing:\n{}", lines(.0))]
    Incomplete(Vec<Finding>),
    /// It exceeds its maximum size.
    #[error("image {image} exceeds its budget: {what}")]
    OverBudget {
        /// Its name.
        image: String,
        /// Which limit is exceeded, and the largest files.
        what: String,
    },
    /// The manifest's CDI specification of the driver's files is invalid.
    #[error(
        "/{path} of the manifest is not a valid CDI specification of the driver's files: {reason}; correct it, or remove it to have one generated"
    )]
    DriverFiles {
        /// Its path in the image.
        path: String,
        /// Why it is invalid.
        reason: String,
    },
    /// The kernel or its modules are not available.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The driver or its files are not available.
    #[error(transparent)]
    Driver(#[from] driver::Error),
    /// Two entries of the manifest conflict.
    #[error(transparent)]
    Tree(#[from] tree::Error),
    /// The image could not be written.
    #[error(transparent)]
    Format(Box<format::Error>),
    /// The format's settings conflict.
    #[error(transparent)]
    Plan(#[from] format::InvalidSetting),
    /// A file could not be read or written.
    #[error(transparent)]
    Cache(#[from] cache::Error),
}

impl From<content::Error> for Error {
    fn from(error: content::Error) -> Self {
        Self::Content(Box::new(error))
    }
}

impl From<archive::Error> for Error {
    fn from(error: archive::Error) -> Self {
        Self::Archive(Box::new(error))
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

/// A built image: the files in the output directory and their record.
#[derive(Debug, Clone)]
pub struct Image {
    /// The kernel, an ELF file with a PVH note; empty if the image is an extension.
    pub kernel: PathBuf,
    /// The initial RAM file system; empty if the image is a disk.
    pub initrd: PathBuf,
    /// The disk image, if the image is one.
    pub disk: Option<PathBuf>,
    /// The record, as JSON.
    pub record: PathBuf,
    /// The parsed record.
    pub contents: ImageRecord,
}

/// Builds the image that `manifest` describes into the directory `out`: `vmlinux`
/// (not for an extension), the root file system image, settings for Kata, and `image.json`.
///
/// # Errors
/// An invalid manifest, an unavailable package, or a failed file operation.
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

/// Builds like [`build`] from a parsed manifest and packages that may be locked.
///
/// # Errors
/// As [`build`].
pub fn build_from(manifest: &Manifest, packages: &mut Packages<'_>, out: &Path) -> Result<Image, Error> {
    let kernel = Kernel::prepare_from(packages, &manifest.kernel_source())?;
    build_with(manifest, &kernel, packages, out)
}

/// Builds like [`build_from`] with a prepared kernel.
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
        Some(settings) => Some(Driver::prepare_from(packages, settings, &kernel.facts)?),
        None => None,
    };
    let built = manifest.extra_modules.iter().map(|module| Extra::built(PathBuf::from(&module.path)));
    let drivers = driver.iter().flat_map(|driver| driver.modules.iter().cloned().map(Extra::update));
    let extra: Vec<Extra> = built.chain(drivers).collect();
    let types = if manifest.kernel.strip_btf { TypeInformation::Drop } else { TypeInformation::Keep };
    let form = if manifest.kernel.keep_packed { Form::AsPackaged } else { Form::Plain(types) };
    let modules = modules::select(&kernel.facts.release, kernel.modules(), &manifest.kernel.modules, &extra, form)?;
    let mut tree = own::tree(manifest)?;
    let compiled_here = manifest.kernel.recipe.as_ref().map(|_| kernel.facts.vmlinux_sha256.as_str());
    let own_files_sha256 = own::digest(&tree, &manifest.extra_modules, compiled_here)?;
    let mut origins: Origins = tree.iter().map(|(path, _)| (path.to_owned(), Origin::Own)).collect();
    for package in &manifest.packages {
        let (pinned, entries) = content::entries(packages, package)?;
        let origin = Origin::Package(pinned.record().id());
        for (path, node) in entries {
            tree.add(&path, node)?;
            origins.insert(path, origin.clone());
        }
    }
    let mut archives = Vec::new();
    for archive in &manifest.archives {
        let (record, entries) = archive::entries(packages.cache(), archive, packages.progress())?;
        for (path, node) in entries {
            tree.add(&path, node)?;
            origins.insert(path, Origin::Archive(record.id()));
        }
        archives.push(record);
    }
    for files in driver.iter().filter_map(|driver| driver.files.as_ref()) {
        for (path, node) in files.entries() {
            tree.add(path, node)?;
        }
        origins.extend(origins_of(&files.record.entries, &files.record.packages));
    }
    if let Some(driver) = driver.as_ref().filter(|driver| driver.files.is_some()) {
        let version = &driver.built.record.driver;
        let written = driver_cdi::add(&mut tree, manifest.image.extension.as_deref(), version)?;
        origins.extend(written.map(|path| (path, Origin::Builder)));
    }
    let kernel_origin = kernel_origin(manifest, &kernel.facts);
    origins.extend(add_modules(&mut tree, kernel, &modules, &kernel_origin, driver.as_ref())?);
    let unused = check_closure(&tree, manifest, driver.as_ref())?;

    let mut output = Output::begin(out, packages.progress())?;
    let built = format::build_image(&plan, &tree, packages, output.staging_dir(), out)?;
    if !built.reused {
        output.add(&built.root.file);
    }
    let mut outputs = BTreeMap::from([(built.root.file.clone(), built.digest.clone())]);
    let facts = &kernel.facts;
    let vmlinux = FileDigest { size: facts.vmlinux_size, sha256: facts.vmlinux_sha256.clone() };
    // An extension is used by a guest that boots another image's kernel.
    if plan.extension.is_none() {
        if !is_unchanged(&out.join(KERNEL), &vmlinux) {
            let to = output.add(KERNEL);
            fs::copy(kernel.vmlinux(), &to).map_err(io_error("copy the kernel to", &to))?;
        }
        outputs.insert(KERNEL.to_owned(), vmlinux);
    }
    let drop_in = || kata::drop_in(&plan, &built.root, &manifest.output.directory);
    if let Some(text) = manifest.output.kata.then(drop_in).flatten() {
        let path = output.add(DROP_IN);
        fs::write(&path, &text).map_err(io_error("write", &path))?;
        outputs.insert(DROP_IN.to_owned(), digest_of(&path)?);
    }
    let contents = ImageRecord {
        kernel_release: facts.release.clone(),
        kernel: Some(kernel_origin),
        built_in_modules: modules.built_in.into_iter().collect(),
        driver: driver.as_ref().map(driver_record),
        packages: records(packages, facts),
        archives,
        tools: sorted(packages.tools().iter().map(Pinned::record)),
        suites: packages.suites().iter().map(Release::record).collect(),
        own_files_sha256,
        unused,
        outputs,
        others: tree::others(&tree),
        entries: tree.iter().count(),
        ..describe(&plan, built, &mut origins)
    };
    let packed = contents.outputs.get(&plan.file_name()).map_or(0, |root| root.size);
    if let Some(what) = manifest.budget.and_then(|budget| budget::exceeded(budget, packed, &contents)) {
        return Err(Error::OverBudget { image: contents.name, what });
    }
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
    let kernel = if plan.extension.is_none() { out.join(KERNEL) } else { PathBuf::new() };
    Ok(Image { kernel, initrd, disk, record: out.join(RECORD), contents })
}

/// Fills in the parts of the record that depend on the format and the files.
fn describe(plan: &Plan, built: BuiltImage, origins: &mut Origins) -> ImageRecord {
    let disk = built.root.disk.as_ref();
    let verity = disk.and_then(|disk| Some((disk.data, disk.verity.as_ref()?)));
    let verity = verity.map(|(data, (hashes, params))| VerityRecord {
        file: built.root.file.clone(),
        root_hash: hex::encode(params.root_hash),
        params: params.to_string(),
        data_offset: data.start,
        hash_offset: hashes.start,
        hash_size: hashes.size,
    });
    let params = built.root.verity();
    let command_line = match &plan.extension {
        Some(name) => Some(kata::extension_parameter(name, params)),
        None => disk.map(|_| kata::command_line(plan.format, params)),
    };
    let mut files = built.files;
    for (path, file) in &mut files {
        file.origin = origins.remove(path);
    }
    ImageRecord {
        schema: 1,
        name: plan.name.clone(),
        format: plan.format.name().to_owned(),
        packing: plan.summary(),
        extension: plan.extension.clone(),
        verity,
        command_line,
        file_bytes: files.values().map(|file| file.size).sum(),
        files,
        ..ImageRecord::default()
    }
}

/// Origin of every file by path.
type Origins = BTreeMap<String, Origin>;

/// Returns the origin of the kernel: its package, or its source package.
fn kernel_origin(manifest: &Manifest, facts: &kernel::Facts) -> Origin {
    let id = package_id(&facts.suite, &facts.package, &facts.version);
    if manifest.kernel.recipe.is_some() { Origin::Source(id) } else { Origin::Package(id) }
}

/// Returns the origins of the driver's libraries, programs and firmware.
fn origins_of<'a>(
    entries: &'a [driver::DriverEntry],
    packages: &'a [Pinned],
) -> impl Iterator<Item = (String, Origin)> + use<'a> {
    entries.iter().filter_map(|entry| {
        let package = packages.iter().find(|package| package.name == entry.package)?;
        Some((entry.path.clone(), Origin::Package(package.record().id())))
    })
}

fn driver_record(driver: &Driver) -> DriverRecord {
    let record = &driver.built.record;
    DriverRecord {
        version: record.driver.clone(),
        source: record.package.record().id(),
        compiler: record.compiler.clone(),
        patches: record.patches.clone(),
    }
}

fn digest_of(path: &Path) -> Result<FileDigest, cache::Error> {
    let (sha256, size) = digest::of_file(path).map_err(io_error("read", path))?;
    Ok(FileDigest { size, sha256 })
}

/// Returns whether the file has the expected contents, to avoid copying the large, rarely changed kernel.
fn is_unchanged(path: &Path, expected: &FileDigest) -> bool {
    fs::metadata(path).is_ok_and(|data| data.len() == expected.size)
        && digest::of_file(path).is_ok_and(|(sha256, _)| sha256 == expected.sha256)
}

/// Returns stale results of an earlier build: files of image-builder that the
/// earlier record names and the new one does not.
fn stale(record: &Path, contents: &ImageRecord) -> Vec<String> {
    let old: Option<ImageRecord> = fs::read(record).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let ours = |name: &String| {
        [DROP_IN, KERNEL].contains(&name.as_str()) || name.starts_with("initrd.cpio") || name.ends_with(".img")
    };
    let names = old.into_iter().flat_map(|old| old.outputs.into_keys());
    names.filter(|name| ours(name) && !name.contains('/') && !contents.outputs.contains_key(name)).collect()
}

/// Returns every package that contributed, by name; adds the kernel's if it was prepared separately.
fn records(packages: &Packages<'_>, kernel: &kernel::Facts) -> Vec<PackageRecord> {
    let mut records: Vec<PackageRecord> = packages.used().iter().map(Pinned::record).collect();
    if !records.iter().any(|one| one.sha256 == kernel.sha256) {
        records.push(PackageRecord {
            name: kernel.package.clone(),
            version: kernel.version.clone(),
            suite: kernel.suite.clone(),
            architecture: None,
            source: None,
            sha256: kernel.sha256.clone(),
        });
    }
    sorted(records)
}

fn sorted(records: impl IntoIterator<Item = PackageRecord>) -> Vec<PackageRecord> {
    let mut records: Vec<PackageRecord> = records.into_iter().collect();
    records.sort_by(|a, b| (&a.name, &a.suite, a).cmp(&(&b.name, &b.suite, b)));
    records
}

fn lines(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("  {finding}")).collect::<Vec<_>>().join("\n")
}

/// Checks that the dependencies of all files are in the image, and returns the unused files with their sizes.
fn check_closure(tree: &Tree, manifest: &Manifest, driver: Option<&Driver>) -> Result<BTreeMap<String, u64>, Error> {
    let driver = driver.filter(|driver| driver.files.is_some());
    let has_external = !manifest.packages.is_empty() || !manifest.archives.is_empty();
    if manifest.closure.is_none() && !has_external && driver.is_none() {
        return Ok(BTreeMap::new());
    }
    let mut rules = manifest.closure.clone().unwrap_or_default();
    if let Some(driver) = driver {
        rules = rules.and(&driver.rules());
    }
    let (errors, rest): (Vec<_>, Vec<_>) = closure::check(tree, &rules)?.into_iter().partition(Finding::is_error);
    if !errors.is_empty() {
        return Err(Error::Incomplete(errors));
    }
    let unused = rest.into_iter().filter_map(|finding| match finding {
        Finding::Unused { file, size } => Some((file, size)),
        _ => None,
    });
    Ok(unused.collect())
}

/// Adds the kernel modules and their index files, and returns their origins.
fn add_modules(
    image: &mut Tree,
    kernel: &Kernel,
    modules: &modules::Set,
    kernel_origin: &Origin,
    driver: Option<&Driver>,
) -> Result<Origins, Error> {
    let modules_dir = format!("lib/modules/{}", kernel.facts.release);
    let plain = |bytes: Vec<u8>| Node::File { mode: 0o644, content: Content::Bytes(bytes) };
    let mut origins = Origins::new();
    for module in modules.iter() {
        let path = format!("{modules_dir}/{}", module.path);
        image.add(&path, plain(module.data.clone()))?;
        let origin = match (module.path.split('/').next(), driver) {
            (Some(modules::EXTRA), _) => Origin::Own,
            (Some(modules::UPDATES), Some(driver)) => Origin::Source(driver.built.record.package.record().id()),
            _ => kernel_origin.clone(),
        };
        origins.insert(path, origin);
    }
    for (name, text) in [
        ("modules.dep", modules.dependency_file()),
        ("modules.alias", modules.alias_file()),
        ("modules.softdep", modules.softdep_file()),
    ] {
        let path = format!("{modules_dir}/{name}");
        image.add(&path, plain(text.into_bytes()))?;
        origins.insert(path, Origin::Builder);
    }
    let path = format!("{modules_dir}/modules.builtin");
    let built_in = Content::Cached(kernel.modules().file("modules.builtin"));
    image.add(&path, Node::File { mode: 0o644, content: built_in })?;
    origins.insert(path, kernel_origin.clone());
    Ok(origins)
}

#[cfg(test)]
mod tests;
