//! Attributes of processes: user, capabilities, limits, directory, terminal, namespaces, cgroups.

use std::fs;
use std::time::{Duration, Instant};

use firstlight_agent_api::agent::{ExecProcessRequest, ReadStreamRequest, WaitProcessRequest, WriteStreamRequest};
use firstlight_agent_api::agent_ttrpc::AgentServiceClient;
use firstlight_agent_api::health::CheckRequest;
use firstlight_agent_api::oci;
use ttrpc::Code;

use crate::support::{Agent, code, process, short, spec, with_agent};

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
fn exec_process_gets_its_settings_and_inherits_the_rest() {
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
        // A non-root user has no effective capabilities; the bounding set is the container's.
        assert!(output.contains("CapBnd:\t00000000080000e3"), "{output}");
        // Root has the container's capabilities, and an OOM score of 0 is 0, not the agent's.
        asking.User = None.into();
        asking.OOMScoreAdj = 0;
        let output = run(&agent, "e2", asking.clone()).await;
        assert!(output.contains("CapEff:\t00000000080000e3") && output.contains("\n0\n"), "{output}");
        // The process's own, smaller set.
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
fn exec_terminal_has_the_requested_size() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let mut with_terminal = process("stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo tty; exit 5");
        with_terminal.Terminal = true;
        with_terminal.ConsoleSize.mut_or_insert_default().Height = 33;
        with_terminal.ConsoleSize.mut_or_insert_default().Width = 111;
        let output = run(&agent, "e1", with_terminal).await;
        assert!(output.contains("33 111") && output.contains("tty"), "{output}");

        let mut first = spec(&agent.root("c2"), "stty size");
        let of = first.Process.mut_or_insert_default();
        of.Terminal = true;
        (of.ConsoleSize.mut_or_insert_default().Height, of.ConsoleSize.mut_or_insert_default().Width) = (22, 77);
        agent.create(first, "c2").await.unwrap();
        agent.begin("c2").await;
        let output = agent.output("c2", "").await;
        assert!(output.contains("22 77"), "{output}");
        agent.remove("c2").await.unwrap();
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn container_with_a_pid_namespace_path_takes_exec_processes() {
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
        // A new namespace, not that of the path, which is the host's.
        let (output, _) = agent.shell("c1", "e1", "cat /proc/1/cmdline | tr '\\0' ' '").await;
        assert!(output.contains("sleep 1000"), "{output}");
        // All containers share the sandbox's IPC and UTS namespaces.
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

#[test]
fn all_waiters_get_the_exit_code() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "read line; exit 3").await;
        agent.exec("c1", "e1", "read line; exit 7").await.unwrap();
        let other = agent.connect().await;
        for (exec, expected) in [("e1", 7), ("", 3)] {
            let request = |container: &str, exec: &str| WaitProcessRequest {
                container_id: container.into(),
                exec_id: exec.into(),
                ..Default::default()
            };
            let wait = async |client: &AgentServiceClient| {
                client.wait_process(short(), &request("c1", exec)).await.map(|reply| reply.status)
            };
            let begin = Instant::now();
            let end = async {
                // All calls are pending, one client has given up, and other calls are served meanwhile.
                let gone = tokio::time::timeout(Duration::from_millis(200), wait(&other)).await;
                assert!(gone.is_err(), "the process lives");
                tokio::time::sleep(Duration::from_millis(300)).await;
                agent.health.check(short(), &CheckRequest::new()).await.unwrap();
                let (container_id, exec_id, data) = ("c1".into(), exec.into(), b"go\n".to_vec());
                let write = WriteStreamRequest { container_id, exec_id, data, ..Default::default() };
                agent.calls.write_stdin(short(), &write).await.unwrap();
            };
            let (first, second, third, ()) = tokio::join!(wait(&agent.calls), wait(&agent.calls), wait(&other), end);
            assert_eq!([first.unwrap(), second.unwrap(), third.unwrap()], [expected; 3]);
            assert!(begin.elapsed() >= Duration::from_millis(500), "before it ended");
            // A later call gets NOT_FOUND.
            assert_eq!(code(wait(&other).await).0, Code::NOT_FOUND);
        }
        agent.remove("c1").await.unwrap();
    });
}

/// As systemd and Docker do in a container with writable cgroups.
const NEST: &str = "cd /sys/fs/cgroup && mkdir GROUP && echo $$ > GROUP/cgroup.procs && \
                    echo +memory > cgroup.subtree_control && echo nested && sleep 1000";

#[test]
fn container_with_nested_cgroups_takes_exec_processes() {
    with_agent(async |agent| {
        agent.sandbox().await;
        for (id, group) in [("c1", "init"), ("c2", "init.scope")] {
            let mut nesting = spec(&agent.root(id), &NEST.replace("GROUP", group));
            nesting.Mounts.push(oci::Mount {
                destination: "/sys/fs/cgroup".into(),
                source: "cgroup".into(),
                type_: "cgroup".into(),
                options: vec!["rw".into(), "nosuid".into(), "noexec".into(), "nodev".into()],
                ..Default::default()
            });
            agent.create(nesting, id).await.unwrap();
            agent.begin(id).await;
            let read = ReadStreamRequest { container_id: id.into(), len: 100, ..Default::default() };
            let output = agent.calls.read_stdout(short(), &read).await.unwrap().data;
            assert_eq!(String::from_utf8(output).unwrap(), "nested\n");
            let enabled = fs::read_to_string(agent.group(id, "cgroup.subtree_control")).unwrap();
            assert_eq!(enabled, "memory\n");

            let (output, code) = agent.shell(id, "e1", "cat /proc/self/cgroup").await;
            assert_eq!((output, code), (format!("0::/{group}\n"), 0));
            agent.exec(id, "e2", "sleep 1000").await.unwrap();
            let inside = fs::read_to_string(agent.group(id, &format!("{group}/cgroup.procs"))).unwrap();
            assert!(inside.lines().count() >= 2, "{inside}");
            // Removal kills all processes and removes the sub-cgroups.
            agent.remove(id).await.unwrap();
            assert!(!agent.group(id, "").exists());
        }
    });
}
