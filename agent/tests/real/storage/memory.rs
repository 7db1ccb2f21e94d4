//! tmpfs and huge pages.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use firstlight_agent_api::agent::{CreateSandboxRequest, UpdateEphemeralMountsRequest, VolumeStatsRequest};
use ttrpc::Code;

use super::{RUN, code, create, inside, mounted, refused, storage, with_agent};
use crate::support::{Agent, require_file_system, require_guest, short};

/// As shims send it; kata-agent drops all of its options.
const SHM: &[&str] = &["noexec", "nosuid", "nodev", "mode=1777", "size=67108864"];

async fn sandbox(agent: &Agent) {
    let request = CreateSandboxRequest {
        storages: vec![storage("ephemeral", "shm", "tmpfs", "sandbox/shm", SHM)],
        ..Default::default()
    };
    agent.calls.create_sandbox(short(), &request).await.unwrap();
}

#[test]
fn sandbox_shm_has_all_its_options() {
    with_agent(async |agent| {
        sandbox(&agent).await;
        let line = mounted(&agent, "sandbox/shm").unwrap();
        for part in ["noexec", "nosuid", "nodev", "size=65536k", " tmpfs shm "] {
            assert!(line.contains(part), "no {part} in {line}");
        }
        assert_eq!(fs::metadata(inside(&agent, "sandbox/shm")).unwrap().permissions().mode() & 0o7777, 0o1777);
    });
}

#[test]
fn failed_create_sandbox_leaves_no_storage() {
    require_file_system("virtiofs");
    with_agent(async |agent| {
        let good = storage("ephemeral", "shm", "tmpfs", "sandbox/shm", SHM);
        let bad = storage("virtio-fs", "kataShared", "virtiofs", "shared/containers/", &[]);
        let request = CreateSandboxRequest { storages: vec![good, bad], ..Default::default() };
        let (_, message) = code(agent.calls.create_sandbox(short(), &request).await);
        assert!(message.contains("kataShared") && message.contains("share with this tag"), "{message}");
        assert_eq!(mounted(&agent, "sandbox/shm"), None);
        sandbox(&agent).await;
    });
}

#[test]
fn tmpfs_volume_has_its_fsgroup() {
    with_agent(async |agent| {
        let volume = storage("ephemeral", "tmpfs", "tmpfs", "sandbox/ephemeral/cache", &["fsgid=1234"]);
        create(&agent, "c1", vec![volume]).await.unwrap();
        let found = fs::metadata(inside(&agent, "sandbox/ephemeral/cache")).unwrap();
        assert_eq!((found.gid(), found.mode() & 0o2070), (1234, 0o2070));
        agent.remove("c1").await.unwrap();
        let bad = storage("ephemeral", "tmpfs", "tmpfs", "sandbox/ephemeral/cache", &["size=many"]);
        let message = refused(&agent, vec![bad]).await;
        assert!(message.contains("rejects the option size=many"), "{message}");
        assert!(message.contains("Bad value for 'size'"), "the kernel's message: {message}");
    });
}

#[test]
fn huge_pages_are_reserved_and_released() {
    with_agent(async |agent| {
        require_guest("huge pages are taken from the machine's memory");
        let count =
            || fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages").unwrap().trim().to_owned();
        let volume = |options| storage("ephemeral", "nodev", "hugetlbfs", "sandbox/ephemeral/huge", &[options]);
        create(&agent, "c1", vec![volume("pagesize=2097152,size=4194304")]).await.unwrap();
        assert_eq!(count(), "2");
        let line = mounted(&agent, "sandbox/ephemeral/huge").unwrap();
        assert!(line.contains("pagesize=2M") && line.contains("size=4194304"), "{line}");
        agent.remove("c1").await.unwrap();
        assert_eq!(count(), "0");
        let message = refused(&agent, vec![volume("pagesize=3145728,size=4194304")]).await;
        assert!(message.contains("does not support huge pages of 3145728 bytes"), "{message}");
        let message = refused(&agent, vec![volume("pagesize=2M,size=900G")]).await;
        assert!(message.contains("more memory"), "{message}");
        assert_eq!(count(), "0");
    });
}

#[test]
fn remount_changes_only_the_size_of_tmpfs() {
    with_agent(async |agent| {
        sandbox(&agent).await;
        let update = async |storages| {
            let request = UpdateEphemeralMountsRequest { storages, ..Default::default() };
            agent.calls.update_ephemeral_mounts(short(), &request).await.map(|_| ())
        };
        update(vec![]).await.unwrap();
        update(vec![storage("ephemeral", "shm", "tmpfs", "sandbox/shm", &["remount", "size=8388608", "fsgid=77"])])
            .await
            .unwrap();
        let line = mounted(&agent, "sandbox/shm").unwrap();
        for part in ["noexec", "nosuid", "nodev", "size=8192k"] {
            assert!(line.contains(part), "no {part} in {line}");
        }
        assert_eq!(fs::metadata(inside(&agent, "sandbox/shm")).unwrap().gid(), 77);

        let request = VolumeStatsRequest { volume_guest_path: format!("{RUN}/sandbox/shm"), ..Default::default() };
        let stats = agent.calls.get_volume_stats(short(), &request).await.unwrap();
        assert_eq!((stats.usage[0].total, stats.usage[0].used), (8 << 20, 0));
        assert_eq!(stats.volume_condition.message, "OK");

        // Smaller than its contents.
        fs::write(inside(&agent, "sandbox/shm/data"), vec![1; 4 << 20]).unwrap();
        let (_, message) =
            code(update(vec![storage("ephemeral", "shm", "tmpfs", "sandbox/shm", &["size=1048576"])]).await);
        assert!(message.contains("sandbox/shm") && message.contains("tmpfs"), "{message}");
        // Mounts that are not the agent's are refused.
        let (kind, message) = code(update(vec![storage("ephemeral", "shm", "tmpfs", "..", &["size=1"])]).await);
        assert_eq!((kind, message.contains("not a storage of this sandbox")), (Code::NOT_FOUND, true), "{message}");
        for path in ["/etc", "/run/kata-containers/nothere"] {
            let request = VolumeStatsRequest { volume_guest_path: path.into(), ..Default::default() };
            assert!(code(agent.calls.get_volume_stats(short(), &request).await).1.contains(path));
        }
    });
}
