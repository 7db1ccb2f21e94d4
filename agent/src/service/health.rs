//! `grpc.Health`: takes no lock and never waits; it answers while the agent's event loop runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use firstlight_agent_api::health::health_check_response::ServingStatus;
use firstlight_agent_api::health::{CheckRequest, HealthCheckResponse, VersionCheckResponse};
use firstlight_agent_api::health_ttrpc::Health;
use ttrpc::r#async::TtrpcContext;

use crate::agent::Agent;

/// The agent's version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The protocol version that Kata's agent reports.
const PROTOCOL_VERSION: &str = "0.0.1";

/// Health service that reports the first Check to PID 1: the moment from which a shim considers the
/// guest running.
pub(super) struct HealthService {
    agent: Arc<Agent>,
    checked: AtomicBool,
}

impl HealthService {
    pub(super) fn new(agent: Arc<Agent>) -> Self {
        Self { agent, checked: AtomicBool::new(false) }
    }
}

#[async_trait]
impl Health for HealthService {
    async fn check(&self, _: &TtrpcContext, _: CheckRequest) -> ttrpc::Result<HealthCheckResponse> {
        if let Some(control) = self.agent.control.as_ref().filter(|_| !self.checked.swap(true, Ordering::Relaxed)) {
            control.event("first-check", "agent", "");
        }
        Ok(HealthCheckResponse { status: ServingStatus::SERVING.into(), ..Default::default() })
    }

    async fn version(&self, _: &TtrpcContext, _: CheckRequest) -> ttrpc::Result<VersionCheckResponse> {
        let (grpc_version, agent_version) = (PROTOCOL_VERSION.to_owned(), VERSION.to_owned());
        Ok(VersionCheckResponse { grpc_version, agent_version, ..Default::default() })
    }
}
