//! Images and image records: untrusted input.

use std::fs;
use std::io::{BufReader, Cursor, Read};

use firstlight_image::digest::of_bytes;
use firstlight_image::{ImageRecord, RECORD};
use firstlight_image_builder::format::cpio::Reader;
use firstlight_image_builder::format::disk::parse_partitions;
use firstlight_image_builder::format::erofs;
use firstlight_image_builder::format::unpack::decompress;
use firstlight_image_builder::format::verity::Params;
use firstlight_image_builder::image::archive::entries;
use firstlight_image_builder::image::diff::Diff;
use firstlight_image_builder::image::manifest::{Archive, Part};
use firstlight_image_builder::image::sbom::{self, Format};
use firstlight_image_builder::image::verify::verify;
use firstlight_image_builder::tree::Node;
use firstlight_oci::pull::docker_archive::parse_image_list;
use firstlight_oci::pull::{Credentials, PullRequest, RetryPolicy, Source, pull};
use firstlight_progress::Progress;

use super::text;

/// The corpus has a small archive of each compression format.
pub(super) const ARCHIVES: &[&[u8]] = &[
    b"07070100000001000081a4000000000000000000000001000000000000000200000000000000000000000000000000000000020000000\
0a\0\0\0hi\0\0",
    b"\x02\x21\x4c\x18\x03\0\0\0\x20hi\0\0\0\0",
];

pub(super) const PARAMETERS: &[&[u8]] = &[
    b"root_hash=f211b9f1921ef726d57a72bf82be23a510076639fa8549ade10f85e214e0ddb4,salt=ab,data_blocks=3,\
data_block_size=4096,hash_block_size=4096",
    b"root_hash=,salt=-,data_blocks=18446744073709551615",
];

pub(super) const RECORDS: &[&[u8]] = &[
    br#"{"schema":1,"name":"x","format":"erofs","kernel_release":"6","built_in_modules":[],"packages":[],
"own_files_sha256":"","outputs":{"image.json":{"size":1,"sha256":""},"../x":{"size":1,"sha256":""}},"files":{},"entries":0,
"file_bytes":0}"#,
    br#"{"schema":1,"name":"x","format":"erofs","kernel_release":"6","built_in_modules":[],"packages":[],
"own_files_sha256":"","outputs":{"image.json":{"size":1,"sha256":""}},"files":{},"entries":0,"file_bytes":0,
"verity":{"file":"image.json","root_hash":"f211b9f1921ef726d57a72bf82be23a510076639fa8549ade10f85e214e0ddb4",
"params":"root_hash=f211b9f1921ef726d57a72bf82be23a510076639fa8549ade10f85e214e0ddb4,salt=-,data_blocks=3,data_block_size=4096,hash_block_size=4096",
"data_offset":1,"hash_offset":2,"hash_size":3}}"#,
];

/// No listed path has an empty, `.` or `..` component.
pub(super) fn file_system(bytes: &[u8]) {
    let Ok(Some(mut image)) = erofs::Image::open(Cursor::new(bytes), 0, bytes.len() as u64) else { return };
    let entries = image.entries().unwrap_or_default();
    for entry in &entries {
        let plain = |part: &str| !matches!(part, "" | "." | "..");
        assert!(entry.path.is_empty() || entry.path.split('/').all(plain), "{:?}", entry.path);
    }
}

/// `manifest.json` of `docker save`, and an OCI manifest.
pub(super) const SAVED: &[&[u8]] = &[
    br#"[{"Config":"c.json","RepoTags":["busybox:1.36"],"Layers":["a/layer.tar","blobs/sha256/b"]}]"#,
    br#"[{"Config":"c.json","RepoTags":null,"Layers":null}]"#,
    br#"{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json",
"digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":0},"layers":[]}"#,
];

