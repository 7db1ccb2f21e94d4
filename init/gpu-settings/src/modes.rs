//! Compute modes of GPUs, and the ready state under confidential computing.

use firstlight_gpu_settings_protocol::{ComputeMode, Ready};
use firstlight_sys::nvml::{self, Gpu, Library};

use crate::step::Todo;

fn words(mode: nvml::ComputeMode) -> String {
    match mode {
        nvml::ComputeMode::Default => ComputeMode::Default.to_string(),
        nvml::ComputeMode::ExclusiveProcess => ComputeMode::ExclusiveProcess.to_string(),
        nvml::ComputeMode::Prohibited => ComputeMode::Prohibited.to_string(),
        nvml::ComputeMode::Other(number) => format!("mode {number}"),
    }
}

const MODES: &str = "default, exclusive-process or prohibited";

pub(crate) fn tell_compute(gpu: Gpu<'_>) -> Result<String, String> {
    let now = gpu.compute_mode().map_err(|error| error.to_string())?;
    Ok(format!("{}; takes {MODES}", words(now)))
}

pub(crate) fn compute(gpu: Gpu<'_>, wanted: ComputeMode) -> Result<Todo<'_>, String> {
    let mode = match wanted {
        ComputeMode::Default => nvml::ComputeMode::Default,
        ComputeMode::ExclusiveProcess => nvml::ComputeMode::ExclusiveProcess,
        ComputeMode::Prohibited => nvml::ComputeMode::Prohibited,
    };
    let now = gpu.compute_mode().map_err(|error| format!("its compute mode cannot be read: {error}"))?;
    if now == mode {
        return Ok(Todo::Nothing(wanted.to_string()));
    }
    let planned = format!("{wanted}, before {}", words(now));
    Ok(Todo::change(planned.clone(), move || {
        let set = gpu.set_compute_mode(mode);
        set.map(|()| planned).map_err(|error| {
            format!(
                "{wanted} was asked for, and not set: {error}; GPUs take {MODES}, and in MIG mode perhaps default only"
            )
        })
    }))
}

pub(crate) fn tell_ready(library: &Library) -> Result<Todo<'_>, String> {
    let state = match (library.is_confidential(), library.is_ready()) {
        (Ok(true), Ok(ready)) => {
            format!("confidential computing is on; GPUs {}", if ready { "accept work" } else { "accept no work yet" })
        }
        (Ok(true), Err(error)) => {
            format!("confidential computing is on; whether GPUs accept work is not known: {error}")
        }
        (Ok(false), _) => "confidential computing is off: GPUs accept work by themselves".to_owned(),
        (Err(error), _) => format!("none: {error}"),
    };
    Ok(Todo::Nothing(state))
}

/// Sets the GPUs' ready state under confidential computing, unless it is set.
pub(crate) fn ready(library: &Library, wanted: Ready) -> Result<Todo<'_>, String> {
    let off = || Ok(Todo::Nothing("confidential computing is off: GPUs accept work by themselves".to_owned()));
    match (wanted, library.is_confidential()) {
        (Ready::No, _) => return Ok(Todo::Nothing("not asked for".to_owned())),
        (Ready::Auto, Ok(false)) => return off(),
        // A driver without confidential computing has it off.
        (Ready::Auto, Err(error)) if error.is_unsupported() || error.is_missing() => return off(),
        (Ready::Auto, Err(error)) => {
            return Err(format!(
                "whether confidential computing is on cannot be read: {error}; firstlight.gpu-ready=yes or no decides it"
            ));
        }
        (Ready::Yes, _) | (Ready::Auto, Ok(true)) => {}
    }
    if library.is_ready().is_ok_and(|ready| ready) {
        return Ok(Todo::Nothing("GPUs accept work".to_owned()));
    }
    Ok(Todo::change("GPUs accept work from now on".to_owned(), move || {
        let set = library.set_ready(true);
        set.map(|()| "GPUs accept work from now on".to_owned()).map_err(|error| {
            format!(
                "failed to make GPUs accept work: {error}; without it nothing computes on them. Check that every GPU of \
                 this guest is attached"
            )
        })
    }))
}
