//! Device filters: the BPF program of a container's cgroup.
//!
//! Loading a program costs more than the rest of creating a cgroup, and most containers have the same rules. So
//! the runtime caches loaded programs, and the worker that creates a container only attaches one, before any
//! process is in the cgroup. Long lists are rare, and the kernel takes milliseconds to verify one: the worker
//! loads those itself, uncached, so that the runtime does not block. The kernel frees a program when neither the
//! runtime nor a cgroup refers to it.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use firstlight_device_filter::{Filter, Instruction, Rule};
use firstlight_sys::bpf;

use crate::cgroup;
use crate::message::{Call, Failure, FailureKind};

/// Cached programs; the least recently used one is evicted.
const MAX_CACHED: usize = 32;

/// Lists of more rules are not cached.
const MAX_CACHED_RULES: usize = 64;

/// Loaded programs, the most recently used first.
#[derive(Debug, Default)]
pub(crate) struct FilterCache(VecDeque<(Filter, OwnedFd)>);

impl FilterCache {
    /// Returns the program that a call needs: one for [`Call::Create`], unless its list is long.
    pub(crate) fn program(&mut self, call: &Call) -> Result<Option<OwnedFd>, Failure> {
        match call {
            Call::Create { container, devices, .. } if is_cached(devices) => {
                let program = self.find(filter(container, devices)?, bpf::load_device_program);
                program.map(Some).map_err(|why| load_failure(container, why))
            }
            _ => Ok(None),
        }
    }

    fn find<E: std::fmt::Display>(
        &mut self,
        filter: Filter,
        load: impl FnOnce(&[Instruction]) -> Result<OwnedFd, E>,
    ) -> Result<OwnedFd, String> {
        let at = self.0.iter().position(|(cached, _)| *cached == filter);
        let entry = match at.and_then(|at| self.0.remove(at)) {
            Some(entry) => entry,
            None => {
                let program = load(&filter.program()).map_err(|error| error.to_string())?;
                (filter, program)
            }
        };
        let copy = entry.1.try_clone().map_err(|error| error.to_string());
        self.0.push_front(entry);
        self.0.truncate(MAX_CACHED);
        copy
    }
}

/// Whether the program of this list is cached and passed with the call.
pub(crate) fn is_cached(devices: &[Rule]) -> bool {
    devices.len() <= MAX_CACHED_RULES
}

fn filter(container: &str, devices: &[Rule]) -> Result<Filter, Failure> {
    let failed = |error| Failure::new(FailureKind::Invalid, format!("container {container}: {error}"));
    Filter::new(devices).map_err(failed)
}

fn load_failure(container: &str, why: impl std::fmt::Display) -> Failure {
    Failure::internal(format!("container {container}: failed to load its device filter: {why}"))
}

/// A cgroup with its device filter attached.
#[derive(Debug)]
pub(crate) struct FilteredCgroup {
    path: PathBuf,
    made: bool,
}

/// Creates a container's cgroup, unless it exists, and attaches the program, or one for these devices. Programs
/// that are already attached stay in force.
pub(crate) fn make_filtered_cgroup(
    container: &str,
    path: &Path,
    devices: &[Rule],
    program: Option<OwnedFd>,
) -> Result<FilteredCgroup, Failure> {
    let failed = |what: &str, error: std::io::Error| {
        Failure::internal(format!("container {container}: failed to {what} {}: {error}", path.display()))
    };
    let program = match program {
        Some(program) => program,
        None => bpf::load_device_program(&filter(container, devices)?.program())
            .map_err(|why| load_failure(container, why))?,
    };
    let made = cgroup::make(path).map_err(|error| failed("create the cgroup", error))?;
    let filtered = FilteredCgroup { path: path.to_owned(), made };
    attach(program, path).map_err(|error| {
        filtered.discard();
        failed("attach the device filter to", error)
    })?;
    Ok(filtered)
}

