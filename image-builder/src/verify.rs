//! Whether results still are what was built: every file against `image.json`,
//! and a disk's blocks against its dm-verity hash tree, as a kernel would
//! check them.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::{FileDigest, ImageRecord, RECORD, RecordError, VerityRecord, digest, is_plain_name};
use serde::Serialize;

use crate::format::disk;
use crate::format::verity::{self, Bad, Params};

/// Why nothing could be verified.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no record to verify by.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The file of a single image cannot be read.
    #[error("cannot verify {}", path.display())]
    Image {
        /// The image.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The image's name.
    pub name: String,
    /// Files that were looked at.
    pub files: usize,
    /// Blocks of data that the hash tree vouches for.
    pub verified_blocks: u64,
    /// What is wrong; nothing if all is well.
    pub problems: Vec<Problem>,
}

/// Something that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The file.
    pub file: String,
    /// What is wrong with it.
    pub what: String,
    /// The first block that is wrong, where a hash tree says which.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bad_block: Option<Bad>,
}

impl Problem {
    fn new(file: &str, what: impl Into<String>) -> Self {
        Self { file: file.to_owned(), what: what.into(), bad_block: None }
    }
}

/// Verifies what `build` wrote into `directory`.
///
/// # Errors
/// There is no record to verify by. What is wrong with the files is in the report.
pub fn verify(dir: &Path) -> Result<Report, Error> {
    let path = dir.join(RECORD);
    let contents = ImageRecord::read(&path)?;
    let no_record = |what: String| RecordError::Invalid { path: path.clone(), what };
    let mut report = Report { name: contents.name, files: 0, verified_blocks: 0, problems: Vec::new() };
    for (name, expected) in &contents.outputs {
        if !is_plain_name(name) {
            return Err(no_record(format!("{name:?} is no file of this directory")).into());
        }
        report.files += 1;
        if let Err(what) = same(&dir.join(name), expected) {
            report.problems.push(Problem::new(name, what));
        }
    }
    if let Some(record) = &contents.verity {
        if !contents.outputs.contains_key(&record.file) {
            return Err(no_record(format!("{:?} is not among its outputs", record.file)).into());
        }
        let params: Params = record.params.parse().map_err(|error| no_record(format!("{error}")))?;
        if hex::encode(params.root_hash) != record.root_hash {
            return Err(no_record("root_hash and params name different hash trees".to_owned()).into());
        }
        match blocks(&dir.join(&record.file), Some(record), &params) {
            Ok(None) => report.verified_blocks = params.data_blocks,
            Ok(Some(bad)) => {
                let problem = Problem::new(&record.file, bad.to_string());
                report.problems.push(Problem { bad_block: Some(bad), ..problem });
            }
            Err(what) => report.problems.push(Problem::new(&record.file, what)),
        }
    }
    Ok(report)
}

/// Verifies one disk against `params` alone: data in its first partition,
/// hashes in its second.
///
/// # Errors
/// The file cannot be opened. What is wrong with it is in the report.
pub fn verify_disk(image: &Path, params: &Params) -> Result<Report, Error> {
    File::open(image).map_err(|source| Error::Image { path: image.to_owned(), source })?;
    let name = image.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut report = Report { name: name.clone(), files: 1, verified_blocks: 0, problems: Vec::new() };
    match blocks(image, None, params) {
        Ok(None) => report.verified_blocks = params.data_blocks,
        Ok(Some(bad)) => {
            report.problems.push(Problem { bad_block: Some(bad), ..Problem::new(&name, bad.to_string()) });
        }
        Err(what) => report.problems.push(Problem::new(&name, what)),
    }
    Ok(report)
}

fn same(path: &Path, expected: &FileDigest) -> Result<(), String> {
    let data = fs::symlink_metadata(path).map_err(|error| format!("it cannot be read: {error}"))?;
    if !data.is_file() {
        return Err("it is no regular file".to_owned());
    }
    if data.len() != expected.size {
        return Err(format!("it has {} bytes, {} were built", data.len(), expected.size));
    }
    let (sha256, _) = digest::of_file(path).map_err(|error| format!("it cannot be read: {error}"))?;
    if sha256 != expected.sha256 {
        return Err(format!("its SHA-256 is {sha256}, {} was built", expected.sha256));
    }
    Ok(())
}

