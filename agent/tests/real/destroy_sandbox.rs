//! DestroySandbox with containers in every state and with storages.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use firstlight_agent_api::agent::{CreateContainerRequest, DestroySandboxRequest, Storage};

use crate::support::{Agent, has_exited, short, spec, with_agent};

const RUN: &str = "/run/kata-containers";

/// Keeps the agent's mount namespace alive after the agent has exited.
struct NamespaceHolder(Child);

impl NamespaceHolder {
    fn of(agent: &Agent) -> Self {
        let pid = agent.pids()[0].to_string();
        let mut command = Command::new("/bin/busybox");
        let child = command.args(["nsenter", "-t", &pid, "-m", "/bin/busybox", "sleep", "1000"]).spawn().unwrap();
        Self(child)
    }

    fn path(&self, of: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{of}", self.0.id()))
    }

    /// Returns the agent's mount points for containers.
    fn mounts(&self) -> Vec<String> {
        let table = fs::read_to_string(self.path("mountinfo")).unwrap();
        let places = table.lines().filter_map(|line| line.split(' ').nth(4));
        // Without the directory itself, a mount of PID 1.
        places.filter(|place| place.starts_with(RUN) && *place != RUN).map(str::to_owned).collect()
    }
}

impl Drop for NamespaceHolder {
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

/// Returns the pids of a container's processes.
fn processes(agent: &Agent, container: &str) -> Vec<u32> {
    let text = fs::read_to_string(agent.group(container, "cgroup.procs")).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn destroy_sandbox_removes_containers_and_storages() {
    with_agent(async |agent| {
        agent.sandbox().await;
        for container in ["c1", "c2", "c3"] {
            let root = agent.root(container);
            let mut request = CreateContainerRequest::new();
            request.container_id = container.into();
            request.OCI = Some(spec(&root, "sleep 1000 & sleep 1000")).into();
            // One storage per container, and a common one.
            request.storages = vec![memory(container), memory("shared")];
            agent.calls.create_container(short(), &request).await.unwrap();
        }
        // One container with an exec process, one paused, one never started.
        agent.begin("c1").await;
        agent.exec("c1", "e1", "sleep 1000").await.unwrap();
        agent.begin("c2").await;
        agent.pause("c2").await.unwrap();

        let holder = NamespaceHolder::of(&agent);
        tokio::time::sleep(Duration::from_millis(500)).await;
        let all: Vec<u32> = ["c1", "c2", "c3"].iter().flat_map(|one| processes(&agent, one)).collect();
        // A shell that was paused at once may not have started a child.
        assert!(all.len() >= 5, "{all:?}");
        assert_eq!(holder.mounts().len(), 4, "{:?}", holder.mounts());
        let groups = holder.path("root/sys/fs/cgroup/firstlight-test");
        assert_eq!(fs::read_dir(&groups).unwrap().flatten().filter(|entry| entry.path().is_dir()).count(), 3);

        agent.calls.destroy_sandbox(short(), &DestroySandboxRequest::new()).await.unwrap();
        // Everything is removed when the reply arrives.
        assert!(all.iter().all(|pid| has_exited(*pid)), "some of {all:?} are still alive");
        assert_eq!(holder.mounts(), [""; 0]);
        assert_eq!(fs::read_dir(&groups).unwrap().flatten().filter(|entry| entry.path().is_dir()).count(), 0);
        for container in ["c1", "c2", "c3"] {
            assert!(!holder.path(&format!("root{RUN}/{container}")).exists());
        }
        // Creates are refused while the agent is shutting down.
        let root = agent.root("c4");
        assert!(agent.create(spec(&root, "true"), "c4").await.is_err());
        agent.wait_for_exit("without PID 1, the agent exits with its sandbox").await;
    });
}
