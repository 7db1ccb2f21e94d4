//! DestroySandbox with everything that a sandbox may have.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use firstlight_agent_api::agent::{CreateContainerRequest, DestroySandboxRequest, Storage};

use crate::support::{Agent, gone, short, spec, with_agent};

const RUN: &str = "/run/kata-containers";

/// Keeps the agent's mount namespace when the agent has ended, to look at.
struct Witness(Child);

impl Witness {
    fn of(agent: &Agent) -> Self {
        let pid = agent.pids()[0].to_string();
        let mut command = Command::new("/bin/busybox");
        let child = command.args(["nsenter", "-t", &pid, "-m", "/bin/busybox", "sleep", "1000"]).spawn().unwrap();
        Self(child)
    }

    fn path(&self, of: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{of}", self.0.id()))
    }

    /// Where the agent has mounted something for containers.
    fn mounts(&self) -> Vec<String> {
        let table = fs::read_to_string(self.path("mountinfo")).unwrap();
        let places = table.lines().filter_map(|line| line.split(' ').nth(4));
        // Not the directory itself, where PID 1 mounts one.
        places.filter(|place| place.starts_with(RUN) && *place != RUN).map(str::to_owned).collect()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn memory(name: &str) -> Storage {
    let mount_point = format!("{RUN}/sandbox/ephemeral/{name}");
    let (driver, source, fstype) = ("ephemeral".into(), "tmpfs".into(), "tmpfs".into());
    Storage { driver, source, fstype, mount_point, ..Default::default() }
}

/// Every process of a container.
fn processes(agent: &Agent, container: &str) -> Vec<u32> {
    let text = fs::read_to_string(agent.group(container, "cgroup.procs")).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn a_sandbox_goes_with_its_containers_and_their_storages() {
    with_agent(async |agent| {
        agent.sandbox().await;
        for container in ["c1", "c2", "c3"] {
            let root = agent.root(container);
            let mut request = CreateContainerRequest::new();
            request.container_id = container.into();
            request.OCI = Some(spec(&root, "sleep 1000 & sleep 1000")).into();
            // One of their own, and one for all.
            request.storages = vec![memory(container), memory("shared")];
            agent.calls.create_container(short(), &request).await.unwrap();
        }
        // One with a further process, one that is paused, one that was never started.
        agent.begin("c1").await;
        agent.exec("c1", "e1", "sleep 1000").await.unwrap();
        agent.begin("c2").await;
        agent.pause("c2").await.unwrap();

        let witness = Witness::of(&agent);
        tokio::time::sleep(Duration::from_millis(500)).await;
        let all: Vec<u32> = ["c1", "c2", "c3"].iter().flat_map(|one| processes(&agent, one)).collect();
        // A shell that was paused at once has not started anything.
        assert!(all.len() >= 5, "{all:?}");
        assert_eq!(witness.mounts().len(), 4, "{:?}", witness.mounts());
        let groups = witness.path("root/sys/fs/cgroup/firstlight-test");
        assert_eq!(fs::read_dir(&groups).unwrap().flatten().filter(|entry| entry.path().is_dir()).count(), 3);

        agent.calls.destroy_sandbox(short(), &DestroySandboxRequest::new()).await.unwrap();
        // All of it is done when the answer comes.
        assert!(all.iter().all(|pid| gone(*pid)), "of {all:?} some live on");
        assert_eq!(witness.mounts(), [""; 0]);
        assert_eq!(fs::read_dir(&groups).unwrap().flatten().filter(|entry| entry.path().is_dir()).count(), 0);
        for container in ["c1", "c2", "c3"] {
            assert!(!witness.path(&format!("root{RUN}/{container}")).exists());
        }
        // And nothing is made while the agent is about to end.
        let root = agent.root("c4");
        assert!(agent.create(spec(&root, "true"), "c4").await.is_err());
        agent.ends("alone, the agent ends with its sandbox").await;
    });
}
