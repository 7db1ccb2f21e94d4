//! A container's resource group, made beside everything else.
//!
//! The kernel takes a good part of a container's creation for it (each
//! controller allocates for every processor). What the server and the runtime
//! do at first does not need it, so a thread begins to make it at once. The
//! runtime does not wait for that thread: it makes what it does not find.

use std::path::{Path, PathBuf};

use tokio::task::{JoinHandle, spawn_blocking};

/// A group that is being made.
#[derive(Debug)]
pub(crate) struct Ahead {
    path: PathBuf,
    made: JoinHandle<bool>,
}

impl Ahead {
    /// Begins to make a group and those above it that are missing.
    pub(crate) fn begin(path: &Path) -> Self {
        let path = path.to_owned();
        let group = path.clone();
        Self { path, made: spawn_blocking(move || firstlight_runtime::make_cgroup(&group).unwrap_or(false)) }
    }

    /// The container is made or not; in the latter case the group is removed
    /// again if it was made here and nobody is in it. Where it cannot be made it
    /// is the runtime that says why.
    pub(crate) async fn settle(self, used: bool) {
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
    async fn only_what_was_made_and_is_empty_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c1");
        Ahead::begin(&path).settle(false).await;
        assert!(!path.exists(), "nobody needs it");
        Ahead::begin(&path).settle(true).await;
        Ahead::begin(&path).settle(false).await;
        assert!(path.is_dir(), "it was there before");
        std::fs::remove_dir(&path).unwrap();
        let group = Ahead::begin(&path);
        while !path.exists() {
            tokio::task::yield_now().await;
        }
        std::fs::write(path.join("a-process"), "").unwrap();
        group.settle(false).await;
        assert!(path.is_dir(), "somebody is in it");
        Ahead::begin(&path.join("a-process/c2")).settle(false).await;
        assert!(path.join("a-process").is_file());
    }
}
