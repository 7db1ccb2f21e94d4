//! Converts the Linux part of a configuration.

use std::path::PathBuf;

use firstlight_agent_api::oci;
use oci_spec::runtime::{
    Linux, LinuxBuilder, LinuxDevice, LinuxDeviceBuilder, LinuxIdMapping, LinuxIdMappingBuilder, LinuxNamespace,
    LinuxNamespaceBuilder, LinuxNamespaceType,
};

use super::{ConvertError, Result, parse_name, resources, seccomp, some};

/// Converts the Linux part. Namespaces are unchanged; `oci_config` adapts them to the sandbox.
pub(super) fn linux(message: &oci::Linux) -> Result<Linux> {
    let mut linux = LinuxBuilder::default().build()?;
    linux
        .set_uid_mappings(mappings(&message.UIDMappings)?)
        .set_gid_mappings(mappings(&message.GIDMappings)?)
        .set_sysctl(Some(message.Sysctl.clone()).filter(|sysctl| !sysctl.is_empty()))
        .set_resources(Some(resources::resources(message.Resources.as_ref())?))
        .set_cgroups_path(Some(PathBuf::from(&message.CgroupsPath)))
        .set_namespaces(Some(message.Namespaces.iter().map(namespace).collect::<Result<_>>()?))
        .set_devices(Some(message.Devices.iter().map(device).collect::<Result<_>>()?))
        .set_seccomp(message.Seccomp.as_ref().map(seccomp::seccomp).transpose()?)
        .set_rootfs_propagation(propagation(&message.RootfsPropagation)?)
        .set_masked_paths(some(&message.MaskedPaths))
        .set_readonly_paths(some(&message.ReadonlyPaths))
        .set_mount_label(None)
        .set_intel_rdt(None);
    Ok(linux)
}

fn mappings(messages: &[oci::LinuxIDMapping]) -> Result<Option<Vec<LinuxIdMapping>>> {
    let all: Vec<LinuxIdMapping> = messages
        .iter()
        .map(|message| {
            LinuxIdMappingBuilder::default()
                .host_id(message.HostID)
                .container_id(message.ContainerID)
                .size(message.Size)
                .build()
        })
        .collect::<std::result::Result<_, _>>()?;
    Ok(some(&all))
}

fn namespace(message: &oci::LinuxNamespace) -> Result<LinuxNamespace> {
    let kind: LinuxNamespaceType = parse_name("namespace", &message.Type)?;
    let builder = LinuxNamespaceBuilder::default().typ(kind);
    let builder = if message.Path.is_empty() { builder } else { builder.path(&message.Path) };
    Ok(builder.build()?)
}

fn device(message: &oci::LinuxDevice) -> Result<LinuxDevice> {
    let builder = LinuxDeviceBuilder::default()
        .path(&message.Path)
        .typ(parse_name::<oci_spec::runtime::LinuxDeviceType>("device type", &message.Type)?)
        .major(message.Major)
        .minor(message.Minor)
        .uid(message.UID)
        .gid(message.GID);
    let builder = if message.FileMode == 0 { builder.file_mode(0o666u32) } else { builder.file_mode(message.FileMode) };
    Ok(builder.build()?)
}

/// Strips the recursive prefix: libcontainer accepts the plain forms only, containerd sends the
/// recursive ones.
fn propagation(text: &str) -> Result<Option<String>> {
    let plain = text.strip_prefix('r').unwrap_or(text);
    match plain {
        "" => Ok(None),
        "shared" | "private" | "slave" | "unbindable" => Ok(Some(plain.to_owned())),
        _ => Err(ConvertError::Unknown { what: "rootfs propagation", text: text.chars().take(60).collect() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::runtime::LinuxDeviceType;

    #[test]
    fn recursive_propagation_becomes_plain() {
        for (text, plain) in
            [("rshared", Some("shared")), ("rslave", Some("slave")), ("private", Some("private")), ("", None)]
        {
            assert_eq!(propagation(text).unwrap().as_deref(), plain);
        }
        assert!(propagation("r").unwrap().is_none());
        assert!(propagation("rrshared").unwrap_err().to_string().contains("rrshared"));
    }

    #[test]
    fn namespaces_and_devices_are_converted() {
        let mut message = oci::Linux::new();
        message.CgroupsPath = "/a/b".into();
        message.Namespaces = ["network", "mount", "pid", "ipc", "uts", "cgroup", "user", "time"]
            .map(|kind| oci::LinuxNamespace { Type: kind.into(), Path: String::new(), ..Default::default() })
            .into();
        message.Devices = vec![oci::LinuxDevice {
            Path: "/dev/x".into(),
            Type: "c".into(),
            Major: 1,
            Minor: 3,
            ..Default::default()
        }];
        let linux = linux(&message).unwrap();
        assert_eq!(linux.namespaces().as_ref().unwrap().len(), 8);
        assert_eq!(linux.namespaces().as_ref().unwrap()[1].typ(), LinuxNamespaceType::Mount);
        let device = &linux.devices().as_ref().unwrap()[0];
        assert_eq!((device.typ(), device.file_mode()), (LinuxDeviceType::C, Some(0o666)));
        message.Namespaces[0].Type = "net".into();
        assert!(super::linux(&message).unwrap_err().to_string().contains("net"));
    }
}
