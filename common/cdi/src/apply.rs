//! Applying container edits to an OCI configuration.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use oci_spec::runtime::{
    Linux, LinuxDevice, LinuxDeviceBuilder, LinuxDeviceCgroup, LinuxDeviceCgroupBuilder, LinuxDeviceType,
    LinuxResources, MountBuilder, Process, Spec,
};

use crate::{ContainerEdits, DeviceNode, Mount};

/// Why edits could not be applied. The configuration may be partially changed.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The edits have a hook, which would run a guest program beside the tenant's files.
    #[error(
        "CDI hook {name} ({path}) is refused: hooks are not run; describe its effect as env, mounts or device nodes"
    )]
    Hook {
        /// Its stage, e.g. `createContainer`.
        name: String,
        /// Its program.
        path: String,
    },
    /// The node's numbers are not given, and `stat` failed.
    #[error("failed to stat CDI device node {path}: {source}; is its driver loaded?")]
    Node {
        /// The path that was looked up.
        path: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The node is neither a character nor a block device.
    #[error("CDI device node {path} has type {kind:?}; expected c or b")]
    Type {
        /// The node.
        path: PathBuf,
        /// Its type.
        kind: String,
    },
    /// A value is invalid in an OCI configuration.
    #[error("invalid value in CDI edits: {0}")]
    Value(String),
}

/// Applies `edits` to `spec`. Device numbers that a node omits are looked up
/// below `root` (normally `/`). Idempotent.
///
/// # Errors
/// The edits have a hook, or a device node cannot be looked up.
pub fn apply(spec: &mut Spec, edits: &ContainerEdits, root: &Path) -> Result<(), ApplyError> {
    if let Some(hook) = edits.hooks.first() {
        return Err(ApplyError::Hook { name: hook.hook_name.clone(), path: hook.path.clone() });
    }
    if !edits.env.is_empty() {
        let process = spec.process_mut().get_or_insert_with(Process::default);
        let env = process.env_mut().get_or_insert_default();
        edits.env.iter().for_each(|entry| set_env(env, entry));
    }
    let owner = spec.process().as_ref().map_or((0, 0), |process| (process.user().uid(), process.user().gid()));
    for node in &edits.device_nodes {
        let (device, rule) = device(node, owner, root)?;
        let linux = spec.linux_mut().get_or_insert_with(Linux::default);
        let devices = linux.devices_mut().get_or_insert_default();
        devices.retain(|known| known.path() != device.path());
        devices.push(device);
        let resources = linux.resources_mut().get_or_insert_with(LinuxResources::default);
        let rules = resources.devices_mut().get_or_insert_default();
        if !rules.contains(&rule) {
            rules.push(rule);
        }
    }
    for mount in &edits.mounts {
        let mounts = spec.mounts_mut().get_or_insert_default();
        mounts.retain(|known| known.destination() != Path::new(&mount.container_path));
        mounts.push(bind(mount)?);
    }
    Ok(())
}

fn set_env(env: &mut Vec<String>, entry: &str) {
    let name = entry.split_once('=').map_or(entry, |(name, _)| name);
    env.retain(|known| known.split_once('=').map_or(known.as_str(), |(known, _)| known) != name);
    env.push(entry.to_owned());
}

/// Type, numbers and mode of a node.
struct NodeAttributes {
    kind: LinuxDeviceType,
    major: i64,
    minor: i64,
    mode: u32,
}

fn device(
    node: &DeviceNode,
    (uid, gid): (u32, u32),
    root: &Path,
) -> Result<(LinuxDevice, LinuxDeviceCgroup), ApplyError> {
    let attributes = node_attributes(node, root)?;
    let value = |error: oci_spec::OciSpecError| ApplyError::Value(format!("{}: {error}", node.path));
    let device = LinuxDeviceBuilder::default()
        .path(&node.path)
        .typ(attributes.kind)
        .major(attributes.major)
        .minor(attributes.minor)
        .file_mode(node.file_mode.unwrap_or(attributes.mode))
        // The container's user owns its devices unless the specification sets an owner.
        .uid(node.uid.unwrap_or(uid))
        .gid(node.gid.unwrap_or(gid))
        .build()
        .map_err(value)?;
    let rule = LinuxDeviceCgroupBuilder::default()
        .allow(true)
        .typ(attributes.kind)
        .major(attributes.major)
        .minor(attributes.minor)
        .access(node.permissions.as_deref().unwrap_or("rwm"))
        .build()
        .map_err(value)?;
    Ok((device, rule))
}

