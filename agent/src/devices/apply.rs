//! Writes guest device nodes into a container's configuration.

use std::fs;
use std::path::{Path, PathBuf};

use oci_spec::runtime::{Linux, LinuxDevice, LinuxDeviceBuilder, LinuxDeviceType, LinuxResources, Spec};
use rustix::fs::FileType;

use crate::error::{Error, Result};

/// Mode of a node that the configuration does not list yet.
const MODE: u32 = 0o660;

/// Upper bound; InfiniBand has one node per port and a few more.
const MAX_INFINIBAND: usize = 256;

/// A guest device and its path in the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    /// Path in the configuration before the change: the host's name of it.
    pub(super) listed: PathBuf,
    /// Path in the container.
    pub(super) path: PathBuf,
    kind: LinuxDeviceType,
    major: i64,
    minor: i64,
    mode: u32,
}

impl Node {
    /// Reads a guest node to appear at `path` in the container, the same path as on the host.
    ///
    /// # Errors
    /// The node does not exist, or the container's path is invalid.
    pub(super) fn disk(node: &Path, path: &str) -> Result<Self> {
        Self::replacing(node, path, Path::new(path))
    }

    /// Reads a guest node to appear at `path` in the container, in place of the host's `listed`.
    ///
    /// # Errors
    /// The node does not exist, or the container's path is invalid.
    pub(super) fn replacing(node: &Path, listed: &str, path: &Path) -> Result<Self> {
        if !path.is_absolute() || path.components().any(|part| matches!(part, std::path::Component::ParentDir)) {
            return Err(Error::invalid("container_path is not an absolute path without \"..\""));
        }
        let found = rustix::fs::lstat(node)
            .map_err(|error| Error::internal(format!("{} disappeared: {error}", node.display())))?;
        let kind = match FileType::from_raw_mode(found.st_mode) {
            FileType::BlockDevice => LinuxDeviceType::B,
            FileType::CharacterDevice => LinuxDeviceType::C,
            other => return Err(Error::internal(format!("{} is not a device but {other:?}", node.display()))),
        };
        let (major, minor) = (rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev));
        Ok(Self {
            listed: listed.into(),
            path: path.to_owned(),
            kind,
            major: major.into(),
            minor: minor.into(),
            mode: MODE,
        })
    }
}

/// Returns all InfiniBand character devices of the guest, under their own names.
pub(super) fn infiniband(root: &Path) -> Vec<Node> {
    let entries = fs::read_dir(root.join("dev/infiniband")).into_iter().flatten().flatten();
    let mut nodes: Vec<Node> = entries
        .take(MAX_INFINIBAND)
        .filter_map(|entry| {
            let path = Path::new("/dev/infiniband").join(entry.file_name());
            let node = Node::replacing(&entry.path(), &path.to_string_lossy(), &path).ok()?;
            (node.kind == LinuxDeviceType::C).then_some(Node { mode: 0o666, ..node })
        })
        .collect();
    nodes.sort_by(|a, b| a.path.cmp(&b.path));
    nodes
}

/// Writes all nodes into the configuration at once: entries and device rules get the guest's
/// numbers in place of the host's.
///
/// # Errors
/// Two nodes have the same path.
pub(super) fn nodes(spec: &mut Spec, nodes: Vec<Node>) -> Result<()> {
    for (at, node) in nodes.iter().enumerate() {
        if let Some(other) = nodes[..at].iter().find(|other| other.path == node.path && **other != *node) {
            let place = node.path.display();
            return Err(Error::invalid(format!(
                "two devices have the path {place}: {}:{} and {}:{}",
                other.major, other.minor, node.major, node.minor
            )));
        }
    }
    if nodes.is_empty() {
        return Ok(());
    }
    let linux = spec.linux_mut().get_or_insert_with(Linux::default);
    let mut listed = linux.devices().clone().unwrap_or_default();
    let mut rules = linux.resources().as_ref().and_then(|all| all.devices().clone()).unwrap_or_default();
    // Compared with the host's numbers only: a guest number may be another device's host number.
    let host = rules.clone();
    for node in nodes {
        let Some(entry) = listed.iter_mut().find(|entry| *entry.path() == node.listed) else {
            listed.push(entry(&node)?);
            continue;
        };
        for (rule, host) in rules.iter_mut().zip(&host) {
            let same = host.major() == Some(entry.major()) && host.minor() == Some(entry.minor());
            if same && host.typ() == Some(entry.typ()) {
                rule.set_typ(Some(node.kind)).set_major(Some(node.major)).set_minor(Some(node.minor));
            }
        }
        entry.set_path(node.path).set_typ(node.kind).set_major(node.major).set_minor(node.minor);
    }
    linux.set_devices(Some(listed));
    if !rules.is_empty() {
        linux.resources_mut().get_or_insert_with(LinuxResources::default).set_devices(Some(rules));
    }
    Ok(())
}

