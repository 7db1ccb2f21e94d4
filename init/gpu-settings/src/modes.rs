//! Sets compute modes of GPUs, and the ready state under confidential computing.

use firstlight_gpu_settings_protocol::{ComputeMode, Ready};
use firstlight_sys::nvml::{self, Gpu, Library};

use crate::step::Plan;

fn describe(mode: nvml::ComputeMode) -> String {
    match mode {
        nvml::ComputeMode::Default => ComputeMode::Default.to_string(),
        nvml::ComputeMode::ExclusiveProcess => ComputeMode::ExclusiveProcess.to_string(),
        nvml::ComputeMode::Prohibited => ComputeMode::Prohibited.to_string(),
        nvml::ComputeMode::Other(number) => format!("mode {number}"),
    }
}

/// The supported compute modes, for messages.
const SUPPORTED_MODES: &str = "default, exclusive-process or prohibited";

pub(crate) fn report_compute(gpu: Gpu<'_>) -> Result<String, String> {
    let current = gpu.compute_mode().map_err(|error| error.to_string())?;
    Ok(format!("{}; supports {SUPPORTED_MODES}", describe(current)))
}

pub(crate) fn compute(gpu: Gpu<'_>, requested: ComputeMode) -> Result<Plan<'_>, String> {
    let mode = match requested {
        ComputeMode::Default => nvml::ComputeMode::Default,
        ComputeMode::ExclusiveProcess => nvml::ComputeMode::ExclusiveProcess,
        ComputeMode::Prohibited => nvml::ComputeMode::Prohibited,
    };
    let current = gpu.compute_mode().map_err(|error| format!("failed to read the compute mode: {error}"))?;
    if current == mode {
        return Ok(Plan::Nothing(requested.to_string()));
    }
    let planned = format!("{requested} (previously {})", describe(current));
    Ok(Plan::change(planned.clone(), move || {
        let set = gpu.set_compute_mode(mode);
        set.map(|()| planned).map_err(|error| {
            format!(
                "failed to set compute mode {requested}: {error}; GPUs support {SUPPORTED_MODES}, in MIG mode possibly only default"
            )
        })
    }))
}

pub(crate) fn report_ready(library: &Library) -> Result<Plan<'_>, String> {
    let state = match (library.is_confidential(), library.is_ready()) {
        (Ok(true), Ok(ready)) => {
            format!(
                "confidential computing is on; GPUs {}",
                if ready { "accept work" } else { "do not accept work yet" }
            )
        }
        (Ok(true), Err(error)) => {
            format!("confidential computing is on; failed to read whether GPUs accept work: {error}")
        }
        (Ok(false), _) => "confidential computing is off: GPUs accept work".to_owned(),
        (Err(error), _) => format!("none: {error}"),
    };
    Ok(Plan::Nothing(state))
}

/// Sets the GPUs' ready state under confidential computing, unless it is set.
pub(crate) fn ready(library: &Library, requested: Ready) -> Result<Plan<'_>, String> {
    let off = || Ok(Plan::Nothing("confidential computing is off: GPUs accept work".to_owned()));
    match (requested, library.is_confidential()) {
        (Ready::No, _) => return Ok(Plan::Nothing("not requested".to_owned())),
        (Ready::Auto, Ok(false)) => return off(),
        // With a driver that does not support confidential computing it is off.
        (Ready::Auto, Err(error)) if error.is_unsupported() || error.is_missing() => return off(),
        (Ready::Auto, Err(error)) => {
            return Err(format!(
                "failed to read whether confidential computing is on: {error}; set firstlight.gpu-ready=yes or no"
            ));
        }
        (Ready::Yes, _) | (Ready::Auto, Ok(true)) => {}
    }
    if library.is_ready().is_ok_and(|ready| ready) {
        return Ok(Plan::Nothing("GPUs accept work".to_owned()));
    }
    Ok(Plan::change("GPUs accept work now".to_owned(), move || {
        let set = library.set_ready(true);
        set.map(|()| "GPUs accept work now".to_owned()).map_err(|error| {
            format!(
                "failed to set the GPU ready state: {error}; GPUs do not accept work without it; check that every GPU of \
                 this guest is attached"
            )
        })
    }))
}
