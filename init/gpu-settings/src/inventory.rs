//! Prints the baseboard module id of each GPU as a line of JSON, measured in a trusted
//! inventory guest for the module map of a service VM.

use std::ffi::OsStr;
use std::io::Write as _;
use std::process::ExitCode;

use firstlight_sys::nvml::{Gpu, Library, NvmlError};
use serde_json::{Map, Value};

/// Prints the inventory. A GPU without a module id is reported and makes the exit
/// status a failure, because an incomplete module map is invalid.
pub(crate) fn print(library_paths: &[&OsStr]) -> ExitCode {
    match lines(library_paths) {
        Ok((lines, errors)) => {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let written = std::io::stdout().write_all(text.as_bytes());
            errors.iter().for_each(|error| print_error(error));
            if written.is_ok() && errors.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(text) => {
            print_error(&text);
            ExitCode::FAILURE
        }
    }
}

fn print_error(text: &str) {
    let _ = writeln!(std::io::stderr(), "firstlight-gpu-settings: {text}");
}

fn lines(library_paths: &[&OsStr]) -> Result<(Vec<Value>, Vec<String>), String> {
    let library = Library::open(library_paths).map_err(|error| error.to_string())?;
    let gpus = library.gpus().map_err(|error| format!("failed to list GPUs with NVML: {error}"))?;
    if gpus.is_empty() {
        return Err("NVML reports no GPUs; check the driver's messages in the kernel log".to_owned());
    }
    let (mut lines, mut errors) = (Vec::new(), Vec::new());
    for (index, gpu) in gpus.into_iter().enumerate() {
        let name = gpu.pci().unwrap_or_else(|_| format!("GPU {index}"));
        match line(gpu) {
            Ok(line) => lines.push(line),
            Err(error) => errors.push(format!(
                "failed to read the module id of {name}: {error}; only GPUs of an HGX baseboard have one, with a driver that supports it"
            )),
        }
    }
    Ok((lines, errors))
}

fn line(gpu: Gpu<'_>) -> Result<Value, NvmlError> {
    let mut line = Map::new();
    line.insert("guest_pci".to_owned(), gpu.pci()?.into());
    line.insert("module_id".to_owned(), gpu.module_id()?.into());
    // Optional fields.
    for (key, value) in [("uuid", gpu.uuid()), ("serial", gpu.serial())] {
        if let Some(value) = value.ok().filter(|value| !value.is_empty()) {
            line.insert(key.to_owned(), value.into());
        }
    }
    Ok(Value::Object(line))
}
