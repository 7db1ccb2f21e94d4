//! Staging directories, including those that failed or killed pulls have left.

use super::*;

fn descriptor(bytes: &[u8]) -> Descriptor {
    let digest = digest::from_sha256(&hash::of_bytes(bytes)).unwrap();
    Descriptor::new(MediaType::ImageConfig, bytes.len() as u64, digest)
}

fn begin(out: &Path) -> Staging {
    Staging::begin(out, Progress::quiet()).unwrap()
}

fn finish(mut staging: Staging, blobs: &[&[u8]]) {
    let manifest = descriptor(b"manifest");
    staging.put(b"manifest").unwrap();
    let mut all = HashSet::from([manifest.digest().clone()]);
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
fn layout_appears_when_it_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("image");
    let staging = begin(&out);
    assert!(!out.exists());
    finish(staging, &[b"layer"]);
    assert_eq!(names(dir.path()), ["image"], "the staging directory is removed");
    assert_eq!(names(&out), ["blobs", "index.json", "oci-layout"]);
    assert_eq!(names(&out.join("blobs/sha256")).len(), 2);
    // An empty directory and an existing layout are replaced.
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    finish(begin(&empty), &[]);
    finish(begin(&out), &[b"another"]);
    assert!(out.join("blobs/sha256").join(hash::of_bytes(b"another")).is_file());
    assert!(!out.join("blobs/sha256").join(hash::of_bytes(b"layer")).exists());
    assert_eq!(names(dir.path()), ["empty", "image"]);
}

#[test]
fn blobs_of_a_killed_pull_are_used_or_removed() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("image");
    let (complete, damaged) = (descriptor(b"complete"), descriptor(b"damaged"));
    drop(begin(&out));
    assert!(names(dir.path()).is_empty(), "a pull without blobs leaves nothing");
    let mut killed = begin(&out);
    killed.put(b"complete").unwrap();
    killed.put(b"of another image").unwrap();
    let dir = killed.dir.clone();
    fs::write(killed.path(damaged.digest()), "dAmaged").unwrap();
    fs::write(killed.parts().join("half"), "ha").unwrap();
    // A killed process does not clean up.
    killed.finished = true;
    drop(killed);
    let mut next = begin(&out);
    assert!(names(&dir.join(PARTS)).is_empty());
    assert!(next.has(&complete).unwrap());
    let mut other_size = complete.clone();
    other_size.set_size(4);
    assert!(!next.has(&other_size).unwrap(), "the size is compared as well");
    next.put(b"complete").unwrap();
    assert!(!next.has(&damaged).unwrap() && !next.path(damaged.digest()).exists());
    finish(next, &[b"complete"]);
    assert_eq!(names(&out.join("blobs/sha256")).len(), 2, "the blob of the other image is removed");
    // A blob of the replaced layout is not fetched again.
    assert!(begin(&out).has(&complete).unwrap());
}

#[test]
fn blob_with_another_size_or_digest_is_not_published() {
    let dir = tempfile::tempdir().unwrap();
    let mut staging = begin(&dir.path().join("image"));
    let wanted = descriptor(b"12345");
    for (bytes, expected) in [(&b"12346"[..], "sha256:"), (b"1234", "it has 4 bytes")] {
        let mut blob = staging.new_blob(wanted.size()).unwrap();
        blob.write_all(bytes).unwrap();
        let error = staging.finish_blob(blob, &wanted, "here").unwrap_err().to_string();
        assert!(
            error.contains(expected) && error.contains("here") && error.contains(wanted.digest().as_ref()),
            "{error}"
        );
        assert!(!staging.path(wanted.digest()).exists());
    }
    let mut blob = staging.new_blob(wanted.size()).unwrap();
    assert!(blob.write_all(b"123456").is_err(), "more bytes than the limit are not written");
    assert_eq!(blob.written(), 0);
}

#[test]
fn existing_files_are_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (full, file) = (dir.path().join("full"), dir.path().join("file"));
    fs::create_dir(&full).unwrap();
    fs::write(full.join("thesis"), "x").unwrap();
    fs::write(&file, "x").unwrap();
    for (out, expected) in [
        (full.as_path(), "not an image layout"),
        (&file, "not a directory"),
        (Path::new("/"), "does not end in a name"),
    ] {
        let error = Staging::begin(out, Progress::quiet()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("--out"), "{error}");
    }
    assert_eq!(names(dir.path()), ["file", "full"]);
}

#[test]
fn second_pull_to_one_directory_waits_for_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("image");
    let first = begin(&out);
    let (sender, receiver) = std::sync::mpsc::channel();
    let other = out.clone();
    let second = std::thread::spawn(move || {
        let staging = begin(&other);
        sender.send(()).unwrap();
        finish(staging, &[b"second"]);
    });
    assert!(receiver.recv_timeout(std::time::Duration::from_millis(100)).is_err());
    finish(first, &[b"first"]);
    second.join().unwrap();
    assert!(out.join("blobs/sha256").join(hash::of_bytes(b"second")).is_file());
    assert_eq!(names(dir.path()), ["image"]);
}
