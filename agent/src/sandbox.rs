//! State of the sandbox: its phase, its containers and the guest's hooks.
//!
//! One mutex, held briefly; no I/O. Operations on containers look them up here and then work with
//! the [`Container`] itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oci_spec::runtime::Hooks;
use ttrpc::Code;

use crate::container::Container;
use crate::error::{Error, Result};

/// The sandbox of the guest, of which there is at most one.
#[derive(Debug, Default)]
pub struct Sandbox(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    phase: Phase,
    containers: BTreeMap<String, Arc<Container>>,
    first: Option<String>,
    hooks: Arc<Hooks>,
}

/// Lifecycle phase of the sandbox.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    #[default]
    None,
    Creating,
    Created,
    Destroyed,
}

fn destroyed() -> Error {
    Error::new(Code::FAILED_PRECONDITION, "the sandbox is being destroyed")
}

impl State {
    fn check_id_unused(&self, id: &str) -> Result<()> {
        if self.containers.contains_key(id) {
            return Err(Error::exists(format!("container {id} already exists; remove it first")));
        }
        Ok(())
    }
}

impl Sandbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the creation of the sandbox.
    ///
    /// # Errors
    /// `ALREADY_EXISTS`: a sandbox exists, is being created or was destroyed.
    pub fn begin_creation(&self) -> Result<()> {
        let mut state = self.state();
        if state.phase != Phase::None {
            return Err(Error::exists(format!(
                "a sandbox already exists ({:?}); a guest has exactly one",
                state.phase
            )));
        }
        state.phase = Phase::Creating;
        Ok(())
    }

    /// Ends the creation with its result. After a failure there is no sandbox, and another creation
    /// may begin.
    ///
    /// # Errors
    /// Errors of `result`; or the sandbox was destroyed in the meantime, and stays so.
    pub fn finish_creation(&self, result: Result<()>) -> Result<()> {
        let mut state = self.state();
        if state.phase != Phase::Creating {
            return result.and_then(|()| Err(destroyed()));
        }
        state.phase = if result.is_ok() { Phase::Created } else { Phase::None };
        result
    }

    /// Returns whether the sandbox is created and not destroyed.
    #[must_use]
    pub fn is_created(&self) -> bool {
        self.state().phase == Phase::Created
    }

    /// Marks the sandbox as destroyed: no container can be added from now on. Returns `false` if it
    /// was already destroyed.
    #[must_use]
    pub fn destroy(&self) -> bool {
        std::mem::replace(&mut self.state().phase, Phase::Destroyed) != Phase::Destroyed
    }

    /// Returns the guest's own hooks, which are added to every container.
    #[must_use]
    pub fn hooks(&self) -> Arc<Hooks> {
        Arc::clone(&self.state().hooks)
    }

    /// Sets the guest's own hooks.
    pub fn set_hooks(&self, hooks: Hooks) {
        self.state().hooks = Arc::new(hooks);
    }

    /// Returns the sandbox's first container.
    #[must_use]
    pub fn first(&self) -> Option<Arc<Container>> {
        let state = self.state();
        state.first.as_ref().and_then(|id| state.containers.get(id)).cloned()
    }

    /// Returns a container.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`: no container has this id.
    pub fn container(&self, id: &str) -> Result<Arc<Container>> {
        self.state().containers.get(id).cloned().ok_or_else(|| Error::no_container(id))
    }

    /// Returns all containers.
    #[must_use]
    pub fn containers(&self) -> Vec<Arc<Container>> {
        self.state().containers.values().cloned().collect()
    }

    /// Returns whether this container is registered. Another container with the same id is not this
    /// one.
    #[must_use]
    pub fn has(&self, container: &Arc<Container>) -> bool {
        self.state().containers.get(&container.id).is_some_and(|known| Arc::ptr_eq(known, container))
    }

    /// Checks that no container has this id.
    ///
    /// # Errors
    /// `ALREADY_EXISTS`; the existing container is not changed.
    pub fn check_id_unused(&self, id: &str) -> Result<()> {
        self.state().check_id_unused(id)
    }

    /// Registers a container that is about to be created.
    ///
    /// # Errors
    /// `ALREADY_EXISTS`, or the sandbox is being destroyed.
    pub fn add(&self, container: &Arc<Container>) -> Result<()> {
        let mut state = self.state();
        state.check_id_unused(&container.id)?;
        if state.phase == Phase::Destroyed {
            return Err(destroyed());
        }
        state.first.get_or_insert_with(|| container.id.clone());
        state.containers.insert(container.id.clone(), Arc::clone(container));
        Ok(())
    }

    /// Unregisters a container.
    pub fn forget(&self, container: &Container) {
        let mut state = self.state();
        state.containers.remove(&container.id);
        if state.first.as_deref() == Some(&container.id) {
            state.first = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::tests::container;
    use oci_spec::runtime::{HookBuilder, HooksBuilder};

    #[test]
    fn second_sandbox_is_rejected_and_a_failed_one_can_be_retried() {
        let sandbox = Sandbox::default();
        sandbox.begin_creation().unwrap();
        let error = sandbox.begin_creation().unwrap_err();
        assert_eq!(error.code, Code::ALREADY_EXISTS);
        assert!(error.message.contains("Creating") && !sandbox.is_created(), "{error}");
        let failure = Error::internal("no namespaces");
        assert_eq!(sandbox.finish_creation(Err(failure.clone())), Err(failure));
        assert!(!sandbox.is_created());
        sandbox.begin_creation().unwrap();
        sandbox.finish_creation(Ok(())).unwrap();
        assert!(sandbox.is_created());
        assert!(sandbox.begin_creation().unwrap_err().message.contains("(Created)"));
    }

    #[test]
    fn sandbox_destroyed_during_creation_stays_destroyed() {
        for result in [Ok(()), Err(Error::internal("no namespaces"))] {
            let sandbox = Sandbox::default();
            sandbox.begin_creation().unwrap();
            assert!(sandbox.destroy());
            let expected = if result.is_ok() { "destroyed" } else { "no namespaces" };
            let error = sandbox.finish_creation(result).unwrap_err();
            assert!(error.message.contains(expected), "{error}");
            assert!(!sandbox.is_created() && !sandbox.destroy());
            assert!(sandbox.begin_creation().unwrap_err().message.contains("Destroyed"));
            assert_eq!(sandbox.add(&container("c1")).unwrap_err().code, Code::FAILED_PRECONDITION);
        }
    }

    #[test]
    fn id_is_unused_again_after_its_container_was_forgotten() {
        let sandbox = Sandbox::default();
        let (old, new) = (container("c1"), container("c1"));
        assert_eq!(sandbox.container("c1").unwrap_err().code, Code::INVALID_ARGUMENT);
        sandbox.add(&old).unwrap();
        for error in [sandbox.check_id_unused("c1").unwrap_err(), sandbox.add(&new).unwrap_err()] {
            assert_eq!(error.code, Code::ALREADY_EXISTS);
        }
        assert!(sandbox.has(&old) && !sandbox.has(&new));
        sandbox.forget(&old);
        sandbox.check_id_unused("c1").unwrap();
        sandbox.add(&new).unwrap();
        assert!(sandbox.has(&new) && !sandbox.has(&old), "only the id is the same");
        assert!(Arc::ptr_eq(&sandbox.container("c1").unwrap(), &new));
    }

    #[test]
    fn existing_id_is_reported_even_if_the_sandbox_is_destroyed() {
        let sandbox = Sandbox::default();
        sandbox.add(&container("c1")).unwrap();
        assert!(sandbox.destroy());
        assert_eq!(sandbox.add(&container("c1")).unwrap_err().code, Code::ALREADY_EXISTS);
        assert_eq!(sandbox.containers().len(), 1, "its containers are removed one by one");
    }

    #[test]
    fn next_added_container_is_first_after_the_first_was_removed() {
        let sandbox = Sandbox::default();
        let id = || sandbox.first().map(|first| first.id.clone());
        assert_eq!(id(), None);
        let first = container("c2");
        sandbox.add(&first).unwrap();
        sandbox.add(&container("c1")).unwrap();
        assert_eq!(id().as_deref(), Some("c2"));
        sandbox.forget(&first);
        assert_eq!(id(), None, "the namespace of an existing container is not shared later");
        sandbox.add(&container("c3")).unwrap();
        assert_eq!(id().as_deref(), Some("c3"));
        let ids: Vec<_> = sandbox.containers().iter().map(|container| container.id.clone()).collect();
        assert_eq!(ids, ["c1", "c3"]);
    }

    #[test]
    fn hooks_are_empty_until_they_are_set() {
        let sandbox = Sandbox::default();
        assert!(sandbox.hooks().poststop().is_none());
        let hook = HookBuilder::default().path("/clean").build().unwrap();
        sandbox.set_hooks(HooksBuilder::default().poststop(vec![hook]).build().unwrap());
        assert_eq!(sandbox.hooks().poststop().as_ref().map(Vec::len), Some(1));
    }
}
