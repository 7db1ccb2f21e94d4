//! Enables and disables MIG mode.

use firstlight_gpu_settings_protocol::Mig;
use firstlight_sys::nvml::{Gpu, MigMode, NvmlError};

use crate::layout;
use crate::step::Plan;

fn mode(gpu: Gpu<'_>) -> Result<MigMode, String> {
    gpu.mig_mode().map_err(|error| match error.code {
        NvmlError::NOT_SUPPORTED => format!("this GPU does not support MIG: {error}; exclude it from firstlight.mig"),
        _ => format!("failed to read the MIG mode: {error}"),
    })
}

pub(crate) fn report(gpu: Gpu<'_>) -> Result<String, String> {
    let MigMode { current, pending } = mode(gpu)?;
    let state = |on| if on { "on" } else { "off" };
    let after = if current == pending { String::new() } else { format!(", {} after a reset", state(pending)) };
    let profiles = gpu.profiles().map_err(|error| error.to_string())?;
    let profiles = if profiles.is_empty() {
        "profiles are known when MIG is on".to_owned()
    } else {
        layout::describe_profiles(gpu, &profiles)
    };
    Ok(format!("{}{after}; supports {profiles}", state(current)))
}

pub(crate) fn prepare<'a>(gpu: Gpu<'a>, requested: &'a Mig) -> Result<Plan<'a>, String> {
    let current_mode = mode(gpu)?;
    match requested {
        Mig::Off if !current_mode.current && !current_mode.pending => Ok(Plan::Nothing("off".to_owned())),
        Mig::Off => disable(gpu, current_mode),
        Mig::On if current_mode.current => Ok(Plan::Nothing("on".to_owned())),
        Mig::On => Ok(Plan::change("on (previously off)".to_owned(), move || {
            set_mode(gpu, true)?;
            Ok("on (previously off)".to_owned())
        })),
        Mig::Instances(parts) if current_mode.current => layout::prepare(gpu, parts),
        Mig::Instances(parts) => {
            // Some drivers report the profiles while MIG is off.
            let profiles = gpu.profiles().unwrap_or_default();
            if !profiles.is_empty() {
                layout::resolve(gpu, &profiles, parts)?;
            }
            Ok(Plan::change(format!("{requested} (previously off)"), move || {
                set_mode(gpu, true)?;
                match layout::prepare(gpu, parts)? {
                    Plan::Nothing(description) => Ok(description),
                    Plan::Change(_, act) => act(),
                }
            }))
        }
    }
}

fn disable(gpu: Gpu<'_>, current_mode: MigMode) -> Result<Plan<'_>, String> {
    if current_mode.current {
        layout::check_unused(gpu)?;
    }
    Ok(Plan::change("off (previously on)".to_owned(), move || {
        if current_mode.current {
            layout::destroy_all(gpu)?;
        }
        set_mode(gpu, false)?;
        Ok("off (previously on)".to_owned())
    }))
}

/// Enables or disables MIG mode immediately, or returns the reason why that failed.
fn set_mode(gpu: Gpu<'_>, on: bool) -> Result<(), String> {
    let state = if on { "on" } else { "off" };
    let set = gpu.set_mig_mode(on);
    let current_mode = mode(gpu)?;
    if set.is_ok() && current_mode.current == on {
        return Ok(());
    }
    let error = set.err().map_or_else(|| "the driver reported no error".to_owned(), |error| error.to_string());
    if gpu.is_ampere().unwrap_or_default() {
        return Err(format!(
            "failed to turn MIG mode {state}: {error}; on this generation the change needs a GPU reset, and this guest does not \
             reset GPUs that are in use; the GPU stores the mode: power the VM off and on to apply it"
        ));
    }
    Err(format!(
        "failed to turn MIG mode {state}: {error}; the GPU is in use: change the mode without firstlight.dcgm and \
         firstlight.persistenced, and without containers on the GPU"
    ))
}
