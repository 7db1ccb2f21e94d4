//! OCI hooks: the guest's own, and the split of hooks between runtime process and libcontainer.
//!
//! A guest image may contain programs in `<guest_hook_path>/{prestart,poststart,poststop}`; they
//! are added to every container. They run outside the container as root, so nothing controlled by
//! the container may reach them: their environment is [`DEFAULT_PATH`] only.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use oci_spec::runtime::{Hook, HookBuilder, Hooks, HooksBuilder, Spec};

use crate::convert::DEFAULT_PATH;
use crate::error::{Error, Result};

/// Timeout of a guest hook, seconds. Some wait for devices.
const TIMEOUT: i64 = 30;

/// Upper bound on hooks per directory.
const MAX_HOOKS: usize = 64;

type List = Option<Vec<Hook>>;

fn join(first: &List, second: &List) -> List {
    let all: Vec<Hook> = first.iter().chain(second).flatten().cloned().collect();
    if all.is_empty() { None } else { Some(all) }
}

/// Reads the directory of the guest's hooks.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn scan(dir: &Path) -> Result<Hooks> {
    fs::read_dir(dir).map_err(|error| Error::internal(format!("{}: {error}", dir.display())))?;
    let mut hooks = HooksBuilder::default().build().map_err(|error| Error::internal(error.to_string()))?;
    // prestart hooks run after the namespaces are created and before the root is changed, which the
    // specification now calls createRuntime.
    hooks.set_create_runtime(kind(dir, "prestart"));
    hooks.set_poststart(kind(dir, "poststart"));
    hooks.set_poststop(kind(dir, "poststop"));
    Ok(hooks)
}

fn kind(dir: &Path, kind: &str) -> List {
    let entries = fs::read_dir(dir.join(kind)).ok()?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).take(MAX_HOOKS).collect();
    // Sorted by name, so images control the order.
    paths.sort();
    let hooks = paths.into_iter().filter_map(|path| {
        let metadata = fs::metadata(&path).ok()?;
        if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
            log::warn!("guest hook {}: not an executable file", path.display());
            return None;
        }
        let name = path.file_name()?.to_str()?.to_owned();
        let hook = HookBuilder::default().path(&path).args(vec![name, kind.to_owned()]);
        hook.env(vec![DEFAULT_PATH.to_owned()]).timeout(TIMEOUT).build().ok()
    });
    Some(hooks.collect())
}

/// Appends the guest's hooks to those of a configuration.
pub(crate) fn append(spec: &mut Spec, guest: &Hooks) {
    let own = spec.hooks().clone().unwrap_or_default();
    let mut all = own.clone();
    all.set_create_runtime(join(own.create_runtime(), guest.create_runtime()));
    all.set_poststart(join(own.poststart(), guest.poststart()));
    all.set_poststop(join(own.poststop(), guest.poststop()));
    let any = [all.create_runtime(), all.create_container(), all.start_container(), all.poststart(), all.poststop()];
    let any = any.iter().any(|list| list.is_some());
    spec.set_hooks(Some(all).filter(|_| any));
}

/// Removes the hooks that the runtime process runs itself, because libcontainer would discard their
/// output. createRuntime hooks, which run while libcontainer creates the container, are replaced by
/// one stand-in.
///
/// # Errors
/// Never for these values; oci-spec's builders are fallible by type.
pub(crate) fn split_runtime_hooks(hooks: &mut Hooks, bundle: &Path) -> Result<Option<Hooks>> {
    let internal = |error: oci_spec::OciSpecError| Error::internal(error.to_string());
    let some = |list: &List| list.clone().filter(|list| !list.is_empty());
    let mut own = HooksBuilder::default().build().map_err(internal)?;
    own.set_create_runtime(some(hooks.create_runtime()));
    own.set_poststart(some(hooks.poststart())).set_poststop(some(hooks.poststop()));
    let stand_in = own.create_runtime().is_some().then(|| firstlight_runtime::create_runtime_hook(bundle)).transpose();
    hooks.set_create_runtime(stand_in.map_err(internal)?.map(|hook| vec![hook]));
    hooks.set_poststart(None).set_poststop(None);
    let any = [own.create_runtime(), own.poststart(), own.poststop()].iter().any(|list| list.is_some());
    Ok(Some(own).filter(|_| any))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant(dir: &Path, name: &str, mode: u32) {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn executables_become_hooks_sorted_by_name() {
        let dir = tempfile::tempdir().unwrap();
        plant(dir.path(), "prestart/20-b", 0o755);
        plant(dir.path(), "prestart/10-a", 0o755);
        plant(dir.path(), "prestart/readme", 0o644);
        fs::create_dir_all(dir.path().join("poststop/dir")).unwrap();
        let hooks = scan(dir.path()).unwrap();
        let prestart = hooks.create_runtime().clone().unwrap();
        let names: Vec<_> = prestart.iter().map(|hook| hook.args().clone().unwrap()).collect();
        assert_eq!(names, [["10-a", "prestart"], ["20-b", "prestart"]]);
        assert_eq!(prestart[0].env().clone().unwrap(), [DEFAULT_PATH]);
        assert_eq!((hooks.poststart().is_none(), hooks.poststop().clone().unwrap().len()), (true, 0));
        assert!(scan(&dir.path().join("nothere")).is_err());
    }

    #[test]
    fn guest_hooks_are_appended_to_the_configurations() {
        let dir = tempfile::tempdir().unwrap();
        plant(dir.path(), "poststop/clean", 0o755);
        let guest = scan(dir.path()).unwrap();
        let mut spec = Spec::default();
        append(&mut spec, &Hooks::default());
        assert!(spec.hooks().is_none());
        let own = HookBuilder::default().path("/own").build().unwrap();
        let hooks = HooksBuilder::default().poststop(vec![own.clone()]).start_container(vec![own]).build().unwrap();
        spec.set_hooks(Some(hooks));
        append(&mut spec, &guest);
        let mut all = spec.hooks().clone().unwrap();
        let paths: Vec<_> = all.poststop().iter().flatten().map(|hook| hook.path().clone()).collect();
        assert_eq!(paths, [Path::new("/own"), &dir.path().join("poststop/clean")]);
        assert_eq!(split_runtime_hooks(&mut all, dir.path()).unwrap().unwrap().poststop().clone().unwrap().len(), 2);
        assert!(all.poststop().is_none() && all.start_container().is_some());
        assert!(split_runtime_hooks(&mut all, dir.path()).unwrap().is_none());
    }

    #[test]
    fn create_runtime_hooks_are_replaced_by_one_stand_in() {
        let dir = tempfile::tempdir().unwrap();
        plant(dir.path(), "prestart/10-a", 0o755);
        plant(dir.path(), "prestart/20-b", 0o755);
        let mut spec = Spec::default();
        append(&mut spec, &scan(dir.path()).unwrap());
        let mut all = spec.hooks().clone().unwrap();
        let own = split_runtime_hooks(&mut all, Path::new("/run/b1")).unwrap().unwrap();
        assert_eq!(own.create_runtime().as_ref().unwrap().len(), 2);
        let left = all.create_runtime().clone().unwrap();
        assert_eq!(left, [firstlight_runtime::create_runtime_hook(Path::new("/run/b1")).unwrap()]);
    }
}
