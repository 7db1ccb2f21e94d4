//! Local, bind-mounted and watchable directories, and network file systems.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::{Duration, Instant};

use super::{code, create, inside, mounted, mounts, read, refused, storage, with_agent};
use crate::support::require_file_system;

#[test]
fn local_directory_has_its_mode_and_survives_its_containers() {
    with_agent(async |agent| {
        let at = "shared/containers/s1/rootfs/local/x";
        create(&agent, "c1", vec![storage("local", "local", "local", at, &["mode=0777"])]).await.unwrap();
        assert_eq!(fs::metadata(inside(&agent, at)).unwrap().permissions().mode() & 0o7777, 0o777);
        agent.remove("c1").await.unwrap();
        assert!(inside(&agent, at).is_dir());
        let message = refused(&agent, vec![storage("local", "local", "local", at, &["mode=wide"])]).await;
        assert!(message.contains("mode=wide"), "{message}");
    });
}

#[test]
fn files_and_directories_are_bind_mounted_with_options() {
    with_agent(async |agent| {
        let source = agent.dir.path().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("file"), "bound").unwrap();
        let dir = storage("bind", &source, "bind", "sandbox/directory", &["rbind", "ro", "noexec", "rprivate"]);
        let file = storage("bind", source.join("file"), "bind", "sandbox/file", &["bind"]);
        create(&agent, "c1", vec![dir, file]).await.unwrap();
        assert_eq!(
            (read(&agent, "sandbox/directory/file").as_str(), read(&agent, "sandbox/file").as_str()),
            ("bound", "bound")
        );
        let line = mounted(&agent, "sandbox/directory").unwrap();
        assert!(line.contains(" ro,") && line.contains("noexec"), "{line}");
        fs::write(inside(&agent, "sandbox/directory/new"), "").unwrap_err();
        fs::write(inside(&agent, "sandbox/file"), "changed").unwrap();
        assert_eq!(fs::read_to_string(source.join("file")).unwrap(), "changed");
        agent.remove("c1").await.unwrap();
        assert!(mounts(&agent).is_empty() && source.join("file").exists());

        symlink(&source, agent.dir.path().join("link")).unwrap();
        let at = "sandbox/directory";
        let linked = storage("bind", agent.dir.path().join("link"), "bind", at, &[]);
        assert!(refused(&agent, vec![linked]).await.contains("\"link\" is a symbolic link"));
        let missing = storage("bind", source.join("nothere"), "bind", at, &[]);
        assert!(refused(&agent, vec![missing]).await.contains("\"nothere\" does not exist"));
    });
}

/// Waits for an effect of the two-second poll.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(15), "timed out after 15 s: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn watchable_directory_follows_its_source_and_is_bind_mounted_when_too_large() {
    with_agent(async |agent| {
        let source = agent.dir.path().join("config");
        fs::create_dir_all(source.join("..1")).unwrap();
        fs::write(source.join("..1/key"), "one").unwrap();
        symlink("..1", source.join("..data")).unwrap();
        symlink("..data/key", source.join("key")).unwrap();
        let single = agent.dir.path().join("single");
        fs::write(&single, "first").unwrap();
        let at = "shared/containers/watchable/config";
        let volumes = vec![
            storage("watchable-bind", &source, "bind", at, &[]),
            storage("watchable-bind", &single, "bind", "shared/containers/watchable/single", &[]),
        ];
        create(&agent, "c1", volumes).await.unwrap();
        assert_eq!(read(&agent, &format!("{at}/key")), "one");
        assert!(mounted(&agent, at).is_none(), "a copy, not a mount");

        // As kubelet updates a volume.
        fs::create_dir(source.join("..2")).unwrap();
        fs::write(source.join("..2/key"), "two").unwrap();
        symlink("..2", source.join("..tmp")).unwrap();
        fs::rename(source.join("..tmp"), source.join("..data")).unwrap();
        fs::write(&single, "second").unwrap();
        eventually("the new version", || read(&agent, &format!("{at}/key")) == "two");
        eventually("the new file", || read(&agent, "shared/containers/watchable/single") == "second");

        for number in 0..20 {
            fs::write(source.join(format!("more{number}")), "").unwrap();
        }
        eventually("the bind mount", || mounted(&agent, at).is_some());
        agent.remove("c1").await.unwrap();
        assert!(mounted(&agent, at).is_none());
        assert!(source.join("..2/key").exists(), "the source is not removed");
        eventually("the removal of the copies", || !inside(&agent, at).exists());

        let message =
            refused(&agent, vec![storage("watchable-bind", &single, "bind", "shared/containers/x", &[])]).await;
        assert!(message.contains("below a directory watchable"), "{message}");
    });
}

#[test]
fn missing_share_is_reported_by_tag() {
    require_file_system("virtiofs");
    with_agent(async |agent| {
        let message =
            refused(&agent, vec![storage("virtio-fs", "kataShared", "virtiofs", "shared/containers", &["nodev"])])
                .await;
        assert!(message.contains("virtiofs") && message.contains("share with this tag"), "{message}");
    });
}

#[test]
fn nfs_needs_an_address_and_a_kernel_with_nfs() {
    with_agent(async |agent| {
        let message = refused(&agent, vec![storage("nfs", "server:/export", "nfs4", "sandbox/nfs", &[])]).await;
        assert!(message.contains("does not resolve names"), "{message}");
        let message = refused(&agent, vec![storage("nfs", "127.0.0.1:/export", "nfs4", "sandbox/nfs", &[])]).await;
        assert!(message.contains("the guest's kernel does not support nfs4"), "{message}");
    });
}

#[test]
fn unknown_storage_drivers_are_reported() {
    with_agent(async |agent| {
        let (kind, message) = code(create(&agent, "c1", vec![storage("nonsense", "", "", "x", &[])]).await);
        assert_eq!(kind, ttrpc::Code::INTERNAL);
        assert!(
            message.contains("Failed to find the storage handler nonsense") && message.contains("erofs.multi-layer"),
            "{message}"
        );
        let (kind, message) = code(create(&agent, "c1", vec![storage("image_guest_pull", "", "", "x", &[])]).await);
        assert_eq!(kind, ttrpc::Code::UNIMPLEMENTED);
        assert!(message.contains("let the host pull"), "{message}");
    });
}
