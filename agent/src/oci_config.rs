//! Adapts a container's OCI configuration to the sandbox: namespaces, cgroup path, HOME.

use std::path::{Component, Path, PathBuf};

use firstlight_runtime::HOME_FROM_PASSWD;
use oci_spec::runtime::{Linux, LinuxNamespace, LinuxNamespaceBuilder, LinuxNamespaceType, Spec};

use crate::error::{Error, Result};

/// Namespaces that containers of the sandbox share.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedNamespaces {
    /// The sandbox's IPC namespace.
    pub ipc: Option<PathBuf>,
    /// The sandbox's UTS namespace, which carries its host name.
    pub uts: Option<PathBuf>,
    /// The PID namespace of the first container, if sharing was requested.
    pub pid: Option<PathBuf>,
}

/// How a namespace of a container is chosen.
enum Rule {
    /// The guest's own: there is one network and one clock.
    Guest,
    /// A new one, whether listed or not.
    New,
    /// The sandbox's if it is listed and a sandbox exists, otherwise a new one.
    Sandbox(Option<PathBuf>),
    /// As listed.
    AsListed,
}

fn rule(kind: LinuxNamespaceType, shared: &SharedNamespaces) -> Rule {
    match kind {
        LinuxNamespaceType::Network | LinuxNamespaceType::Time => Rule::Guest,
        LinuxNamespaceType::Mount | LinuxNamespaceType::Cgroup => Rule::New,
        LinuxNamespaceType::Ipc => Rule::Sandbox(shared.ipc.clone()),
        LinuxNamespaceType::Uts => Rule::Sandbox(shared.uts.clone()),
        // Never as listed: a path would be the host's.
        LinuxNamespaceType::Pid => shared.pid.clone().map_or(Rule::New, |path| Rule::Sandbox(Some(path))),
        LinuxNamespaceType::User => Rule::AsListed,
    }
}

/// All kinds, in the order in which they are written.
const KINDS: &[LinuxNamespaceType] = &[
    LinuxNamespaceType::Mount,
    LinuxNamespaceType::Cgroup,
    LinuxNamespaceType::Pid,
    LinuxNamespaceType::Ipc,
    LinuxNamespaceType::Uts,
    LinuxNamespaceType::User,
    LinuxNamespaceType::Network,
    LinuxNamespaceType::Time,
];

/// Sets the configuration's namespaces.
///
/// # Errors
/// Never for these values; oci-spec's builders are fallible by type.
pub fn namespaces(spec: &mut Spec, shared: &SharedNamespaces) -> Result<()> {
    let linux = spec.linux_mut().get_or_insert_with(Linux::default);
    let listed = linux.namespaces().clone().unwrap_or_default();
    let mut all = Vec::new();
    for kind in KINDS {
        let entry = listed.iter().find(|namespace| namespace.typ() == *kind);
        let pid = *kind == LinuxNamespaceType::Pid;
        match rule(*kind, shared) {
            Rule::Guest => {}
            Rule::New => all.push(namespace(*kind, None)?),
            Rule::Sandbox(path) if entry.is_some() || pid => all.push(namespace(*kind, path)?),
            Rule::Sandbox(_) => {}
            Rule::AsListed => all.extend(entry.cloned()),
        }
    }
    linux.set_namespaces(Some(all));
    Ok(())
}

fn namespace(kind: LinuxNamespaceType, path: Option<PathBuf>) -> Result<LinuxNamespace> {
    let builder = LinuxNamespaceBuilder::default().typ(kind);
    let builder = if let Some(path) = path { builder.path(path) } else { builder };
    builder.build().map_err(|error| Error::internal(error.to_string()))
}

/// Returns the container's cgroup as the absolute path that libcontainer requires. The systemd form
/// `slice:prefix:name` becomes a path too, as the guest has no systemd.
///
/// # Errors
/// The path contains `..`.
pub fn cgroup(requested: &Path, container: &str) -> Result<PathBuf> {
    let text = requested.to_string_lossy().replace(':', "/");
    let mut path = PathBuf::from("/");
    for part in Path::new(&text).components() {
        match part {
            Component::Normal(part) => path.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(Error::invalid(format!("container {container}: CgroupsPath {text:?} contains \"..\"")));
            }
        }
    }
    if path == Path::new("/") {
        path.push(container);
    }
    Ok(path)
}

