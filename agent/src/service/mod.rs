//! The calls as they come in: each is checked, handed to the agent, and answered.

mod agent_service;
mod health;
#[cfg(feature = "agent-policy")]
mod judged;
mod noted;
mod record;

use std::collections::HashMap;
use std::sync::Arc;

use firstlight_agent_api::{agent_ttrpc, firstlight_ttrpc, health_ttrpc};
use ttrpc::r#async::Service;

use crate::agent::Agent;
use crate::policy::Gate;

pub use health::VERSION;

/// The calls of `grpc.AgentService` that are served. ttrpc answers every other
/// one with `UNIMPLEMENTED`, which is what shims look for.
const SERVED: &[&str] = &[
    "CreateContainer",
    "StartContainer",
    "RemoveContainer",
    "ExecProcess",
    "SignalProcess",
    "WaitProcess",
    "PauseContainer",
    "ResumeContainer",
    "UpdateContainer",
    "UpdateEphemeralMounts",
    "StatsContainer",
    "RemoveStaleVirtiofsShareMounts",
    "WriteStdin",
    "ReadStdout",
    "ReadStderr",
    "CloseStdin",
    "TtyWinResize",
    "UpdateInterface",
    "UpdateRoutes",
    "ListInterfaces",
    "ListRoutes",
    "AddARPNeighbors",
    "GetIPTables",
    "SetIPTables",
    "CreateSandbox",
    "DestroySandbox",
    "OnlineCPUMem",
    "GetGuestDetails",
    "GetOOMEvent",
    "AddSwap",
    "AddSwapPath",
    "GetVolumeStats",
    "MemHotplugByProbe",
    "ReseedRandomDev",
    "SetGuestDateTime",
    "CopyFile",
    "GetDiagnosticData",
    "GetMetrics",
    #[cfg(feature = "agent-policy")]
    "SetPolicy",
];

/// Every service of the agent; its calls pass the policy's gate.
#[must_use]
pub fn all(agent: &Arc<Agent>, gate: &Arc<Gate>) -> HashMap<String, Service> {
    let calls = Arc::new(agent_service::Calls(Arc::clone(agent)));
    let mut services = agent_ttrpc::create_agent_service(calls);
    for service in services.values_mut() {
        // The generated table has every call of the schema, and answers those
        // that nobody serves with a code that no caller expects.
        service.methods.retain(|name, _| SERVED.contains(&name.as_str()));
        #[cfg(not(feature = "agent-policy"))]
        let _ = gate;
        #[cfg(feature = "agent-policy")]
        {
            service.methods = judged::judged(std::mem::take(&mut service.methods), gate);
        }
        let noted = |(name, serve)| (name, Box::new(noted::Noted { agent: Arc::clone(agent), serve }) as _);
        service.methods = std::mem::take(&mut service.methods).into_iter().map(noted).collect();
    }
    services.extend(health_ttrpc::create_health(Arc::new(health::Alive::new(Arc::clone(agent)))));
    services.extend(firstlight_ttrpc::create_boot_record(Arc::new(record::Record(Arc::clone(agent)))));
    services
}
