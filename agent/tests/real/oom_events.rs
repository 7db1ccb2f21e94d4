//! Memory limits and OOM events. Needs the memory controller.

use std::time::Duration;

use firstlight_agent_api::agent::{GetOOMEventRequest, StatsContainerRequest};

use crate::support::{Agent, short, spec, with_containers};

const MIB: i64 = 1 << 20;

/// Allocates more memory than the limit.
const HUNGRY: &str = "head -c 99999999 /dev/zero | tail -c 99999999";

#[test]
fn every_oom_kill_is_reported() {
    with_containers(async || {
        let agent = Agent::start().await;
        let controllers = std::fs::read_to_string(agent.inside("/sys/fs/cgroup/cgroup.controllers")).unwrap();
        assert!(controllers.contains("memory"), "cgroup v2 has no memory controller here: {controllers}");
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut limited = spec(&root, "sleep 1000");
        let memory =
            limited.Linux.mut_or_insert_default().Resources.mut_or_insert_default().Memory.mut_or_insert_default();
        memory.Limit = 24 * MIB;
        agent.create(limited, "c1").await.unwrap();
        agent.begin("c1").await;
        let next = || async {
            let event = agent.calls.get_oom_event(short(), &GetOOMEventRequest::new()).await;
            event.map(|event| event.container_id)
        };
        for round in 0..2 {
            // An exec process is killed; the container's init process survives.
            let (_, code) = agent.shell("c1", &format!("e{round}"), HUNGRY).await;
            assert_ne!(code, 0);
            assert_eq!(next().await.unwrap(), "c1");
        }
        // A pending call gets the event too.
        let hungry = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            agent.shell("c1", "e9", HUNGRY).await
        };
        let (event, _) = tokio::join!(next(), hungry);
        assert_eq!(event.unwrap(), "c1");

        let request = StatsContainerRequest { container_id: "c1".into(), ..Default::default() };
        let stats = agent.calls.stats_container(short(), &request).await.unwrap().cgroup_stats.unwrap();
        let memory = stats.memory_stats.usage.clone().unwrap();
        assert_eq!(i64::try_from(memory.limit).unwrap(), 24 * MIB);
        assert!(memory.usage > 0 && stats.cpu_stats.cpu_usage.total_usage > 0);
        agent.remove("c1").await.unwrap();
    });
}
