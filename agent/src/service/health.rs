//! `grpc.Health`: no lock, no wait; it answers as long as the agent's loop turns.

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

/// The version of the wire that callers of Kata's agent are told.
const WIRE: &str = "0.0.1";

/// Answers, and tells PID 1 of the first time: the moment from which a shim
/// counts the guest as up.
pub(super) struct Alive {
    agent: Arc<Agent>,
    asked: AtomicBool,
}

impl Alive {
    pub(super) fn new(agent: Arc<Agent>) -> Self {
        Self { agent, asked: AtomicBool::new(false) }
    }
}

#[async_trait]
impl Health for Alive {
    async fn check(&self, _: &TtrpcContext, _: CheckRequest) -> ttrpc::Result<HealthCheckResponse> {
        if let Some(control) = self.agent.control.as_ref().filter(|_| !self.asked.swap(true, Ordering::Relaxed)) {
            control.event("first-check", "agent", "");
        }
        Ok(HealthCheckResponse { status: ServingStatus::SERVING.into(), ..Default::default() })
    }

    async fn version(&self, _: &TtrpcContext, _: CheckRequest) -> ttrpc::Result<VersionCheckResponse> {
        let (grpc_version, agent_version) = (WIRE.to_owned(), VERSION.to_owned());
        Ok(VersionCheckResponse { grpc_version, agent_version, ..Default::default() })
    }
}
