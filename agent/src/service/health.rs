//! `grpc.Health`: takes no lock and never waits; it answers while the agent's event loop runs.

use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use firstlight_agent_api::health::health_check_response::ServingStatus;
use firstlight_agent_api::health::{CheckRequest, HealthCheckResponse, VersionCheckResponse};
use firstlight_agent_api::health_ttrpc::Health;
use ttrpc::r#async::TtrpcContext;

use crate::VERSION;
use crate::boot_events::BootEvents;

/// The protocol version that Kata's agent reports.
const PROTOCOL_VERSION: &str = "0.0.1";

/// Health service that reports the first Check to PID 1: the moment from which a shim considers the
/// guest running.
pub(super) struct HealthService {
    events: BootEvents,
    checked: AtomicBool,
}

impl HealthService {
    pub(super) fn new(events: BootEvents) -> Self {
        Self { events, checked: AtomicBool::new(false) }
    }
}

#[async_trait]
impl Health for HealthService {
    async fn check(&self, _: &TtrpcContext, _: CheckRequest) -> ttrpc::Result<HealthCheckResponse> {
        if !self.checked.swap(true, Ordering::Relaxed) {
            self.events.add("first-check", "agent", "");
        }
        Ok(HealthCheckResponse { status: ServingStatus::SERVING.into(), ..Default::default() })
    }

    async fn version(&self, _: &TtrpcContext, _: CheckRequest) -> ttrpc::Result<VersionCheckResponse> {
        let (grpc_version, agent_version) = (PROTOCOL_VERSION.to_owned(), VERSION.to_owned());
        Ok(VersionCheckResponse { grpc_version, agent_version, ..Default::default() })
    }
}
