//! How ids are resolved, and which error codes a shim gets.

use firstlight_agent_api::agent::{CloseStdinRequest, ReadStreamRequest, TtyWinResizeRequest, WriteStreamRequest};
use ttrpc::Code;

use crate::support::{code, process, short, spec, with_agent};

#[test]
fn containers_need_no_sandbox_and_ids_are_unique() {
    with_agent(async |agent| {
        // Before CreateSandbox, and twice.
        agent.run("c1", "sleep 1000").await;
        agent.sandbox().await;
        let root = agent.root("c2");
        let (kind, text) = code(agent.create(spec(&root, "true"), "c1").await);
        assert!(kind == Code::ALREADY_EXISTS && text.contains("c1"), "{text}");
        assert_eq!(code(agent.start_container("c1").await).0, Code::FAILED_PRECONDITION);
        assert_eq!(agent.shell("c1", "e1", "echo alive").await.0, "alive\n");
        assert_eq!(code(agent.start_container("none").await).0, Code::INVALID_ARGUMENT);
        // Created but not started: exec is refused, and it can be removed.
        agent.create(spec(&root, "true"), "c2").await.unwrap();
        assert_eq!(code(agent.exec("c2", "e1", "true").await).0, Code::FAILED_PRECONDITION);
        agent.remove("c2").await.unwrap();
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn signals_reach_the_named_process() {
    with_agent(async |agent| {
        agent.sandbox().await;
        // A handled SIGTERM runs the handler.
        agent.run("c1", "trap 'echo term; exit 7' TERM; echo ready; while :; do usleep 10000; done").await;
        let request = ReadStreamRequest { container_id: "c1".into(), len: 6, ..Default::default() };
        assert_eq!(agent.calls.read_stdout(short(), &request).await.unwrap().data, b"ready\n");
        agent.signal("c1", "", 15).await.unwrap();
        assert_eq!(agent.output("c1", "").await, "term\n");
        assert_eq!(agent.wait("c1", "c1").await.unwrap(), 7);
        // Exited and waited for: unknown, but SIGKILL to the container still succeeds.
        for name in ["", "c1"] {
            assert_eq!(code(agent.signal("c1", name, 15).await).0, Code::NOT_FOUND);
            assert_eq!(code(agent.wait("c1", name).await).0, Code::NOT_FOUND);
        }
        agent.signal("c1", "", 9).await.unwrap();
        agent.remove("c1").await.unwrap();

        // An ignored SIGTERM has no effect. (An unhandled one, which the kernel would drop, becomes SIGKILL.)
        agent.run("c2", "trap '' TERM; echo ready; while :; do usleep 10000; done").await;
        let request = ReadStreamRequest { container_id: "c2".into(), len: 6, ..Default::default() };
        assert_eq!(agent.calls.read_stdout(short(), &request).await.unwrap().data, b"ready\n");
        agent.signal("c2", "c2", 15).await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        assert_eq!(agent.shell("c2", "e1", "echo alive").await.0, "alive\n");
        // SIGKILL with the container's id as exec id is for the init process, with none for all; both kill all.
        agent.exec("c2", "e2", "sleep 1000").await.unwrap();
        agent.signal("c2", "", 9).await.unwrap();
        assert_eq!(agent.wait("c2", "e2").await.unwrap(), 137);
        assert_eq!(agent.wait("c2", "").await.unwrap(), 137);
        // A signal to an exited process that was not waited for succeeds (ESRCH is success).
        agent.remove("c2").await.unwrap();
        agent.run("c3", "sleep 1000").await;
        agent.exec("c3", "e1", "exit 0").await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        agent.signal("c3", "e1", 15).await.unwrap();
        assert_eq!(agent.wait("c3", "e1").await.unwrap(), 0);
        assert_eq!(code(agent.signal("c3", "e1", 15).await).0, Code::NOT_FOUND);
        agent.remove("c3").await.unwrap();
    });
}

#[test]
fn unknown_processes_are_not_found_by_any_call() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let (container_id, exec_id) = ("c1".to_owned(), "none".to_owned());
        let write = WriteStreamRequest {
            container_id: container_id.clone(),
            exec_id: exec_id.clone(),
            data: vec![1],
            ..Default::default()
        };
        assert_eq!(code(agent.calls.write_stdin(short(), &write).await).0, Code::NOT_FOUND);
        let read = ReadStreamRequest {
            container_id: container_id.clone(),
            exec_id: exec_id.clone(),
            len: 1,
            ..Default::default()
        };
        assert_eq!(code(agent.calls.read_stdout(short(), &read).await).0, Code::NOT_FOUND);
        assert_eq!(code(agent.calls.read_stderr(short(), &read).await).0, Code::NOT_FOUND);
        let close =
            CloseStdinRequest { container_id: container_id.clone(), exec_id: exec_id.clone(), ..Default::default() };
        assert_eq!(code(agent.calls.close_stdin(short(), &close).await).0, Code::NOT_FOUND);
        let size = TtyWinResizeRequest { container_id, exec_id, row: 1, column: 1, ..Default::default() };
        assert_eq!(code(agent.calls.tty_win_resize(short(), &size).await).0, Code::NOT_FOUND);
        let size = TtyWinResizeRequest { exec_id: String::new(), ..size };
        assert_eq!(code(agent.calls.tty_win_resize(short(), &size).await).0, Code::UNAVAILABLE);
        let mut request = firstlight_agent_api::agent::ExecProcessRequest::new();
        request.container_id = "c1".into();
        request.exec_id = "e1".into();
        assert_eq!(code(agent.calls.exec_process(short(), &request).await).0, Code::INVALID_ARGUMENT);
        // Invalid values.
        for spoil in [
            (|process| process.Capabilities.mut_or_insert_default().Effective = vec!["CAP_FLY".into()])
                as fn(&mut firstlight_agent_api::oci::Process),
            |process| {
                process.Rlimits =
                    vec![firstlight_agent_api::oci::POSIXRlimit { Type: "RLIMIT_SKY".into(), ..Default::default() }]
            },
            |process| process.OOMScoreAdj = 5000,
            |process| process.Args.clear(),
        ] {
            let mut bad = process("true");
            spoil(&mut bad);
            request.process = Some(bad).into();
            assert_eq!(code(agent.calls.exec_process(short(), &request).await).0, Code::INVALID_ARGUMENT);
        }
        agent.remove("c1").await.unwrap();
    });
}
