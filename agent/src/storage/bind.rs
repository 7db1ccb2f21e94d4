//! Driver `bind`: a bind mount of a guest file or directory.

use std::path::Path;

use rustix::fs::FileType;

use super::mount::Detached;
use super::safe_path::{self, Kind, MountPoint};
use super::{Job, Resources, fs_group};
use crate::error::Result;

pub(super) fn make(job: &Job<'_>) -> Result<Resources> {
    let source = safe_path::existing(Path::new(&job.storage.source)).map_err(|error| error.during("source"))?;
    let kind = if safe_path::kind(&source)? == FileType::Directory { Kind::Directory } else { Kind::File };
    let bound = Detached::bind(&source, &job.options)?;
    fs_group::apply(&bound, job)?;
    let place = MountPoint::create(&job.paths.run, Path::new(&job.storage.mount_point), kind)?;
    Ok(bound.attach(&job.paths.run, place, &job.options)?.into())
}
