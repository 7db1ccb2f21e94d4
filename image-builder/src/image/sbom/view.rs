//! Groups the files of an image by origin, for both SBOM formats.

use std::collections::{BTreeMap, BTreeSet};

use firstlight_image::{ArchiveRecord, FileRecord, ImageRecord, KERNEL, Origin, PackageRecord};

use crate::packages::store::is_hash;

/// A path without leading slash, and its record.
pub(super) type File<'a> = (&'a str, &'a FileRecord);

/// The role of a package in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Files of it are in the image.
    Content,
    /// Files in the image were compiled from it.
    Input,
    /// Its programs are build tools.
    Tool,
    /// Unknown: the record does not distinguish content and input.
    Unknown,
}

/// A package, and its files in the image.
#[derive(Debug)]
pub(super) struct Package<'a> {
    pub(super) record: &'a PackageRecord,
    pub(super) role: Role,
    pub(super) files: Vec<File<'a>>,
}

/// The kind of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Own,
    Builder,
    Kernel,
    Driver,
    OtherSource,
    Archive,
}

/// A group of files that are not from a package.
#[derive(Debug)]
pub(super) struct Group<'a> {
    pub(super) kind: Kind,
    /// Unique among groups.
    pub(super) id: String,
    pub(super) name: String,
    pub(super) version: Option<String>,
    pub(super) note: String,
    /// The package it was compiled from.
    pub(super) source: Option<&'a PackageRecord>,
    /// The archive of the files.
    pub(super) archive: Option<&'a ArchiveRecord>,
    pub(super) files: Vec<File<'a>>,
}

/// All files of an image. Every file is in one package, one group, or `unattributed`.
#[derive(Debug)]
pub(super) struct View<'a> {
    pub(super) contents: &'a ImageRecord,
    pub(super) groups: Vec<Group<'a>>,
    pub(super) packages: Vec<Package<'a>>,
    /// Files without origin.
    pub(super) unattributed: Vec<File<'a>>,
}

/// Checks that all hashes in a record are well-formed.
pub(super) fn check(contents: &ImageRecord) -> Result<(), String> {
    let packages = contents.packages.iter().chain(&contents.tools).map(|one| (one.name.as_str(), &one.sha256));
    let files = contents.files.iter().map(|(path, file)| (path.as_str(), &file.sha256));
    let outputs = contents.outputs.iter().map(|(name, file)| (name.as_str(), &file.sha256));
    let archives = contents.archives.iter().map(|one| (one.name.as_str(), &one.sha256));
    if let Some((what, hash)) = packages.chain(archives).chain(files).chain(outputs).find(|(_, hash)| !is_hash(hash)) {
        return Err(format!("{what} has {hash:?} instead of a SHA-256"));
    }
    let sha1 = |text: &String| text.len() == 40 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    match contents.files.iter().find(|(_, file)| file.sha1.as_ref().is_some_and(|text| !sha1(text))) {
        Some((path, file)) => Err(format!("{path} has {:?} instead of a SHA-1", file.sha1)),
        None => Ok(()),
    }
}

impl<'a> View<'a> {
    pub(super) fn of(contents: &'a ImageRecord) -> Self {
        let mut packages_by_id: BTreeMap<String, &'a PackageRecord> = BTreeMap::new();
        for package in &contents.packages {
            packages_by_id.entry(package.id()).or_insert(package);
        }
        let mut package_files: BTreeMap<&str, Vec<File<'a>>> = BTreeMap::new();
        let mut groups: BTreeMap<&Origin, Vec<File<'a>>> = BTreeMap::new();
        let mut unattributed = Vec::new();
        // A compiled kernel has a group even without files in the image.
        for origin in contents.kernel.iter().filter(|origin| matches!(origin, Origin::Source(_))) {
            groups.entry(origin).or_default();
        }
        for (path, file) in &contents.files {
            let file = (path.as_str(), file);
            match &file.1.origin {
                Some(Origin::Package(id)) if packages_by_id.contains_key(id) => {
                    package_files.entry(id).or_default().push(file)
                }
                Some(Origin::Archive(id)) if !contents.archives.iter().any(|one| one.id() == *id) => {
                    unattributed.push(file)
                }
                None | Some(Origin::Package(_)) => unattributed.push(file),
                Some(origin) => groups.entry(origin).or_default().push(file),
            }
        }
        let has_origins = contents.files.values().all(|file| file.origin.is_some());
        let mut seen = BTreeSet::new();
        let mut packages = Vec::new();
        for (list, tools) in [(&contents.packages, false), (&contents.tools, true)] {
            for record in list {
                let id = record.id();
                let files = package_files.remove(id.as_str()).unwrap_or_default();
                let is_kernel = contents.kernel.as_ref().is_some_and(|origin| *origin == Origin::Package(id.clone()));
                let role = match (tools, has_origins) {
                    (true, _) => Role::Tool,
                    (false, false) => Role::Unknown,
                    (false, true) if is_kernel || !files.is_empty() => Role::Content,
                    (false, true) => Role::Input,
                };
                if seen.insert(id) {
                    packages.push(Package { record, role, files });
                }
            }
        }
        let groups =
            groups.into_iter().map(|(origin, files)| group(contents, &packages_by_id, origin, files)).collect();
        Self { contents, groups, packages, unattributed }
    }

