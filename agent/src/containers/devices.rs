//! Devices of a container: those of the request and its GPUs.

use std::time::Duration;

use firstlight_agent_api::agent::CreateContainerRequest;
use firstlight_agent_api::oci;
use oci_spec::runtime::Spec;

use crate::config::Config;
use crate::devices::{self, Functions};
use crate::error::Result;
use crate::gpu::{self, Source};
use crate::hotplug::Hotplug;
use crate::paths::Paths;

/// Part of the caller's timeout that is reserved for the error to reach it.
const REPLY_MARGIN: Duration = Duration::from_millis(200);

/// Waits for devices and writes them into configurations.
#[derive(Debug)]
pub(super) struct DeviceProvider {
    paths: Paths,
    hotplug: Hotplug,
    gpus: Source,
    timeouts: gpu::Timeouts,
    /// Whether the variable `VISIBLE_CDI_DEVICES` grants devices.
    environment_grants: bool,
}

/// Devices that were written into a configuration.
#[derive(Debug)]
pub(super) struct Provided {
    /// PCI functions: host address and guest address.
    pub(super) functions: Functions,
    /// Warnings about the request.
    pub(super) warnings: Vec<String>,
}

impl DeviceProvider {
    pub(super) fn new(config: &Config, paths: &Paths, hotplug: Hotplug, gpus: Source) -> Self {
        let timeouts = gpu::Timeouts { ready: config.cdi_timeout, plugged: config.hotplug_timeout };
        Self { paths: paths.clone(), hotplug, gpus, timeouts, environment_grants: config.visible_cdi_devices }
    }

    /// Waits until the requested devices are present and ready, and writes them into the
    /// configuration. Nothing else is changed; cancel-safe.
    ///
    /// # Errors
    /// The request is invalid, or a device failed or is not ready in time.
    pub(super) async fn provide(
        &self,
        request: &CreateContainerRequest,
        message: &oci::Spec,
        spec: &mut Spec,
        timeout: Option<Duration>,
    ) -> Result<Provided> {
        let name = format!("container {}", request.container_id);
        let attached = devices::attach(&self.hotplug, &self.paths, &request.devices, spec).await;
        let functions = attached.map_err(|error| error.during(&name))?;
        let input = gpu::RequestInput {
            annotations: &message.Annotations,
            devices: &request.devices,
            environment: message.Process.as_ref().map_or(&[], |process| &process.Env),
            environment_grants: self.environment_grants,
        };
        let requested = gpu::requested_devices(input, &self.paths.sysfs)?;
        let injected = self.gpus.inject_devices(spec, &requested, self.timeouts(timeout), &self.paths).await;
        let warnings = injected.map_err(|error| error.during(&name))?;
        Ok(Provided { functions, warnings })
    }

    /// Returns the timeouts for a caller that waits for at most `timeout`.
    fn timeouts(&self, timeout: Option<Duration>) -> gpu::Timeouts {
        let gpu::Timeouts { ready, plugged } = self.timeouts;
        let ready = timeout.map_or(ready, |timeout| ready.min(timeout.saturating_sub(REPLY_MARGIN)));
        gpu::Timeouts { ready, plugged: plugged.min(ready) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_runtime::run;
    use std::path::Path;

    fn provider(root: &Path) -> DeviceProvider {
        let (config, paths) = (Config::default(), Paths::below(root));
        DeviceProvider::new(&config, &paths, Hotplug::new(&paths, Duration::ZERO), Source::Files)
    }

    #[test]
    fn wait_ends_before_the_callers_timeout() {
        let provider = provider(Path::new("/nonexistent"));
        let millis = |timeout: Option<u64>| {
            let timeouts = provider.timeouts(timeout.map(Duration::from_millis));
            (timeouts.ready.as_millis(), timeouts.plugged.as_millis())
        };
        assert_eq!(millis(None), (100_000, 3000));
        assert_eq!(millis(Some(1_000_000)), (100_000, 3000));
        assert_eq!(millis(Some(10_250)), (10_050, 3000));
        assert_eq!(millis(Some(1250)), (1050, 1050));
        assert_eq!(millis(Some(100)), (0, 0));
    }

    #[test]
    fn missing_gpu_fails_with_the_containers_name_and_an_unchanged_configuration() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let mut message = oci::Spec::new();
            message.Annotations.insert("cdi.k8s.io/gpu".into(), "nvidia.com/gpu=0".into());
            let request = CreateContainerRequest { container_id: "c1".into(), ..Default::default() };
            let mut spec = Spec::default();
            let provider = provider(root.path());
            let error = provider.provide(&request, &message, &mut spec, None).await.unwrap_err();
            assert!(error.message.starts_with("container c1: "), "{error}");
            assert_eq!(spec, Spec::default());
            message.Annotations.clear();
            let provided = provider.provide(&request, &message, &mut spec, None).await.unwrap();
            assert!(provided.warnings.is_empty());
        });
    }
}