/// Checks a disk's first partition against its second.
fn blocks(image: &Path, record: Option<&VerityRecord>, params: &Params) -> Result<Option<Bad>, String> {
    let text = |error: io::Error| error.to_string();
    let file = File::open(image).map_err(text)?;
    let partitions = disk::partitions_of(&file).map_err(text)?;
    let [data, hashes] = partitions[..] else {
        return Err(format!(
            "its partition table has {} partitions, not one of data and one of hashes",
            partitions.len()
        ));
    };
    if let Some(record) = record {
        let starts = (record.data_offset, record.hash_offset);
        if starts != (data.start, hashes.start) {
            return Err("its partitions are not where the record says".to_owned());
        }
    }
    if data.size < params.data_bytes() {
        return Err(format!("its first partition has {} bytes, {} are hashed", data.size, params.data_bytes()));
    }
    verity::check(&mut disk::inside(&file, data), &mut disk::inside(&file, hashes), params)
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::disk::{Layout, assemble};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const BLOCK: u64 = verity::BLOCK as u64;

    /// A directory with a disk of `blocks` blocks, another file, and the record.
    fn built(blocks: usize) -> (tempfile::TempDir, ImageRecord) {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mut data = vec![0; blocks * verity::BLOCK];
        for (number, block) in (1u64..).zip(data.chunks_exact_mut(verity::BLOCK)) {
            block[..8].copy_from_slice(&number.to_le_bytes());
        }
        fs::write(path("content"), data).unwrap();
        let layout = Layout { name: "x", signature: 1, verity: Some(None) };
        let made = assemble(&layout, &path("content"), &path("rootfs.img")).unwrap();
        fs::write(path("kata.toml"), "text").unwrap();
        let (hashes, params) = made.verity.unwrap();
        let bytes = |name: &str| {
            let (sha256, size) = digest::of_file(&path(name)).unwrap();
            (name.to_owned(), FileDigest { size, sha256 })
        };
        let contents = ImageRecord {
            schema: 1,
            name: "x".to_owned(),
            format: "erofs".to_owned(),
            verity: Some(VerityRecord {
                file: "rootfs.img".to_owned(),
                root_hash: hex::encode(params.root_hash),
                params: params.to_string(),
                data_offset: made.data.start,
                hash_offset: hashes.start,
                hash_size: hashes.size,
            }),
            outputs: BTreeMap::from([bytes("rootfs.img"), bytes("kata.toml")]),
            ..ImageRecord::default()
        };
        record(&dir, &contents);
        (dir, contents)
    }

    fn record(dir: &tempfile::TempDir, contents: &ImageRecord) {
        fs::write(dir.path().join(RECORD), serde_json::to_vec(contents).unwrap()).unwrap();
    }

    fn flip(path: &Path, at: u64, bit: u8) {
        let mut bytes = fs::read(path).unwrap();
        bytes[usize::try_from(at).unwrap()] ^= 1 << bit;
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn what_was_built_is_as_built() {
        let (dir, _) = built(300);
        let report = verify(dir.path()).unwrap();
        assert_eq!(report, Report { name: "x".into(), files: 2, verified_blocks: 300, problems: Vec::new() });
    }

    #[test]
    fn changed_and_missing_files_are_named() {
        let (dir, _) = built(2);
        fs::write(dir.path().join("kata.toml"), "TEXT").unwrap();
        let problems = verify(dir.path()).unwrap().problems;
        assert_eq!(problems.len(), 1);
        assert!(problems[0].file == "kata.toml" && problems[0].what.contains("SHA-256"), "{problems:?}");
        fs::remove_file(dir.path().join("kata.toml")).unwrap();
        fs::write(dir.path().join("rootfs.img"), "short").unwrap();
        let problems = verify(dir.path()).unwrap().problems;
        let all = format!("{problems:?}");
        assert!(all.contains("cannot be read") && all.contains("5 bytes") && all.contains("partition"), "{all}");
        let error = verify(&dir.path().join("none")).unwrap_err().to_string();
        assert!(error.contains("image.json"), "{error}");
    }

    #[test]
    fn a_hostile_record_leads_nowhere() {
        let (dir, good) = built(2);
        let entry = good.outputs["kata.toml"].clone();
        for name in ["../x", "/etc/passwd", "..", ""] {
            let mut bad = good.clone();
            bad.outputs.insert(name.to_owned(), entry.clone());
            record(&dir, &bad);
            assert!(matches!(verify(dir.path()), Err(Error::Record(RecordError::Invalid { .. }))), "{name}");
        }
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
        let mut bad = good.clone();
        bad.outputs.insert("link".to_owned(), entry);
        record(&dir, &bad);
        assert!(verify(dir.path()).unwrap().problems[0].what.contains("no regular file"));
        let mut bad = good.clone();
        bad.verity.as_mut().unwrap().root_hash = "00".repeat(32);
        record(&dir, &bad);
        assert!(matches!(verify(dir.path()), Err(Error::Record(RecordError::Invalid { .. }))));
        let mut bad = good;
        bad.verity.as_mut().unwrap().hash_offset += BLOCK;
        record(&dir, &bad);
        assert!(verify(dir.path()).unwrap().problems[0].what.contains("where the record says"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        /// A flipped bit anywhere on the disk is found; in data or hashes the
        /// block is named, also when only the root hash is known.
        #[test]
        fn a_flipped_bit_is_found(blocks in 1usize..300, at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let (dir, contents) = built(blocks);
            let image = dir.path().join("rootfs.img");
            let length = fs::metadata(&image).unwrap().len();
            let at = at.index(usize::try_from(length).unwrap()) as u64;
            flip(&image, at, bit);
            let report = verify(dir.path()).unwrap();
            prop_assert!(report.problems.iter().any(|problem| problem.what.contains("SHA-256")), "{report:?}");
            let record = contents.verity.unwrap();
            let params: Params = record.params.parse().unwrap();
            let hashes = verity::hash_blocks(params.data_blocks) * BLOCK;
            let data = (record.data_offset..record.data_offset + params.data_bytes()).contains(&at);
            let tree = (record.hash_offset..record.hash_offset + hashes).contains(&at);
            let alone = verify_disk(&image, &params).unwrap();
            let named = report.problems.iter().find_map(|problem| problem.bad_block);
            if data {
                prop_assert_eq!(named, Some(Bad::Data { block: (at - record.data_offset) / BLOCK }));
            } else if tree {
                let expected = (at - record.hash_offset) / BLOCK;
                prop_assert!(matches!(named, Some(Bad::Hashes { block, .. }) if block == expected), "{named:?}");
            }
            if data || tree {
                prop_assert_eq!(alone.problems.first().and_then(|problem| problem.bad_block), named);
            }
        }
    }
}
