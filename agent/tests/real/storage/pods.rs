//! What containers of a pod have in common.

use std::fs;

use firstlight_agent_api::agent::{CreateContainerRequest, RemoveStaleVirtiofsShareMountsRequest, SharedMount};

use super::{code, create, mounted, storage, with_agent};
use crate::support::{Agent, short, spec};

async fn named(agent: &Agent, container: &str, script: &str, shared: Vec<SharedMount>) -> ttrpc::Result<()> {
    let root = agent.root(container);
    let mut spec = spec(&root, script);
    spec.Annotations.insert("io.kubernetes.cri.container-name".into(), format!("name-of-{container}"));
    let mut request = CreateContainerRequest::new();
    request.container_id = container.into();
    request.OCI = Some(spec).into();
    request.shared_mounts = shared;
    agent.calls.create_container(short(), &request).await.map(|_| ())
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
fn a_container_sees_what_another_shares_also_later() {
    with_agent(async |agent| {
        named(&agent, "c1", "sleep 1; mkdir /tmp/out; echo one > /tmp/out/file; sleep 1000", vec![]).await.unwrap();
        agent.begin("c1").await;
        // Waits until it is there.
        named(&agent, "c2", "sleep 1000", vec![shared("/tmp/out", "/deep/in")]).await.unwrap();
        agent.begin("c2").await;
        assert_eq!(
            agent.shell("c2", "e1", "cat /deep/in/file; echo two > /deep/in/back").await,
            ("one\n".to_owned(), 0)
        );
        assert_eq!(agent.shell("c1", "e1", "cat /tmp/out/back").await.0, "two\n");

        let (_, message) = code(named(&agent, "c3", "true", vec![shared("/tmp/never", "/x")]).await);
        assert!(message.contains("there is no /tmp/never, after 10 s"), "{message}");
        let (kind, _) = code(named(&agent, "c3", "true", vec![shared("../x", "/x")]).await);
        assert_eq!(kind, ttrpc::Code::INVALID_ARGUMENT);
        agent.remove("c2").await.unwrap();
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn a_shared_storage_stays_and_mounts_in_the_share_are_looked_at() {
    with_agent(async |agent| {
        let mut volume = storage("ephemeral", "tmpfs", "tmpfs", "shared/containers/kept", &[]);
        volume.shared = true;
        create(&agent, "c1", vec![volume.clone()]).await.unwrap();
        fs::write(super::inside(&agent, "shared/containers/kept/x"), "y").unwrap();
        agent.remove("c1").await.unwrap();
        assert!(mounted(&agent, "shared/containers/kept").is_some());
        create(&agent, "c2", vec![volume]).await.unwrap();
        assert_eq!(super::read(&agent, "shared/containers/kept/x"), "y");
        let request = RemoveStaleVirtiofsShareMountsRequest::new();
        agent.calls.remove_stale_virtiofs_share_mounts(short(), &request).await.unwrap();
        // The same place cannot be something else.
        let other = storage("bind", "/bin", "bind", "shared/containers/kept", &[]);
        let (kind, message) = code(create(&agent, "c3", vec![other]).await);
        assert_eq!(kind, ttrpc::Code::ALREADY_EXISTS);
        assert!(message.contains("ephemeral"), "{message}");
    });
}