/// The image list of `docker save`, and the same bytes as `index.json` of an OCI layout.
pub(super) fn saved(bytes: &[u8]) {
    for image in parse_image_list(bytes).unwrap_or_default() {
        let plain = |name: &String| !name.starts_with('/') && name.split('/').all(|part| part != "..");
        assert!(plain(&image.config) && image.layers.iter().all(plain), "{image:?}");
    }
    let Ok(dir) = tempfile::tempdir() else { return };
    let (from, out) = (dir.path().join("from"), dir.path().join("out"));
    let _ = fs::create_dir(&from);
    let _ = fs::write(from.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#);
    let _ = fs::write(from.join("index.json"), bytes);
    let (Ok(platform), source) = ("linux/amd64".parse(), Source::Layout { path: from, reference: None }) else {
        return;
    };
    let request = PullRequest {
        source: &source,
        out: &out,
        platform: &platform,
        plain_http: false,
        credentials: &Credentials::default(),
        retry: RetryPolicy::default(),
        progress: Progress::quiet(),
    };
    assert!(pull(&request).is_err() && !out.exists(), "a layout without blobs was pulled");
}

/// First bytes of a tar header: the file's name.
pub(super) const SUPPLIED: &[&[u8]] = &[b"fm-1/bin/nv-fabricmanager", b"../x"];

/// A tar archive whose first header begins with the input's first 512 bytes; the rest of the input follows it.
pub(super) fn supplied(bytes: &[u8]) {
    let mut header = tar::Header::new_ustar();
    header.set_size(0);
    header.set_mode(0o755);
    header.set_entry_type(tar::EntryType::Regular);
    let length = bytes.len().min(512);
    header.as_mut_bytes()[..length].copy_from_slice(&bytes[..length]);
    header.set_cksum();
    let mut archive = header.as_bytes().to_vec();
    archive.extend_from_slice(&bytes[length..]);
    let Ok(dir) = tempfile::tempdir() else { return };
    let path = dir.path().join("a.tar");
    let _ = fs::write(&path, &archive);
    let part = |from: &str| Part { from: from.to_owned(), into: "usr".to_owned() };
    let supplied = Archive {
        name: "a".to_owned(),
        version: "1".to_owned(),
        path: path.display().to_string(),
        sha256: of_bytes(&archive),
        licence: String::new(),
        reason: String::new(),
        files: vec![part("*")],
    };
    let cache = dir.path().join("cache");
    for (place, node) in entries(&cache, &supplied, Progress::quiet()).map(|(_, all)| all).unwrap_or_default() {
        assert!(place.starts_with("usr/") && place.split('/').all(|part| part != ".."), "{place}");
        if let Node::File { content, .. } = node {
            assert!(content.path().is_some_and(|file| file.starts_with(&cache) && file.is_file()), "{content:?}");
        }
    }
    let mut names: Vec<_> = fs::read_dir(dir.path()).into_iter().flatten().flatten().map(|it| it.file_name()).collect();
    names.sort();
    assert_eq!(names, ["a.tar", "cache"], "a file was written outside of the cache");
}

/// A registry reference that parses is printed so that it parses to the same reference.
pub(super) fn reference(bytes: &[u8]) {
    if let Ok(Source::Registry(remote)) = text(bytes).parse() {
        assert_eq!(remote.to_string().parse().ok(), Some(Source::Registry(remote)));
    }
}

/// A cpio archive, compressed or not; decompressed size is limited to 64 MiB.
pub(super) fn archive(bytes: &[u8]) {
    let Ok(archive) = decompress(bytes) else { return };
    let _ = Reader::listing(BufReader::new(archive.take(1 << 26))).count();
}

/// A partition table; the last two bytes are the size of the disk in MiB.
pub(super) fn table(bytes: &[u8]) {
    let mut sector = [0; 512];
    let length = bytes.len().min(510);
    sector[..length].copy_from_slice(&bytes[..length]);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    let disk = bytes.iter().rev().take(2).fold(0, |size, byte| size << 8 | u64::from(*byte)) << 20;
    for part in parse_partitions(&sector, disk).unwrap_or_default() {
        assert!(part.size > 0 && part.start + part.size <= disk);
    }
}

pub(super) fn parameters(bytes: &[u8]) {
    if let Ok(params) = text(bytes).parse::<Params>() {
        assert_eq!(params.to_string().parse::<Params>().as_ref(), Ok(&params));
        let _ = params.data_bytes();
    }
}

/// An image record in a directory that contains no other file.
pub(super) fn record(bytes: &[u8]) {
    let Ok(dir) = tempfile::tempdir() else { return };
    let _ = fs::write(dir.path().join(RECORD), bytes);
    if let Ok(report) = verify(dir.path()) {
        assert!(report.problems.iter().all(|problem| !problem.file.contains('/')));
    }
    let path = dir.path().join(RECORD);
    if let Ok(contents) = ImageRecord::read(&path) {
        let itself = Diff::new(&contents, &contents);
        assert!(itself.same && itself.packages.is_empty());
        let text = Diff::new(&contents, &ImageRecord::default()).text(true);
        assert!(!text.contains('\u{1b}'), "an escape sequence of a record was printed");
    }
    for format in [Format::CycloneDx, Format::Spdx] {
        if let Ok(document) = sbom::write(&path, format, Some(0)) {
            assert!(document.first() == Some(&b'{'));
        }
    }
}
