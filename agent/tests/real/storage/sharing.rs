//! Mounts and storages shared by the containers of a pod.

use std::fs;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use firstlight_agent_api::agent::{
    CreateContainerRequest, RemoveContainerRequest, RemoveStaleVirtiofsShareMountsRequest, SharedMount,
    WriteStreamRequest,
};
use firstlight_agent_api::oci;

use super::{Loop, RUN, busybox, code, create, mounted, storage, with_agent};
use crate::support::{Agent, has_exited, require_guest, short, spec};

async fn named(agent: &Agent, container: &str, script: &str, shared: Vec<SharedMount>) -> ttrpc::Result<()> {
    let root = super::fresh_root(agent, container);
    let mut spec = spec(&root, script);
    spec.Annotations.insert("io.kubernetes.cri.container-name".into(), format!("name-of-{container}"));
    let mut request = CreateContainerRequest::new();
    request.container_id = container.into();
    request.OCI = Some(spec).into();
    request.shared_mounts = shared;
    agent.calls.create_container(short(), &request).await.map(|_| ())
}

/// Returns the cgroup and the process of a container that is being created.
async fn process_of(agent: &Agent, container: &str) -> (PathBuf, u32) {
    let start = format!("{container}-");
    loop {
        let groups = fs::read_dir(agent.inside("/sys/fs/cgroup/firstlight-test")).into_iter().flatten().flatten();
        let group = groups
            .map(|entry| entry.path())
            .find(|path| path.file_name().unwrap().to_string_lossy().starts_with(&start));
        let processes = group.as_ref().and_then(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
        if let (Some(group), Some(Ok(process))) = (group, processes.map(|text| text.trim().parse())) {
            return (group, process);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn shared(from: &str, to: &str) -> SharedMount {
    SharedMount {
        name: "m".into(),
        src_ctr: "name-of-c1".into(),
        src_path: from.into(),
        dst_ctr: "name-of-c2".into(),
        dst_path: to.into(),
        ..Default::default()
    }
}

#[test]
fn container_sees_a_shared_mount_of_another() {
    with_agent(async |agent| {
        named(&agent, "c1", "sleep 1; mkdir /tmp/out; echo one > /tmp/out/file; sleep 1000", vec![]).await.unwrap();
        agent.begin("c1").await;
        // Waits until the source exists.
        named(&agent, "c2", "sleep 1000", vec![shared("/tmp/out", "/deep/in")]).await.unwrap();
        agent.begin("c2").await;
        assert_eq!(
            agent.shell("c2", "e1", "cat /deep/in/file; echo two > /deep/in/back").await,
            ("one\n".to_owned(), 0)
        );
        assert_eq!(agent.shell("c1", "e1", "cat /tmp/out/back").await.0, "two\n");

        // At that point it has a process, which must be rolled back.
        let never = named(&agent, "c3", "true", vec![shared("/tmp/never", "/x")]);
        let (refused, (group, process)) = tokio::join!(never, process_of(&agent, "c3"));
        let (_, message) = code(refused);
        assert!(message.contains("/tmp/never does not exist, after 10 s"), "{message}");
        assert!(has_exited(process), "the process {process} of the failed container is still alive");
        assert!(!group.exists(), "{}", group.display());
        for dir in ["/run/kata-containers/c3", "/run/firstlight/containers/c3"] {
            assert!(!agent.inside(dir).exists(), "{dir}");
        }
        named(&agent, "c3", "exit 7", vec![]).await.unwrap();
        agent.begin("c3").await;
        assert_eq!(agent.wait("c3", "").await.unwrap(), 7);
        agent.remove("c3").await.unwrap();
        let (kind, _) = code(named(&agent, "c3", "true", vec![shared("../x", "/x")]).await);
        assert_eq!(kind, ttrpc::Code::INVALID_ARGUMENT);
        agent.remove("c2").await.unwrap();
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn shared_storage_survives_its_container_and_stale_mounts_are_checked() {
    with_agent(async |agent| {
        let mut volume = storage("ephemeral", "tmpfs", "tmpfs", "shared/containers/volume", &[]);
        volume.shared = true;
        create(&agent, "c1", vec![volume.clone()]).await.unwrap();
        fs::write(super::inside(&agent, "shared/containers/volume/x"), "y").unwrap();
        agent.remove("c1").await.unwrap();
        assert!(mounted(&agent, "shared/containers/volume").is_some());
        create(&agent, "c2", vec![volume]).await.unwrap();
        assert_eq!(super::read(&agent, "shared/containers/volume/x"), "y");
        let request = RemoveStaleVirtiofsShareMountsRequest::new();
        agent.calls.remove_stale_virtiofs_share_mounts(short(), &request).await.unwrap();
        // Another storage at the same mount point is refused.
        let other = storage("bind", "/bin", "bind", "shared/containers/volume", &[]);
        let (kind, message) = code(create(&agent, "c3", vec![other]).await);
        assert_eq!(kind, ttrpc::Code::ALREADY_EXISTS);
        assert!(message.contains("ephemeral"), "{message}");
    });
}

/// As in kata-containers issue 13757: a container that cannot be killed does not keep the guest's mounts.
#[test]
fn unkillable_container_keeps_no_storage_mounted() {
    with_agent(async |agent| {
        require_guest("a failure would leave an unkillable process");
        let disk = Loop::ext4(agent.dir.path(), "data", "x");
        let root = agent.root("c1");
        let mut spec = spec(&root, "read go; echo more > /v/data");
        spec.Mounts.push(oci::Mount {
            destination: "/v".into(),
            source: format!("{RUN}/sandbox/storage/v"),
            type_: "bind".into(),
            options: vec!["rbind".into()],
            ..Default::default()
        });
        let mut request = CreateContainerRequest::new();
        request.container_id = "c1".into();
        request.OCI = Some(spec).into();
        request.storages = vec![storage("blk", &disk.0, "ext4", "sandbox/storage/v", &[])];
        agent.calls.create_container(short(), &request).await.unwrap();
        agent.begin("c1").await;
        // By descriptor, which stays valid after the unmount.
        let dir = fs::File::open(super::inside(&agent, "sandbox/storage/v")).unwrap();
        let frozen = format!("/proc/{}/fd/{}", std::process::id(), dir.as_raw_fd());
        busybox(&["fsfreeze", "--freeze", &frozen]);
        // The process is in uninterruptible sleep on the frozen disk.
        let write = WriteStreamRequest { container_id: "c1".into(), data: b"go\n".to_vec(), ..Default::default() };
        agent.calls.write_stdin(short(), &write).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let remove = RemoveContainerRequest { container_id: "c1".into(), timeout: 1, ..Default::default() };
        let (_, message) = code(agent.calls.remove_container(short(), &remove).await);
        assert!(message.contains("ETIME"), "{message}");
        assert_eq!(mounted(&agent, "sandbox/storage/v"), None);
        busybox(&["fsfreeze", "--unfreeze", &frozen]);
        agent.remove("c1").await.unwrap();
    });
}
