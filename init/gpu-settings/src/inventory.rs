//! Where each GPU is on the baseboard: what a trusted inventory guest measures for
//! the module map of a service VM. A line of JSON for each GPU.

use std::ffi::OsStr;
use std::io::Write as _;
use std::process::ExitCode;

use firstlight_sys::nvml::{Gpu, Library, NvmlError};
use serde_json::{Map, Value};

/// Prints it. A GPU that does not say where it is is named, and is a failure: a map
/// with a hole is none.
pub(crate) fn print(places: &[&OsStr]) -> ExitCode {
    match lines(places) {
        Ok((lines, complaints)) => {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let written = std::io::stdout().write_all(text.as_bytes());
            complaints.iter().for_each(|complaint| complain(complaint));
            if written.is_ok() && complaints.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(text) => {
            complain(&text);
            ExitCode::FAILURE
        }
    }
}

fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "firstlight-gpu-settings: {text}");
}

fn lines(places: &[&OsStr]) -> Result<(Vec<Value>, Vec<String>), String> {
    let library = Library::open(places).map_err(|error| error.to_string())?;
    let gpus = library.gpus().map_err(|error| format!("NVML does not list GPUs: {error}"))?;
    if gpus.is_empty() {
        return Err("NVML sees no GPU; look at the driver's words in the kernel log".to_owned());
    }
    let (mut lines, mut complaints) = (Vec::new(), Vec::new());
    for (index, gpu) in gpus.into_iter().enumerate() {
        let name = gpu.pci().unwrap_or_else(|_| format!("GPU {index}"));
        match line(gpu) {
            Ok(line) => lines.push(line),
            Err(error) => complaints.push(format!(
                "{name} does not say where it is: {error}; is it a GPU of an HGX baseboard, and the driver one for such?"
            )),
        }
    }
    Ok((lines, complaints))
}

fn line(gpu: Gpu<'_>) -> Result<Value, NvmlError> {
    let mut line = Map::new();
    line.insert("guest_pci".to_owned(), gpu.pci()?.into());
    line.insert("module_id".to_owned(), gpu.module_id()?.into());
    // Good to have, and not what it is about.
    for (key, value) in [("uuid", gpu.uuid()), ("serial", gpu.serial())] {
        if let Some(value) = value.ok().filter(|value| !value.is_empty()) {
            line.insert(key.to_owned(), value.into());
        }
    }
    Ok(Value::Object(line))
}
