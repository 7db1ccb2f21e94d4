//! `grpc.Health`: no lock, no wait; it answers as long as the agent's loop turns.

use async_trait::async_trait;
use firstlight_agent_api::health::health_check_response::ServingStatus;
use firstlight_agent_api::health::{CheckRequest, HealthCheckResponse, VersionCheckResponse};
use firstlight_agent_api::health_ttrpc::Health;
use ttrpc::r#async::TtrpcContext;

/// The agent's version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version of the wire that callers of Kata's agent are told.
const WIRE: &str = "0.0.1";

pub(super) struct Alive;

#[async_trait]
impl Health for Alive {
    async fn check(&self, _: &TtrpcContext, _: CheckRequest) -> ttrpc::Result<HealthCheckResponse> {
        Ok(HealthCheckResponse { status: ServingStatus::SERVING.into(), ..Default::default() })
    }

    async fn version(&self, _: &TtrpcContext, _: CheckRequest) -> ttrpc::Result<VersionCheckResponse> {
        let (grpc_version, agent_version) = (WIRE.to_owned(), VERSION.to_owned());
        Ok(VersionCheckResponse { grpc_version, agent_version, ..Default::default() })
    }
}
