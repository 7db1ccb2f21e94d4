//! Driver `bind`: a bind mount of a guest file or directory.

use std::path::Path;

use rustix::fs::FileType;

use super::mount::Detached;
use super::place::{self, Kind, Place};
use super::{Job, Made, group};
use crate::error::Result;

pub(super) fn make(job: &Job<'_>) -> Result<Made> {
    let source = place::existing(Path::new(&job.storage.source)).map_err(|error| error.during("source"))?;
    let kind = if place::kind(&source)? == FileType::Directory { Kind::Directory } else { Kind::File };
    let bound = Detached::bind(&source, &job.options)?;
    group::give(&bound, job)?;
    let place = Place::make(&job.paths.run, Path::new(&job.storage.mount_point), kind)?;
    Ok(bound.attach(&job.paths.run, place, &job.options)?.into())
}
