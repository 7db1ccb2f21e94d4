//! Standard streams: end of output, closing of input.

use std::time::{Duration, Instant};

use firstlight_agent_api::agent::{CloseStdinRequest, ReadStreamRequest, WriteStreamRequest};

use crate::support::{Agent, process, short, spec, with_agent};

fn write(container: &str, exec: &str, data: &[u8]) -> WriteStreamRequest {
    WriteStreamRequest {
        container_id: container.into(),
        exec_id: exec.into(),
        data: data.to_vec(),
        ..Default::default()
    }
}

#[test]
fn output_ends_with_its_process_even_if_a_child_holds_the_pipe() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        // Reads that begin before the exit, after it, and after the wait.
        for (name, sleep, fetch) in [("e1", 0, false), ("e2", 1500, false), ("e3", 1500, true)] {
            let script = "echo first; sleep 200 & seq 1 5000; echo last; exit 6";
            agent.exec("c1", name, script).await.unwrap();
            tokio::time::sleep(Duration::from_millis(sleep)).await;
            if fetch {
                assert_eq!(agent.wait("c1", name).await.unwrap(), 6);
            }
            let begin = Instant::now();
            let output = agent.output("c1", name).await;
            assert!(
                output.starts_with("first\n") && output.ends_with("5000\nlast\n"),
                "{name}: {} bytes",
                output.len()
            );
            assert!(begin.elapsed() < Duration::from_secs(60), "{name}: {:?}", begin.elapsed());
            if !fetch {
                assert_eq!(agent.wait("c1", name).await.unwrap(), 6);
            }
        }
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn stdout_and_stderr_are_complete_and_separate() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        agent
            .exec("c1", "e1", "i=0; while [ $i -lt 3000 ]; do echo out$i; echo err$i >&2; i=$((i+1)); done")
            .await
            .unwrap();
        let errors = async {
            let mut all = Vec::new();
            loop {
                let request = ReadStreamRequest {
                    container_id: "c1".into(),
                    exec_id: "e1".into(),
                    len: 32768,
                    ..Default::default()
                };
                let data = agent.calls.read_stderr(short(), &request).await.unwrap().data;
                if data.is_empty() {
                    return String::from_utf8(all).unwrap();
                }
                all.extend(data);
            }
        };
        let (output, errors) = tokio::join!(agent.output("c1", "e1"), errors);
        let expected = |word: &str| (0..3000).map(|i| format!("{word}{i}\n")).collect::<String>();
        assert_eq!((output, errors), (expected("out"), expected("err")));
        assert_eq!(agent.wait("c1", "e1").await.unwrap(), 0);
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn stdin_is_closed_by_either_call() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        for (name, by_write) in [("e1", false), ("e2", true)] {
            agent.exec("c1", name, "cat; echo end").await.unwrap();
            let data = write("c1", name, b"data\n");
            assert_eq!(agent.calls.write_stdin(short(), &data).await.unwrap().len, 5);
            if by_write {
                agent.calls.write_stdin(short(), &write("c1", name, b"")).await.unwrap();
            } else {
                let close = CloseStdinRequest { container_id: "c1".into(), exec_id: name.into(), ..Default::default() };
                agent.calls.close_stdin(short(), &close).await.unwrap();
                // Idempotent.
                agent.calls.close_stdin(short(), &close).await.unwrap();
            }
            assert_eq!(agent.output("c1", name).await, "data\nend\n");
            assert_eq!(agent.wait("c1", name).await.unwrap(), 0);
        }
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn end_of_a_terminal_is_end_of_file() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut with_terminal = spec(&root, "seq 1 2000; exit 4");
        with_terminal.Process.mut_or_insert_default().Terminal = true;
        agent.create(with_terminal, "c1").await.unwrap();
        agent.begin("c1").await;
        let output = agent.output("c1", "").await;
        assert!(output.ends_with("2000\r\n"), "{} bytes", output.len());
        let request = ReadStreamRequest { container_id: "c1".into(), len: 10, ..Default::default() };
        assert_eq!(agent.calls.read_stdout(short(), &request).await.unwrap().data, b"");
        assert_eq!(agent.calls.read_stderr(short(), &request).await.unwrap().data, b"");
        assert_eq!(agent.wait("c1", "").await.unwrap(), 4);
        // Closing a terminal's input does not hang it up: it sends end of file to the program.
        closing_a_terminal(&agent).await;
        agent.remove("c1").await.unwrap();
    });
}

async fn closing_a_terminal(agent: &Agent) {
    agent.run("c2", "sleep 1000").await;
    let mut request = firstlight_agent_api::agent::ExecProcessRequest::new();
    request.container_id = "c2".into();
    request.exec_id = "e1".into();
    let mut with_terminal = process("cat; echo after");
    with_terminal.Terminal = true;
    request.process = Some(with_terminal).into();
    agent.calls.exec_process(short(), &request).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let close = CloseStdinRequest { container_id: "c2".into(), exec_id: "e1".into(), ..Default::default() };
    agent.calls.close_stdin(short(), &close).await.unwrap();
    let output = agent.output("c2", "e1").await;
    assert!(output.contains("after"), "{output}");
    assert_eq!(agent.wait("c2", "e1").await.unwrap(), 0);
    agent.remove("c2").await.unwrap();
}
