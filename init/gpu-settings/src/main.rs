//! Applies settings to a guest's GPUs through NVML: MIG layout, compute mode, power
//! limit, clocks, and the ready state under confidential computing.
//!
//! A separate program, because NVML is opened with dlopen and PID 1 is linked
//! statically. PID 1 starts it when the GPUs are attached and parses its output: one
//! line of JSON at the start of each step and one at its end. GPUs are set in parallel,
//! with one thread each, which NVML supports; the steps of a GPU are sequential.
#![forbid(unsafe_code)]

mod clocks;
mod inventory;
mod layout;
mod mig;
mod modes;
mod placement;
mod power;
mod step;

use std::ffi::OsStr;
use std::io::Write as _;
use std::process::ExitCode;

use firstlight_gpu_settings_protocol::{Gpu as RequestedSettings, SYSTEM, SettingsRequest};
use firstlight_sys::nvml::{Gpu, Library};

use crate::step::{Plan, Steps};

const HELP: &str = "\
Applies settings of GPUs through NVML, and reports each step as a line of JSON.
  apply REQUEST   applies the settings; exit status 1 if a step fails
  check [REQUEST] reports what apply would change, and the current and supported settings; changes nothing
  inventory       prints the baseboard module id of each GPU, for fmctl inventory nvml; changes nothing
  --library FILE  the path of NVML; before the command
  --version       prints the version
REQUEST is JSON: {\"gpus\": [{\"pci\": \"0000:01:00.0\", \"mig\": \"3g.71gb,4g.71gb\", \"compute-mode\": \"default\",
\"power-limit\": \"500\", \"memory-clock\": \"2619\", \"clocks\": \"345,1980\"}], \"ready\": \"auto\"}; every key but pci is optional.
";

/// Names of the NVML library: in the loader's search path, or in the directories of drivers.
const LIBRARY_PATHS: &[&str] = &[
    "libnvidia-ml.so.1",
    "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    "/usr/lib64/libnvidia-ml.so.1",
    "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
];

/// A parsed command line.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    Print(String),
    Inventory { library: Option<String> },
    Run { library: Option<String>, request: Option<SettingsRequest>, apply: bool },
}

fn parse_arguments(mut arguments: impl Iterator<Item = String>) -> Result<Command, String> {
    let mut library = None;
    loop {
        let apply = match arguments.next().as_deref() {
            Some("--library") => {
                library = Some(arguments.next().ok_or("--library needs a file")?);
                continue;
            }
            Some("--help" | "-h") => return Ok(Command::Print(HELP.to_owned())),
            Some("--version") => {
                return Ok(Command::Print(format!("firstlight-gpu-settings {}\n", env!("CARGO_PKG_VERSION"))));
            }
            Some("inventory") => {
                let more = arguments.next();
                return more
                    .map_or(Ok(Command::Inventory { library }), |_| Err("inventory takes no arguments".to_owned()));
            }
            Some("apply") => true,
            Some("check") => false,
            Some(other) => return Err(format!("unknown argument {other:?}; see --help")),
            None => return Err("missing command apply, check or inventory; see --help".to_owned()),
        };
        let text = arguments.next();
        if apply && text.is_none() {
            return Err("apply needs REQUEST; see --help".to_owned());
        }
        if arguments.next().is_some() {
            return Err("too many arguments; pass REQUEST as one argument, see --help".to_owned());
        }
        let request =
            text.map(|text| serde_json::from_str(&text).map_err(|error| format!("REQUEST: {error}"))).transpose()?;
        return Ok(Command::Run { library, request, apply });
    }
}