fn node_attributes(node: &DeviceNode, root: &Path) -> Result<NodeAttributes, ApplyError> {
    let host_path = node.host_path.as_deref().unwrap_or(&node.path);
    let path = root.join(host_path.trim_start_matches('/'));
    if let (Some(kind), Some(major), Some(minor)) = (&node.node_type, node.major, node.minor) {
        return Ok(NodeAttributes { kind: kind_of(kind, &path)?, major, minor, mode: 0o666 });
    }
    let found = fs::metadata(&path).map_err(|source| ApplyError::Node { path: path.clone(), source })?;
    let kind = match &node.node_type {
        Some(kind) => kind_of(kind, &path)?,
        None if found.file_type().is_char_device() => LinuxDeviceType::C,
        None if found.file_type().is_block_device() => LinuxDeviceType::B,
        None => return Err(ApplyError::Type { path, kind: "file".to_owned() }),
    };
    Ok(NodeAttributes {
        kind,
        major: node.major.unwrap_or_else(|| rustix::fs::major(found.rdev()).into()),
        minor: node.minor.unwrap_or_else(|| rustix::fs::minor(found.rdev()).into()),
        mode: found.mode() & 0o777,
    })
}

fn kind_of(text: &str, path: &Path) -> Result<LinuxDeviceType, ApplyError> {
    match text {
        "c" | "u" => Ok(LinuxDeviceType::C),
        "b" => Ok(LinuxDeviceType::B),
        other => Err(ApplyError::Type { path: path.to_owned(), kind: other.chars().take(20).collect() }),
    }
}

