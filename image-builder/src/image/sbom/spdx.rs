//! Writes SPDX 2.3.
//!
//! The image is a package that contains every file; Debian packages are archives
//! that files were expanded from. Licences are not analysed, so they are
//! `NOASSERTION`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;

use firstlight_image::{
    PackageRecord,
    digest::{self, Hashing},
};
use serde::Serialize;
use sha1::Sha1;

use super::view::{File, Group, Kind, Package, Role, View};
use super::{Created, purl};

/// The value of fields that were not analysed.
const UNKNOWN: &str = "NOASSERTION";
const DOCUMENT: &str = "SPDXRef-DOCUMENT";
const IMAGE: &str = "SPDXRef-Image";

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Document {
    spdx_version: &'static str,
    data_license: &'static str,
    #[serde(rename = "SPDXID")]
    id: &'static str,
    name: String,
    document_namespace: String,
    creation_info: CreationInfo,
    packages: Vec<SpdxPackage>,
    files: Vec<SpdxFile>,
    relationships: Vec<Relationship>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    has_extracted_licensing_infos: Vec<ExtractedLicence>,
}

/// A licence without SPDX identifier.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ExtractedLicence {
    license_id: String,
    name: String,
    extracted_text: String,
}

#[derive(Debug, Serialize)]
struct CreationInfo {
    created: String,
    creators: Vec<String>,
    comment: &'static str,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct SpdxPackage {
    name: String,
    #[serde(rename = "SPDXID")]
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    version_info: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    supplier: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_info: Option<String>,
    download_location: &'static str,
    files_analyzed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    package_verification_code: Option<VerificationCode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    checksums: Vec<Checksum>,
    license_concluded: &'static str,
    license_declared: String,
    copyright_text: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    comment: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    external_refs: Vec<ExternalRef>,
    #[serde(skip_serializing_if = "Option::is_none")]
    primary_package_purpose: Option<&'static str>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct VerificationCode {
    package_verification_code_value: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ExternalRef {
    reference_category: &'static str,
    reference_type: &'static str,
    reference_locator: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SpdxFile {
    file_name: String,
    #[serde(rename = "SPDXID")]
    id: String,
    checksums: Vec<Checksum>,
    license_concluded: &'static str,
    license_info_in_files: [&'static str; 1],
    copyright_text: &'static str,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Checksum {
    algorithm: &'static str,
    checksum_value: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Relationship {
    spdx_element_id: String,
    relationship_type: &'static str,
    related_spdx_element: String,
}

fn relationship(from: &str, kind: &'static str, to: &str) -> Relationship {
    Relationship { spdx_element_id: from.to_owned(), relationship_type: kind, related_spdx_element: to.to_owned() }
}

/// Returns an identifier that contains `name` and the hash of `unique`.
fn reference(kind: &str, name: &str, unique: &str) -> String {
    let plain = |one: char| if one.is_ascii_alphanumeric() || one == '.' { one } else { '-' };
    let name: String = name.chars().map(plain).collect();
    format!("SPDXRef-{kind}-{name}-{}", &digest::of_bytes(unique.as_bytes())[..12])
}

fn file_id(path: &str) -> String {
    reference("File", path.rsplit('/').next().unwrap_or(path), path)
}

fn package_id(package: &PackageRecord) -> String {
    reference("Package", &package.name, &package.id())
}

fn result_id(name: &str) -> String {
    reference("Result", name, name)
}

/// Returns the identifier of a licence that the manifest names.
fn licence_id(name: &str) -> String {
    let plain = |one: char| if one.is_ascii_alphanumeric() || one == '.' { one } else { '-' };
    let words: String = name.chars().take(40).map(plain).collect();
    format!("LicenseRef-{words}-{}", &digest::of_bytes(name.as_bytes())[..12])
}

/// Returns the licences of archives without duplicates.
fn licences(view: &View<'_>) -> Vec<ExtractedLicence> {
    let names: BTreeSet<&str> =
        view.groups.iter().filter_map(|one| one.archive).map(|one| one.licence.as_str()).collect();
    let one = |name: &str| ExtractedLicence {
        license_id: licence_id(name),
        name: name.to_owned(),
        extracted_text: format!("{name}. The text is in the archive, or available from its supplier."),
    };
    names.into_iter().map(one).collect()
}

fn group_id(group: &Group<'_>) -> String {
    reference("Part", &group.name, &group.id)
}

fn sha256(value: &str) -> Checksum {
    Checksum { algorithm: "SHA256", checksum_value: value.to_owned() }
}

/// Returns a package with the common fields.
fn unknown(name: &str, id: String) -> SpdxPackage {
    SpdxPackage {
        name: name.to_owned(),
        id,
        download_location: UNKNOWN,
        license_concluded: UNKNOWN,
        license_declared: UNKNOWN.to_owned(),
        copyright_text: UNKNOWN,
        ..SpdxPackage::default()
    }
}

/// Returns the SHA-1 of the sorted SHA-1s of files. The error is the first file without SHA-1.
fn verification_code<'a>(files: impl Iterator<Item = File<'a>>) -> Result<VerificationCode, String> {
    let mut hashes = files
        .map(|(path, file)| file.sha1.as_deref().ok_or_else(|| path.to_owned()))
        .collect::<Result<Vec<&str>, String>>()?;
    hashes.sort_unstable();
    let mut hashing = Hashing::<_, Sha1>::with_algorithm(std::io::sink());
    // Writing to a sink does not fail.
    let _ = hashing.write_all(hashes.concat().as_bytes());
    Ok(VerificationCode { package_verification_code_value: hashing.finish().0 })
}

fn file((path, record): File<'_>) -> SpdxFile {
    let sha1 = Checksum { algorithm: "SHA1", checksum_value: record.sha1.clone().unwrap_or_default() };
    SpdxFile {
        file_name: format!("./{path}"),
        id: file_id(path),
        checksums: vec![sha1, sha256(&record.sha256)],
        license_concluded: UNKNOWN,
        license_info_in_files: [UNKNOWN],
        copyright_text: UNKNOWN,
    }
}

fn package(one: &Package<'_>) -> SpdxPackage {
    let record = one.record;
    SpdxPackage {
        version_info: Some(record.version.clone()),
        supplier: Some("Organization: Debian"),
        source_info: record.source.as_ref().map(|source| format!("built from Debian's source package {source}")),
        checksums: vec![sha256(&record.sha256)],
        external_refs: vec![ExternalRef {
            reference_category: "PACKAGE-MANAGER",
            reference_type: "purl",
            reference_locator: purl::of(record),
        }],
        ..unknown(&record.name, package_id(record))
    }
}

fn group(one: &Group<'_>) -> Result<SpdxPackage, String> {
    // A package without files is not analysed.
    let code = match one.files.is_empty() {
        true => None,
        false => Some(verification_code(one.files.iter().copied())?),
    };
    Ok(SpdxPackage {
        version_info: one.version.clone(),
        files_analyzed: code.is_some(),
        package_verification_code: code,
        comment: Some(one.note.clone()),
        checksums: one.archive.map(|archive| sha256(&archive.sha256)).into_iter().collect(),
        license_declared: one.archive.map_or(UNKNOWN.to_owned(), |archive| licence_id(&archive.licence)),
        primary_package_purpose: match one.kind {
            Kind::Kernel => Some("OPERATING-SYSTEM"),
            Kind::Own | Kind::Archive => Some("APPLICATION"),
            Kind::Driver | Kind::Builder | Kind::OtherSource => None,
        },
        ..unknown(&one.name, group_id(one))
    })
}

/// Returns which element contains or was created from which.
fn relationships(view: &View<'_>) -> Vec<Relationship> {
    let mut all = vec![relationship(DOCUMENT, "DESCRIBES", IMAGE)];
    for name in view.contents.outputs.keys() {
        all.push(relationship(IMAGE, "CONTAINS", &result_id(name)));
    }
    for group in &view.groups {
        let id = group_id(group);
        all.push(relationship(IMAGE, "CONTAINS", &id));
        all.extend(group.files.iter().map(|(path, _)| relationship(&id, "CONTAINS", &file_id(path))));
        all.extend(group.source.map(|source| relationship(&id, "GENERATED_FROM", &package_id(source))));
    }
    for package in &view.packages {
        let id = package_id(package.record);
        all.push(match package.role {
            Role::Content | Role::Unknown => relationship(IMAGE, "CONTAINS", &id),
            Role::Input => relationship(&id, "BUILD_DEPENDENCY_OF", IMAGE),
            Role::Tool => relationship(&id, "BUILD_TOOL_OF", IMAGE),
        });
        let files = package.files.iter();
        all.extend(files.map(|(path, _)| relationship(&file_id(path), "EXPANDED_FROM_ARCHIVE", &id)));
    }
    if let Some((name, package, group)) = view.kernel() {
        let result = result_id(name);
        all.extend(package.map(|record| relationship(&result, "EXPANDED_FROM_ARCHIVE", &package_id(record))));
        all.extend(group.map(|group| relationship(&result, "GENERATED_FROM", &group_id(group))));
    }
    all.extend(view.contents.files.keys().map(|path| relationship(IMAGE, "CONTAINS", &file_id(path))));
    all
}

/// Returns the complete document with the namespace `uuid`. The error is a file without SHA-1.
pub(super) fn document(view: &View<'_>, created: &Created, uuid: &str) -> Result<Document, String> {
    let contents = view.contents;
    let all = || contents.files.iter().map(|(path, file)| (path.as_str(), file));
    let image = SpdxPackage {
        files_analyzed: !contents.files.is_empty(),
        package_verification_code: match contents.files.is_empty() {
            true => None,
            false => Some(verification_code(all())?),
        },
        comment: Some(format!("An image for a virtual machine, with the kernel {}.", contents.kernel_release)),
        primary_package_purpose: Some("OPERATING-SYSTEM"),
        ..unknown(&contents.name, IMAGE.to_owned())
    };
    let results = contents.outputs.iter().map(|(name, bytes)| SpdxPackage {
        checksums: vec![sha256(&bytes.sha256)],
        primary_package_purpose: Some("FILE"),
        ..unknown(name, result_id(name))
    });
    let groups = view.groups.iter().map(group).collect::<Result<Vec<_>, String>>()?;
    let mut packages: BTreeMap<String, SpdxPackage> = BTreeMap::new();
    for one in results.chain(groups).chain(view.packages.iter().map(package)) {
        packages.entry(one.id.clone()).or_insert(one);
    }
    Ok(Document {
        spdx_version: "SPDX-2.3",
        data_license: "CC0-1.0",
        id: DOCUMENT,
        name: contents.name.clone(),
        document_namespace: format!("urn:uuid:{uuid}"),
        creation_info: CreationInfo {
            created: created.date.clone().unwrap_or_else(|| "1970-01-01T00:00:00Z".to_owned()),
            creators: vec![format!("Tool: firstlight-image-builder-{}", env!("CARGO_PKG_VERSION"))],
            comment: created.date_source,
        },
        packages: std::iter::once(image).chain(packages.into_values()).collect(),
        files: all().map(file).collect(),
        relationships: relationships(view),
        has_extracted_licensing_infos: licences(view),
    })
}
