//! The JSON of requests, exactly as kata-agent produces it: policies written for kata-agent depend on it.
#![cfg(test)]
#![forbid(unsafe_code)]

use firstlight_agent_api::agent::{
    CopyFileRequest, CreateContainerRequest, CreateSandboxRequest, ExecProcessRequest, FSGroup, KernelModule,
    MemAgentMemcgConfig, SignalProcessRequest, Storage, StringUser, UpdateInterfaceRequest, WriteStreamRequest,
};
use firstlight_agent_api::oci::{Hook, LinuxNamespace, LinuxSyscall, Mount, POSIXRlimit, Spec, linux_syscall};
use firstlight_agent_api::types::{FSGroupChangePolicy, IPAddress, IPFamily, Interface};
use firstlight_policy::requests;
use protobuf::Message;
use serde_json::{Value, json};

fn shape<M: Message>(message: &M) -> Value {
    let text = requests::json(M::NAME, &message.write_to_bytes().unwrap()).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn storage() -> Storage {
    let group =
        FSGroup { group_id: 5, group_change_policy: FSGroupChangePolicy::OnRootMismatch.into(), ..Default::default() };
    Storage {
        driver: "ephemeral".into(),
        options: vec!["fsgid=5".into()],
        source: "tmpfs".into(),
        fstype: "tmpfs".into(),
        mount_point: "/m".into(),
        fs_group: Some(group).into(),
        shared: true,
        ..Default::default()
    }
}

fn storage_json() -> Value {
    json!({
        "driver": "ephemeral", "driver_options": [], "source": "tmpfs", "fstype": "tmpfs", "options": ["fsgid=5"],
        "mount_point": "/m", "fs_group": {"group_id": 5, "group_change_policy": 1}, "shared": true,
    })
}

#[test]
fn create_container() {
    let mut spec = Spec::new();
    spec.Version = "1.1.0".into();
    spec.Hostname = "h".into();
    spec.Annotations.insert("io.kubernetes.cri.image-name".into(), "web".into());
    let process = spec.Process.mut_or_insert_default();
    process.Args = vec!["/bin/web".into()];
    process.Env = vec!["A=b".into()];
    process.Cwd = "/".into();
    process.NoNewPrivileges = true;
    process.OOMScoreAdj = -998;
    process.User.mut_or_insert_default().AdditionalGids = vec![7];
    process.Capabilities.mut_or_insert_default().Bounding = vec!["CAP_KILL".into()];
    process.Rlimits =
        vec![POSIXRlimit { Type: "RLIMIT_NOFILE".into(), Hard: u64::MAX, Soft: 1024, ..Default::default() }];
    spec.Root.mut_or_insert_default().Path = "/r".into();
    spec.Mounts = vec![Mount {
        destination: "/proc".into(),
        source: "proc".into(),
        type_: "proc".into(),
        options: vec!["nosuid".into()],
        ..Default::default()
    }];
    spec.Hooks.mut_or_insert_default().Prestart = vec![Hook { Path: "/h".into(), Timeout: 9, ..Default::default() }];
    let linux = spec.Linux.mut_or_insert_default();
    linux.CgroupsPath = "/c".into();
    linux.Namespaces = vec![LinuxNamespace { Type: "ipc".into(), ..Default::default() }];
    linux.Sysctl.insert("net.x".into(), "1".into());
    linux.Seccomp.mut_or_insert_default().Syscalls = vec![LinuxSyscall {
        Names: vec!["clone".into()],
        Action: "SCMP_ACT_ERRNO".into(),
        ErrnoRet: Some(linux_syscall::ErrnoRet::Errnoret(38)),
        ..Default::default()
    }];
    let mut request = CreateContainerRequest::new();
    request.container_id = "c1".into();
    request.exec_id = "c1".into();
    request.string_user = Some(StringUser { additionalGids: vec!["7".into()], ..Default::default() }).into();
    request.storages = vec![storage()];
    request.devices = vec![Default::default()];
    request.devices[0].type_ = "blk".into();
    request.shared_mounts = vec![Default::default()];
    request.OCI = Some(spec).into();
    request.sandbox_pidns = true;
    request.stderr_port = 3;
    let expected = json!({
        "container_id": "c1",
        "exec_id": "c1",
        "string_user": {"uid": "", "gid": "", "additionalGids": ["7"]},
        "devices": [{"id": "", "type_": "blk", "vm_path": "", "container_path": "", "options": []}],
        "storages": [storage_json()],
        "OCI": {
            "Version": "1.1.0",
            "Process": {
                "Terminal": false,
                "ConsoleSize": null,
                "User": {"UID": 0, "GID": 0, "AdditionalGids": [7], "Username": ""},
                "Args": ["/bin/web"],
                "Env": ["A=b"],
                "Cwd": "/",
                "Capabilities": {
                    "Bounding": ["CAP_KILL"], "Effective": [], "Inheritable": [], "Permitted": [], "Ambient": [],
                },
                "Rlimits": [{"Type": "RLIMIT_NOFILE", "Hard": u64::MAX, "Soft": 1024}],
                "NoNewPrivileges": true,
                "ApparmorProfile": "",
                "OOMScoreAdj": -998,
                "SelinuxLabel": "",
            },
            "Root": {"Path": "/r", "Readonly": false},
            "Hostname": "h",
            "Mounts": [{"destination": "/proc", "source": "proc", "type_": "proc", "options": ["nosuid"]}],
            "Hooks": {
                "Prestart": [{"Path": "/h", "Args": [], "Env": [], "Timeout": 9}],
                "Poststart": [], "Poststop": [], "CreateRuntime": [], "CreateContainer": [], "StartContainer": [],
            },
            "Annotations": {"io.kubernetes.cri.image-name": "web"},
            "Linux": {
                "UIDMappings": [],
                "GIDMappings": [],
                "Sysctl": {"net.x": "1"},
                "Resources": null,
                "CgroupsPath": "/c",
                "Namespaces": [{"Type": "ipc", "Path": ""}],
                "Devices": [],
                "Seccomp": {
                    "DefaultAction": "",
                    "Architectures": [],
                    "Flags": [],
                    "Syscalls": [{
                        "Names": ["clone"], "Action": "SCMP_ACT_ERRNO", "Args": [], "ErrnoRet": {"Errnoret": 38},
                    }],
                },
                "RootfsPropagation": "",
                "MaskedPaths": [],
                "ReadonlyPaths": [],
                "MountLabel": "",
                "IntelRdt": null,
            },
            "Solaris": null,
            "Windows": null,
        },
        "sandbox_pidns": true,
        "shared_mounts": [{"name": "", "src_ctr": "", "src_path": "", "dst_ctr": "", "dst_path": ""}],
        "stdin_port": 0,
        "stdout_port": 0,
        "stderr_port": 3,
    });
    assert_eq!(shape(&request), expected);
}

#[test]
fn create_sandbox() {
    let request = CreateSandboxRequest {
        hostname: "h".into(),
        dns: vec!["nameserver 10.0.0.10".into()],
        storages: vec![storage()],
        sandbox_id: "s".into(),
        kernel_modules: vec![KernelModule { name: "m".into(), parameters: vec!["a=1".into()], ..Default::default() }],
        ..Default::default()
    };
    let expected = json!({
        "hostname": "h", "dns": ["nameserver 10.0.0.10"], "storages": [storage_json()], "sandbox_pidns": false,
        "sandbox_id": "s", "guest_hook_path": "", "kernel_modules": [{"name": "m", "parameters": ["a=1"]}],
    });
    assert_eq!(shape(&request), expected);
}

#[test]
fn exec_process() {
    let mut request = ExecProcessRequest::new();
    request.container_id = "c".into();
    request.exec_id = "e".into();
    let process = request.process.mut_or_insert_default();
    process.Terminal = true;
    process.ConsoleSize.mut_or_insert_default().Height = 24;
    process.Args = vec!["sh".into()];
    let expected = json!({
        "container_id": "c",
        "exec_id": "e",
        "string_user": null,
        "process": {
            "Terminal": true, "ConsoleSize": {"Height": 24, "Width": 0}, "User": null, "Args": ["sh"], "Env": [],
            "Cwd": "", "Capabilities": null, "Rlimits": [], "NoNewPrivileges": false, "ApparmorProfile": "",
            "OOMScoreAdj": 0, "SelinuxLabel": "",
        },
        "stdin_port": 0,
        "stdout_port": 0,
        "stderr_port": 0,
    });
    assert_eq!(shape(&request), expected);
}

#[test]
fn copy_file_has_the_file_type_and_no_data() {
    let mut request = CopyFileRequest {
        path: "/run/kata-containers/shared/containers/x".into(),
        file_size: 4,
        file_mode: 0o100_644,
        dir_mode: 0o755,
        uid: 1000,
        gid: -1,
        offset: 2,
        data: b"data".to_vec(),
        ..Default::default()
    };
    let mut expected = json!({
        "path": "/run/kata-containers/shared/containers/x", "file_type": "Regular", "symlink_target": null,
        "symlink_src": "", "file_size": 4, "file_mode": 0o100_644, "dir_mode": 0o755, "uid": 1000, "gid": -1,
        "offset": 2,
    });
    assert_eq!(shape(&request), expected);
    request.file_mode = 0o120_777;
    request.data = b"..data/x".to_vec();
    expected["file_type"] = "Symlink".into();
    expected["file_mode"] = request.file_mode.into();
    expected["symlink_target"] = "..data/x".into();
    expected["symlink_src"] = "..data/x".into();
    assert_eq!(shape(&request), expected);
    for (mode, kind) in [(0o040_755, "Directory"), (0o140_000, "Unknown"), (0, "Unknown")] {
        request.file_mode = mode;
        assert_eq!(shape(&request)["file_type"], kind);
    }
}

#[test]
fn update_interface() {
    let mut request = UpdateInterfaceRequest::new();
    request.interface = Some(Interface {
        device: "eth0".into(),
        name: "eth0".into(),
        IPAddresses: vec![IPAddress {
            family: IPFamily::v6.into(),
            address: "fd00::1".into(),
            mask: "64".into(),
            ..Default::default()
        }],
        mtu: 1500,
        hwAddr: "02:00:00:00:00:01".into(),
        devicePath: "02/00".into(),
        type_: "veth".into(),
        raw_flags: 128,
        ..Default::default()
    })
    .into();
    let expected = json!({"interface": {
        "device": "eth0", "name": "eth0", "IPAddresses": [{"family": 1, "address": "fd00::1", "mask": "64"}],
        "mtu": 1500, "hwAddr": "02:00:00:00:00:01", "devicePath": "02/00", "type_": "veth", "raw_flags": 128,
    }});
    assert_eq!(shape(&request), expected);
    assert_eq!(shape(&UpdateInterfaceRequest::new()), json!({"interface": null}));
}

#[test]
fn small_requests() {
    let request = SignalProcessRequest { container_id: "c".into(), signal: 15, ..Default::default() };
    assert_eq!(shape(&request), json!({"container_id": "c", "exec_id": "", "signal": 15}));
    let request = WriteStreamRequest { container_id: "c".into(), data: vec![0, 255], ..Default::default() };
    assert_eq!(shape(&request), json!({"container_id": "c", "exec_id": "", "data": [0, 255]}));
    let request = MemAgentMemcgConfig { swap: Some(false), ..Default::default() };
    let expected = json!({
        "disabled": null, "swap": false, "swappiness_max": null, "period_secs": null,
        "period_psi_percent_limit": null, "eviction_psi_percent_limit": null, "eviction_run_aging_count_min": null,
    });
    assert_eq!(shape(&request), expected);
}
