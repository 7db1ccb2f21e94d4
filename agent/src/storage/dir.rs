//! `local`: a directory on a file system that is there already. It stays when its
//! last user is gone: what is in it is the pod's, and may be the host's.

use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::place::{self, Kind, Place};
use super::{Job, Made, group};
use crate::error::{Error, Result};

pub(super) fn make(job: &Job<'_>) -> Result<Made> {
    let path = Path::new(&job.storage.mount_point);
    drop(Place::make(&job.paths.run, path, Kind::Directory)?);
    let dir = place::open_below(&job.paths.run, path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    if let Some(mode) = job.options.mode {
        // Not the mode of mkdir, which the umask would narrow.
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode))
            .map_err(|error| Error::internal(format!("cannot set the mode: {error}")))?;
    }
    group::give(&dir, job)?;
    Ok(Made::default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::Paths;
    use crate::storage::Options;
    use firstlight_agent_api::agent::Storage;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn make_at(root: &Path, path: &str, options: &[&str]) -> Result<Made> {
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
    fn a_directory_gets_its_mode_whatever_the_umask_and_stays() {
        let root = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            drop(make_at(root.path(), "run/kata-containers/a/b", &["mode=0777"]).unwrap());
            let mode = fs::metadata(root.path().join("run/kata-containers/a/b")).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o777);
        }
    }

    #[test]
    fn a_directory_behind_a_link_is_not_touched() {
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
