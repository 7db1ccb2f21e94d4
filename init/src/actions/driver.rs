//! Units of the GPU driver: its modules, device nodes and CDI files.

use firstlight_pci::{Function, Kind};

use super::kernel::lock_all;
use super::modules::{load, locked};
use super::{Inputs, Product, Report, joined, not_needed, plain};
use crate::executor::End;
use crate::modules::{LoadOrder, Modules};
use crate::nodes::{self, Mknod, NodesError};
use crate::{cdi, driver_paths};

/// The GPU driver's module.
pub(super) const NVIDIA_MODULE: &str = "nvidia";

/// The GPU driver's modules in load order.
const NVIDIA_MODULES: &[&str] = &[NVIDIA_MODULE, "nvidia-uvm"];

pub(super) fn nvidia_modules(inputs: &Inputs) -> Report {
    if let Some(decision) = inputs.decision.as_ref().filter(|decision| !decision.driver) {
        let why = format!("mode {}: {}", decision.mode.name, decision.mode.reason);
        return not_needed(why);
    }
    if driver_waits_for_gpu(inputs) {
        let why = "no GPU is on the PCI bus yet; the driver is loaded for the first one (firstlight.gpu-hotplug=on)";
        return not_needed(why.to_owned());
    }
    let place = match driver_paths::modules(&inputs.root, &inputs.release) {
        Ok(place) => place,
        Err(error) => return plain(Err(error)),
    };
    if let Err(error) = driver_paths::offer_firmware(&inputs.root) {
        return plain(Err(error));
    }
    let modules = Modules::read_at(&inputs.root, place, &inputs.release);
    // CUDA is not used in a service VM, so nvidia-uvm is not needed.
    let attach = inputs.decision.as_ref().is_none_or(|decision| decision.attach);
    let names = &NVIDIA_MODULES[..if attach { NVIDIA_MODULES.len() } else { 1 }];
    plain(load(&modules, names, LoadOrder::InOrder, inputs).to_result())
}

/// Loads the driver for the first hotplugged GPU, then applies the locks that were deferred for it.
///
/// # Errors
/// A module is not in the image, the kernel rejected a module, or module loading is locked.
pub fn load_driver(inputs: &Inputs) -> Result<String, String> {
    match nvidia_modules(inputs).0 {
        End::Ok(text) | End::NotNeeded(text) => {
            if inputs.params.lockdown {
                lock_all(inputs)?;
            }
            cdi::publish_driver(&inputs.root).map_err(|error| error.to_string())?;
            Ok(text)
        }
        End::Failed(_) | End::TimedOut(_) if locked(&inputs.root) => Err(
            "the driver is not loaded, and the guest has locked module loading, as it does when it has booted; boot \
             with firstlight.gpu-hotplug=on where the first GPU comes later"
                .to_owned(),
        ),
        End::Failed(text) | End::TimedOut(text) => Err(text),
    }
}

/// Returns whether the driver has to wait for a hotplugged GPU. Without a GPU or an NVSwitch the
/// driver's module fails to load.
fn driver_waits_for_gpu(inputs: &Inputs) -> bool {
    let some = |function: &Function| matches!(function.kind(), Some(Kind::Gpu | Kind::NvSwitch));
    inputs.params.gpu_hotplug && !inputs.functions.iter().any(some)
}

pub(super) fn make_nodes(inputs: &Inputs) -> Report {
    match nodes::make(&inputs.root, &inputs.gpus, inputs.params.imex_channels, &mut Mknod) {
        Ok(made) => {
            let known = made.minors.iter().filter(|(_, minor)| minor.is_ok()).count();
            let mut detail = format!("nodes for {known} of {} GPUs", inputs.gpus.len());
            // GPUs can be attached and used without the skipped nodes.
            if !made.left_out.is_empty() {
                detail.push_str(&skipped_nodes(&made.left_out));
            }
            // Published before the first GPU is published. The unit `cdi` retries, and fails if the
            // retry fails.
            match cdi::publish_driver(&inputs.root) {
                Ok(None) => {}
                Ok(Some(path)) => detail.push_str(&format!("; the driver's files as {path} has them")),
                Err(error) => detail.push_str(&format!("; {error}")),
            }
            (End::Ok(detail), Product::Minors(made.minors))
        }
        Err(error) => plain(Err(error.to_string())),
    }
}

/// Lists the skipped nodes, at most four.
fn skipped_nodes(errors: &[NodesError]) -> String {
    let more = errors.len().saturating_sub(4);
    let text = joined(&errors[..errors.len() - more]);
    if more == 0 { format!("; left out: {text}") } else { format!("; left out: {text}; and {more} more") }
}

pub(super) fn check_cdi(inputs: &Inputs) -> Report {
    let total = inputs.gpus.len();
    if inputs.ready == 0 {
        let why = if total == 0 { "there is no GPU" } else { "no GPU is ready, so no file was written" };
        return not_needed(why.to_owned());
    }
    if let Err(error) = cdi::ensure_driver(&inputs.root) {
        return plain(Err(error.to_string()));
    }
    // A GPU is ready only when the file that names it has been written.
    let detail = format!("names for {} of {total} GPUs", inputs.ready);
    // An attach can create MIG instances; those whose capabilities cannot be read have no CDI name.
    match nodes::make_capabilities(&inputs.root, &mut Mknod) {
        Ok(errors) if errors.is_empty() => plain(Ok(detail)),
        Ok(errors) => plain(Err(format!("{detail}{}", skipped_nodes(&errors)))),
        Err(error) => plain(Err(error.to_string())),
    }
}
