//! PauseContainer and ResumeContainer.

use std::fs;
use std::time::{Duration, Instant};

use firstlight_agent_api::health::CheckRequest;
use ttrpc::Code;

use crate::support::{code, short, spec, with_agent};

#[test]
fn paused_container_is_frozen_and_resumes() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "while :; do echo x >> /tmp/log; usleep 20000; done").await;
        let log = agent.dir.path().join("c1/rootfs/tmp/log");
        let len = || fs::metadata(&log).map_or(0, |metadata| metadata.len());
        let grows = async || {
            let before = len();
            for _ in 0..100 {
                tokio::time::sleep(Duration::from_millis(20)).await;
                if len() > before {
                    return true;
                }
            }
            false
        };
        assert!(grows().await);
        assert!(code(agent.resume("c1").await).1.contains("is not paused"));
        agent.pause("c1").await.unwrap();
        assert!(fs::read_to_string(agent.group("c1", "cgroup.events")).unwrap().contains("frozen 1"));
        let still = len();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(len(), still, "the reply came before the cgroup was frozen");
        // A second pause and an exec are refused; other containers and the agent are not affected.
        assert_eq!(code(agent.pause("c1").await).0, Code::FAILED_PRECONDITION);
        let (kind, text) = code(agent.exec("c1", "e1", "true").await);
        assert!(kind == Code::FAILED_PRECONDITION && text.contains("resume"), "{text}");
        agent.health.check(short(), &CheckRequest::new()).await.unwrap();
        agent.run("c2", "exit 3").await;
        assert_eq!(agent.wait("c2", "").await.unwrap(), 3);
        agent.resume("c1").await.unwrap();
        assert!(grows().await);
        assert_eq!(agent.shell("c1", "e1", "echo hi").await, ("hi\n".to_owned(), 0));
        for container in ["c1", "c2"] {
            agent.remove(container).await.unwrap();
        }
    });
}

#[test]
fn paused_container_can_be_killed_and_removed() {
    with_agent(async |agent| {
        agent.sandbox().await;
        assert_eq!(code(agent.pause("none").await).0, Code::INVALID_ARGUMENT);
        // Also before start.
        let root = agent.root("c1");
        agent.create(spec(&root, "sleep 1000"), "c1").await.unwrap();
        agent.pause("c1").await.unwrap();
        assert!(code(agent.start_container("c1").await).1.contains("resume"));
        agent.resume("c1").await.unwrap();
        agent.begin("c1").await;
        agent.pause("c1").await.unwrap();
        let begin = Instant::now();
        agent.signal("c1", "", 9).await.unwrap();
        assert_eq!(agent.wait("c1", "").await.unwrap(), 137);
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
        agent.remove("c1").await.unwrap();
        agent.run("c2", "sleep 1000").await;
        agent.pause("c2").await.unwrap();
        agent.remove("c2").await.unwrap();
        // An exited container cannot be paused.
        agent.run("c3", "exit 0").await;
        assert_eq!(agent.wait("c3", "").await.unwrap(), 0);
        assert!(code(agent.pause("c3").await).1.contains("exited"));
        agent.remove("c3").await.unwrap();
    });
}
