//! Driver `virtio-fs`: a host directory; the source is its tag.

use std::path::Path;

use super::mount::Detached;
use super::safe_path::{Kind, MountPoint};
use super::{Job, Resources};
use crate::error::Result;

pub(super) fn make(job: &Job<'_>) -> Result<Resources> {
    let share = Detached::filesystem("virtiofs", Some(&job.storage.source), &job.options)?;
    let place = MountPoint::create(&job.paths.run, Path::new(&job.storage.mount_point), Kind::Directory)?;
    Ok(share.attach(&job.paths.run, place, &job.options)?.into())
}
