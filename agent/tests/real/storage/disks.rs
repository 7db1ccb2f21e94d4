//! Block devices.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use firstlight_agent_api::agent::FSGroup;

use super::{Loop, code, create, erofs, mounted, mounts, read, refused, storage, with_agent};
use crate::storage::inside;

#[test]
fn a_disk_is_mounted_with_its_options_and_goes_with_its_last_user() {
    with_agent(async |agent| {
        let disk = Loop::ext4(agent.folder.path(), "data", "from the disk");
        let mut volume =
            storage("blk", &disk.0, "ext4", "sandbox/storage/v", &["nosuid,noexec", "noatime", "stripe=16"]);
        volume.fs_group = Some(FSGroup { group_id: 4711, ..Default::default() }).into();
        create(&agent, "c1", vec![volume.clone()]).await.unwrap();
        create(&agent, "c2", vec![volume.clone()]).await.unwrap();
        assert_eq!(read(&agent, "sandbox/storage/v/data"), "from the disk");
        let line = mounted(&agent, "sandbox/storage/v").unwrap();
        for part in ["nosuid", "noexec", "noatime", "stripe=16", " ext4 ", &disk.0] {
            assert!(line.contains(part), "no {part} in {line}");
        }
        let root = fs::metadata(inside(&agent, "sandbox/storage/v")).unwrap();
        assert_eq!((root.gid(), root.permissions().mode() & 0o2770), (4711, 0o2770));
        assert_eq!(fs::metadata(inside(&agent, "sandbox/storage/v/data")).unwrap().mode() & 0o777, 0o664);
        assert_eq!(mounts(&agent).iter().filter(|line| line.contains("storage/v")).count(), 1, "mounted once");

        agent.remove("c1").await.unwrap();
        assert!(mounted(&agent, "sandbox/storage/v").is_some(), "c2 uses it");
        agent.remove("c2").await.unwrap();
        assert_eq!(mounted(&agent, "sandbox/storage/v"), None);
        assert!(!inside(&agent, "sandbox/storage/v").exists(), "the mount point was ours");
        // Nothing holds the disk any more: it can be had with other options.
        let again = storage("mmioblk", &disk.0, "ext4", "sandbox/storage/w", &["ro"]);
        create(&agent, "c3", vec![again]).await.unwrap();
        assert!(mounted(&agent, "sandbox/storage/w").unwrap().contains(" ro"));
        agent.remove("c3").await.unwrap();
    });
}

#[test]
fn users_at_the_same_time_share_one_mount() {
    with_agent(async |agent| {
        let disk = Loop::ext4(agent.folder.path(), "data", "x");
        let volume = storage("nvdimm", &disk.0, "ext4", "sandbox/storage/v", &[]);
        for round in 0..5 {
            let one = create(&agent, "c1", vec![volume.clone()]);
            let two = create(&agent, "c2", vec![volume.clone()]);
            let (one, two) = tokio::join!(one, two);
            one.unwrap();
            two.unwrap();
            assert_eq!(mounts(&agent).iter().filter(|line| line.contains("storage/v")).count(), 1, "round {round}");
            assert_eq!(read(&agent, "sandbox/storage/v/data"), "x");
            let (one, two) = tokio::join!(agent.remove("c1"), agent.remove("c2"));
            one.unwrap();
            two.unwrap();
            assert_eq!(mounted(&agent, "sandbox/storage/v"), None, "round {round}");
        }
    });
}

#[test]
fn a_raw_volume_is_the_device_itself() {
    with_agent(async |agent| {
        let disk = Loop::ext4(agent.folder.path(), "data", "x");
        create(&agent, "c1", vec![storage("blk", &disk.0, "bind", "sandbox/storage/raw", &[])]).await.unwrap();
        let found = fs::metadata(inside(&agent, "sandbox/storage/raw")).unwrap();
        assert!(found.file_type().is_block_device());
        assert_eq!(found.rdev(), fs::metadata(&disk.0).unwrap().rdev());
        agent.remove("c1").await.unwrap();
        assert!(!inside(&agent, "sandbox/storage/raw").exists());
    });
}

#[test]
fn an_erofs_image_is_read() {
    with_agent(async |agent| {
        let path = agent.folder.path().join("image.erofs");
        fs::write(&path, erofs::image("hello", "from the image")).unwrap();
        let disk = Loop::of(&path);
        create(&agent, "c1", vec![storage("blk", &disk.0, "erofs", "sandbox/storage/e", &["ro"])]).await.unwrap();
        assert_eq!(read(&agent, "sandbox/storage/e/hello"), "from the image");
        fs::write(inside(&agent, "sandbox/storage/e/more"), "").unwrap_err();
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn a_disk_that_cannot_be_mounted_is_named_with_the_cause() {
    with_agent(async |agent| {
        let disk = Loop::ext4(agent.folder.path(), "data", "x");
        let node = disk.0.as_str();
        let at = "sandbox/storage/v";
        for (driver, source, fstype, options, parts) in [
            ("blk", node, "erofs", "", ["cannot mount erofs", node]),
            ("blk", node, "ext4", "data=nonsense", ["ext4 does not take the option data=nonsense", node]),
            ("blk", node, "proc", "", ["\"proc\"", "erofs"]),
            ("mmioblk", "/dev/null", "ext4", "", ["no block device", "/dev/null"]),
            ("nvdimm", "/dev/../etc/passwd", "ext4", "", ["passwd", "/dev/"]),
        ] {
            let message = refused(&agent, vec![storage(driver, source, fstype, at, &[options])]).await;
            for part in parts {
                assert!(message.contains(part), "no {part:?} in: {message}");
            }
        }
        let mut encrypted = storage("blk", node, "ext4", at, &[]);
        encrypted.driver_options = vec!["encryption_key=ephemeral".into()];
        let (kind, message) = code(create(&agent, "c1", vec![encrypted]).await);
        assert_eq!(kind, ttrpc::Code::UNIMPLEMENTED);
        assert!(message.contains("encryption_key") && message.contains("plain block volume"), "{message}");
    });
}
