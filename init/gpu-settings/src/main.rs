//! Settings of a guest's GPUs, through NVML: MIG layout, compute mode, power
//! limit, clocks, and the ready state under confidential computing.
//!
//! A program of its own because NVML is a library that has to be opened at run
//! time, and PID 1 is linked statically. PID 1 starts it once the GPUs are
//! attached, and reads what it writes: one line of JSON when a step begins and
//! one when it has ended. GPUs have a thread each, which NVML allows; the steps
//! of one follow each other.
#![forbid(unsafe_code)]

mod clocks;
mod inventory;
mod layout;
mod mig;
mod modes;
mod place;
mod power;
mod step;

use std::ffi::OsStr;
use std::io::Write as _;
use std::process::ExitCode;

use firstlight_gpu_settings_protocol::{Gpu as Wanted, SYSTEM, SettingsRequest};
use firstlight_sys::nvml::{Gpu, Library};

use crate::step::{Steps, Todo};

const HELP: &str = "\
Settings of GPUs, through NVML. What it does is written as lines of JSON.
  apply WORK      does it; ends with status 1 if something is not as asked
  check [WORK]    changes nothing: tells what would be done, and what each GPU can be set to
  inventory       changes nothing: where each GPU is on the baseboard, for fmctl inventory nvml
  --library FILE  before these: where NVML is
  --version       its version
WORK is JSON: {\"gpus\": [{\"pci\": \"0000:01:00.0\", \"mig\": \"3g.71gb,4g.71gb\", \"compute-mode\": \"default\",
\"power-limit\": \"500\", \"memory-clock\": \"2619\", \"clocks\": \"345,1980\"}], \"ready\": \"auto\"}, each part if it is wished.
";

/// Where NVML is: where the loader finds it, or in the directories of drivers.
const PLACES: &[&str] = &[
    "libnvidia-ml.so.1",
    "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    "/usr/lib64/libnvidia-ml.so.1",
    "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
];

/// What the command line says.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    Tell(String),
    Inventory { library: Option<String> },
    Run { library: Option<String>, work: Option<SettingsRequest>, apply: bool },
}

fn command(mut words: impl Iterator<Item = String>) -> Result<Command, String> {
    let mut library = None;
    loop {
        let apply = match words.next().as_deref() {
            Some("--library") => {
                library = Some(words.next().ok_or("--library needs a file")?);
                continue;
            }
            Some("--help" | "-h") => return Ok(Command::Tell(HELP.to_owned())),
            Some("--version") => {
                return Ok(Command::Tell(format!("firstlight-gpu-settings {}\n", env!("CARGO_PKG_VERSION"))));
            }
            Some("inventory") => {
                let more = words.next();
                return more
                    .map_or(Ok(Command::Inventory { library }), |_| Err("inventory takes nothing more".to_owned()));
            }
            Some("apply") => true,
            Some("check") => false,
            Some(other) => return Err(format!("unknown word {other:?}; see --help")),
            None => return Err("apply, check or inventory? see --help".to_owned()),
        };
        let text = words.next();
        if apply && text.is_none() {
            return Err("apply needs WORK; see --help".to_owned());
        }
        if words.next().is_some() {
            return Err("too many words; WORK is one of them, see --help".to_owned());
        }
        let work =
            text.map(|text| serde_json::from_str(&text).map_err(|error| format!("WORK: {error}"))).transpose()?;
        return Ok(Command::Run { library, work, apply });
    }
}

