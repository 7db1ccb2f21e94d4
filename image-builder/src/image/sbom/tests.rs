use std::collections::{BTreeMap, BTreeSet};

use firstlight_image::{
    ArchiveRecord, DriverRecord, FileDigest, FileRecord, Origin, PackageRecord, RECORD, SuiteRecord, digest::of_bytes,
};

use super::*;
use proptest::prelude::*;
use serde_json::Value;

/// SHA-1 of "abc" and of the empty string, from FIPS 180.
const ABC: &str = "a9993e364706816aba3e25717850c26c9cd0d89d";
const EMPTY: &str = "da39a3ee5e6b4b0d3255bfef95601890afd80709";

fn package(name: &str, version: &str) -> PackageRecord {
    PackageRecord {
        name: name.into(),
        version: version.into(),
        suite: "trixie".into(),
        architecture: Some("amd64".into()),
        source: (name == "libc6").then(|| format!("glibc={version}")),
        sha256: of_bytes(name.as_bytes()),
    }
}

fn file(sha1: &str, origin: Origin) -> FileRecord {
    let (sha256, sha1) = (of_bytes(sha1.as_bytes()), Some(sha1.to_owned()));
    FileRecord { size: 3, sha256, sha1, mode: Some(0o755), origin: Some(origin) }
}

/// Returns an image with files of every origin and a compiled kernel.
fn image() -> ImageRecord {
    let dkms = package("nvidia-open-kernel-dkms", "550.163.01-2");
    let source = package("linux-source-6.12", "6.12.107-1");
    let libc = package("libc6", "2.41-12+deb13u1");
    let suite = |name: &str, date: &str| SuiteRecord { name: name.into(), date: date.into(), sha256: String::new() };
    let bytes = |text: &str| FileDigest { size: 9, sha256: of_bytes(text.as_bytes()) };
    ImageRecord {
        schema: 1,
        name: "gpu".into(),
        format: "erofs".into(),
        kernel_release: "6.12.107-firstlight-lab".into(),
        kernel: Some(Origin::Source(source.id())),
        driver: Some(DriverRecord {
            version: "550.163.01".into(),
            source: dkms.id(),
            compiler: "gcc-14".into(),
            patches: vec!["resize".into()],
        }),
        own_files_sha256: of_bytes(b"own"),
        suites: vec![suite("trixie", "Sat, 14 Nov 2026 09:57:18 UTC"), suite("sid", "Thu, 01 Jan 1970 00:00:00 UTC")],
        tools: vec![libc.clone(), package("erofs-utils", "1.8.6-1")],
        outputs: BTreeMap::from([("rootfs.img".into(), bytes("root")), ("vmlinux".into(), bytes("kernel"))]),
        files: BTreeMap::from([
            ("init".into(), file(ABC, Origin::Own)),
            ("usr/bin/nv-fabricmanager".into(), file(ABC, Origin::Archive("fabricmanager=550".into()))),
            ("lib/libc.so.6".into(), file(EMPTY, Origin::Package(libc.id()))),
            ("lib/modules/6/modules.dep".into(), file(ABC, Origin::Builder)),
            ("lib/modules/6/modules.builtin".into(), file(EMPTY, Origin::Source(source.id()))),
            ("lib/modules/6/updates/nvidia.ko".into(), file(ABC, Origin::Source(dkms.id()))),
        ]),
        archives: vec![ArchiveRecord {
            name: "fabricmanager".into(),
            version: "550".into(),
            size: 7,
            sha256: of_bytes(b"archive"),
            licence: "NVIDIA's licence".into(),
            reason: "the fabric".into(),
        }],
        packages: vec![libc, source, dkms],
        ..ImageRecord::default()
    }
}

fn written(contents: &ImageRecord, format: Format, epoch: Option<i64>) -> Result<Vec<u8>, Error> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(RECORD), serde_json::to_vec(contents).unwrap()).unwrap();
    write(dir.path(), format, epoch)
}

fn sbom(contents: &ImageRecord, format: Format) -> Value {
    serde_json::from_slice(&written(contents, format, None).unwrap()).unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Adds all nested components of `of`, in order.
fn components<'a>(of: &'a Value, all: &mut Vec<&'a Value>) {
    for one in list(&of["components"]) {
        all.push(one);
        components(one, all);
    }
}

