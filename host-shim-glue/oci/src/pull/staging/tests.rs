//! The directory in the making, as it is left by pulls that end anywhere.

use super::*;
use crate::pull::document::{OCI_CONFIG, OCI_MANIFEST};

fn descriptor(media_type: &str, bytes: &[u8]) -> Descriptor {
    Descriptor {
        media_type: media_type.to_owned(),
        digest: Digest::of_hex(digest::of_bytes(bytes)),
        size: bytes.len() as u64,
        platform: None,
        annotations: BTreeMap::new(),
    }
}

fn begin(out: &Path) -> Staging {
    Staging::begin(out, Progress::quiet()).unwrap()
}

fn finish(mut staging: Staging, blobs: &[&[u8]]) {
    let manifest = descriptor(OCI_MANIFEST, b"manifest");
    staging.put(b"manifest").unwrap();
    let mut all = BTreeSet::from([manifest.digest.clone()]);
    for blob in blobs {
        all.insert(staging.put(blob).unwrap());
    }
    staging.finish(&manifest, &all).unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_layout_appears_when_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("image");
    let staging = begin(&out);
    assert!(!out.exists());
    finish(staging, &[b"layer"]);
    assert_eq!(names(dir.path()), ["image"], "nothing is left beside it");
    assert_eq!(names(&out), ["blobs", "index.json", "oci-layout"]);
    assert_eq!(names(&out.join("blobs/sha256")).len(), 2);
    // An empty directory is filled, and an older layout replaced.
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    finish(begin(&empty), &[]);
    finish(begin(&out), &[b"another"]);
    assert!(out.join("blobs/sha256").join(digest::of_bytes(b"another")).is_file());
    assert!(!out.join("blobs/sha256").join(digest::of_bytes(b"layer")).exists());
    assert_eq!(names(dir.path()), ["empty", "image"]);
}

#[test]
fn what_a_killed_pull_leaves_is_used_or_removed() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("image");
    let (whole, damaged) = (descriptor(OCI_CONFIG, b"whole"), descriptor(OCI_CONFIG, b"damaged"));
    drop(begin(&out));
    assert!(names(dir.path()).is_empty(), "what has brought nothing leaves nothing");
    let mut killed = begin(&out);
    killed.put(b"whole").unwrap();
    killed.put(b"of another image").unwrap();
    let dir = killed.dir.clone();
    fs::write(killed.path(&damaged.digest), "dAmaged").unwrap();
    fs::write(killed.parts().join("half"), "ha").unwrap();
    // Nothing of it is cleared away.
    killed.done = true;
    drop(killed);
    let mut next = begin(&out);
    assert!(names(&dir.join(PARTS)).is_empty());
    assert!(next.has(&whole).unwrap());
    assert!(!next.has(&Descriptor { size: 4, ..whole.clone() }).unwrap(), "the size counts as well");
    next.put(b"whole").unwrap();
    assert!(!next.has(&damaged).unwrap() && !next.path(&damaged.digest).exists());
    finish(next, &[b"whole"]);
    assert_eq!(names(&out.join("blobs/sha256")).len(), 2, "the other image's blob is not in it");
    // And what is in the finished one need not be fetched for the next.
    assert!(begin(&out).has(&whole).unwrap());
}

#[test]
fn a_blob_that_is_not_what_was_wanted_gets_no_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut staging = begin(&dir.path().join("image"));
    let wanted = descriptor(OCI_CONFIG, b"12345");
    for (bytes, said) in [(&b"12346"[..], "sha256:"), (b"1234", "it has 4 bytes")] {
        let mut blob = staging.blob(wanted.size).unwrap();
        blob.write_all(bytes).unwrap();
        let error = staging.finish_blob(blob, &wanted, "here").unwrap_err().to_string();
        assert!(
            error.contains(said) && error.contains("here") && error.contains(&wanted.digest.to_string()),
            "{error}"
        );
        assert!(!staging.path(&wanted.digest).exists());
    }
    let mut blob = staging.blob(wanted.size).unwrap();
    assert!(blob.write_all(b"123456").is_err(), "the disk is not filled by a peer");
    assert_eq!(blob.written(), 0);
}

#[test]
fn what_is_there_is_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let (full, file) = (dir.path().join("full"), dir.path().join("file"));
    fs::create_dir(&full).unwrap();
    fs::write(full.join("thesis"), "x").unwrap();
    fs::write(&file, "x").unwrap();
    for (out, said) in
        [(full.as_path(), "no image layout"), (&file, "no directory"), (Path::new("/"), "no new directory")]
    {
        let error = Staging::begin(out, Progress::quiet()).unwrap_err().to_string();
        assert!(error.contains(said) && error.contains("--out"), "{error}");
    }
    assert_eq!(names(dir.path()), ["file", "full"]);
}

#[test]
fn two_pulls_into_one_directory_take_turns() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("image");
    let first = begin(&out);
    let (sender, receiver) = std::sync::mpsc::channel();
    let place = out.clone();
    let second = std::thread::spawn(move || {
        let staging = begin(&place);
        sender.send(()).unwrap();
        finish(staging, &[b"second"]);
    });
    assert!(receiver.recv_timeout(std::time::Duration::from_millis(100)).is_err());
    finish(first, &[b"first"]);
    second.join().unwrap();
    assert!(out.join("blobs/sha256").join(digest::of_bytes(b"second")).is_file());
    assert_eq!(names(dir.path()), ["image"]);
}
