//! Completes a container's OCI configuration with what the guest determines.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use oci_spec::runtime::{Hooks, Spec};

use crate::capabilities::CapabilitySet;
use crate::error::{Error, Result};
use crate::oci_config::SharedNamespaces;
use crate::{devices, hooks, oci_config};

/// Properties of a completed configuration.
#[derive(Debug)]
pub(super) struct Completed {
    /// The container's cgroup, relative to the hierarchy.
    pub(super) cgroup: PathBuf,
    /// What was requested and is not granted.
    pub(super) warnings: Vec<String>,
}

/// Returns the namespaces that a new container shares: those of the sandbox in `persistent`, and
/// the PID namespace of a descriptor. The paths are valid while that descriptor is open.
pub(super) fn shared_namespaces(persistent: Option<&Path>, pid: Option<&OwnedFd>) -> SharedNamespaces {
    let path = |kind: &str| persistent.map(|dir| dir.join(kind));
    // /proc/PID and not /proc/self: the runtime process opens the path.
    let pid = pid.map(|fd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()).into());
    SharedNamespaces { ipc: path("ipc"), uts: path("uts"), pid }
}

/// Sets device rules, hooks, namespaces, cgroup and capabilities.
///
/// # Errors
/// The cgroup's path contains `..`.
pub(super) fn complete(id: &str, spec: &mut Spec, guest: &Hooks, shared: &SharedNamespaces) -> Result<Completed> {
    for why in devices::allow(spec).map_err(|error| Error::internal(error.to_string()))? {
        log::warn!("container {id}: device {why} and is denied");
    }
    hooks::append(spec, guest);
    oci_config::namespaces(spec, shared)?;
    let linux = spec.linux_mut().get_or_insert_default();
    let cgroup = oci_config::cgroup(linux.cgroups_path().as_deref().unwrap_or("".as_ref()), id)?;
    linux.set_cgroups_path(Some(cgroup.clone()));
    let removed = spec.process_mut().as_mut().map(|process| CapabilitySet::own().restrict(process));
    let removed = removed.filter(|removed| !removed.is_empty());
    let warning = removed
        .map(|removed| format!("capabilities {} are not granted: the agent does not have them", removed.join(", ")));
    let cgroup = cgroup.strip_prefix("/").map_or_else(|_| cgroup.clone(), Path::to_owned);
    Ok(Completed { cgroup, warnings: warning.into_iter().collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::runtime::{HookBuilder, HooksBuilder, LinuxNamespaceType};

    #[test]
    fn namespaces_are_those_of_the_sandbox_and_of_the_descriptor() {
        assert_eq!(shared_namespaces(None, None), SharedNamespaces::default());
        let fd = OwnedFd::from(std::fs::File::open("/proc/self/ns/pid").unwrap());
        let shared = shared_namespaces(Some(Path::new("/run/ns")), Some(&fd));
        assert_eq!((shared.ipc, shared.uts), (Some("/run/ns/ipc".into()), Some("/run/ns/uts".into())));
        let target = std::fs::read_link(shared.pid.unwrap()).unwrap();
        assert!(target.to_string_lossy().starts_with("pid:"), "{target:?}");
    }

    #[test]
    fn configuration_gets_cgroup_hooks_and_namespaces() {
        let mut spec = Spec::default();
        let hook = HookBuilder::default().path("/clean").build().unwrap();
        let guest = HooksBuilder::default().poststop(vec![hook]).build().unwrap();
        spec.linux_mut().get_or_insert_default().set_cgroups_path(Some("a:b:c1".into()));
        let pid = SharedNamespaces { pid: Some("/proc/1/fd/9".into()), ..Default::default() };
        let completed = complete("c1", &mut spec, &guest, &pid).unwrap();
        assert_eq!(completed.cgroup, Path::new("a/b/c1"));
        assert_eq!(spec.hooks().as_ref().unwrap().poststop().as_ref().map(Vec::len), Some(1));
        let linux = spec.linux().as_ref().unwrap();
        assert_eq!(linux.cgroups_path().as_deref(), Some(Path::new("/a/b/c1")));
        let namespaces = linux.namespaces().clone().unwrap();
        let pid = namespaces.iter().find(|namespace| namespace.typ() == LinuxNamespaceType::Pid);
        assert_eq!(pid.and_then(|pid| pid.path().clone()), Some("/proc/1/fd/9".into()));
    }

    #[test]
    fn cgroup_outside_of_the_hierarchy_is_rejected() {
        let mut spec = Spec::default();
        spec.linux_mut().get_or_insert_default().set_cgroups_path(Some("/../x".into()));
        let error = complete("c1", &mut spec, &Hooks::default(), &SharedNamespaces::default()).unwrap_err();
        assert!(error.message.contains("\"..\""), "{error}");
    }
}
