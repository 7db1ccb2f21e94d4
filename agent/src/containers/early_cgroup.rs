//! Creates a container's cgroup in parallel with the rest of CreateContainer.
//!
//! Creating a cgroup is a large part of the time of a container's creation (each controller
//! allocates per CPU). The first steps of server and runtime do not need it, so a thread starts to
//! create it at once. The runtime does not wait for that thread: it creates the cgroup if it is
//! missing.

use std::path::{Path, PathBuf};

use tokio::task::{JoinHandle, spawn_blocking};

/// A cgroup whose creation is in progress.
#[derive(Debug)]
pub(crate) struct EarlyCgroup {
    path: PathBuf,
    made: JoinHandle<bool>,
}

impl EarlyCgroup {
    /// Starts to create a cgroup and its missing ancestors.
    pub(crate) fn start(path: &Path) -> Self {
        let path = path.to_owned();
        let group = path.clone();
        Self { path, made: spawn_blocking(move || firstlight_runtime::make_cgroup(&group).unwrap_or(false)) }
    }

    /// Waits for the creation. If the container was not created, removes the cgroup, provided that
    /// it was created here and is empty. A failure to create it is reported by the runtime.
    pub(crate) async fn finish(self, used: bool) {
        let made = self.made.await.unwrap_or(false);
        if made && !used {
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_new_and_empty_cgroup_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c1");
        EarlyCgroup::start(&path).finish(false).await;
        assert!(!path.exists(), "it is unused");
        EarlyCgroup::start(&path).finish(true).await;
        EarlyCgroup::start(&path).finish(false).await;
        assert!(path.is_dir(), "it existed before");
        std::fs::remove_dir(&path).unwrap();
        let early_cgroup = EarlyCgroup::start(&path);
        while !path.exists() {
            tokio::task::yield_now().await;
        }
        std::fs::write(path.join("a-process"), "").unwrap();
        early_cgroup.finish(false).await;
        assert!(path.is_dir(), "it has a process");
        EarlyCgroup::start(&path.join("a-process/c2")).finish(false).await;
        assert!(path.join("a-process").is_file());
    }
}
