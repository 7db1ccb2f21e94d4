//! Invalid and oversized requests. After each the agent still responds.

use std::time::Duration;

use firstlight_agent_api::agent::{CreateContainerRequest, ExecProcessRequest};
use firstlight_agent_api::health::CheckRequest;
use firstlight_agent_api::oci;
use protobuf::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use ttrpc::Code;
use ttrpc::proto::{Request, Response};

use crate::support::{Agent, code, process, short, spec, with_agent};

async fn answers(agent: &Agent) {
    agent.health.check(short(), &CheckRequest::new()).await.unwrap();
}

#[test]
fn invalid_container_ids_are_refused() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        for name in ["", "x", "../x", "a/b", "a\0b", ".hidden", "shared", &"x".repeat(300), "a\nb"] {
            let (kind, text) = code(agent.create(spec(&root, "true"), name).await);
            assert!(kind == Code::INVALID_ARGUMENT && text.len() < 400 && !text.contains('\n'), "{text}");
            answers(&agent).await;
        }
        agent.create(spec(&root, "sleep 1000"), "c1").await.unwrap();
        agent.begin("c1").await;
        // Exec ids are never part of a path, so any text is valid.
        for name in ["../../x", "a/b", "a b\u{7}", "\0"] {
            agent.exec("c1", name, "exit 4").await.unwrap();
            assert_eq!(agent.wait("c1", name).await.unwrap(), 4);
        }
        let mut bad = ExecProcessRequest::new();
        bad.container_id = "c1".into();
        bad.exec_id = "e1".into();
        for argument in ["a\0b", "/bin/\0sh"] {
            let mut nul = process("");
            nul.Args = vec![argument.into()];
            bad.process = Some(nul).into();
            assert!(agent.calls.exec_process(short(), &bad).await.is_err());
            answers(&agent).await;
        }
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn oversized_configurations_are_refused_and_long_ones_accepted() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("healthy", "sleep 1000").await;
        let root = agent.root("c1");
        let mount = |number: usize| oci::Mount {
            destination: format!("/tmp/{number}"),
            source: "/nowhere".into(),
            type_: "bind".into(),
            ..Default::default()
        };
        let mut many = spec(&root, "true");
        many.Mounts.extend((0..100_000).map(mount));
        let (kind, text) = code(agent.create(many, "c1").await);
        assert!(kind == Code::INVALID_ARGUMENT && text.contains("100004 mounts") && text.len() < 400, "{text}");
        answers(&agent).await;

        let mut huge = spec(&root, "true");
        huge.Annotations.insert("x".repeat(1000), "y".repeat(3 << 20));
        // Long, but below the limit of a message.
        agent.create(huge, "c1").await.unwrap();
        agent.remove("c1").await.unwrap();
        answers(&agent).await;
        assert_eq!(agent.shell("healthy", "e1", "echo alive").await.0, "alive\n");
        assert!(!agent.inside("/run/kata-containers/c1").exists());
        agent.remove("healthy").await.unwrap();
    });
}

/// Builds a ttrpc frame; the header has ten bytes: length, stream, type, flags.
fn frame(length: u32, stream: u32, kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut all = length.to_be_bytes().to_vec();
    all.extend(stream.to_be_bytes());
    all.extend([kind, 0]);
    all.extend(payload);
    all
}

#[test]
fn oversized_message_is_refused_and_the_connection_survives() {
    with_agent(async |agent| {
        let mut request = CreateContainerRequest::new();
        request.container_id = "c1".into();
        request.OCI = Some(oci::Spec::new()).into();
        request.OCI.mut_or_insert_default().Annotations.insert("a".into(), "z".repeat(5 << 20));
        let call = |service: &str, method: &str, payload: Vec<u8>| {
            let (service, method) = (service.to_owned(), method.to_owned());
            Request { service, method, payload, ..Default::default() }.write_to_bytes().unwrap()
        };
        // ttrpc's own client would refuse to send it.
        let long = call("grpc.AgentService", "CreateContainer", request.write_to_bytes().unwrap());
        let check = call("grpc.Health", "Check", Vec::new());
        let mut stream = UnixStream::connect(agent.address.strip_prefix("unix://").unwrap()).await.unwrap();
        for (number, payload, expected) in [(1, long, Code::INVALID_ARGUMENT), (3, check, Code::OK)] {
            let length = u32::try_from(payload.len()).unwrap();
            stream.write_all(&frame(length, number, 1, &payload)).await.unwrap();
            let mut header = [0; 10];
            stream.read_exact(&mut header).await.unwrap();
            let length = u32::from_be_bytes(header[..4].try_into().unwrap());
            let mut reply = vec![0; usize::try_from(length).unwrap()];
            stream.read_exact(&mut reply).await.unwrap();
            let reply = Response::parse_from_bytes(&reply).unwrap();
            assert_eq!(reply.status().code(), expected, "{:?}", reply.status());
            assert_eq!(u32::from_be_bytes(header[4..8].try_into().unwrap()), number);
        }
        assert!(!agent.inside("/run/kata-containers/c1").exists());
    });
}

#[test]
fn invalid_frames_do_not_stop_the_agent() {
    with_agent(async |agent| {
        let path = agent.address.strip_prefix("unix://").unwrap().to_owned();
        let frames = [
            frame(5, 1, 1, b"\xff\xff\xff\xff\xff"),
            frame(0, 2, 1, b""),
            frame(3, 1, 77, b"abc"),
            frame(u32::MAX, 1, 1, &[0; 4096]),
            frame((4 << 20) + 1, 1, 1, &vec![7; (4 << 20) + 1]),
            frame(100, 1, 1, b"short"),
            vec![0; 3],
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        ];
        for bytes in frames {
            let mut stream = UnixStream::connect(&path).await.unwrap();
            // The server may close the connection before all is written.
            let _ = tokio::time::timeout(Duration::from_secs(5), stream.write_all(&bytes)).await;
            let mut reply = [0; 1024];
            let _ = tokio::time::timeout(Duration::from_millis(300), stream.read(&mut reply)).await;
            answers(&agent).await;
        }
    });
}
