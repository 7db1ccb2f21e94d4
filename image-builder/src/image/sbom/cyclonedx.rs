//! Writes CycloneDX 1.6.
//!
//! Contains the part of the format that images need; names and values of fields are
//! those of the specification (ECMA-424).

use firstlight_image::{FileDigest, PackageRecord};
use serde::Serialize;

use super::view::{File, Group, Kind, Package, Role, View};
use super::{Created, purl};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Bom {
    #[serde(rename = "$schema")]
    schema: &'static str,
    bom_format: &'static str,
    spec_version: &'static str,
    serial_number: String,
    version: u32,
    metadata: Metadata,
    components: Vec<Component>,
    dependencies: Vec<Dependency>,
}

#[derive(Debug, Serialize)]
struct Metadata {
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp: Option<String>,
    lifecycles: Vec<Lifecycle>,
    tools: Tools,
    component: Component,
    properties: Vec<Property>,
}

#[derive(Debug, Serialize)]
struct Lifecycle {
    phase: &'static str,
}

#[derive(Debug, Serialize)]
struct Tools {
    components: Vec<Component>,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Component {
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    bom_ref: Option<String>,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hashes: Vec<Hash>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    licenses: Vec<Licensed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    purl: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pedigree: Option<Pedigree>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    components: Vec<Component>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    properties: Vec<Property>,
}

#[derive(Debug, Serialize)]
struct Licensed {
    license: License,
}

/// A licence by name, as manifests do not contain SPDX identifiers.
#[derive(Debug, Serialize)]
struct License {
    name: String,
}

#[derive(Debug, Serialize)]
struct Pedigree {
    ancestors: Vec<Component>,
}

#[derive(Debug, Serialize)]
struct Hash {
    alg: &'static str,
    content: String,
}

#[derive(Debug, Serialize)]
struct Property {
    name: &'static str,
    value: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Dependency {
    r#ref: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    depends_on: Vec<String>,
}

/// The reference of the image component.
const IMAGE: &str = "image";

fn sha256(content: &str) -> Hash {
    Hash { alg: "SHA-256", content: content.to_owned() }
}

fn size(bytes: u64) -> Property {
    Property { name: "firstlight:size", value: bytes.to_string() }
}

fn file(&(path, record): &File<'_>) -> Component {
    let sha1 = record.sha1.iter().map(|content| Hash { alg: "SHA-1", content: content.clone() });
    let mode = record.mode.map(|mode| Property { name: "firstlight:mode", value: format!("{mode:o}") });
    Component {
        r#type: "file",
        bom_ref: Some(format!("file/{path}")),
        name: format!("/{path}"),
        hashes: sha1.chain([sha256(&record.sha256)]).collect(),
        properties: [size(record.size)].into_iter().chain(mode).collect(),
        ..Component::default()
    }
}

fn files(files: &[File<'_>]) -> Vec<Component> {
    files.iter().map(file).collect()
}

/// Returns the component of a package, with the fields of an ancestor only.
fn ancestor(package: &PackageRecord) -> Component {
    Component {
        r#type: "library",
        name: package.name.clone(),
        version: Some(package.version.clone()),
        hashes: vec![sha256(&package.sha256)],
        purl: Some(purl::of(package)),
        ..Component::default()
    }
}

fn package_ref(package: &PackageRecord) -> String {
    format!("package/{}", package.id())
}

fn package(one: &Package<'_>) -> Component {
    let suite = Property { name: "firstlight:suite", value: one.record.suite.clone() };
    let role = match one.role {
        Role::Content => Some("content"),
        Role::Input => Some("input"),
        Role::Tool => Some("tool"),
        Role::Unknown => None,
    };
    let role = role.map(|role| Property { name: "firstlight:role", value: role.to_owned() });
    Component {
        bom_ref: Some(package_ref(one.record)),
        scope: match one.role {
            Role::Content => Some("required"),
            Role::Input | Role::Tool => Some("excluded"),
            Role::Unknown => None,
        },
        components: files(&one.files),
        properties: [suite].into_iter().chain(role).collect(),
        ..ancestor(one.record)
    }
}

fn group(one: &Group<'_>, kernel: Option<&FileDigest>) -> Component {
    Component {
        r#type: match one.kind {
            Kind::Own | Kind::Archive => "application",
            Kind::Builder => "data",
            Kind::Kernel | Kind::OtherSource => "library",
            Kind::Driver => "device-driver",
        },
        bom_ref: Some(one.id.clone()),
        name: one.name.clone(),
        version: one.version.clone(),
        description: Some(one.note.clone()),
        scope: Some("required"),
        hashes: kernel
            .filter(|_| one.kind == Kind::Kernel)
            .map(|bytes| sha256(&bytes.sha256))
            .into_iter()
            .chain(one.archive.map(|archive| sha256(&archive.sha256)))
            .collect(),
        licenses: one
            .archive
            .map(|archive| Licensed { license: License { name: archive.licence.clone() } })
            .into_iter()
            .collect(),
        pedigree: one.source.map(|source| Pedigree { ancestors: vec![ancestor(source)] }),
        components: files(&one.files),
        ..Component::default()
    }
}

/// Returns the component of the image with its output files.
fn image(view: &View<'_>) -> Component {
    let contents = view.contents;
    let results = contents.outputs.iter().map(|(name, bytes)| Component {
        r#type: "file",
        bom_ref: Some(format!("result/{name}")),
        name: name.clone(),
        hashes: vec![sha256(&bytes.sha256)],
        properties: vec![size(bytes.size)],
        ..Component::default()
    });
    let kernel = Property { name: "firstlight:kernel-release", value: contents.kernel_release.clone() };
    let format = Property { name: "firstlight:format", value: contents.format.clone() };
    let verity = contents.verity.as_ref().map(|verity| verity.root_hash.clone());
    let verity = verity.map(|value| Property { name: "firstlight:root-hash", value });
    Component {
        r#type: "operating-system",
        bom_ref: Some(IMAGE.to_owned()),
        name: contents.name.clone(),
        description: Some("An image for a virtual machine, with its kernel.".to_owned()),
        components: results.collect(),
        properties: [format, kernel].into_iter().chain(verity).collect(),
        ..Component::default()
    }
}

/// Returns the complete document with the serial number `uuid`.
pub(super) fn bom(view: &View<'_>, created: &Created, uuid: &str) -> Bom {
    let kernel = view.kernel().and_then(|(name, ..)| view.contents.outputs.get(name));
    let groups = view.groups.iter().map(|one| group(one, kernel));
    let packages = view.packages.iter().map(package);
    let components: Vec<Component> = groups.chain(packages).chain(view.unattributed.iter().map(file)).collect();
    // Tools and inputs are not part of the image.
    let parts = components.iter().filter(|one| one.scope != Some("excluded"));
    let depends_on = parts.filter_map(|one| one.bom_ref.clone()).collect();
    let mut dependencies = vec![Dependency { r#ref: IMAGE.to_owned(), depends_on }];
    for one in components.iter().filter_map(|one| one.bom_ref.clone()) {
        let source = view.groups.iter().find(|group| group.id == one).and_then(|group| group.source);
        let depends_on = source.map(package_ref).into_iter().collect();
        dependencies.push(Dependency { r#ref: one, depends_on });
    }
    let builder = Component {
        r#type: "application",
        name: "firstlight-image-builder".to_owned(),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        ..Component::default()
    };
    let date_source =
        created.date.as_ref().map(|_| Property { name: "firstlight:timestamp", value: created.date_source.to_owned() });
    Bom {
        schema: "http://cyclonedx.org/schema/bom-1.6.schema.json",
        bom_format: "CycloneDX",
        spec_version: "1.6",
        serial_number: format!("urn:uuid:{uuid}"),
        version: 1,
        metadata: Metadata {
            timestamp: created.date.clone(),
            lifecycles: vec![Lifecycle { phase: "build" }],
            tools: Tools { components: vec![builder] },
            component: image(view),
            properties: date_source.into_iter().collect(),
        },
        components,
        dependencies,
    }
}