fn main() -> ExitCode {
    match parse_arguments(std::env::args().skip(1)) {
        Ok(Command::Print(text)) => {
            let written = std::io::stdout().write_all(text.as_bytes());
            if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Ok(Command::Inventory { library }) => inventory::print(&library_paths(library.as_deref())),
        Ok(Command::Run { library, request, apply }) => run(library.as_deref(), request, apply),
        Err(text) => {
            let _ = writeln!(std::io::stderr(), "firstlight-gpu-settings: {text}");
            ExitCode::from(2)
        }
    }
}

fn library_paths(library: Option<&str>) -> Vec<&OsStr> {
    match library {
        Some(file) => vec![OsStr::new(file)],
        None => LIBRARY_PATHS.iter().map(OsStr::new).collect(),
    }
}

fn run(library: Option<&str>, request: Option<SettingsRequest>, apply: bool) -> ExitCode {
    let steps = Steps::new(apply);
    let library_paths = library_paths(library);
    let mut opened = None;
    steps.run(SYSTEM, "nvml", || {
        let library = Library::open(&library_paths).map_err(|error| error.to_string())?;
        let version = library.driver_version().map_err(|error| error.to_string())?;
        opened = Some(library);
        Ok(Plan::Nothing(format!("driver {version}")))
    });
    let Some(library) = opened else { return ExitCode::FAILURE };
    let report_only = request.is_none();
    let request = request.unwrap_or_default();
    std::thread::scope(|scope| {
        for settings in &request.gpus {
            let (library, steps) = (&library, &steps);
            let thread = std::thread::Builder::new().name(settings.pci.to_string());
            if let Err(error) = thread.spawn_scoped(scope, move || apply_gpu(library, steps, settings)) {
                steps.failed(
                    &settings.pci.to_string(),
                    "thread",
                    &format!("failed to start a thread: {error}; check the memory of the guest"),
                );
            }
        }
    });
    if report_only {
        report_all(&library, &steps);
    }
    if let Some(ready) = request.ready {
        steps.run(SYSTEM, "ready", || modes::ready(&library, ready));
    }
    if steps.all_succeeded() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs all steps of a GPU. After a failed step the next ones still run.
fn apply_gpu(library: &Library, steps: &Steps, settings: &RequestedSettings) {
    let object = settings.pci.to_string();
    let gpu = match library.gpu(&object) {
        Ok(gpu) => gpu,
        Err(error) => {
            let text =
                format!("failed to open the GPU with NVML: {error}; check the driver's messages in the kernel log");
            steps.failed(&object, "find", &text);
            return;
        }
    };
    if !steps.applies() {
        report(steps, &object, gpu);
    }
    if let Some(mig) = &settings.mig {
        steps.run(&object, "mig", || mig::prepare(gpu, mig));
    }
    if let Some(mode) = settings.compute_mode {
        steps.run(&object, "compute-mode", || modes::compute(gpu, mode));
    }
    if let Some(limit) = settings.power_limit {
        steps.run(&object, "power-limit", || power::prepare(gpu, limit));
    }
    if let Some(clocks) = settings.memory_clock {
        steps.run(&object, "memory-clock", || clocks::lock_memory(gpu, clocks));
    }
    if let Some(clocks) = settings.clocks {
        steps.run(&object, "clocks", || clocks::lock_sm(gpu, clocks));
    }
}

/// Reports the current and supported settings of every GPU.
fn report_all(library: &Library, steps: &Steps) {
    let gpus = match library.gpus() {
        Ok(gpus) => gpus,
        Err(error) => return steps.failed(SYSTEM, "find", &error.to_string()),
    };
    for gpu in gpus {
        match gpu.pci() {
            Ok(object) => report(steps, &object, gpu),
            Err(error) => steps.failed(SYSTEM, "find", &error.to_string()),
        }
    }
    steps.run(SYSTEM, "ready", || modes::report_ready(library));
}

/// Reports the current and supported settings of a GPU. An unsupported setting is not a failure.
fn report(steps: &Steps, object: &str, gpu: Gpu<'_>) {
    let result_or_error =
        |value: Result<String, String>| Ok(Plan::Nothing(value.unwrap_or_else(|error| format!("none: {error}"))));
    steps.run(object, "has-model", || result_or_error(gpu.name().map_err(|error| error.to_string())));
    steps.run(object, "has-mig", || result_or_error(mig::report(gpu)));
    steps.run(object, "has-compute-mode", || result_or_error(modes::report_compute(gpu)));
    steps.run(object, "has-power-limit", || result_or_error(power::report(gpu)));
    steps.run(object, "has-memory-clock", || result_or_error(clocks::report_memory(gpu)));
    steps.run(object, "has-clocks", || result_or_error(clocks::report_sm(gpu)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Command, String> {
        parse_arguments(arguments.iter().map(ToString::to_string))
    }

    #[test]
    fn command_line_is_one_command_and_one_request() {
        let none = Command::Run { library: None, request: None, apply: false };
        assert_eq!(parse(&["check"]), Ok(none));
        assert_eq!(parse(&["inventory"]), Ok(Command::Inventory { library: None }));
        let request = Some(SettingsRequest::default());
        let library = Some("/x".to_owned());
        assert_eq!(parse(&["--library", "/x", "apply", "{}"]), Ok(Command::Run { library, request, apply: true }));
        for (arguments, part) in [
            (&[][..], "missing command"),
            (&["inventory", "x"], "takes no arguments"),
            (&["apply"], "needs REQUEST"),
            (&["apply", "x"], "REQUEST: expected value"),
            (&["apply", "{}", "{}"], "too many"),
            (&["--library"], "needs a file"),
            (&["mend"], "unknown argument \"mend\""),
        ] {
            let error = parse(arguments).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
