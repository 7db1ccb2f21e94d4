//! MIG mode, and what it takes to change it.

use firstlight_gpu_settings_protocol::Mig;
use firstlight_sys::nvml::{Gpu, MigMode, NvmlError};

use crate::layout;
use crate::step::Todo;

fn mode(gpu: Gpu<'_>) -> Result<MigMode, String> {
    gpu.mig_mode().map_err(|error| match error.code {
        NvmlError::NOT_SUPPORTED => format!("this GPU cannot be divided: {error}; leave it out of firstlight.mig"),
        _ => format!("its MIG mode cannot be read: {error}"),
    })
}

pub(crate) fn tell(gpu: Gpu<'_>) -> Result<String, String> {
    let MigMode { current, pending } = mode(gpu)?;
    let word = |on| if on { "on" } else { "off" };
    let after = if current == pending { String::new() } else { format!(", {} after a reset", word(pending)) };
    let kinds = gpu.profiles().map_err(|error| error.to_string())?;
    let kinds = if kinds.is_empty() { "profiles once it is on".to_owned() } else { layout::words(gpu, &kinds) };
    Ok(format!("{}{after}; has {kinds}", word(current)))
}

pub(crate) fn prepare<'a>(gpu: Gpu<'a>, wanted: &'a Mig) -> Result<Todo<'a>, String> {
    let now = mode(gpu)?;
    match wanted {
        Mig::Off if !now.current && !now.pending => Ok(Todo::Nothing("off".to_owned())),
        Mig::Off => off(gpu, now),
        Mig::On if now.current => Ok(Todo::Nothing("on".to_owned())),
        Mig::On => Ok(Todo::change("on, before off".to_owned(), move || {
            turn(gpu, true)?;
            Ok("on, before off".to_owned())
        })),
        Mig::Instances(parts) if now.current => layout::prepare(gpu, parts),
        Mig::Instances(parts) => {
            // Some drivers tell what there will be while the mode is off.
            let kinds = gpu.profiles().unwrap_or_default();
            if !kinds.is_empty() {
                layout::resolve(gpu, &kinds, parts)?;
            }
            Ok(Todo::change(format!("{wanted}, before off"), move || {
                turn(gpu, true)?;
                match layout::prepare(gpu, parts)? {
                    Todo::Nothing(words) => Ok(words),
                    Todo::Change(_, act) => act(),
                }
            }))
        }
    }
}

fn off(gpu: Gpu<'_>, now: MigMode) -> Result<Todo<'_>, String> {
    if now.current {
        layout::unused(gpu)?;
    }
    Ok(Todo::change("off, before on".to_owned(), move || {
        if now.current {
            layout::destroy_all(gpu)?;
        }
        turn(gpu, false)?;
        Ok("off, before on".to_owned())
    }))
}

/// Enables or disables MIG mode immediately, or returns the reason why that failed.
fn turn(gpu: Gpu<'_>, on: bool) -> Result<(), String> {
    let word = if on { "on" } else { "off" };
    let set = gpu.set_mig_mode(on);
    let now = mode(gpu)?;
    if set.is_ok() && now.current == on {
        return Ok(());
    }
    let error = set.err().map_or_else(|| "the driver reported no error".to_owned(), |error| error.to_string());
    if gpu.is_ampere().unwrap_or_default() {
        return Err(format!(
            "MIG mode is to be {word}: {error}; on this generation it changes by a reset of the GPU, and this guest does not \
             reset a GPU that it holds. The GPU remembers the mode: power the VM off and on, and it has it"
        ));
    }
    Err(format!(
        "failed to turn MIG mode {word}: {error}; the GPU is in use: request it without firstlight.dcgm and \
         firstlight.persistenced, and with no container on the GPU"
    ))
}
