//! Known problems of libcontainer, one test each. Two more are tested elsewhere: exec processes without the seccomp
//! filter (`containers::exec_processes_get_the_seccomp_filter_and_pods_share_pid_namespaces`) and lost exits
//! (`short_processes`).

use std::fs;
use std::time::{Duration, Instant};

use ttrpc::Code;

use crate::support::{Agent, code, process, spec, with_agent};

fn runtime(agent: &Agent) -> u32 {
    agent.pids()[1]
}

/// The child of a multi-threaded process may block on a lock held by a thread that it did not inherit.
#[test]
fn malloc_deadlock_after_fork_with_threads() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let tasks = || fs::read_dir(format!("/proc/{}/task", runtime(&agent))).unwrap().count();
        let begin = Instant::now();
        for round in 0..5 {
            // The multi-threaded server allocates meanwhile; the runtime always has a single thread.
            let all = (0..8).map(|number| {
                let (agent, name) = (&agent, format!("e{round}-{number}"));
                async move { assert_eq!(agent.shell("c1", &name, "echo hi").await, ("hi\n".to_owned(), 0)) }
            });
            futures_join(all).await;
            assert_eq!(tasks(), 1);
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
        agent.remove("c1").await.unwrap();
    });
}

async fn futures_join(all: impl Iterator<Item = impl Future<Output = ()>>) {
    let mut all: Vec<_> = all.map(Box::pin).collect();
    std::future::poll_fn(|context| {
        all.retain_mut(|one| one.as_mut().poll(context).is_pending());
        if all.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// A reaper of all children also reaps hook processes, and the hook then appears to have failed.
#[test]
fn reaper_races_with_hooks() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("busy", "while :; do true & wait; done").await;
        for round in 0..10 {
            let container = format!("c{round}x");
            let root = agent.root(&container);
            let mut hooked = spec(&root, "exit 0");
            let hook = firstlight_agent_api::oci::Hook { Path: "/bin/true".into(), ..Default::default() };
            let hooks = hooked.Hooks.mut_or_insert_default();
            (hooks.CreateRuntime, hooks.Poststart, hooks.Poststop) =
                (vec![hook.clone()], vec![hook.clone()], vec![hook]);
            agent.create(hooked, &container).await.unwrap();
            agent.begin(&container).await;
            assert_eq!(agent.wait(&container, "").await.unwrap(), 0);
            agent.remove(&container).await.unwrap();
        }
        agent.remove("busy").await.unwrap();
    });
}

/// Helpers of a failed exec stay zombies in the container's pid namespace, whose init process then never finishes
/// exiting.
#[test]
fn lost_exits_after_a_failed_exec() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        for round in 0..3 {
            let mut missing = process("");
            missing.Args = vec!["/bin/nothere".into()];
            let mut request = firstlight_agent_api::agent::ExecProcessRequest::new();
            request.container_id = "c1".into();
            request.exec_id = format!("e{round}");
            request.process = Some(missing).into();
            assert!(code(agent.calls.exec_process(crate::support::short(), &request).await).1.contains("nothere"));
        }
        agent.signal("c1", "c1", 9).await.unwrap();
        assert_eq!(agent.wait("c1", "").await.unwrap(), 137);
        agent.remove("c1").await.unwrap();
    });
}

/// libcontainer leaves a socket per exec process in the container's state directory.
#[test]
fn leaked_sockets_of_exec_processes() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let all = (0..6).map(|number| {
            let (agent, name) = (&agent, format!("e{number}"));
            async move {
                agent.shell("c1", &name, "true").await;
            }
        });
        futures_join(all).await;
        let names = |dir: &str| -> Vec<String> {
            let entries = fs::read_dir(agent.inside(dir)).unwrap().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        let left = names("/run/firstlight/containers/c1");
        assert!(left.iter().all(|name| !name.starts_with("tenant-")), "{left:?}");
        // No console sockets and no process files either.
        assert_eq!(names("/run/firstlight/containers"), ["c1"]);
        let bundle = names("/run/kata-containers/c1");
        assert!(bundle.iter().all(|name| !name.starts_with("exec-")), "{bundle:?}");
        agent.remove("c1").await.unwrap();
    });
}

/// libcontainer sets the container's OOM score on the creating process, which the next container would inherit.
#[test]
fn changed_oom_score_of_the_runtime() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let score = || fs::read_to_string(format!("/proc/{}/oom_score_adj", runtime(&agent))).unwrap();
        let before = score();
        let root = agent.root("c1");
        let mut victim = spec(&root, "cat /proc/self/oom_score_adj; sleep 1000");
        victim.Process.mut_or_insert_default().OOMScoreAdj = 500;
        agent.create(victim, "c1").await.unwrap();
        agent.begin("c1").await;
        assert_eq!(score(), before);
        agent.run("c2", "cat /proc/self/oom_score_adj").await;
        assert_eq!(agent.output("c2", "").await, "0\n");
        let dumpable = fs::metadata(format!("/proc/{}/fd", runtime(&agent))).is_ok();
        let dir = fs::read_link(format!("/proc/{}/cwd", runtime(&agent))).unwrap();
        assert!(dumpable && dir == std::path::Path::new("/"), "{dir:?}");
        for container in ["c1", "c2"] {
            agent.remove(container).await.unwrap();
        }
    });
}

/// A concurrent create with the same id must not remove the first container.
#[test]
fn concurrent_duplicate_create_leaves_the_first_running() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        let create = async || agent.create(spec(&root, "echo one; sleep 1000"), "c1").await;
        let (first, second) = tokio::join!(create(), create());
        assert!(first.is_ok() != second.is_ok(), "{first:?} {second:?}");
        let failed = if first.is_err() { first } else { second };
        assert_eq!(code(failed).0, Code::ALREADY_EXISTS);
        agent.begin("c1").await;
        assert_eq!(agent.shell("c1", "e1", "echo alive").await.0, "alive\n");
        agent.remove("c1").await.unwrap();
    });
}