fn bind(mount: &Mount) -> Result<oci_spec::runtime::Mount, ApplyError> {
    let mut options = mount.options.clone();
    if options.is_empty() {
        options.extend(["ro", "nosuid", "nodev"].map(str::to_owned));
    }
    let kind = mount.mount_type.as_deref().filter(|kind| !kind.is_empty() && *kind != "none").unwrap_or("bind");
    // The type "bind" sets no mount(2) flag; the option does.
    if kind == "bind" && !options.iter().any(|option| option == "bind" || option == "rbind") {
        options.push("rbind".to_owned());
    }
    MountBuilder::default()
        .source(&mount.host_path)
        .destination(&mount.container_path)
        .typ(kind)
        .options(options)
        .build()
        .map_err(|error| ApplyError::Value(format!("{}: {error}", mount.container_path)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Hook;
    use proptest::prelude::*;

    fn node(path: &str) -> DeviceNode {
        DeviceNode { path: path.to_owned(), ..DeviceNode::default() }
    }

    #[test]
    fn gpu_edits_add_node_rule_mount_and_variable() {
        let mut spec = Spec::default();
        let edits = ContainerEdits {
            env: vec!["PATH=/x".into(), "A=1".into()],
            device_nodes: vec![DeviceNode {
                node_type: Some("c".into()),
                major: Some(195),
                minor: Some(0),
                permissions: Some("rw".into()),
                ..node("/dev/nvidia0")
            }],
            mounts: vec![Mount {
                host_path: "/usr/lib/libcuda.so.1".into(),
                container_path: "/usr/lib/libcuda.so.1".into(),
                options: vec!["ro".into()],
                mount_type: None,
            }],
            hooks: vec![],
        };
        apply(&mut spec, &edits, Path::new("/")).unwrap();
        let once = spec.clone();
        apply(&mut spec, &edits, Path::new("/")).unwrap();
        assert_eq!(spec, once, "applying is idempotent");

        let env = spec.process().as_ref().unwrap().env().clone().unwrap();
        assert_eq!(env.iter().filter(|entry| entry.starts_with("PATH=")).collect::<Vec<_>>(), ["PATH=/x"]);
        let linux = spec.linux().as_ref().unwrap();
        let device = linux.devices().as_ref().unwrap().last().unwrap().clone();
        assert_eq!((device.major(), device.minor(), device.file_mode()), (195, 0, Some(0o666)));
        let rule = linux.resources().as_ref().unwrap().devices().as_ref().unwrap().last().unwrap().clone();
        assert_eq!((rule.allow(), rule.major(), rule.access().as_deref()), (true, Some(195), Some("rw")));
        let mount = spec.mounts().as_ref().unwrap().last().unwrap().clone();
        assert_eq!(mount.options().clone().unwrap(), ["ro", "rbind"]);
    }

    #[test]
    fn omitted_numbers_are_looked_up_and_the_containers_user_owns_the_node() {
        let mut spec = Spec::default();
        spec.process_mut().get_or_insert_with(Process::default).user_mut().set_uid(1000);
        let edits = ContainerEdits {
            device_nodes: vec![DeviceNode { host_path: Some("/dev/null".into()), ..node("/dev/x") }],
            ..ContainerEdits::default()
        };
        apply(&mut spec, &edits, Path::new("/")).unwrap();
        let device = spec.linux().as_ref().unwrap().devices().as_ref().unwrap().last().unwrap().clone();
        assert_eq!((device.typ(), device.major(), device.minor()), (LinuxDeviceType::C, 1, 3));
        assert_eq!((device.uid(), device.gid()), (Some(1000), Some(0)));
    }

    #[test]
    fn hooks_missing_nodes_and_plain_files_are_refused() {
        let mut spec = Spec::default();
        let hook = Hook { hook_name: "createContainer".into(), path: "/usr/bin/x".into(), args: vec![] };
        let edits = ContainerEdits { hooks: vec![hook], ..ContainerEdits::default() };
        assert!(apply(&mut spec, &edits, Path::new("/")).unwrap_err().to_string().contains("/usr/bin/x"));
        let root = tempfile::tempdir().unwrap();
        let edits = ContainerEdits { device_nodes: vec![node("/dev/nvidia0")], ..ContainerEdits::default() };
        let error = apply(&mut spec, &edits, root.path()).unwrap_err().to_string();
        assert!(error.contains("dev/nvidia0") && error.contains("driver"), "{error}");
        fs::create_dir(root.path().join("dev")).unwrap();
        fs::write(root.path().join("dev/nvidia0"), "").unwrap();
        assert!(matches!(apply(&mut spec, &edits, root.path()), Err(ApplyError::Type { .. })));
    }

    proptest! {
        #[test]
        fn applying_is_idempotent_and_allows_only_listed_devices(
            env in proptest::collection::vec("[A-Z]{1,3}=[a-z]{0,3}", 0..5),
            minors in proptest::collection::vec(0i64..256, 0..5),
            paths in proptest::collection::vec("/[a-z]{1,4}", 0..4),
        ) {
            let edits = ContainerEdits {
                env,
                device_nodes: minors.iter().map(|minor| DeviceNode {
                    node_type: Some("c".into()), major: Some(195), minor: Some(*minor), ..node(&format!("/dev/n{minor}"))
                }).collect(),
                mounts: paths.iter().map(|path| Mount {
                    host_path: path.clone(), container_path: path.clone(), ..Mount::default()
                }).collect(),
                hooks: vec![],
            };
            let mut spec = Spec::default();
            apply(&mut spec, &edits, Path::new("/")).unwrap();
            let once = spec.clone();
            apply(&mut spec, &edits, Path::new("/")).unwrap();
            prop_assert_eq!(&spec, &once);
            let resources = spec.linux().as_ref().unwrap().resources().clone();
            let rules = resources.and_then(|resources| resources.devices().clone()).unwrap_or_default();
            for rule in rules.iter().filter(|rule| rule.allow()) {
                prop_assert_eq!(rule.major(), Some(195));
                prop_assert!(minors.contains(&rule.minor().unwrap()));
            }
        }
    }
}