fn is_uuid(text: &str) -> bool {
    let lengths: Vec<usize> = text.split('-').map(str::len).collect();
    lengths == [8, 4, 4, 4, 12]
        && text.bytes().all(|byte| matches!(byte, b'-' | b'0'..=b'9' | b'a'..=b'f'))
        && text.as_bytes()[14] == b'8'
        && b"89ab".contains(&text.as_bytes()[19])
}

#[test]
fn same_record_then_same_bytes() {
    for format in [Format::CycloneDx, Format::Spdx] {
        let once = written(&image(), format, None).unwrap();
        assert_eq!(written(&image(), format, None).unwrap(), once);
        assert!(once.ends_with(b"}\n"));
        // The identifier differs for another image.
        let mut other = image();
        other.outputs.get_mut("rootfs.img").unwrap().sha256 = of_bytes(b"other");
        let name = |bytes: &[u8]| {
            let value: Value = serde_json::from_slice(bytes).unwrap();
            let name = value.get("serialNumber").or(value.get("documentNamespace")).map(text).unwrap().to_owned();
            assert!(is_uuid(name.strip_prefix("urn:uuid:").unwrap()), "{name}");
            name
        };
        assert_ne!(name(&written(&other, format, None).unwrap()), name(&once));
    }
}

#[test]
fn archives_are_listed_with_hash_and_licence() {
    let (cyclonedx, spdx) = (sbom(&image(), Format::CycloneDx), sbom(&image(), Format::Spdx));
    let is = |one: &&Value| one["name"] == "fabricmanager";
    let one = list(&cyclonedx["components"]).iter().find(is).unwrap();
    assert_eq!((text(&one["version"]), text(&one["hashes"][0]["content"])), ("550", of_bytes(b"archive").as_str()));
    assert_eq!(text(&one["licenses"][0]["license"]["name"]), "NVIDIA's licence");
    assert_eq!(text(&one["components"][0]["name"]), "/usr/bin/nv-fabricmanager");
    let one = list(&spdx["packages"]).iter().find(is).unwrap();
    assert_eq!(text(&one["checksums"][0]["checksumValue"]), of_bytes(b"archive"));
    let licence = &spdx["hasExtractedLicensingInfos"][0];
    assert_eq!(one["licenseDeclared"], licence["licenseId"]);
    assert!(text(&licence["licenseId"]).starts_with("LicenseRef-NVIDIA-s-licence-"));
    assert_eq!(text(&licence["name"]), "NVIDIA's licence");
}

#[test]
fn dates_come_from_the_epoch_or_the_newest_suite() {
    let date = |contents: &ImageRecord, epoch| {
        let sbom = |format| serde_json::from_slice::<Value>(&written(contents, format, epoch).unwrap()).unwrap();
        let (cyclonedx, spdx) = (sbom(Format::CycloneDx), sbom(Format::Spdx));
        let created = text(&spdx["creationInfo"]["created"]).to_owned();
        let date_source = text(&spdx["creationInfo"]["comment"]).to_owned();
        (cyclonedx["metadata"].get("timestamp").map(|date| text(date).to_owned()), created, date_source)
    };
    let suite = "2026-11-14T09:57:18Z".to_owned();
    let (timestamp, created, date_source) = date(&image(), None);
    assert_eq!((timestamp, created), (Some(suite.clone()), suite));
    assert!(date_source.contains("newest release file"), "{date_source}");
    let (timestamp, created, date_source) = date(&image(), Some(951_825_601));
    assert_eq!((timestamp.as_deref(), created.as_str()), (Some("2000-02-29T12:00:01Z"), "2000-02-29T12:00:01Z"));
    assert!(date_source.contains("SOURCE_DATE_EPOCH"), "{date_source}");
    let (timestamp, created, date_source) = date(&ImageRecord { suites: Vec::new(), ..image() }, None);
    assert_eq!((timestamp, created.as_str()), (None, "1970-01-01T00:00:00Z"));
    assert!(date_source.contains("has no suite"), "{date_source}");
    let error = written(&image(), Format::Spdx, Some(-1)).unwrap_err().to_string();
    assert!(error.contains("SOURCE_DATE_EPOCH") && error.contains("-1"), "{error}");
}