fn attach(program: impl AsFd, path: &Path) -> std::io::Result<()> {
    let cgroup = File::open(path)?;
    let Err(error) = bpf::attach(&program, &cgroup) else { return Ok(()) };
    // A container may share another's cgroup, and then often has the same rules.
    let id = bpf::id(&program)?;
    if bpf::attached(&cgroup).is_ok_and(|ids| ids.contains(&id)) { Ok(()) } else { Err(error) }
}

impl FilteredCgroup {
    /// Removes the cgroup if it was created here and is empty.
    pub(crate) fn discard(&self) {
        if self.made {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_device_filter::{Access, Kind};

    fn devices(major: u32) -> Vec<Rule> {
        vec![Rule { allow: true, kind: Kind::Char, major: Some(major), minor: None, access: Access::READ }]
    }

    /// Gets the filter of a major number; returns whether it had to be loaded.
    fn loaded(filters: &mut FilterCache, major: u32) -> bool {
        let mut loaded = false;
        let load = |_: &[Instruction]| {
            loaded = true;
            File::open("/dev/null").map(OwnedFd::from)
        };
        filters.find(Filter::new(&devices(major)).unwrap(), load).unwrap();
        loaded
    }

    #[test]
    fn programs_are_loaded_once_and_the_least_recently_used_is_evicted() {
        let mut filters = FilterCache::default();
        assert!((0..32).all(|major| loaded(&mut filters, major)));
        assert!(!loaded(&mut filters, 0), "cached");
        assert!(loaded(&mut filters, 32));
        assert_eq!(filters.0.len(), MAX_CACHED);
        assert!(!loaded(&mut filters, 0) && loaded(&mut filters, 1), "1 was the least recently used");
    }

    #[test]
    fn refused_program_is_not_cached() {
        let mut filters = FilterCache::default();
        let refuse = |_: &[Instruction]| Err::<OwnedFd, _>("no");
        assert_eq!(filters.find(Filter::default(), refuse).unwrap_err(), "no");
        assert!(filters.0.is_empty());
    }

    fn create(devices: Vec<Rule>) -> Call {
        Call::Create {
            container: "c1".into(),
            bundle: "/b".into(),
            cgroup: "/g".into(),
            devices,
            root: "/r".into(),
            terminal: false,
            no_pivot: false,
            hooks: false,
        }
    }

    #[test]
    fn only_create_needs_a_program_and_too_many_rules_are_reported() {
        let mut filters = FilterCache::default();
        assert!(filters.program(&Call::Kill { container: "c1".into() }).unwrap().is_none());
        assert!(filters.program(&create(devices(1).repeat(2000))).unwrap().is_none(), "the worker loads it");
        let failure = make_filtered_cgroup("c1", Path::new("/nowhere"), &devices(1).repeat(2000), None).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Invalid);
        assert!(failure.message.contains("container c1: 2000 device rules"), "{}", failure.message);
    }

    #[test]
    fn longest_request_fits_into_a_packet() {
        let long =
            Rule { allow: false, kind: Kind::Char, major: Some(u32::MAX), minor: Some(u32::MAX), access: Access::ALL };
        let request = crate::Request { id: u64::MAX, call: create(vec![long; firstlight_device_filter::MAX_RULES]) };
        let length = serde_json::to_vec(&request).unwrap().len();
        // Two paths of PATH_MAX and the rest must fit as well.
        assert!(length + 3 * 4096 < crate::socket::MAX_REQUEST, "{length}");
    }

    #[test]
    fn directory_that_is_not_a_cgroup_is_refused_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c1");
        let program = OwnedFd::from(File::open("/dev/null").unwrap());
        let failure = make_filtered_cgroup("c1", &path, &[], Some(program)).unwrap_err();
        assert!(
            failure.message.contains("attach the device filter to") && failure.message.contains("c1"),
            "{failure:?}"
        );
        assert!(!path.exists());
    }
}
