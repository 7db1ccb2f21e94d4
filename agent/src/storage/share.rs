//! Driver `virtio-fs`: a host directory; the source is its tag.

use std::path::Path;

use super::mount::Detached;
use super::place::{Kind, Place};
use super::{Job, Made};
use crate::error::Result;

pub(super) fn make(job: &Job<'_>) -> Result<Made> {
    let share = Detached::filesystem("virtiofs", Some(&job.storage.source), &job.options)?;
    let place = Place::make(&job.paths.run, Path::new(&job.storage.mount_point), Kind::Directory)?;
    Ok(share.attach(&job.paths.run, place, &job.options)?.into())
}
