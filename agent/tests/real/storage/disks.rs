//! Block devices.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use firstlight_agent_api::agent::{FSGroup, ReadStreamRequest, StatsContainerRequest, WriteStreamRequest};
use firstlight_agent_api::oci;

use super::{Loop, code, create, erofs, mounted, mounts, read, refused, storage, with_agent};
use crate::storage::inside;
use crate::support::{Agent, not_runnable, short, spec};

#[test]
fn disk_is_mounted_with_options_and_unmounted_after_its_last_container() {
    with_agent(async |agent| {
        let disk = Loop::ext4(agent.dir.path(), "data", "from the disk");
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
        assert!(!inside(&agent, "sandbox/storage/v").exists(), "the agent's mount point is removed");
        // The disk is no longer in use: it can be mounted with other options.
        let again = storage("mmioblk", &disk.0, "ext4", "sandbox/storage/w", &["ro"]);
        create(&agent, "c3", vec![again]).await.unwrap();
        assert!(mounted(&agent, "sandbox/storage/w").unwrap().contains(" ro"));
        agent.remove("c3").await.unwrap();
    });
}

#[test]
fn concurrent_containers_share_one_mount() {
    with_agent(async |agent| {
        let disk = Loop::ext4(agent.dir.path(), "data", "x");
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
fn raw_block_volume_is_the_device() {
    with_agent(async |agent| {
        let disk = Loop::ext4(agent.dir.path(), "data", "x");
        create(&agent, "c1", vec![storage("blk", &disk.0, "bind", "sandbox/storage/raw", &[])]).await.unwrap();
        let found = fs::metadata(inside(&agent, "sandbox/storage/raw")).unwrap();
        assert!(found.file_type().is_block_device());
        assert_eq!(found.rdev(), fs::metadata(&disk.0).unwrap().rdev());
        agent.remove("c1").await.unwrap();
        assert!(!inside(&agent, "sandbox/storage/raw").exists());
    });
}

#[test]
fn erofs_image_is_mounted() {
    with_agent(async |agent| {
        let path = agent.dir.path().join("image.erofs");
        fs::write(&path, erofs::image("hello", "from the image")).unwrap();
        let disk = Loop::of(&path);
        create(&agent, "c1", vec![storage("blk", &disk.0, "erofs", "sandbox/storage/e", &["ro"])]).await.unwrap();
        assert_eq!(read(&agent, "sandbox/storage/e/hello"), "from the image");
        fs::write(inside(&agent, "sandbox/storage/e/more"), "").unwrap_err();
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn failed_disk_mount_is_reported_with_the_cause() {
    with_agent(async |agent| {
        let disk = Loop::ext4(agent.dir.path(), "data", "x");
        let node = disk.0.as_str();
        let at = "sandbox/storage/v";
        for (driver, source, fstype, options, parts) in [
            ("blk", node, "erofs", "", ["failed to mount erofs", node]),
            ("blk", node, "ext4", "data=nonsense", ["ext4 rejects the option data=nonsense", node]),
            ("blk", node, "proc", "", ["\"proc\"", "erofs"]),
            ("mmioblk", "/dev/null", "ext4", "", ["not a block device", "/dev/null"]),
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

/// Returns a container's I/O on a disk by operation, as a shim reads it.
async fn done(agent: &Agent, container: &str, minor: u64) -> BTreeMap<String, u64> {
    let request = StatsContainerRequest { container_id: container.into(), ..Default::default() };
    let stats = agent.calls.stats_container(short(), &request).await.unwrap().cgroup_stats.unwrap();
    let entries = stats.blkio_stats.io_service_bytes_recursive.iter();
    let ours = entries.filter(|entry| (entry.major, entry.minor) == (7, minor));
    ours.map(|entry| (entry.op.clone(), entry.value)).collect()
}

#[test]
fn disk_io_of_a_container_is_counted() {
    with_agent(async |agent| {
        let image = agent.dir.path().join("disk.img");
        fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
        let disk = Loop::of(&image);
        let minor: u64 = disk.0.trim_start_matches("/dev/loop").parse().unwrap();
        let script = "read line; dd if=/dev/disk of=/dev/null bs=65536 count=16 2>&1; echo done; sleep 1000";
        let mut user = spec(&agent.root("c1"), script);
        let node = oci::LinuxDevice {
            Path: "/dev/disk".into(),
            Type: "b".into(),
            Major: 7,
            Minor: i64::try_from(minor).unwrap(),
            FileMode: 0o600,
            ..Default::default()
        };
        user.Linux.mut_or_insert_default().Devices.push(node);
        agent.create(user, "c1").await.unwrap();
        if !agent.group("c1", "io.stat").exists() {
            not_runnable("the io controller of cgroup v2 is not available here");
        }
        agent.begin("c1").await;
        assert_eq!(done(&agent, "c1", minor).await, BTreeMap::new(), "nothing yet");
        let line = WriteStreamRequest { container_id: "c1".into(), data: b"go\n".to_vec(), ..Default::default() };
        agent.calls.write_stdin(short(), &line).await.unwrap();
        let mut output = String::new();
        while !output.contains("done") {
            let read = ReadStreamRequest { container_id: "c1".into(), len: 4096, ..Default::default() };
            output += &String::from_utf8(agent.calls.read_stdout(short(), &read).await.unwrap().data).unwrap();
        }
        let counted = done(&agent, "c1", minor).await;
        let at_least = |operation: &str, least: u64| counted.get(operation).is_some_and(|value| *value >= least);
        assert!(at_least("read", 1 << 20) && at_least("rios", 1), "{counted:?}: {output}");
        // Which cgroup the kernel charges for writeback depends on earlier writers of this disk.
        assert!(at_least("write", 0) && at_least("wios", 0), "{counted:?}: {output}");
        agent.remove("c1").await.unwrap();
    });
}