#[test]
fn cyclonedx_lists_every_file_once_under_its_origin() {
    let sbom = sbom(&image(), Format::CycloneDx);
    assert_eq!(
        (text(&sbom["bomFormat"]), text(&sbom["specVersion"]), &sbom["version"]),
        ("CycloneDX", "1.6", &1.into())
    );
    let mut all = vec![&sbom["metadata"]["component"]];
    components(all[0], &mut all);
    components(&sbom, &mut all);
    let mut refs = BTreeSet::new();
    for one in &all {
        assert!(one["type"].is_string() && !text(&one["name"]).is_empty(), "{one}");
        assert!(refs.insert(text(&one["bom-ref"]).to_owned()), "duplicate: {one}");
        assert!(list(&one["hashes"]).iter().all(|hash| [40, 64].contains(&text(&hash["content"]).len())), "{one}");
    }
    // The files of each component.
    let files = |reference: &str| {
        let one = all.iter().find(|one| one["bom-ref"] == reference).unwrap_or_else(|| panic!("no {reference}"));
        list(&one["components"]).iter().map(|file| text(&file["name"])).collect::<Vec<_>>()
    };
    assert_eq!(files("own"), ["/init"]);
    assert_eq!(files("archive/fabricmanager=550"), ["/usr/bin/nv-fabricmanager"]);
    assert_eq!(files("builder"), ["/lib/modules/6/modules.dep"]);
    assert_eq!(files("package/trixie/libc6=2.41-12+deb13u1"), ["/lib/libc.so.6"]);
    assert_eq!(files("compiled/trixie/linux-source-6.12=6.12.107-1"), ["/lib/modules/6/modules.builtin"]);
    let driver = "compiled/trixie/nvidia-open-kernel-dkms=550.163.01-2";
    assert_eq!(files(driver), ["/lib/modules/6/updates/nvidia.ko"]);
    assert_eq!(files("image"), ["rootfs.img", "vmlinux"]);
    assert_eq!(all.iter().filter(|one| one["type"] == "file").count(), 6 + 2);
    let find = |reference: &str| *all.iter().find(|one| one["bom-ref"] == reference).unwrap();
    let driver = find(driver);
    assert_eq!((text(&driver["type"]), text(&driver["version"])), ("device-driver", "550.163.01"));
    assert!(text(&driver["description"]).contains("gcc-14 and the patches resize"), "{driver}");
    assert_eq!(driver["pedigree"]["ancestors"][0]["name"], "nvidia-open-kernel-dkms");
    let libc = find("package/trixie/libc6=2.41-12+deb13u1");
    assert_eq!(libc["purl"], "pkg:deb/debian/libc6@2.41-12%2Bdeb13u1?arch=amd64&distro=trixie&upstream=glibc");
    assert_eq!(libc["scope"], "required", "it is in the image, and also a tool");
    let kernel = find("compiled/trixie/linux-source-6.12=6.12.107-1");
    assert_eq!(kernel["hashes"][0]["content"], of_bytes(b"kernel").as_str());
    // The image depends on its contents, not on inputs and tools.
    for one in list(&sbom["dependencies"]) {
        let ends = std::iter::once(&one["ref"]).chain(list(&one["dependsOn"]));
        assert!(ends.map(text).all(|end| refs.contains(end)), "{one}");
    }
    let parts: Vec<&str> = list(&sbom["dependencies"][0]["dependsOn"]).iter().map(text).collect();
    assert_eq!(parts.len(), 6, "{parts:?}");
    for reference in ["package/trixie/erofs-utils=1.8.6-1", "package/trixie/nvidia-open-kernel-dkms=550.163.01-2"] {
        assert_eq!(find(reference)["scope"], "excluded");
        assert!(!parts.contains(&reference), "{parts:?}");
    }
}

