//! Unpacking of a layer.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firstlight_image::digest::Hashing;
use flate2::bufread::MultiGzDecoder;
use oci_spec::image::{Descriptor, MediaType};
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Uid, chmodat, chownat, fchmod, fchown, linkat, makedev, mkdirat, mknodat,
    openat, symlinkat,
};
use rustix::io::Errno;
use tar::{Archive, Entry, EntryType};

use crate::tree::{Tree, clear, remove, split};
use crate::{OciError, blob};

/// Prefix of a whiteout: the entry with the rest of the name is removed.
const WHITEOUT: &[u8] = b".wh.";

/// Name of an opaque whiteout: all entries of its directory are removed.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Unpacks the blob `file`, and compares the bytes that were unpacked with its descriptor: the file
/// may change after [`blob::open`] verified it.
pub(crate) fn unpack_layer(file: File, descriptor: &Descriptor, target: &Path) -> Result<(), OciError> {
    let mut hashing = Hashing::new(file);
    unpack_from(&mut hashing, descriptor, target)?;
    // Trailing bytes that unpacking did not need.
    io::copy(&mut hashing, &mut io::sink()).map_err(OciError::file(descriptor.digest().to_string()))?;
    blob::compare(descriptor, hashing.finish().0)
}

fn unpack_from(file: impl Read, descriptor: &Descriptor, target: &Path) -> Result<(), OciError> {
    let digest = descriptor.digest().to_string();
    let wrong =
        |entry: &str, reason: String| OciError::Entry { digest: digest.clone(), entry: entry.to_owned(), reason };
    let file = io::BufReader::new(file);
    let zstd = |file| zstd::Decoder::with_buffer(file).map_err(|error| wrong("", error.to_string()));
    let reader: Box<dyn Read> = match descriptor.media_type() {
        MediaType::ImageLayer | MediaType::ImageLayerNonDistributable => Box::new(file),
        MediaType::ImageLayerGzip | MediaType::ImageLayerNonDistributableGzip => Box::new(MultiGzDecoder::new(file)),
        MediaType::ImageLayerZstd | MediaType::ImageLayerNonDistributableZstd => Box::new(zstd(file)?),
        // Docker's media types: vnd.docker.image.rootfs.diff.tar.gzip.
        other => match other.to_string().rsplit_once(".diff.").map(|(_, packing)| packing) {
            Some("tar") => Box::new(file),
            Some("tar.gzip") => Box::new(MultiGzDecoder::new(file)),
            Some("tar.zstd") => Box::new(zstd(file)?),
            _ => {
                let reason = format!("layers of type {other} are not supported: use tar, tar+gzip or tar+zstd");
                return Err(wrong("", reason));
            }
        },
    };
    let tree = Tree::open(target).map_err(OciError::file(target))?;
    let mut archive = Archive::new(reader);
    let entries = archive.entries().map_err(|error| wrong("", error.to_string()))?;
    // A directory's mode may forbid writing to it, so modes are set last.
    let mut dirs = Vec::new();
    for entry in entries {
        let mut entry = entry.map_err(|error| wrong("", error.to_string()))?;
        let path = entry.path().map_err(|error| wrong("", error.to_string()))?.into_owned();
        let name = path.display().to_string();
        unpack_entry(&tree, &mut entry, &path, &mut dirs).map_err(|error| wrong(&name, error.to_string()))?;
    }
    for (path, mode) in dirs.into_iter().rev() {
        let dir = tree.dir(&path).map_err(|error| wrong(&path.display().to_string(), error.to_string()))?;
        fchmod(&dir, mode).map_err(|error| wrong(&path.display().to_string(), error.to_string()))?;
    }
    Ok(())
}

