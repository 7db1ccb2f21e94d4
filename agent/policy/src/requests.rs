//! Requests as the JSON input of policies.
//!
//! The format is kata-agent's: serde's serialization of the messages that rust-protobuf generates. Fields have
//! the generated names (`OCI`, `Args`, `type_`, `hwAddr`), bytes are arrays of numbers, enums are numbers, an
//! unset message is null, a oneof is `{"Errnoret": 1}`. The exception is `CopyFile`: its type of file instead of
//! its data.

use firstlight_agent_api::agent;
use protobuf::Message;
use serde::Serialize;

/// Converts an encoded message to JSON.
type Write = fn(&[u8]) -> Result<String, String>;

macro_rules! requests {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), plain::<agent::$name> as Write),)* ("CopyFileRequest", copy_file as Write)]
    };
}

/// All request messages of the agent's service.
const REQUESTS: &[(&str, Write)] = requests![
    AddARPNeighborsRequest,
    AddSwapPathRequest,
    AddSwapRequest,
    CloseStdinRequest,
    CreateContainerRequest,
    CreateSandboxRequest,
    DestroySandboxRequest,
    ExecProcessRequest,
    GetDiagnosticDataRequest,
    GetIPTablesRequest,
    GetMetricsRequest,
    GetOOMEventRequest,
    GuestDetailsRequest,
    ListInterfacesRequest,
    ListRoutesRequest,
    MemAgentCompactConfig,
    MemAgentMemcgConfig,
    MemHotplugByProbeRequest,
    OnlineCPUMemRequest,
    PauseContainerRequest,
    ReadStreamRequest,
    RemoveContainerRequest,
    RemoveStaleVirtiofsShareMountsRequest,
    ReseedRandomDevRequest,
    ResizeVolumeRequest,
    ResumeContainerRequest,
    SetGuestDateTimeRequest,
    SetIPTablesRequest,
    SetPolicyRequest,
    SignalProcessRequest,
    StartContainerRequest,
    StatsContainerRequest,
    TtyWinResizeRequest,
    UpdateContainerRequest,
    UpdateEphemeralMountsRequest,
    UpdateInterfaceRequest,
    UpdateRoutesRequest,
    VolumeStatsRequest,
    WaitProcessRequest,
    WriteStreamRequest,
];

/// Returns the names of all request messages.
pub fn names() -> impl Iterator<Item = &'static str> {
    REQUESTS.iter().map(|(name, _)| *name)
}

/// Converts an encoded request to JSON.
///
/// # Errors
/// The name is unknown, or the bytes are not such a message.
pub fn json(name: &str, bytes: &[u8]) -> Result<String, String> {
    let (_, write) =
        REQUESTS.iter().find(|(known, _)| *known == name).ok_or_else(|| format!("unknown request {name}"))?;
    write(bytes)
}

fn parsed<M: Message>(bytes: &[u8]) -> Result<M, String> {
    M::parse_from_bytes(bytes).map_err(|error| format!("invalid {}: {error}", M::NAME))
}

fn written(message: &impl Serialize) -> Result<String, String> {
    serde_json::to_string(message).map_err(|error| error.to_string())
}

fn plain<M: Message + Serialize>(bytes: &[u8]) -> Result<String, String> {
    written(&parsed::<M>(bytes)?)
}

/// The type of file that a request creates.
#[derive(Debug, Serialize)]
enum FileType {
    Unknown,
    Regular,
    Directory,
    Symlink,
}

/// A `CopyFile` request without its data, which may be large and does not help a decision.
#[derive(Debug, Serialize)]
struct CopyFile<'a> {
    path: &'a str,
    file_type: FileType,
    symlink_target: Option<&'a str>,
    /// kata-agent's name of `symlink_target` before version 4; empty if none.
    symlink_src: &'a str,
    file_size: i64,
    file_mode: u32,
    dir_mode: u32,
    uid: i32,
    gid: i32,
    offset: i64,
}

/// `S_IFMT` and file types (POSIX `sys/stat.h`).
const TYPE: u32 = 0o170_000;
const REGULAR: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const SYMLINK: u32 = 0o120_000;

fn copy_file(bytes: &[u8]) -> Result<String, String> {
    let request: agent::CopyFileRequest = parsed(bytes)?;
    let file_type = match request.file_mode & TYPE {
        REGULAR => FileType::Regular,
        DIRECTORY => FileType::Directory,
        SYMLINK => FileType::Symlink,
        _ => FileType::Unknown,
    };
    let symlink_target = match file_type {
        FileType::Symlink => Some(str::from_utf8(&request.data).map_err(|_| "the link's target is not UTF-8")?),
        _ => None,
    };
    written(&CopyFile {
        path: &request.path,
        file_type,
        symlink_target,
        symlink_src: symlink_target.unwrap_or_default(),
        file_size: request.file_size,
        file_mode: request.file_mode,
        dir_mode: request.dir_mode,
        uid: request.uid,
        gid: request.gid,
        offset: request.offset,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_of_the_proto_is_listed() {
        let schema = include_str!("../../../common/agent-api/proto/agent.proto");
        let service = schema.split("service AgentService").nth(1).and_then(|rest| rest.split('}').next()).unwrap();
        let mut expected: Vec<_> = service
            .lines()
            .filter_map(|line| line.trim().strip_prefix("rpc ")?.split(['(', ')']).nth(1))
            .map(|name| name.rsplit('.').next().unwrap_or(name).trim())
            .collect();
        assert_eq!(expected.len(), 42);
        let mut known: Vec<_> = names().collect();
        expected.sort_unstable();
        expected.dedup();
        known.sort_unstable();
        assert_eq!(known, expected);
    }

    #[test]
    fn invalid_requests_are_reported_by_name() {
        assert_eq!(json("Nonsense", b"").unwrap_err(), "unknown request Nonsense");
        assert!(json("SetPolicyRequest", b"\xff").unwrap_err().starts_with("invalid SetPolicyRequest: "));
        let link = agent::CopyFileRequest { file_mode: SYMLINK, data: vec![0xff], ..Default::default() };
        assert!(json("CopyFileRequest", &link.write_to_bytes().unwrap()).unwrap_err().contains("UTF-8"));
    }
}
