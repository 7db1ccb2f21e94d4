//! Unpacks an archive: files into one directory, links only into the listing.
//!
//! Links are never created, so no entry can be written through one, and existing
//! names are never overwritten.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use firstlight_image::digest::Hashing;
use flate2::read::MultiGzDecoder;
use lzma_rust2::XzReader;
use serde::{Deserialize, Serialize};
use tar::EntryType;

use super::listing_of;
use super::tar_names::{followed, plain};

/// Subdirectory of the files.
pub(super) const FILES: &str = "files";

/// Maximum number of entries.
const MAX_ENTRIES: usize = 65_536;
/// Maximum total size in bytes.
const MAX_BYTES: u64 = 8 << 30;
/// Memory limit of the xz decoder; its largest preset needs 65 MiB.
const MAX_MEMORY_KIB: u32 = 128 << 10;
/// Mode bits set-uid and set-gid.
const SETID_BITS: u32 = 0o6000;

/// Entries of an archive except directories.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Listing {
    pub(super) entries: BTreeMap<String, Entry>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Entry {
    File { program: bool, sha256: String },
    Link { target: String },
}

/// Unpacks into the directory `into` and returns the SHA-256 of the archive.
pub(super) fn unpack(file: File, into: &Path) -> Result<String, String> {
    let mut packed = BufReader::new(Hashing::new(file));
    let listing = {
        let magic = packed.fill_buf().map_err(|error| error.to_string())?;
        match magic {
            [0x1f, 0x8b, ..] => files(MultiGzDecoder::new(&mut packed), into)?,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
                files(XzReader::new_mem_limit(&mut packed, true, MAX_MEMORY_KIB), into)?
            }
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [b'B', b'Z', b'h', ..] | [b'P', b'K', ..] | [b'!', b'<', ..] => {
                return Err("it is neither tar, tar.gz nor tar.xz: repack it".to_owned());
            }
            _ => files(&mut packed, into)?,
        }
    };
    // The hash includes trailing data.
    io::copy(&mut packed, &mut io::sink()).map_err(|error| error.to_string())?;
    let text = serde_json::to_vec(&listing).map_err(|error| error.to_string())?;
    fs::write(listing_of(into), text).map_err(|error| error.to_string())?;
    Ok(packed.into_inner().finish().0)
}

fn files(reader: impl Read, into: &Path) -> Result<Listing, String> {
    let root = into.join(FILES);
    fs::create_dir(&root).map_err(|error| error.to_string())?;
    let mut listing = Listing::default();
    let mut left = MAX_BYTES;
    let mut archive = tar::Archive::new(reader);
    for (number, entry) in archive.entries().map_err(|error| error.to_string())?.enumerate() {
        if number == MAX_ENTRIES {
            return Err(format!("more than {MAX_ENTRIES} entries"));
        }
        let mut entry = entry.map_err(|error| format!("entry {}: {error}", number + 1))?;
        let path = entry.path_bytes().into_owned();
        let name = std::str::from_utf8(&path).map_err(|_| format!("entry {}: its name is not UTF-8", number + 1))?;
        let name = plain(name)?;
        let new = match entry.header().entry_type() {
            EntryType::Directory | EntryType::XGlobalHeader => continue,
            EntryType::Regular | EntryType::Continuous => {
                let mode = entry.header().mode().map_err(|error| format!("{name:?}: {error}"))?;
                if mode & SETID_BITS != 0 {
                    return Err(format!("{name:?} is set-uid or set-gid (mode {mode:o}), which images do not allow"));
                }
                left = left.checked_sub(entry.size()).ok_or_else(|| format!("more than {MAX_BYTES} bytes"))?;
                let failed = |error: io::Error| format!("{name:?}: {error}");
                let path = root.join(&name);
                fs::create_dir_all(path.parent().unwrap_or(&root)).map_err(failed)?;
                let file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(failed)?;
                let mut file = Hashing::new(file);
                io::copy(&mut entry, &mut file).map_err(failed)?;
                Entry::File { program: mode & 0o111 != 0, sha256: file.finish().0 }
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().map(std::borrow::Cow::into_owned).unwrap_or_default();
                let target =
                    String::from_utf8(target).map_err(|_| format!("link {name:?} has a target that is not UTF-8"))?;
                followed(&name, &target)?;
                Entry::Link { target }
            }
            other => {
                return Err(format!(
                    "{name:?} is of type {other:?}; only files, directories and symbolic links are allowed"
                ));
            }
        };
        if name.is_empty() || listing.entries.contains_key(&name) {
            return Err(format!("{name:?} is a duplicate or has no name"));
        }
        listing.entries.insert(name, new);
    }
    match listing.entries.is_empty() {
        true => Err("it is empty or not a tar archive".to_owned()),
        false => Ok(listing),
    }
}
