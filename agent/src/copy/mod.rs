//! CopyFile: files, directories and links that the host writes into the guest, below one directory.
//!
//! A file arrives in chunks. They are written to a temporary file with an unpredictable name next
//! to the target, which is renamed when complete: readers see the old or the new file. An
//! incomplete file is discarded when its transfer restarts at offset 0, or when too many others are
//! in progress.

mod destination;
mod incomplete;

use std::io;
use std::path::Path;

use firstlight_agent_api::agent::CopyFileRequest;
use rustix::fs::{AtFlags, FileType, Mode, symlinkat};

use crate::error::{Error, Result};
use destination::{Destination, NewDirectory, Owner};
use incomplete::IncompleteFiles;

pub use destination::names;

/// Upper bound on a file's size, bytes; above any guest's memory.
const MAX_FILE: u64 = 1 << 40;

/// The kernel's limit on a link's target.
const MAX_TARGET: usize = 4095;

/// A failed step and its cause.
#[derive(Debug)]
struct StepError {
    step: String,
    source: io::Error,
}

impl StepError {
    fn new(step: String, source: io::Error) -> Self {
        Self { step, source }
    }
}

/// Properties that a file gets when it is complete.
#[derive(Debug, Clone, Copy)]
struct Completion {
    mode: Mode,
    owner: Owner,
    size: u64,
}

/// The CopyFile transfers in progress.
#[derive(Debug, Default)]
pub struct FileCopies(IncompleteFiles);

impl FileCopies {
    /// Handles one request. Blocks for as long as the file system does.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a path outside `share`, a type other than directory, link or file,
    /// and invalid sizes; `FAILED_PRECONDITION` for a chunk whose predecessor is missing;
    /// `INTERNAL` with the failed step for errors of the kernel, such as `ELOOP` for a link in the
    /// path.
    pub fn handle(&self, share: &Path, request: &CopyFileRequest) -> Result<()> {
        self.copy(share, request).map_err(|error| error.during(&format!("CopyFile {:?}", request.path)))
    }

    fn copy(&self, share: &Path, request: &CopyFileRequest) -> Result<()> {
        let names = names(share, &request.path).map_err(Error::invalid)?;
        let owner = Owner::of(request.uid, request.gid);
        let missing = NewDirectory { mode: Mode::from_raw_mode(request.dir_mode & 0o777), owner };
        let mode = Mode::from_raw_mode(request.file_mode & 0o7777);
        let wrong = |failed: StepError| {
            let hint = if failed.source.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
                " (a symbolic link in the path is not followed)"
            } else {
                ""
            };
            Error::internal(format!("{}: {}{hint}", failed.step, failed.source))
        };
        match FileType::from_raw_mode(request.file_mode) {
            FileType::Directory => {
                let destination = destination::open_parent(share, &names, missing).map_err(wrong)?;
                let made = destination::create_dir(&destination.dir, &destination.name, mode, owner);
                made.map(drop).map_err(|error| wrong(StepError::new("create the directory".to_owned(), error.into())))
            }
            FileType::Symlink => {
                check_target(&request.data)?;
                let destination = destination::open_parent(share, &names, missing).map_err(wrong)?;
                link(&destination, &request.data, owner).map_err(wrong)
            }
            FileType::RegularFile => {
                let (offset, size) = check_sizes(request)?;
                let destination = destination::open_parent(share, &names, missing).map_err(wrong)?;
                let finish = Completion { mode, owner, size };
                self.0.write_chunk(&names.join("/"), destination, offset, &request.data, finish)?.map_err(wrong)
            }
            _ => Err(Error::invalid(format!("file mode {:#o} is not a directory, link or file", request.file_mode))),
        }
    }
}

fn check_target(target: &[u8]) -> Result<()> {
    if target.is_empty() || target.len() > MAX_TARGET || target.contains(&0) {
        return Err(Error::invalid(format!("the link's target must be 1 to {MAX_TARGET} bytes without NUL")));
    }
    Ok(())
}

/// Returns offset and total size.
fn check_sizes(request: &CopyFileRequest) -> Result<(u64, u64)> {
    let CopyFileRequest { offset, file_size, data, .. } = request;
    let of = |number: &i64| u64::try_from(*number).ok().filter(|number| *number <= MAX_FILE);
    let end = |offset: u64| u64::try_from(data.len()).ok().and_then(|len| offset.checked_add(len));
    match (of(offset), of(file_size)) {
        (Some(offset), Some(size)) if end(offset).is_some_and(|end| end <= size) => Ok((offset, size)),
        _ => Err(Error::invalid(format!(
            "{} bytes at {offset} of a file of {file_size} bytes are out of range (at most {MAX_FILE} bytes)",
            data.len()
        ))),
    }
}

/// Creates a link, replacing an existing file or link.
fn link(destination: &Destination, target: &[u8], owner: Owner) -> std::result::Result<(), StepError> {
    let step = |what: &'static str| move |error: rustix::io::Errno| StepError::new(what.to_owned(), error.into());
    let (temporary, ()) =
        incomplete::create_unique(|name| symlinkat(target, &destination.dir, name)).map_err(step("create the link"))?;
    let owned = rustix::fs::chownat(&destination.dir, &temporary, owner.user, owner.group, AtFlags::SYMLINK_NOFOLLOW);
    let renamed = owned.map_err(step("set the owner of the link")).and_then(|()| {
        rustix::fs::renameat(&destination.dir, &temporary, &destination.dir, &destination.name)
            .map_err(step("rename the link"))
    });
    if renamed.is_err() {
        let _ = rustix::fs::unlinkat(&destination.dir, &temporary, AtFlags::empty());
    }
    renamed
}

#[cfg(test)]
mod tests;
