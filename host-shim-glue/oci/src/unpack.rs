//! Unpacking one layer.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use oci_spec::image::{Descriptor, MediaType};
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Uid, chmodat, chownat, fchmod, fchown, linkat, makedev, mkdirat, mknodat,
    openat, symlinkat,
};
use rustix::io::Errno;
use tar::{Archive, Entry, EntryType};

use crate::OciError;
use crate::tree::{Tree, clear, remove, split};

/// A whiteout: the rest of the name is removed from the layers below.
const WHITEOUT: &[u8] = b".wh.";

/// An opaque whiteout: everything below the folder is removed.
const OPAQUE: &[u8] = b".wh..wh..opq";

pub(crate) fn layer(file: File, descriptor: &Descriptor, target: &Path) -> Result<(), OciError> {
    let digest = descriptor.digest().to_string();
    let wrong =
        |entry: &str, reason: String| OciError::Entry { digest: digest.clone(), entry: entry.to_owned(), reason };
    let zstd = |file| zstd::Decoder::new(file).map_err(|error| wrong("", error.to_string()));
    let reader: Box<dyn Read> = match descriptor.media_type() {
        MediaType::ImageLayer | MediaType::ImageLayerNonDistributable => Box::new(io::BufReader::new(file)),
        MediaType::ImageLayerGzip | MediaType::ImageLayerNonDistributableGzip => Box::new(MultiGzDecoder::new(file)),
        MediaType::ImageLayerZstd | MediaType::ImageLayerNonDistributableZstd => Box::new(zstd(file)?),
        // Docker's own: vnd.docker.image.rootfs.diff.tar.gzip.
        other => match other.to_string().rsplit_once(".diff.").map(|(_, packing)| packing) {
            Some("tar") => Box::new(io::BufReader::new(file)),
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
    // A folder's own mode may forbid writing into it, so modes come last.
    let mut folders = Vec::new();
    for entry in entries {
        let mut entry = entry.map_err(|error| wrong("", error.to_string()))?;
        let path = entry.path().map_err(|error| wrong("", error.to_string()))?.into_owned();
        let name = path.display().to_string();
        one(&tree, &mut entry, &path, &mut folders).map_err(|error| wrong(&name, error.to_string()))?;
    }
    for (path, mode) in folders.into_iter().rev() {
        let folder = tree.folder(&path).map_err(|error| wrong(&path.display().to_string(), error.to_string()))?;
        fchmod(&folder, mode).map_err(|error| wrong(&path.display().to_string(), error.to_string()))?;
    }
    Ok(())
}

fn one<R: Read>(
    tree: &Tree,
    entry: &mut Entry<'_, R>,
    path: &Path,
    folders: &mut Vec<(PathBuf, Mode)>,
) -> io::Result<()> {
    let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text.to_owned());
    let mode = Mode::from_raw_mode(entry.header().mode()? & 0o7777);
    let Some((parent, name)) = split(path) else {
        // The root's own entry ("./") is common; ".." is not to be believed.
        if path.components().any(|c| matches!(c, std::path::Component::ParentDir)) {
            return Err(invalid("the path has '..'"));
        }
        folders.push((PathBuf::new(), mode));
        return Ok(());
    };
    let folder = tree.folder(&parent)?;
    if name.as_bytes() == OPAQUE {
        return clear(&folder);
    }
    if let Some(hidden) = name.as_bytes().strip_prefix(WHITEOUT) {
        if hidden.is_empty() || hidden == b"." || hidden == b".." || hidden.contains(&b'/') {
            return Err(invalid("a whiteout of nothing"));
        }
        return remove(&folder, OsStr::from_bytes(hidden));
    }
    let kind = entry.header().entry_type();
    if kind == EntryType::Directory {
        make_folder(&folder, name)?;
        own(&folder, name, entry)?;
        folders.push((path.to_owned(), mode));
        return Ok(());
    }
    remove(&folder, name)?;
    match kind {
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut file = File::from(openat(&folder, name, flags, Mode::from_raw_mode(0o600))?);
            io::copy(entry, &mut file)?;
            if let (uid, gid, true) = owner(entry)? {
                fchown(&file, Some(uid), Some(gid))?;
            }
            // After the owner: a change of owner clears set-uid bits.
            fchmod(&file, mode)?;
        }
        EntryType::Symlink => {
            let target = entry.link_name()?.ok_or_else(|| invalid("a symbolic link to nothing"))?;
            symlinkat(target.as_ref(), &folder, name)?;
            own(&folder, name, entry)?;
        }
        EntryType::Link => {
            let target = entry.link_name()?.ok_or_else(|| invalid("a hard link to nothing"))?;
            let (parent, old) = split(&target).ok_or_else(|| invalid("a hard link out of the image"))?;
            linkat(tree.folder(&parent)?, old, &folder, name, AtFlags::empty())?;
        }
        EntryType::Fifo | EntryType::Char | EntryType::Block => {
            let header = entry.header();
            let device = makedev(header.device_major()?.unwrap_or(0), header.device_minor()?.unwrap_or(0));
            let kind = match kind {
                EntryType::Fifo => FileType::Fifo,
                EntryType::Char => FileType::CharacterDevice,
                _ => FileType::BlockDevice,
            };
            mknodat(&folder, name, kind, mode, device)?;
            own(&folder, name, entry)?;
            chmodat(&folder, name, mode, AtFlags::empty())?;
        }
        EntryType::XGlobalHeader => {}
        other => return Err(invalid(&format!("entries of type {other:?} are not supported"))),
    }
    Ok(())
}

fn make_folder(folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match mkdirat(folder, name, Mode::from_raw_mode(0o755)) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) => {
            let found = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
                return Ok(());
            }
            remove(folder, name)?;
            Ok(mkdirat(folder, name, Mode::from_raw_mode(0o755))?)
        }
        Err(error) => Err(error.into()),
    }
}

/// Owner and group of an entry, and whether this process may set them.
fn owner<R: Read>(entry: &Entry<'_, R>) -> io::Result<(Uid, Gid, bool)> {
    let id = |value: u64| u32::try_from(value).map_err(|_| io::Error::other(format!("owner {value} is no user id")));
    let uid = Uid::from_raw(id(entry.header().uid()?)?);
    let gid = Gid::from_raw(id(entry.header().gid()?)?);
    Ok((uid, gid, rustix::process::geteuid().is_root()))
}

fn own<R: Read>(folder: &OwnedFd, name: &OsStr, entry: &Entry<'_, R>) -> io::Result<()> {
    let (uid, gid, may) = owner(entry)?;
    if may {
        chownat(folder, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}
