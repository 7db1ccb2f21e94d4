//! Driver `local`: a directory on an existing file system. It is not removed after its last user:
//! its content belongs to the pod, and may be the host's.

use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::safe_path::{self, Kind, MountPoint};
use super::{Job, Resources, fs_group};
use crate::error::{Error, Result};

pub(super) fn make(job: &Job<'_>) -> Result<Resources> {
    let path = Path::new(&job.storage.mount_point);
    drop(MountPoint::create(&job.paths.run, path, Kind::Directory)?);
    let dir = safe_path::open_below(&job.paths.run, path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    if let Some(mode) = job.options.mode {
        // Not by mkdir, whose mode is reduced by the umask.
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode))
            .map_err(|error| Error::internal(format!("failed to set the mode: {error}")))?;
    }
    fs_group::apply(&dir, job)?;
    Ok(Resources::default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::Paths;
    use crate::storage::Options;
    use firstlight_agent_api::agent::Storage;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn make_at(root: &Path, path: &str, options: &[&str]) -> Result<Resources> {
        let storage = Storage {
            driver: "local".into(),
            mount_point: root.join(path).display().to_string(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            ..Default::default()
        };
        let paths = Paths::below(root);
        make(&Job { storage: &storage, options: Options::parse(&storage)?, device: None, paths: &paths })
    }

    #[test]
    fn directory_gets_its_mode_despite_the_umask_and_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            drop(make_at(root.path(), "run/kata-containers/a/b", &["mode=0777"]).unwrap());
            let mode = fs::metadata(root.path().join("run/kata-containers/a/b")).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o777);
        }
    }

    #[test]
    fn directory_behind_a_symlink_is_not_changed() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(root.path().join("run/kata-containers")).unwrap();
        symlink(outside.path(), root.path().join("run/kata-containers/a")).unwrap();
        let before = fs::metadata(outside.path()).unwrap().permissions().mode();
        for path in ["run/kata-containers/a", "run/kata-containers/a/b"] {
            make_at(root.path(), path, &["mode=0777"]).unwrap_err();
        }
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
        assert_eq!(fs::metadata(outside.path()).unwrap().permissions().mode(), before);
    }
}