#[test]
fn spdx_contains_every_file_and_relates_every_package() {
    let sbom = sbom(&image(), Format::Spdx);
    assert_eq!((text(&sbom["spdxVersion"]), text(&sbom["dataLicense"])), ("SPDX-2.3", "CC0-1.0"));
    assert!(text(&sbom["creationInfo"]["creators"][0]).starts_with("Tool: firstlight-image-builder-"));
    let (packages, files) = (list(&sbom["packages"]), list(&sbom["files"]));
    assert_eq!((packages.len(), files.len()), (1 + 2 + 5 + 4, 6));
    let mut ids = BTreeSet::from(["SPDXRef-DOCUMENT"]);
    for one in packages.iter().chain(files) {
        let id = text(&one["SPDXID"]);
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-".contains(&byte);
        assert!(id.starts_with("SPDXRef-") && id.bytes().all(plain) && ids.insert(id), "{id}");
    }
    for file in files {
        let kinds: Vec<&str> = list(&file["checksums"]).iter().map(|one| text(&one["algorithm"])).collect();
        assert_eq!(kinds, ["SHA1", "SHA256"]);
        assert!(text(&file["fileName"]).starts_with("./"), "{file}");
    }
    let id = |name: &str| {
        let is_it = |one: &&Value| one.get("name").or(one.get("fileName")).is_some_and(|found| found == name);
        text(&packages.iter().chain(files).find(is_it).unwrap_or_else(|| panic!("no {name}"))["SPDXID"])
    };
    let relations: BTreeSet<(&str, &str, &str)> = list(&sbom["relationships"])
        .iter()
        .map(|one| (text(&one["spdxElementId"]), text(&one["relationshipType"]), text(&one["relatedSpdxElement"])))
        .collect();
    assert_eq!(relations.len(), list(&sbom["relationships"]).len(), "no duplicates");
    assert!(relations.iter().all(|(from, _, to)| ids.contains(from) && ids.contains(to)), "{relations:?}");
    let image = id("gpu");
    assert!(relations.contains(&("SPDXRef-DOCUMENT", "DESCRIBES", image)));
    for file in files {
        assert!(relations.contains(&(image, "CONTAINS", text(&file["SPDXID"]))), "{file}");
    }
    for package in packages.iter().map(|one| text(&one["SPDXID"])).filter(|id| *id != image) {
        let related =
            |(from, _, to): &(&str, &str, &str)| (*from, *to) == (image, package) || (*from, *to) == (package, image);
        assert!(relations.iter().any(related), "{package} has no relationship with the image");
    }
    for (from, kind, to) in [
        ("./lib/libc.so.6", "EXPANDED_FROM_ARCHIVE", "libc6"),
        ("gpu-own-files", "CONTAINS", "./init"),
        ("nvidia-open-kernel-modules", "CONTAINS", "./lib/modules/6/updates/nvidia.ko"),
        ("nvidia-open-kernel-modules", "GENERATED_FROM", "nvidia-open-kernel-dkms"),
        ("linux", "GENERATED_FROM", "linux-source-6.12"),
        ("vmlinux", "GENERATED_FROM", "linux"),
        ("erofs-utils", "BUILD_TOOL_OF", "gpu"),
        ("linux-source-6.12", "BUILD_DEPENDENCY_OF", "gpu"),
    ] {
        assert!(relations.contains(&(id(from), kind, id(to))), "{from} {kind} {to}");
    }
    // The expected values are from `printf %s%s%s%s%s%s ... | sha1sum` with the sorted hashes.
    let code = |name: &str| {
        let one = packages.iter().find(|one| one["name"] == name).unwrap();
        assert_eq!(one["filesAnalyzed"], true, "{name}");
        text(&one["packageVerificationCode"]["packageVerificationCodeValue"])
    };
    assert_eq!(code("gpu"), "491236fedfcfb002266133741f3f4044c6fee577");
    assert_eq!(code("gpu-own-files"), "9ef2bdeea2b1bae79b9ddb930427d0b2c880bdac");
}