/// Sets `HOME` if the environment has none or an empty one. The container's own process looks it
/// up: see [`HOME_FROM_PASSWD`].
pub fn set_home(env: &mut Vec<String>) {
    let has_home = |entry: &String| entry.strip_prefix("HOME=").is_some_and(|home| !home.is_empty());
    if !env.iter().any(has_home) {
        env.retain(|entry| !entry.starts_with("HOME="));
        env.extend(["HOME=/".to_owned(), format!("{HOME_FROM_PASSWD}=1")]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(kinds: &[(LinuxNamespaceType, Option<&str>)]) -> Spec {
        let mut spec = Spec::default();
        let all = kinds.iter().map(|(kind, path)| namespace(*kind, path.map(PathBuf::from)).unwrap()).collect();
        spec.linux_mut().get_or_insert_with(Linux::default).set_namespaces(Some(all));
        spec
    }

    fn result(spec: &Spec) -> Vec<(LinuxNamespaceType, Option<String>)> {
        let all = spec.linux().as_ref().unwrap().namespaces().clone().unwrap();
        all.iter().map(|n| (n.typ(), n.path().as_ref().map(|path| path.display().to_string()))).collect()
    }

    #[test]
    fn containers_of_a_pod_share_ipc_uts_and_the_guests_network() {
        use LinuxNamespaceType::{Cgroup, Ipc, Mount, Network, Pid, Uts};
        let mut spec = list(&[(Ipc, None), (Uts, Some("/proc/7/ns/uts")), (Mount, None), (Network, Some("/x"))]);
        let shared = SharedNamespaces { ipc: Some("/i".into()), uts: Some("/u".into()), pid: None };
        namespaces(&mut spec, &shared).unwrap();
        let own = [(Mount, None), (Cgroup, None), (Pid, None)];
        let sandbox = [(Ipc, Some("/i".to_owned())), (Uts, Some("/u".to_owned()))];
        assert_eq!(result(&spec), [&own[..], &sandbox[..]].concat());
        let shared = SharedNamespaces { pid: Some("/p".into()), ..SharedNamespaces::default() };
        namespaces(&mut spec, &shared).unwrap();
        assert_eq!(result(&spec)[2], (Pid, Some("/p".to_owned())));
        assert_eq!(result(&spec)[3], (Ipc, None), "no sandbox: a new one, never the host's path");
    }

    #[test]
    fn cgroup_paths_are_absolute_and_stay_below_the_root() {
        assert_eq!(cgroup(Path::new("/kubepods/x/c"), "c").unwrap(), Path::new("/kubepods/x/c"));
        assert_eq!(cgroup(Path::new("system.slice:docker:c"), "c").unwrap(), Path::new("/system.slice/docker/c"));
        assert_eq!(cgroup(Path::new(""), "c").unwrap(), Path::new("/c"));
        assert_eq!(cgroup(Path::new("/"), "c").unwrap(), Path::new("/c"));
        assert!(cgroup(Path::new("/a/../../b"), "c").is_err());
    }

    #[test]
    fn missing_or_empty_home_is_looked_up() {
        let marked = format!("{HOME_FROM_PASSWD}=1");
        for nothing in [vec!["A=1"], vec!["HOME=", "A=1"]] {
            let mut env: Vec<String> = nothing.iter().map(ToString::to_string).collect();
            set_home(&mut env);
            assert_eq!(env, ["A=1", "HOME=/", marked.as_str()]);
        }
        let mut env = vec!["HOME=/mine".to_owned()];
        set_home(&mut env);
        assert_eq!(env, ["HOME=/mine"]);
    }

    proptest! {
        #[test]
        fn any_cgroup_path_stays_below_the_root(text in "\\PC{0,80}") {
            if let Ok(path) = cgroup(Path::new(&text), "c") {
                prop_assert!(path.starts_with("/") && path != Path::new("/"));
                prop_assert!(path.components().all(|part| part != Component::ParentDir));
            }
        }
    }
}
