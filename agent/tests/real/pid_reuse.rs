//! The pid of an exited process may be reused.

use std::fs;
use std::process::{Child, Command};

use firstlight_agent_api::agent::{CreateContainerRequest, SharedMount};
use ttrpc::Code;

use crate::support::{Agent, code, not_runnable, short, spec, with_agent};

/// A process outside of all containers, with a given pid.
struct ForeignProcess(Child);

impl ForeignProcess {
    fn with(number: u32) -> Self {
        let last = "/proc/sys/kernel/ns_last_pid";
        for _ in 0..200 {
            if let Err(error) = fs::write(last, (number - 1).to_string()) {
                not_runnable(format_args!("{last}: {error}"));
            }
            let child = Self(Command::new("/bin/busybox").args(["sleep", "2222"]).spawn().unwrap());
            // Another process may have got the pid first.
            if child.0.id() == number {
                return child;
            }
        }
        panic!("no process got the pid {number}");
    }
}

impl Drop for ForeignProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the pid of a container's init process.
fn number(agent: &Agent, container: &str) -> u32 {
    let state = fs::read(agent.inside(&format!("/run/firstlight/containers/{container}/state.json"))).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    u32::try_from(state["pid"].as_u64().unwrap()).unwrap()
}

#[test]
fn reused_pid_is_not_mistaken_for_the_exited_container() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let number = number(&agent, "c1");
        agent.signal("c1", "", 9).await.unwrap();
        assert_eq!(agent.wait("c1", "").await.unwrap(), 137);
        let _foreign = ForeignProcess::with(number);

        let root = agent.root("c2");
        let mut request = CreateContainerRequest::new();
        request.container_id = "c2".into();
        request.OCI = Some(spec(&root, "sleep 1000")).into();
        request.sandbox_pidns = true;
        let (kind, text) = code(agent.calls.create_container(short(), &request).await);
        assert_eq!(kind, Code::FAILED_PRECONDITION, "{text}");
        assert!(text.contains("c1 has exited"), "{text}");

        let mut sharing = request.clone();
        sharing.sandbox_pidns = false;
        sharing.shared_mounts = vec![SharedMount {
            name: "m".into(),
            src_ctr: "c1".into(),
            src_path: "/bin".into(),
            dst_ctr: "c2".into(),
            dst_path: "/x".into(),
            ..Default::default()
        }];
        let (_, text) = code(agent.calls.create_container(short(), &sharing).await);
        assert!(text.contains("c1 has exited"), "{text}");

        // After the removal of the exited one, c2 is the sandbox's first container.
        agent.remove("c1").await.unwrap();
        agent.calls.create_container(short(), &request).await.unwrap();
        agent.begin("c2").await;
        let (output, _) = agent.shell("c2", "e1", "cat /proc/1/cmdline").await;
        assert!(output.contains("1000"), "its own init process: {output}");
        agent.remove("c2").await.unwrap();
    });
}
