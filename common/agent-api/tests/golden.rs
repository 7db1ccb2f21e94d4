//! Golden bytes encoded by hand, which detect a changed field number or type.
#![forbid(unsafe_code)]

use firstlight_agent_api::agent::{
    CreateContainerRequest, CreateSandboxRequest, FSGroup, MemAgentMemcgConfig, MemHotplugByProbeRequest,
    ReadStreamRequest, ReseedRandomDevRequest, SetGuestDateTimeRequest, StatsContainerResponse, Storage, StringUser,
    WaitProcessResponse,
};
use firstlight_agent_api::firstlight::BootRecordReply;
use firstlight_agent_api::health::{HealthCheckResponse, health_check_response::ServingStatus};
use firstlight_agent_api::oci::{LinuxResources, LinuxSyscall, Spec, linux_syscall};
use firstlight_agent_api::types::{FSGroupChangePolicy, IPFamily, Interface};
use protobuf::Message;

fn assert_encodes<M: Message + PartialEq + std::fmt::Debug>(message: &M, bytes: &[u8]) {
    assert_eq!(message.write_to_bytes().ok().as_deref(), Some(bytes));
    assert_eq!(M::parse_from_bytes(bytes).ok().as_ref(), Some(message));
}

#[test]
fn strings_and_nested_messages() {
    let mut request = CreateContainerRequest::new();
    request.container_id = "c1".into();
    request.exec_id = "e".into();
    request.string_user = Some(StringUser { additionalGids: vec!["7".into()], ..Default::default() }).into();
    let mut spec = Spec::new();
    spec.Version = "1".into();
    spec.Annotations.insert("k".into(), "v".into());
    request.OCI = Some(spec).into();
    request.sandbox_pidns = true;
    request.stderr_port = 300;
    assert_encodes(
        &request,
        &[
            0x0a, 2, b'c', b'1', // 1 container_id
            0x12, 1, b'e', // 2 exec_id
            0x1a, 3, 0x1a, 1, b'7', // 3 string_user { 3 additionalGids }
            0x32, 11, 0x0a, 1, b'1', 0x3a, 6, 0x0a, 1, b'k', 0x12, 1, b'v', // 6 OCI { 1 Version, 7 Annotations }
            0x38, 1, // 7 sandbox_pidns
            0x58, 0xac, 0x02, // 11 stderr_port
        ],
    );
}

#[test]
fn storages_and_groups() {
    let mut storage = Storage::new();
    storage.driver = "d".into();
    storage.options = vec!["a".into(), String::new()];
    storage.mount_point = "/m".into();
    let group =
        FSGroup { group_id: 5, group_change_policy: FSGroupChangePolicy::OnRootMismatch.into(), ..Default::default() };
    storage.fs_group = Some(group).into();
    storage.shared = true;
    let mut request = CreateSandboxRequest::new();
    request.storages = vec![storage];
    request.sandbox_id = "s".into();
    assert_encodes(
        &request,
        &[
            0x1a, 20, // 3 storages
            0x0a, 1, b'd', // 1 driver
            0x2a, 1, b'a', 0x2a, 0, // 5 options
            0x32, 2, b'/', b'm', // 6 mount_point
            0x3a, 4, 0x10, 5, 0x18, 1, // 7 fs_group { 2 group_id, 3 policy }
            0x40, 1, // 8 shared
            0x2a, 1, b's', // 5 sandbox_id
        ],
    );
}

#[test]
fn numbers() {
    assert_encodes(
        &WaitProcessResponse { status: -1, ..Default::default() },
        &[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
    );
    assert_encodes(&SetGuestDateTimeRequest { Sec: 1, Usec: 2, ..Default::default() }, &[0x08, 1, 0x10, 2]);
    assert_encodes(
        &MemHotplugByProbeRequest { memHotplugProbeAddr: vec![1, 300], ..Default::default() },
        &[0x0a, 3, 1, 0xac, 0x02],
    );
    assert_encodes(&ReseedRandomDevRequest { data: vec![9], ..Default::default() }, &[0x12, 1, 9]);
    assert_encodes(
        &ReadStreamRequest { container_id: "c".into(), exec_id: "c".into(), len: 32768, ..Default::default() },
        &[0x0a, 1, b'c', 0x12, 1, b'c', 0x18, 0x80, 0x80, 2],
    );
}

#[test]
fn explicit_presence() {
    assert_encodes(
        &MemAgentMemcgConfig { swap: Some(false), period_secs: Some(0), ..Default::default() },
        &[0x10, 0, 0x20, 0],
    );
    let mut call = LinuxSyscall::new();
    call.Names = vec!["x".into()];
    call.ErrnoRet = Some(linux_syscall::ErrnoRet::Errnoret(0));
    assert_encodes(&call, &[0x0a, 1, b'x', 0x18, 0]);
}

#[test]
fn enums_and_other_packages() {
    assert_encodes(&HealthCheckResponse { status: ServingStatus::SERVING.into(), ..Default::default() }, &[0x08, 1]);
    let mut interface = Interface::new();
    interface.type_ = "t".into();
    interface.raw_flags = 128;
    interface.IPAddresses = vec![Default::default()];
    interface.IPAddresses[0].family = IPFamily::v6.into();
    assert_encodes(&interface, &[0x1a, 2, 0x08, 1, 0x3a, 1, b't', 0x40, 0x80, 1]);
    assert_encodes(&BootRecordReply { json: "{}".into(), ..Default::default() }, &[0x0a, 2, b'{', b'}']);
}

#[test]
fn maps_of_statistics() {
    let mut reply = StatsContainerResponse::new();
    reply.cgroup_stats.mut_or_insert_default().memory_stats.mut_or_insert_default().stats.insert("a".into(), 1);
    assert_encodes(&reply, &[0x0a, 9, 0x12, 7, 0x32, 5, 0x0a, 1, b'a', 0x10, 1]);
}

#[test]
fn unknown_fields_are_ignored() {
    let resources = LinuxResources::parse_from_bytes(&[0xfa, 0x01, 1, b'x']).unwrap();
    assert!(resources.Memory.is_none());
}