fn unpack_entry<R: Read>(
    tree: &Tree,
    entry: &mut Entry<'_, R>,
    path: &Path,
    dirs: &mut Vec<(PathBuf, Mode)>,
) -> io::Result<()> {
    let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text.to_owned());
    let mode = Mode::from_raw_mode(entry.header().mode()? & 0o7777);
    let Some((parent, name)) = split(path) else {
        // An entry for the root ("./") is common; ".." is refused.
        if path.components().any(|c| matches!(c, std::path::Component::ParentDir)) {
            return Err(invalid("the path contains '..'"));
        }
        dirs.push((PathBuf::new(), mode));
        return Ok(());
    };
    let dir = tree.dir(&parent)?;
    if name.as_bytes() == OPAQUE {
        return clear(&dir);
    }
    if let Some(hidden) = name.as_bytes().strip_prefix(WHITEOUT) {
        if hidden.is_empty() || hidden == b"." || hidden == b".." || hidden.contains(&b'/') {
            return Err(invalid("whiteout without a valid name"));
        }
        return remove(&dir, OsStr::from_bytes(hidden));
    }
    let kind = entry.header().entry_type();
    if kind == EntryType::Directory {
        make_directory(&dir, name)?;
        set_owner(&dir, name, entry)?;
        dirs.push((path.to_owned(), mode));
        return Ok(());
    }
    remove(&dir, name)?;
    match kind {
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut file = File::from(openat(&dir, name, flags, Mode::from_raw_mode(0o600))?);
            io::copy(entry, &mut file)?;
            if let (uid, gid, true) = owner(entry)? {
                fchown(&file, Some(uid), Some(gid))?;
            }
            // After chown, which clears set-uid bits.
            fchmod(&file, mode)?;
        }
        EntryType::Symlink => {
            let target = entry.link_name()?.ok_or_else(|| invalid("symbolic link without a target"))?;
            symlinkat(target.as_ref(), &dir, name)?;
            set_owner(&dir, name, entry)?;
        }
        EntryType::Link => {
            let target = entry.link_name()?.ok_or_else(|| invalid("hard link without a target"))?;
            let (parent, old) = split(&target).ok_or_else(|| invalid("hard link escapes the image"))?;
            linkat(tree.dir(&parent)?, old, &dir, name, AtFlags::empty())?;
        }
        EntryType::Fifo | EntryType::Char | EntryType::Block => {
            let header = entry.header();
            let device = makedev(header.device_major()?.unwrap_or(0), header.device_minor()?.unwrap_or(0));
            let kind = match kind {
                EntryType::Fifo => FileType::Fifo,
                EntryType::Char => FileType::CharacterDevice,
                _ => FileType::BlockDevice,
            };
            mknodat(&dir, name, kind, mode, device)?;
            set_owner(&dir, name, entry)?;
            chmodat(&dir, name, mode, AtFlags::empty())?;
        }
        EntryType::XGlobalHeader => {}
        other => return Err(invalid(&format!("entries of type {other:?} are not supported"))),
    }
    Ok(())
}

fn make_directory(dir: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match mkdirat(dir, name, Mode::from_raw_mode(0o755)) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) => {
            let found = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
                return Ok(());
            }
            remove(dir, name)?;
            Ok(mkdirat(dir, name, Mode::from_raw_mode(0o755))?)
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns owner and group of an entry, and whether this process can set them.
fn owner<R: Read>(entry: &Entry<'_, R>) -> io::Result<(Uid, Gid, bool)> {
    let id = |value: u64| u32::try_from(value).map_err(|_| io::Error::other(format!("invalid owner id {value}")));
    let uid = Uid::from_raw(id(entry.header().uid()?)?);
    let gid = Gid::from_raw(id(entry.header().gid()?)?);
    Ok((uid, gid, rustix::process::geteuid().is_root()))
}

fn set_owner<R: Read>(dir: &OwnedFd, name: &OsStr, entry: &Entry<'_, R>) -> io::Result<()> {
    let (uid, gid, can_set) = owner(entry)?;
    if can_set {
        chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::File as NewFile;
    use crate::NewImage;
    use oci_spec::image::{DescriptorBuilder, Sha256Digest};
    use std::str::FromStr;

    #[test]
    fn layer_that_changed_after_its_verification_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let files = vec![NewFile::Text { path: "a".into(), text: "b".into() }];
        NewImage { files, env: Vec::new(), command: Vec::new() }.write(dir.path()).unwrap();
        let digest = |name: &str| {
            DescriptorBuilder::default()
                .media_type(MediaType::ImageLayer)
                .digest(Sha256Digest::from_str(name).unwrap())
                .size(1u64)
                .build()
                .unwrap()
        };
        let layers: Vec<_> =
            std::fs::read_dir(dir.path().join("blobs/sha256")).unwrap().map(|it| it.unwrap()).collect();
        let layer = layers.iter().max_by_key(|entry| entry.metadata().unwrap().len()).unwrap();
        let name = layer.file_name().into_string().unwrap();
        let target = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let open = || File::open(layer.path()).unwrap();
        unpack_layer(open(), &digest(&name), &target("good")).unwrap();
        let error = unpack_layer(open(), &digest(&"0".repeat(64)), &target("other")).unwrap_err().to_string();
        assert!(error.contains("digest mismatch") && error.contains(&name), "{error}");
        // The end is missing, as in a file that is being rewritten: tar itself accepts it.
        let part = dir.path().join("part");
        std::fs::write(&part, &std::fs::read(layer.path()).unwrap()[..1024]).unwrap();
        let error = unpack_layer(File::open(part).unwrap(), &digest(&name), &target("cut")).unwrap_err();
        assert!(error.to_string().contains("digest mismatch"), "{error}");
        assert_eq!(std::fs::read_to_string(dir.path().join("cut/a")).unwrap(), "b", "the entries before the end");
    }
}