#[test]
fn kernel_of_debian_then_its_package_is_content() {
    let kernel = package("linux-image-6.12.107+deb13-cloud-amd64", "6.12.107-1");
    let mut contents = image();
    contents.kernel = Some(Origin::Package(kernel.id()));
    contents.files.retain(|path, _| !path.contains("modules"));
    contents.packages = vec![kernel, package("libc6", "2.41-12+deb13u1")];
    let spdx = sbom(&contents, Format::Spdx);
    let ends = |one: &Value| {
        let kind = text(&one["relationshipType"]).to_owned();
        (text(&one["spdxElementId"]).to_owned(), kind, text(&one["relatedSpdxElement"]).to_owned())
    };
    let from_kernel = list(&spdx["relationships"]).iter().map(ends).any(|(from, kind, to)| {
        from.starts_with("SPDXRef-Result-vmlinux") && kind == "EXPANDED_FROM_ARCHIVE" && to.contains("linux-image")
    });
    assert!(from_kernel);
    let cyclonedx = sbom(&contents, Format::CycloneDx);
    let one = list(&cyclonedx["components"]).iter().find(|one| text(&one["name"]).starts_with("linux-image")).unwrap();
    assert_eq!(one["scope"], "required", "the kernel is content although no file of its package is in the root");
}

#[test]
fn missing_or_invalid_hashes_then_error() {
    let mut old = image();
    for file in old.files.values_mut() {
        (file.sha1, file.origin) = (None, None);
    }
    let error = written(&old, Format::Spdx, None).unwrap_err().to_string();
    assert!(error.contains("no SHA-1 of /init") && error.contains("cyclonedx"), "{error}");
    let cyclonedx = sbom(&old, Format::CycloneDx);
    let unattributed = list(&cyclonedx["components"]).iter().filter(|one| one["type"] == "file").count();
    assert_eq!(unattributed, 6, "files without origin are top-level components");
    let scopes = list(&cyclonedx["components"]).iter().filter(|one| one["name"] == "linux-source-6.12");
    assert!(scopes.into_iter().all(|one| one.get("scope").is_none()), "the role is unknown");
    for change in [
        |invalid: &mut ImageRecord| invalid.files.get_mut("init").unwrap().sha256 = "x".into(),
        |invalid: &mut ImageRecord| invalid.files.get_mut("init").unwrap().sha1 = Some("x".into()),
        |invalid: &mut ImageRecord| invalid.packages[0].sha256 = String::new(),
        |invalid: &mut ImageRecord| invalid.archives[0].sha256 = "x".into(),
        |invalid: &mut ImageRecord| invalid.outputs.get_mut("vmlinux").unwrap().sha256.push('0'),
    ] {
        let mut invalid = image();
        change(&mut invalid);
        let error = written(&invalid, Format::CycloneDx, None).unwrap_err().to_string();
        assert!(error.contains("instead of a SHA") && error.contains(RECORD), "{error}");
    }
    assert!(matches!(write(Path::new("/none"), Format::Spdx, None), Err(Error::Record(_))));
}

proptest! {
    /// For arbitrary names, identifiers are unique and relationships refer to existing elements.
    #[test]
    fn arbitrary_names_then_identifiers_are_unique(names in prop::collection::btree_set("\\PC{0,8}", 1..5), suite in "\\PC{0,5}") {
        let mut contents = image();
        contents.files = names.iter().map(|name| (name.clone(), file(ABC, Origin::Package(name.clone())))).collect();
        contents.packages = names.iter().map(|name| PackageRecord { suite: suite.clone(), ..package(name, name) }).collect();
        contents.packages.extend(contents.packages.clone());
        let spdx = sbom(&contents, Format::Spdx);
        let ids: Vec<&str> = list(&spdx["packages"]).iter().chain(list(&spdx["files"])).map(|one| text(&one["SPDXID"])).collect();
        let unique: BTreeSet<&str> = ids.iter().copied().chain(["SPDXRef-DOCUMENT"]).collect();
        prop_assert_eq!(unique.len(), ids.len() + 1);
        for one in list(&spdx["relationships"]) {
            prop_assert!(unique.contains(text(&one["spdxElementId"])) && unique.contains(text(&one["relatedSpdxElement"])));
        }
        let cyclonedx = sbom(&contents, Format::CycloneDx);
        let mut all = Vec::new();
        components(&cyclonedx, &mut all);
        let refs: BTreeSet<&str> = all.iter().map(|one| text(&one["bom-ref"])).collect();
        prop_assert_eq!(refs.len(), all.len());
    }
}