fn main() -> ExitCode {
    match command(std::env::args().skip(1)) {
        Ok(Command::Tell(text)) => {
            let written = std::io::stdout().write_all(text.as_bytes());
            if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Ok(Command::Inventory { library }) => inventory::print(&places(library.as_deref())),
        Ok(Command::Run { library, work, apply }) => run(library.as_deref(), work, apply),
        Err(text) => {
            let _ = writeln!(std::io::stderr(), "firstlight-gpu-settings: {text}");
            ExitCode::from(2)
        }
    }
}

fn places(library: Option<&str>) -> Vec<&OsStr> {
    match library {
        Some(file) => vec![OsStr::new(file)],
        None => PLACES.iter().map(OsStr::new).collect(),
    }
}

fn run(library: Option<&str>, work: Option<SettingsRequest>, apply: bool) -> ExitCode {
    let steps = Steps::new(apply);
    let places = places(library);
    let mut opened = None;
    steps.run(SYSTEM, "nvml", || {
        let library = Library::open(&places).map_err(|error| error.to_string())?;
        let version = library.driver_version().map_err(|error| error.to_string())?;
        opened = Some(library);
        Ok(Todo::Nothing(format!("driver {version}")))
    });
    let Some(library) = opened else { return ExitCode::FAILURE };
    let all = work.is_none();
    let work = work.unwrap_or_default();
    std::thread::scope(|scope| {
        for wanted in &work.gpus {
            let (library, steps) = (&library, &steps);
            let thread = std::thread::Builder::new().name(wanted.pci.to_string());
            if let Err(error) = thread.spawn_scoped(scope, move || one(library, steps, wanted)) {
                steps.failed(
                    &wanted.pci.to_string(),
                    "thread",
                    &format!("cannot start one: {error}; is memory short?"),
                );
            }
        }
    });
    if all {
        tell_all(&library, &steps);
    }
    if let Some(ready) = work.ready {
        steps.run(SYSTEM, "ready", || modes::ready(&library, ready));
    }
    if steps.all_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// All steps of one GPU. A step that fails does not keep the next from being done.
fn one(library: &Library, steps: &Steps, wanted: &Wanted) {
    let object = wanted.pci.to_string();
    let gpu = match library.gpu(&object) {
        Ok(gpu) => gpu,
        Err(error) => {
            let text =
                format!("NVML does not give this GPU: {error}; look at the driver's words about it in the kernel log");
            steps.failed(&object, "find", &text);
            return;
        }
    };
    if !steps.applies() {
        report(steps, &object, gpu);
    }
    if let Some(mig) = &wanted.mig {
        steps.run(&object, "mig", || mig::prepare(gpu, mig));
    }
    if let Some(mode) = wanted.compute_mode {
        steps.run(&object, "compute-mode", || modes::compute(gpu, mode));
    }
    if let Some(limit) = wanted.power_limit {
        steps.run(&object, "power-limit", || power::prepare(gpu, limit));
    }
    if let Some(clocks) = wanted.memory_clock {
        steps.run(&object, "memory-clock", || clocks::memory(gpu, clocks));
    }
    if let Some(clocks) = wanted.clocks {
        steps.run(&object, "clocks", || clocks::processors(gpu, clocks));
    }
}

/// What every GPU has and can have.
fn tell_all(library: &Library, steps: &Steps) {
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
    steps.run(SYSTEM, "ready", || modes::tell_ready(library));
}

/// Reports the current and supported settings of a GPU. An unsupported setting is not a failure.
fn report(steps: &Steps, object: &str, gpu: Gpu<'_>) {
    let words =
        |value: Result<String, String>| Ok(Todo::Nothing(value.unwrap_or_else(|error| format!("none: {error}"))));
    steps.run(object, "has-model", || words(gpu.name().map_err(|error| error.to_string())));
    steps.run(object, "has-mig", || words(mig::tell(gpu)));
    steps.run(object, "has-compute-mode", || words(modes::tell_compute(gpu)));
    steps.run(object, "has-power-limit", || words(power::tell(gpu)));
    steps.run(object, "has-memory-clock", || words(clocks::tell_memory(gpu)));
    steps.run(object, "has-clocks", || words(clocks::tell_processors(gpu)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(words: &[&str]) -> Result<Command, String> {
        command(words.iter().map(ToString::to_string))
    }

    #[test]
    fn the_command_line_is_one_verb_and_one_task() {
        let none = Command::Run { library: None, work: None, apply: false };
        assert_eq!(said(&["check"]), Ok(none));
        assert_eq!(said(&["inventory"]), Ok(Command::Inventory { library: None }));
        let work = Some(SettingsRequest::default());
        let library = Some("/x".to_owned());
        assert_eq!(said(&["--library", "/x", "apply", "{}"]), Ok(Command::Run { library, work, apply: true }));
        for (words, part) in [
            (&[][..], "apply, check or inventory"),
            (&["inventory", "x"], "takes nothing more"),
            (&["apply"], "needs WORK"),
            (&["apply", "x"], "WORK: expected value"),
            (&["apply", "{}", "{}"], "too many"),
            (&["--library"], "needs a file"),
            (&["mend"], "unknown word \"mend\""),
        ] {
            let error = said(words).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
