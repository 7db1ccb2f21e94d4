//! What a process is given: user, capabilities, limits, folder, terminal, namespaces.

use std::fs;

use firstlight_agent_api::agent::ExecProcessRequest;
use firstlight_agent_api::oci;

use crate::support::{Agent, process, short, spec, with_agent};

async fn run(agent: &Agent, exec: &str, process: oci::Process) -> String {
    let mut request = ExecProcessRequest::new();
    request.container_id = "c1".into();
    request.exec_id = exec.into();
    request.process = Some(process).into();
    agent.calls.exec_process(short(), &request).await.unwrap();
    let output = agent.output("c1", exec).await;
    agent.wait("c1", exec).await.unwrap();
    output
}

#[test]
fn a_further_process_gets_what_it_asks_for_and_inherits_the_rest() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let mut asking = process(
            "id -u; id -g; id -G; pwd; ulimit -n; grep -E 'NoNewPrivs|CapEff|CapBnd' /proc/self/status; \
             cat /proc/self/oom_score_adj; echo $MARK",
        );
        asking.Capabilities = None.into();
        asking.Cwd = "/tmp".into();
        asking.NoNewPrivileges = true;
        asking.OOMScoreAdj = 77;
        asking.Env = vec!["MARK=mark".into()];
        let user = asking.User.mut_or_insert_default();
        (user.UID, user.GID, user.AdditionalGids) = (1000, 1001, vec![1002, 1003]);
        asking.Rlimits =
            vec![oci::POSIXRlimit { Type: "RLIMIT_NOFILE".into(), Hard: 123, Soft: 123, ..Default::default() }];
        let output = run(&agent, "e1", asking.clone()).await;
        for part in ["1000\n1001\n", "1002 1003", "/tmp\n", "123\n", "NoNewPrivs:\t1", "\n77\n", "mark\n"] {
            assert!(output.contains(part), "{part:?} in {output}");
        }
        // Another user than root has none in effect; the container's are the bound.
        assert!(output.contains("CapBnd:\t00000000080000e3"), "{output}");
        // Root has the container's in effect, and a score of 0 is 0, not the agent's.
        asking.User = None.into();
        asking.OOMScoreAdj = 0;
        let output = run(&agent, "e2", asking.clone()).await;
        assert!(output.contains("CapEff:\t00000000080000e3") && output.contains("\n0\n"), "{output}");
        // Its own, fewer.
        let fewer = asking.Capabilities.mut_or_insert_default();
        fewer.Bounding = vec!["CAP_KILL".into()];
        fewer.Effective = vec!["CAP_KILL".into()];
        fewer.Permitted = vec!["CAP_KILL".into()];
        let output = run(&agent, "e3", asking).await;
        assert!(output.contains("CapEff:\t0000000000000020"), "{output}");
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn a_further_process_has_a_terminal_of_its_size() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let mut with_terminal = process("stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo tty; exit 5");
        with_terminal.Terminal = true;
        with_terminal.ConsoleSize.mut_or_insert_default().Height = 33;
        with_terminal.ConsoleSize.mut_or_insert_default().Width = 111;
        let output = run(&agent, "e1", with_terminal).await;
        assert!(output.contains("33 111") && output.contains("tty"), "{output}");
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn a_container_with_a_pid_namespace_in_its_request_takes_further_processes() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut listed = spec(&root, "sleep 1000");
        listed.Linux.mut_or_insert_default().Namespaces.push(oci::LinuxNamespace {
            Type: "pid".into(),
            Path: "/proc/1/ns/pid".into(),
            ..Default::default()
        });
        agent.create(listed, "c1").await.unwrap();
        agent.begin("c1").await;
        // Its own namespace, not that of the path, which is the host's.
        let (output, _) = agent.shell("c1", "e1", "cat /proc/1/cmdline | tr '\\0' ' '").await;
        assert!(output.contains("sleep 1000"), "{output}");
        // IPC and host name are the sandbox's, for all alike.
        agent.run("c2", "sleep 1000").await;
        let namespaces = "for n in ipc uts pid mnt; do ls -l /proc/self/ns/$n; done";
        let lines = async |container: &str| {
            let (output, _) = agent.shell(container, "e2", namespaces).await;
            let names = output.lines().filter_map(|line| line.rsplit(' ').next().map(str::to_owned));
            names.collect::<Vec<_>>()
        };
        let (first, second) = (lines("c1").await, lines("c2").await);
        assert_eq!(first.len(), 4, "{first:?}");
        assert_eq!(first[..2], second[..2]);
        assert!(first[2] != second[2] && first[3] != second[3], "{first:?} {second:?}");
        assert_ne!(fs::read_link("/proc/self/ns/ipc").unwrap().display().to_string(), first[0]);
        for container in ["c1", "c2"] {
            agent.remove(container).await.unwrap();
        }
    });
}
