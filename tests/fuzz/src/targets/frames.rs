//! Frames of ttrpc, as a host sends them, to a server that answers every call.

#![expect(clippy::panic, reason = "a target panics where it cannot do its work")]

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

/// The same with a deadline, metadata and a payload, and a frame that goes on.
pub(super) const MORE: &[u8] = b"\x00\x00\x00\x2b\x00\x00\x00\x03\x01\x00\x0a\x11grpc.AgentService\x12\x08CopyFile\
\x1a\x03\x0a\x01c\x20\x05\x2a\x05\x0a\x01k\x12\x00\x00\x00\x00\x02\x00\x00\x00\x05\x03\x02\x0a\x00";

/// Nothing but what the schema says: each call is parsed, found not to be supported, and answered.
struct Nobody;

impl AgentService for Nobody {}

#[async_trait]
impl Health for Nobody {
    async fn check(&self, _: &TtrpcContext, _: CheckRequest) -> ttrpc::Result<HealthCheckResponse> {
        Ok(HealthCheckResponse::new())
    }
}

/// A server in a runtime of its own, and where it gets its connections from.
struct Serving {
    runtime: Runtime,
    connect: UnboundedSender<UnixStream>,
    _server: Server,
}

fn serve() -> Option<Serving> {
    let runtime = Builder::new_current_thread().enable_all().build().ok()?;
    let (connect, connections): (_, UnboundedReceiver<UnixStream>) = unbounded_channel();
    let server = runtime.block_on(async {
        let accepted = futures::stream::unfold(connections, |mut connections| async {
            connections.recv().await.map(|stream| (io::Result::Ok(stream), connections))
        });
        let mut services: HashMap<String, Service> = create_agent_service(Arc::new(Nobody));
        services.extend(create_health(Arc::new(Nobody)));
        let mut server = Server::new().add_listener(Listener::new(accepted)).register_service(services);
        server.start().await.ok().map(|()| server)
    })?;
    Some(Serving { runtime, connect, _server: server })
}

thread_local! {
    static SERVING: Option<Serving> = serve();
}

/// Sends all bytes, hangs up, and reads what comes until the server hangs up too.
pub(super) fn send(bytes: &[u8]) {
    SERVING.with(|serving| {
        let Some(Serving { runtime, connect, .. }) = serving else { panic!("no server") };
        runtime.block_on(async {
            let Ok((mut ours, theirs)) = UnixStream::pair() else { panic!("no socket pair") };
            assert!(connect.send(theirs).is_ok(), "the server has ended");
            let (mut answers, mut requests) = ours.split();
            let send = async {
                // A server that has heard enough hangs up.
                let _ = requests.write_all(bytes).await;
                let _ = requests.shutdown().await;
            };
            let hear = async {
                let mut all = Vec::new();
                let heard = tokio::time::timeout(Duration::from_secs(5), answers.read_to_end(&mut all)).await;
                assert!(heard.is_ok(), "the server did not hang up");
            };
            tokio::join!(send, hear);
        });
    });
}
