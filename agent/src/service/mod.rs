//! The ttrpc services: each call is authorised, handed to the agent, and answered.

mod activity;
mod agent_service;
mod health;
#[cfg(feature = "agent-policy")]
mod policy_check;
mod record;

use std::collections::HashMap;
use std::sync::Arc;

use firstlight_agent_api::{agent_ttrpc, firstlight_ttrpc, health_ttrpc};
use ttrpc::r#async::Service;

use crate::agent::Agent;
use crate::boot_events::BootEvents;
use crate::control::Control;
use crate::idle::Idle;
use crate::policy::Gate;

/// The implemented calls of `grpc.AgentService`. ttrpc answers all others with `UNIMPLEMENTED`,
/// which shims check for.
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

/// Returns every service of the agent, with the policy check before each call. `idle` is notified of
/// each call; `control` is the connection to PID 1, if there is one.
#[must_use]
pub fn all(
    agent: &Arc<Agent>,
    gate: &Arc<Gate>,
    idle: &Arc<Idle>,
    control: Option<&Arc<Control>>,
) -> HashMap<String, Service> {
    let calls = Arc::new(agent_service::Calls(Arc::clone(agent)));
    let mut services = agent_ttrpc::create_agent_service(calls);
    for service in services.values_mut() {
        // The generated table has every call of the schema and answers unimplemented ones with a
        // code that no caller expects.
        service.methods.retain(|name, _| SERVED.contains(&name.as_str()));
        #[cfg(not(feature = "agent-policy"))]
        let _ = gate;
        #[cfg(feature = "agent-policy")]
        {
            service.methods = policy_check::authorise_all(std::mem::take(&mut service.methods), gate);
        }
        let tracked = |(name, serve)| (name, Box::new(activity::Tracked { idle: Arc::clone(idle), serve }) as _);
        service.methods = std::mem::take(&mut service.methods).into_iter().map(tracked).collect();
    }
    let events = control.map_or_else(BootEvents::default, |control| control.events());
    services.extend(health_ttrpc::create_health(Arc::new(health::HealthService::new(events))));
    services.extend(firstlight_ttrpc::create_boot_record(Arc::new(record::Record(control.cloned()))));
    services
}
