//! Verifies build outputs: the size and SHA-256 of every file against
//! `image.json`, and the blocks of a disk against its dm-verity hash tree, as
//! the kernel does.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use firstlight_image::{FileDigest, ImageRecord, RECORD, RecordError, VerityRecord, digest, is_plain_name};
use serde::Serialize;

use crate::format::disk;
use crate::format::verity::{self, CorruptBlock, Params};

/// Why verification could not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `image.json` is missing or invalid.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A disk image cannot be opened.
    #[error("failed to open the image {}", path.display())]
    Image {
        /// The image.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
}

/// The result of a verification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The image's name.
    pub name: String,
    /// Number of files checked.
    pub files: usize,
    /// Number of data blocks that match the hash tree.
    pub verified_blocks: u64,
    /// The mismatches found; empty if the image is intact.
    pub problems: Vec<Problem>,
}

/// A file that differs from the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The file.
    pub file: String,
    /// The description of the mismatch.
    pub what: String,
    /// The first corrupt block, if the hash tree identifies one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bad_block: Option<CorruptBlock>,
}

impl Problem {
    fn new(file: &str, what: impl Into<String>) -> Self {
        Self { file: file.to_owned(), what: what.into(), bad_block: None }
    }
}

/// Verifies the output directory `dir` of a build.
///
/// # Errors
/// `image.json` is missing or invalid. Mismatches of files are in the report.
pub fn verify(dir: &Path) -> Result<Report, Error> {
    let path = dir.join(RECORD);
    let contents = ImageRecord::read(&path)?;
    let invalid = |what: String| RecordError::Invalid { path: path.clone(), what };
    let mut report = Report { name: contents.name, files: 0, verified_blocks: 0, problems: Vec::new() };
    for (name, expected) in &contents.outputs {
        if !is_plain_name(name) {
            return Err(invalid(format!("{name:?} is not a plain file name")).into());
        }
        report.files += 1;
        if let Err(what) = check_file(&dir.join(name), expected) {
            report.problems.push(Problem::new(name, what));
        }
    }
    if let Some(record) = &contents.verity {
        if !contents.outputs.contains_key(&record.file) {
            return Err(invalid(format!("{:?} is not among its outputs", record.file)).into());
        }
        let params: Params = record.params.parse().map_err(|error| invalid(format!("{error}")))?;
        if hex::encode(params.root_hash) != record.root_hash {
            return Err(invalid("root_hash and params contain different root hashes".to_owned()).into());
        }
        match check_disk(&dir.join(&record.file), Some(record), &params) {
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

/// Verifies one disk image against `params` alone, without a record. The first
/// partition contains the data, the second the hash tree.
///
/// # Errors
/// The file cannot be opened. Mismatches are in the report.
pub fn verify_disk(image: &Path, params: &Params) -> Result<Report, Error> {
    File::open(image).map_err(|source| Error::Image { path: image.to_owned(), source })?;
    let name = image.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut report = Report { name: name.clone(), files: 1, verified_blocks: 0, problems: Vec::new() };
    match check_disk(image, None, params) {
        Ok(None) => report.verified_blocks = params.data_blocks,
        Ok(Some(bad)) => {
            report.problems.push(Problem { bad_block: Some(bad), ..Problem::new(&name, bad.to_string()) });
        }
        Err(what) => report.problems.push(Problem::new(&name, what)),
    }
    Ok(report)
}

/// Checks type, size and SHA-256 of a file.
fn check_file(path: &Path, expected: &FileDigest) -> Result<(), String> {
    let metadata = fs::symlink_metadata(path).map_err(|error| format!("cannot be read: {error}"))?;
    if !metadata.is_file() {
        return Err("not a regular file".to_owned());
    }
    if metadata.len() != expected.size {
        return Err(format!("size is {} bytes, expected {}", metadata.len(), expected.size));
    }
    let (sha256, _) = digest::of_file(path).map_err(|error| format!("cannot be read: {error}"))?;
    if sha256 != expected.sha256 {
        return Err(format!("SHA-256 is {sha256}, expected {}", expected.sha256));
    }
    Ok(())
}

/// Checks the blocks of a disk's first partition against the hash tree in its
/// second one, and returns the first corrupt block.
fn check_disk(image: &Path, record: Option<&VerityRecord>, params: &Params) -> Result<Option<CorruptBlock>, String> {
    let text = |error: io::Error| error.to_string();
    let file = File::open(image).map_err(text)?;
    let partitions = disk::read_partitions(&file).map_err(text)?;
    let [data, hashes] = partitions[..] else {
        return Err(format!("expected 2 partitions (data and hash tree), found {}", partitions.len()));
    };
    if let Some(record) = record {
        let starts = (record.data_offset, record.hash_offset);
        if starts != (data.start, hashes.start) {
            return Err("partition offsets differ from the record".to_owned());
        }
    }
    if data.size < params.data_bytes() {
        return Err(format!(
            "the data partition has {} bytes, but the hash tree covers {}",
            data.size,
            params.data_bytes()
        ));
    }
    verity::check(&mut disk::partition_reader(&file, data), &mut disk::partition_reader(&file, hashes), params)
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::disk::{Layout, assemble};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const BLOCK: u64 = verity::BLOCK as u64;

    /// Creates an output directory with a disk of `blocks` blocks, another file, and the record.
    fn built(blocks: usize) -> (tempfile::TempDir, ImageRecord) {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mut data = vec![0; blocks * verity::BLOCK];
        for (number, block) in (1u64..).zip(data.chunks_exact_mut(verity::BLOCK)) {
            block[..8].copy_from_slice(&number.to_le_bytes());
        }
        fs::write(path("content"), data).unwrap();
        let layout = Layout { name: "x", signature: 1, verity: Some(None) };
        let disk = assemble(&layout, &path("content"), &path("rootfs.img")).unwrap();
        fs::write(path("kata.toml"), "text").unwrap();
        let (hashes, params) = disk.verity.unwrap();
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
                data_offset: disk.data.start,
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
    fn unmodified_outputs_then_no_problems() {
        let (dir, _) = built(300);
        let report = verify(dir.path()).unwrap();
        assert_eq!(report, Report { name: "x".into(), files: 2, verified_blocks: 300, problems: Vec::new() });
    }

    #[test]
    fn changed_or_missing_file_then_reported_by_name() {
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
    fn malicious_record_then_no_file_outside_the_directory_is_read() {
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
        assert!(verify(dir.path()).unwrap().problems[0].what.contains("not a regular file"));
        let mut bad = good.clone();
        bad.verity.as_mut().unwrap().root_hash = "00".repeat(32);
        record(&dir, &bad);
        assert!(matches!(verify(dir.path()), Err(Error::Record(RecordError::Invalid { .. }))));
        let mut bad = good;
        bad.verity.as_mut().unwrap().hash_offset += BLOCK;
        record(&dir, &bad);
        assert!(verify(dir.path()).unwrap().problems[0].what.contains("differ from the record"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        /// A flipped bit anywhere on the disk is detected. Inside the data or the
        /// hash tree the block is reported, also if only the root hash is known.
        #[test]
        fn flipped_bit_then_corrupt_block_is_reported(blocks in 1usize..300, at in any::<prop::sample::Index>(), bit in 0u8..8) {
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
            let reported = report.problems.iter().find_map(|problem| problem.bad_block);
            if data {
                prop_assert_eq!(reported, Some(CorruptBlock::Data { block: (at - record.data_offset) / BLOCK }));
            } else if tree {
                let expected = (at - record.hash_offset) / BLOCK;
                prop_assert!(matches!(reported, Some(CorruptBlock::Hashes { block, .. }) if block == expected), "{reported:?}");
            }
            if data || tree {
                prop_assert_eq!(alone.problems.first().and_then(|problem| problem.bad_block), reported);
            }
        }
    }
}
