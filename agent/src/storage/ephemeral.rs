//! Driver `ephemeral`: a tmpfs or hugetlbfs, with all its options.

use std::path::Path;

use super::huge_pages::HugePages;
use super::mount::Detached;
use super::safe_path::{Kind, MountPoint};
use super::{Job, Resource, Resources, fs_group};
use crate::error::{Error, Result};

/// Returns the file system type of a storage.
pub(super) fn fs_type(fstype: &str) -> Result<&'static str> {
    match fstype {
        "" | "tmpfs" => Ok("tmpfs"),
        "hugetlbfs" => Ok("hugetlbfs"),
        other => Err(Error::invalid(format!("file system {other:?} is not supported; use tmpfs or hugetlbfs"))),
    }
}

pub(super) fn make(job: &Job<'_>) -> Result<Resources> {
    let kind = fs_type(&job.storage.fstype)?;
    let mut made = Resources::default();
    if kind == "hugetlbfs" {
        made.add(Resource::Pages(HugePages::add(&job.paths.sysfs, &job.options)?));
    }
    let source = if job.storage.source.is_empty() { kind } else { &job.storage.source };
    let memory = Detached::filesystem(kind, Some(source), &job.options)?;
    fs_group::apply(&memory, job)?;
    let place = MountPoint::create(&job.paths.run, Path::new(&job.storage.mount_point), Kind::Directory)?;
    made.add(Resource::Mount(memory.attach(&job.paths.run, place, &job.options)?));
    Ok(made)
}
