//! UpdateContainer.

use std::sync::Arc;

use firstlight_agent_api::oci;
use oci_spec::runtime::Spec;

use crate::agent::Agent;
use crate::container::{Container, Phase};
use crate::error::{Error, Result};
use crate::{background, bundle, convert, limits};

impl Agent {
    /// Changes a container's limits and its stored configuration.
    ///
    /// # Errors
    /// The container does not exist, a number is invalid, or the kernel rejects a value: the error
    /// has file and value.
    pub async fn update_container(self: &Arc<Self>, id: &str, resources: Option<oci::LinuxResources>) -> Result<()> {
        let container = self.container(id)?;
        let phase = container.phase();
        if !matches!(phase, Phase::Created | Phase::Started) {
            let message = format!("container {id} is {phase:?}; its limits cannot be changed now");
            return Err(Error::new(ttrpc::Code::FAILED_PRECONDITION, message));
        }
        let given = convert::resources(resources.as_ref()).map_err(|error| Error::invalid(error.to_string()))?;
        background::to_completion(background::blocking(move || {
            let result = update(&container, &given);
            result.map_err(|error| error.during(&format!("container {}", container.id)))
        }))
        .await
    }
}

fn update(container: &Container, given: &oci_spec::runtime::LinuxResources) -> Result<()> {
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
