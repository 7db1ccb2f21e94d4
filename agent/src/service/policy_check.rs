//! Authorises every call of `grpc.AgentService` by the policy.
//!
//! Done in one place, before a request is parsed, so no call can bypass it: a call without a row in
//! `CALLS` is not served.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use ttrpc::r#async::{MethodHandler, TtrpcContext};
use ttrpc::proto::{Request, Response};

use crate::error::Error;
use crate::policy::Gate;

type Handler = Box<dyn MethodHandler + Send + Sync>;

/// Calls and the request names by which policies know them.
const CALLS: &[(&str, &str)] = &[
    ("AddARPNeighbors", "AddARPNeighborsRequest"),
    ("AddSwap", "AddSwapRequest"),
    ("AddSwapPath", "AddSwapPathRequest"),
    ("CloseStdin", "CloseStdinRequest"),
    ("CopyFile", "CopyFileRequest"),
    ("CreateContainer", "CreateContainerRequest"),
    ("CreateSandbox", "CreateSandboxRequest"),
    ("DestroySandbox", "DestroySandboxRequest"),
    ("ExecProcess", "ExecProcessRequest"),
    ("GetDiagnosticData", "GetDiagnosticDataRequest"),
    ("GetGuestDetails", "GuestDetailsRequest"),
    ("GetIPTables", "GetIPTablesRequest"),
    ("GetMetrics", "GetMetricsRequest"),
    ("GetOOMEvent", "GetOOMEventRequest"),
    ("GetVolumeStats", "VolumeStatsRequest"),
    ("ListInterfaces", "ListInterfacesRequest"),
    ("ListRoutes", "ListRoutesRequest"),
    ("MemAgentCompactSet", "MemAgentCompactConfig"),
    ("MemAgentMemcgSet", "MemAgentMemcgConfig"),
    ("MemHotplugByProbe", "MemHotplugByProbeRequest"),
    ("OnlineCPUMem", "OnlineCPUMemRequest"),
    ("PauseContainer", "PauseContainerRequest"),
    ("ReadStderr", "ReadStreamRequest"),
    ("ReadStdout", "ReadStreamRequest"),
    ("RemoveContainer", "RemoveContainerRequest"),
    ("RemoveStaleVirtiofsShareMounts", "RemoveStaleVirtiofsShareMountsRequest"),
    ("ReseedRandomDev", "ReseedRandomDevRequest"),
    ("ResizeVolume", "ResizeVolumeRequest"),
    ("ResumeContainer", "ResumeContainerRequest"),
    ("SetGuestDateTime", "SetGuestDateTimeRequest"),
    ("SetIPTables", "SetIPTablesRequest"),
    ("SetPolicy", "SetPolicyRequest"),
    ("SignalProcess", "SignalProcessRequest"),
    ("StartContainer", "StartContainerRequest"),
    ("StatsContainer", "StatsContainerRequest"),
    ("TtyWinResize", "TtyWinResizeRequest"),
    ("UpdateContainer", "UpdateContainerRequest"),
    ("UpdateEphemeralMounts", "UpdateEphemeralMountsRequest"),
    ("UpdateInterface", "UpdateInterfaceRequest"),
    ("UpdateRoutes", "UpdateRoutesRequest"),
    ("WaitProcess", "WaitProcessRequest"),
    ("WriteStdin", "WriteStreamRequest"),
];

/// Wraps every call in the policy check.
pub(super) fn authorise_all(methods: HashMap<String, Handler>, gate: &Arc<Gate>) -> HashMap<String, Handler> {
    let row = |name: &str| CALLS.iter().find(|(call, _)| *call == name).copied();
    let wrap = |(name, serve): (String, Handler)| {
        let (_, request) = row(&name)?;
        let gate = Arc::clone(gate);
        let handler: Handler = match name.as_str() {
            "SetPolicy" => Box::new(SetPolicy { gate }),
            "ReadStdout" | "ReadStderr" => Box::new(Read { gate, request, serve }),
            _ => Box::new(Call { gate, request, serve }),
        };
        Some((name, handler))
    };
    methods.into_iter().filter_map(wrap).collect()
}

fn refused(error: Error) -> Response {
    let mut response = Response::new();
    response.set_status(ttrpc::get_status(error.code, error.message));
    response
}

/// Authorised, then served.
struct Call {
    gate: Arc<Gate>,
    request: &'static str,
    serve: Handler,
}

#[async_trait]
impl MethodHandler for Call {
    async fn handler(&self, context: TtrpcContext, request: Request) -> ttrpc::Result<Response> {
        match self.gate.authorise(self.request, &request.payload).await {
            Ok(()) => self.serve.handler(context, request).await,
            Err(error) => Ok(refused(error)),
        }
    }
}

/// Served, then authorised: a shim that reads must see the end of a stream and the error for a
/// missing process, but not the output.
struct Read {
    gate: Arc<Gate>,
    request: &'static str,
    serve: Handler,
}

#[async_trait]
impl MethodHandler for Read {
    async fn handler(&self, context: TtrpcContext, request: Request) -> ttrpc::Result<Response> {
        let payload = request.payload.clone();
        let mut response = self.serve.handler(context, request).await?;
        if self.gate.authorise(self.request, &payload).await.is_err() {
            // An empty reply: its only field is unset.
            response.payload.clear();
        }
        Ok(response)
    }
}

/// Authorised, then replaces the policy.
struct SetPolicy {
    gate: Arc<Gate>,
}

#[async_trait]
impl MethodHandler for SetPolicy {
    async fn handler(&self, _: TtrpcContext, request: Request) -> ttrpc::Result<Response> {
        match self.gate.replace(request.payload).await {
            Ok(()) => {
                let mut response = Response::new();
                response.set_status(ttrpc::get_status(ttrpc::Code::OK, ""));
                Ok(response)
            }
            Err(error) => Ok(refused(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_of_the_schema_has_a_row_naming_its_request() {
        let schema = include_str!("../../../common/agent-api/proto/agent.proto");
        let service = schema.split("service AgentService").nth(1).and_then(|rest| rest.split('}').next()).unwrap();
        let rows = service.lines().filter_map(|line| {
            let (call, rest) = line.trim().strip_prefix("rpc ")?.split_once('(')?;
            let request = rest.split(')').next()?.rsplit('.').next()?;
            Some((call.trim(), request.trim()))
        });
        let mut expected: Vec<_> = rows.collect();
        expected.sort_unstable();
        assert_eq!(CALLS, expected);
        let known: Vec<_> = firstlight_policy::requests::names().collect();
        assert!(CALLS.iter().all(|(_, request)| known.contains(request)));
    }
}
