//! UpdateContainer.

use std::sync::Arc;

use firstlight_agent_api::oci;
use oci_spec::runtime::Spec;

use crate::container::{Container, Phase};
use crate::error::{Error, Result};
use crate::{background, bundle, convert, limits};

/// Changes a container's limits and its stored configuration.
///
/// # Errors
/// The container is being created or removed, a number is invalid, or the kernel rejects a value:
/// the error has file and value.
pub async fn update(container: Arc<Container>, resources: Option<oci::LinuxResources>) -> Result<()> {
    let phase = container.phase();
    if !matches!(phase, Phase::Created | Phase::Started) {
        let message = format!("container {} is {phase:?}; its limits cannot be changed now", container.id);
        return Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, message));
    }
    let given = convert::resources(resources.as_ref()).map_err(|error| Error::invalid(error.to_string()))?;
    background::to_completion(background::blocking(move || {
        let result = apply(&container, &given);
        result.map_err(|error| error.during(&format!("container {}", container.id)))
    }))
    .await
}

fn apply(container: &Container, given: &oci_spec::runtime::LinuxResources) -> Result<()> {
    // Serialised: concurrent updates would each overwrite the other's configuration.
    let _limits = container.lock_limits();
    let file = container.bundle.join("config.json");
    let mut spec = Spec::load(&file).map_err(|error| Error::internal(format!("{}: {error}", file.display())))?;
    let linux = spec.linux_mut().get_or_insert_default();
    let all = limits::merge(linux.resources().as_ref().unwrap_or(&Default::default()), given);
    limits::apply(&container.cgroup, &limits::settings(given, &all)?)?;
    linux.set_resources(Some(all));
    bundle::replace(&file, &spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_runtime::run;
    use crate::process::Process;

    #[test]
    fn limits_are_written_to_the_cgroup_and_the_configuration() {
        run(async {
            let (bundle, cgroup) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let first = Arc::new(Process::new(false));
            let container = Container::new("c1", bundle.path().into(), cgroup.path().into(), None, first);
            let container = Arc::new(container);
            let mut limits = oci::LinuxResources::new();
            limits.CPU.mut_or_insert_default().Shares = 512;
            let change = || update(Arc::clone(&container), Some(limits.clone()));
            let error = change().await.unwrap_err();
            assert_eq!(error.code, ttrpc::Code::FAILED_PRECONDITION);
            assert!(error.message.contains("Creating"), "{error}");
            container.advance(&[Phase::Creating], Phase::Started).unwrap();
            let error = change().await.unwrap_err();
            assert!(error.message.contains("container c1") && error.message.contains("config.json"), "{error}");
            let file = bundle.path().join("config.json");
            bundle::write(&file, &Spec::default()).unwrap();
            std::fs::write(cgroup.path().join("cpu.weight"), "100").unwrap();
            change().await.unwrap();
            assert_ne!(std::fs::read_to_string(cgroup.path().join("cpu.weight")).unwrap(), "100");
            let spec = Spec::load(&file).unwrap();
            let linux = spec.linux().as_ref().unwrap();
            let cpu = linux.resources().as_ref().and_then(|resources| resources.cpu().clone());
            assert_eq!(cpu.and_then(|cpu| cpu.shares()), Some(512));
        });
    }
}