fn entry(node: &Node) -> Result<LinuxDevice> {
    let builder = LinuxDeviceBuilder::default().path(&node.path).typ(node.kind).major(node.major).minor(node.minor);
    let built = builder.file_mode(node.mode).uid(0u32).gid(0u32).build();
    built.map_err(|error| Error::internal(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::runtime::LinuxDeviceCgroupBuilder;

    fn node(path: &str, major: i64, minor: i64) -> Node {
        Node { listed: path.into(), path: path.into(), kind: LinuxDeviceType::B, major, minor, mode: MODE }
    }

    fn spec(entries: &[(&str, i64, i64)], ruled: bool) -> Spec {
        let mut spec = Spec::default();
        let mut linux = Linux::default();
        let entries = entries.iter().map(|(path, major, minor)| entry(&node(path, *major, *minor)).unwrap());
        let entries: Vec<LinuxDevice> = entries.collect();
        let mut resources = LinuxResources::default();
        let rules = entries.iter().map(|entry| {
            let rule = LinuxDeviceCgroupBuilder::default().allow(true).typ(entry.typ()).access("r");
            rule.major(entry.major()).minor(entry.minor()).build().unwrap()
        });
        resources.set_devices(Some(rules.collect::<Vec<_>>()).filter(|_| ruled));
        linux.set_devices(Some(entries)).set_resources(Some(resources).filter(|_| ruled));
        spec.set_linux(Some(linux));
        spec
    }

    fn numbers(spec: &Spec) -> Vec<(String, i64, i64)> {
        let devices = spec.linux().as_ref().unwrap().devices().clone().unwrap();
        devices.iter().map(|entry| (entry.path().display().to_string(), entry.major(), entry.minor())).collect()
    }

    fn ruled(spec: &Spec) -> Vec<(Option<i64>, Option<i64>)> {
        let resources = spec.linux().as_ref().unwrap().resources().clone().unwrap();
        resources.devices().clone().unwrap().iter().map(|rule| (rule.major(), rule.minor())).collect()
    }

    #[test]
    fn swapped_host_and_guest_numbers_are_not_mixed_up() {
        let mut spec = spec(&[("/dev/a", 8, 0), ("/dev/b", 254, 0)], true);
        nodes(&mut spec, vec![node("/dev/a", 254, 0), node("/dev/b", 8, 0)]).unwrap();
        assert_eq!(numbers(&spec), [("/dev/a".into(), 254, 0), ("/dev/b".into(), 8, 0)]);
        assert_eq!(ruled(&spec), [(Some(254), Some(0)), (Some(8), Some(0))]);
    }

    #[test]
    fn devices_are_allowed_without_resources_and_listed_if_missing() {
        let mut spec = spec(&[("/dev/a", 8, 0)], false);
        nodes(&mut spec, vec![node("/dev/a", 254, 0), node("/dev/new", 254, 16)]).unwrap();
        assert_eq!(numbers(&spec), [("/dev/a".into(), 254, 0), ("/dev/new".into(), 254, 16)]);
        super::super::allow(&mut spec).unwrap();
        for expected in [(Some(254), Some(0)), (Some(254), Some(16))] {
            assert!(ruled(&spec).contains(&expected), "{:?}", ruled(&spec));
        }
        assert!(!ruled(&spec).contains(&(Some(8), Some(0))), "the host's number has no device here");
    }

    #[test]
    fn two_devices_at_one_path_are_rejected() {
        let mut given = spec(&[], false);
        let error = nodes(&mut given, vec![node("/dev/a", 254, 0), node("/dev/a", 254, 16)]).unwrap_err().message;
        assert!(error.contains("/dev/a") && error.contains("254:0") && error.contains("254:16"), "{error}");
        nodes(&mut given, vec![node("/dev/a", 254, 0), node("/dev/a", 254, 0)]).unwrap();
    }

    #[test]
    fn invalid_paths_are_rejected() {
        for path in ["", "dev/a", "/dev/../etc/a"] {
            assert!(Node::disk(Path::new("/dev/null"), path).unwrap_err().message.contains("container_path"), "{path}");
        }
        assert!(Node::disk(Path::new("/"), "/dev/a").unwrap_err().message.contains("not a device"));
        let null = Node::disk(Path::new("/dev/null"), "/dev/a").unwrap();
        assert_eq!((null.kind, null.major, null.minor), (LinuxDeviceType::C, 1, 3));
    }
}
