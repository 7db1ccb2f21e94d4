//! ttrpc frames, as a host sends them, to a server with the agent's services.

#![expect(clippy::panic, reason = "a target panics if its test server fails")]

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use firstlight_agent_api::agent_ttrpc::{AgentService, create_agent_service};
use firstlight_agent_api::health::{CheckRequest, HealthCheckResponse};
use firstlight_agent_api::health_ttrpc::{Health, create_health};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use ttrpc::r#async::transport::Listener;
use ttrpc::r#async::{Server, Service, TtrpcContext};

/// A Check: stream 1, a request, service, method, no payload.
pub(super) const CHECK: &[u8] = b"\x00\x00\x00\x14\x00\x00\x00\x01\x01\x00\x0a\x0bgrpc.Health\x12\x05Check";

/// The same with a timeout, metadata and a payload, and a data frame of a further stream.
pub(super) const MORE: &[u8] = b"\x00\x00\x00\x2b\x00\x00\x00\x03\x01\x00\x0a\x11grpc.AgentService\x12\x08CopyFile\
\x1a\x03\x0a\x01c\x20\x05\x2a\x05\x0a\x01k\x12\x00\x00\x00\x00\x02\x00\x00\x00\x05\x03\x02\x0a\x00";

/// An agent without implementation: each call is decoded and answered `UNIMPLEMENTED`.
struct UnimplementedAgent;

impl AgentService for UnimplementedAgent {}

#[async_trait]
impl Health for UnimplementedAgent {
    async fn check(&self, _: &TtrpcContext, _: CheckRequest) -> ttrpc::Result<HealthCheckResponse> {
        Ok(HealthCheckResponse::new())
    }
}

/// A ttrpc server in its own runtime, and the channel that hands it connections.
struct TestServer {
    runtime: Runtime,
    connect: UnboundedSender<UnixStream>,
    _server: Server,
}

fn start_server() -> Option<TestServer> {
    let runtime = Builder::new_current_thread().enable_all().build().ok()?;
    let (connect, connections): (_, UnboundedReceiver<UnixStream>) = unbounded_channel();
    let server = runtime.block_on(async {
        let accepted = futures::stream::unfold(connections, |mut connections| async {
            connections.recv().await.map(|stream| (io::Result::Ok(stream), connections))
        });
        let mut services: HashMap<String, Service> = create_agent_service(Arc::new(UnimplementedAgent));
        services.extend(create_health(Arc::new(UnimplementedAgent)));
        let mut server = Server::new().add_listener(Listener::new(accepted)).register_service(services);
        server.start().await.ok().map(|()| server)
    })?;
    Some(TestServer { runtime, connect, _server: server })
}

thread_local! {
    static SERVER: Option<TestServer> = start_server();
}

/// Sends all bytes, shuts down the write side, and reads until the server closes the connection.
pub(super) fn send(bytes: &[u8]) {
    SERVER.with(|server| {
        let Some(TestServer { runtime, connect, .. }) = server else { panic!("no server") };
        runtime.block_on(async {
            let Ok((mut ours, theirs)) = UnixStream::pair() else { panic!("no socket pair") };
            assert!(connect.send(theirs).is_ok(), "the server has exited");
            let (mut answers, mut requests) = ours.split();
            let send = async {
                // The server may close the connection before it has read everything.
                let _ = requests.write_all(bytes).await;
                let _ = requests.shutdown().await;
            };
            let receive = async {
                let mut all = Vec::new();
                let received = tokio::time::timeout(Duration::from_secs(5), answers.read_to_end(&mut all)).await;
                assert!(received.is_ok(), "the server did not close the connection within 5 s");
            };
            tokio::join!(send, receive);
        });
    });
}