    /// Returns the kernel's output file and its package or group, if known.
    pub(super) fn kernel(&self) -> Option<(&'static str, Option<&PackageRecord>, Option<&Group<'a>>)> {
        let origin = self.contents.kernel.as_ref()?;
        self.contents.outputs.get(KERNEL)?;
        let mut packages = self.packages.iter().map(|package| package.record);
        let package = packages.find(|record| *origin == Origin::Package(record.id()));
        Some((KERNEL, package, self.groups.iter().find(|group| group.kind == Kind::Kernel)))
    }
}

fn group<'a>(
    contents: &'a ImageRecord,
    packages: &BTreeMap<String, &'a PackageRecord>,
    origin: &Origin,
    files: Vec<File<'a>>,
) -> Group<'a> {
    let image = &contents.name;
    let archive = match origin {
        Origin::Archive(id) => contents.archives.iter().find(|one| one.id() == *id),
        _ => None,
    };
    let own = || contents.own_files_sha256.get(..16).map(str::to_owned);
    let (kind, id, name, version, note) = match origin {
        Origin::Source(id) if contents.kernel.as_ref() == Some(origin) => {
            let (release, note) = (contents.kernel_release.clone(), "Linux, compiled from a recipe.".to_owned());
            (Kind::Kernel, format!("compiled/{id}"), "linux".to_owned(), Some(release), note)
        }
        Origin::Source(id) => match contents.driver.as_ref().filter(|driver| driver.source == *id) {
            Some(driver) => {
                let patches = match driver.patches.as_slice() {
                    [] => "no patches".to_owned(),
                    names => format!("the patches {}", names.join(", ")),
                };
                let note = format!("Modules of the NVIDIA driver, compiled with {} and {patches}.", driver.compiler);
                let name = "nvidia-open-kernel-modules".to_owned();
                (Kind::Driver, format!("compiled/{id}"), name, Some(driver.version.clone()), note)
            }
            None => {
                let note = format!("Compiled from {id}.");
                (Kind::OtherSource, format!("compiled/{id}"), format!("compiled from {id}"), None, note)
            }
        },
        Origin::Builder => {
            let note = "Module lists written by the image builder.".to_owned();
            let version = Some(env!("CARGO_PKG_VERSION").to_owned());
            (Kind::Builder, "builder".to_owned(), format!("{image}-module-lists"), version, note)
        }
        Origin::Archive(id) => {
            let (name, version) = id.split_once('=').unwrap_or((id, ""));
            let reason = archive.map(|one| one.reason.as_str()).unwrap_or_default();
            let note = format!("From an archive supplied for the image: {reason}");
            (Kind::Archive, format!("archive/{id}"), name.to_owned(), Some(version.to_owned()), note)
        }
        Origin::Own | Origin::Package(_) => {
            let note = "Programs and files listed in the image's manifest, not from a package.".to_owned();
            (Kind::Own, "own".to_owned(), format!("{image}-own-files"), own(), note)
        }
    };
    let source = match origin {
        Origin::Source(id) => packages.get(id).copied(),
        _ => None,
    };
    Group { kind, id, name, version, note, source, archive, files }
}
