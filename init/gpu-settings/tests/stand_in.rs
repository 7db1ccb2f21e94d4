//! Tests the program with a stand-in for NVML (`tests/stand-in-nvml`).
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use firstlight_gpu_settings_protocol::{Outcome, StepReport};

const ONE: &str = "0000:01:00.0";
const TWO: &str = "0000:02:00.0";

/// Returns the path of the stand-in library, compiled once.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/stand-in-nvml/libnvidia-ml.c");
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libnvidia-ml.so.1");
        let mut gcc = Command::new("gcc");
        gcc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-o"]);
        assert!(gcc.arg(&library).arg(source).status().unwrap().success());
        library
    })
}

/// The state directory of the stand-in, with two GPUs.
struct Gpus {
    dir: tempfile::TempDir,
}

impl Gpus {
    fn new() -> Self {
        let gpus = Self { dir: tempfile::tempdir().unwrap() };
        gpus.write("gpus", &format!("{ONE}\n{TWO}\n"));
        gpus
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Returns a value of a GPU; empty if it was never set.
    fn has(&self, object: &str, key: &str) -> String {
        fs::read_to_string(self.dir.path().join(object).join(key)).unwrap_or_default().trim().to_owned()
    }

    /// Returns the instances: profile, first slice, compute instance profile.
    fn instances(&self, object: &str) -> Vec<[u32; 3]> {
        let text = self.has(object, "instances");
        let number = |line: &str, at: usize| line.split(' ').nth(at).unwrap().parse().unwrap();
        text.lines().map(|line| [number(line, 1), number(line, 2), number(line, 3)]).collect()
    }

    fn program(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firstlight-gpu-settings"));
        command.arg("--library").arg(library()).args(arguments).env("STAND_IN_NVML", self.dir.path());
        command
    }

    /// Runs the program until it exits, and returns whether it succeeded and the results of the steps.
    fn run(&self, arguments: &[&str]) -> (bool, Vec<StepReport>) {
        let output = self.program(arguments).output().unwrap();
        let lines = lines(&output);
        let ended = lines.iter().filter(|line| line.result != Outcome::Started).cloned().collect();
        assert!(lines.iter().filter(|line| line.result == Outcome::Started).count() > 0, "{output:?}");
        (output.status.success(), ended)
    }

    fn apply(&self, gpu: &str, settings: &str) -> (bool, Vec<StepReport>) {
        self.run(&["apply", &format!(r#"{{"gpus":[{{"pci":"{gpu}",{settings}}}]}}"#)])
    }

    /// Runs one step of a GPU, checks its result, and returns the detail.
    fn step(&self, settings: &str, step: &str, result: Outcome) -> String {
        let (good, lines) = self.apply(ONE, settings);
        let line = lines.iter().find(|line| line.object == ONE && line.step == step);
        let line = line.unwrap_or_else(|| panic!("no {step} in {lines:?}"));
        assert_eq!((line.result, good), (result, result != Outcome::Failed), "{line:?}");
        line.detail.clone()
    }
}

fn lines(output: &Output) -> Vec<StepReport> {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

#[test]
fn all_settings_are_applied_in_order_and_unchanged_the_second_time() {
    let gpus = Gpus::new();
    let request = format!(
        r#"{{"gpus":[{{"pci":"{ONE}","mig":"3g.71gb,4g.71gb","compute-mode":"exclusive-process","power-limit":"500",
        "memory-clock":"2619","clocks":"345,1980"}},{{"pci":"{TWO}","power-limit":"400"}}],"ready":"auto"}}"#
    );
    let (good, lines) = gpus.run(&["apply", &request]);
    assert!(good, "{lines:?}");
    let of = |object: &str| -> Vec<(&str, Outcome, &str)> {
        let mine = lines.iter().filter(|line| line.object == object);
        mine.map(|line| (line.step.as_str(), line.result, line.detail.as_str())).collect()
    };
    assert_eq!(
        of(ONE),
        [
            ("mig", Outcome::Done, "3g.71gb,4g.71gb (previously without instances)"),
            ("compute-mode", Outcome::Done, "exclusive-process (previously default)"),
            ("power-limit", Outcome::Done, "500 W (previously 700 W)"),
            ("memory-clock", Outcome::Done, "2619 MHz"),
            ("clocks", Outcome::Done, "345 to 1980 MHz"),
        ]
    );
    assert_eq!(of(TWO), [("power-limit", Outcome::Done, "400 W (previously 700 W)")]);
    assert_eq!(of("system")[0], ("nvml", Outcome::Unchanged, "driver 550.163.01"));
    assert_eq!(of("system")[1].1, Outcome::Unchanged, "confidential computing is off");
    assert_eq!((gpus.has(ONE, "power"), gpus.has(TWO, "power")), ("500000".into(), "400000".into()));
    assert_eq!((gpus.has(ONE, "clocks"), gpus.has(ONE, "memory-clock")), ("345,1980".into(), "2619,2619".into()));
    assert_eq!((gpus.has(ONE, "compute-mode"), gpus.has(ONE, "mig")), ("3".into(), "1".into()));
    // The instance with only one possible placement has it, though it was requested last.
    assert_eq!(gpus.instances(ONE), [[9, 4, 2], [5, 0, 3]]);
    assert_eq!(gpus.has(TWO, "mig"), "");

    // Clocks cannot be read back, so they are set again.
    let (good, lines) = gpus.run(&["apply", &request]);
    let again: Vec<&str> =
        lines.iter().filter(|line| line.result == Outcome::Done).map(|line| line.step.as_str()).collect();
    assert_eq!((good, again), (true, vec!["memory-clock", "clocks"]));
}

#[test]
fn check_changes_nothing_and_reports_supported_settings() {
    let gpus = Gpus::new();
    gpus.write(&format!("{TWO}/mig"), "1");
    let request = format!(r#"{{"gpus":[{{"pci":"{TWO}","mig":"1g.18gb*7","power-limit":"500"}}],"ready":"yes"}}"#);
    gpus.write("confidential", "");
    let (good, lines) = gpus.run(&["check", &request]);
    assert!(good, "{lines:?}");
    let of = |step: &str| lines.iter().find(|line| line.step == step).unwrap();
    for (step, detail) in [
        ("mig", "1g.18gb,1g.18gb,1g.18gb,1g.18gb,1g.18gb,1g.18gb,1g.18gb (previously without instances)"),
        ("power-limit", "500 W (previously 700 W)"),
        ("ready", "GPUs accept work now"),
    ] {
        assert_eq!((of(step).result, of(step).detail.as_str()), (Outcome::WouldChange, detail));
    }
    for (step, part) in [
        ("has-power-limit", "700 W; supports 200 W to 700 W, default 700 W"),
        ("has-memory-clock", "supports 2619, 3201 MHz"),
        ("has-clocks", "supports 345 to 1980 MHz in 110 steps"),
        ("has-mig", "1g.18gb+me (20: 1 free of 1), 1g.35gb (15: 4 free of 4)"),
    ] {
        assert!(of(step).detail.contains(part), "{:?}", of(step));
    }
    assert_eq!((gpus.has(TWO, "power"), gpus.has(TWO, "instances"), gpus.has("system", "ready")), Default::default());

    let (good, lines) = gpus.run(&["check"]);
    assert!(good && lines.iter().any(|line| line.object == ONE) && lines.iter().any(|line| line.object == TWO));
}

#[test]
fn out_of_range_value_fails_with_the_range_and_other_steps_are_done() {
    let gpus = Gpus::new();
    let settings = r#""power-limit":"900","memory-clock":"5000","clocks":"100,200","compute-mode":"prohibited""#;
    let (good, lines) = gpus.apply(ONE, settings);
    assert!(!good);
    let detail = |step: &str| lines.iter().find(|line| line.step == step && line.result == Outcome::Failed).unwrap();
    assert!(
        detail("power-limit").detail.contains("requested 900 W, but this GPU supports 200 W to 700 W"),
        "{lines:?}"
    );
    assert!(detail("memory-clock").detail.contains("requested 5000 MHz, but this GPU supports 2619, 3201 MHz"));
    assert!(detail("clocks").detail.contains("requested 100 to 200 MHz, but this GPU supports 345 to 1980 MHz"));
    assert_eq!((gpus.has(ONE, "compute-mode"), gpus.has(ONE, "power")), ("2".into(), String::new()));
}

#[test]
fn profile_numbers_and_defaults_are_accepted() {
    let gpus = Gpus::new();
    gpus.write(&format!("{ONE}/power"), "300000");
    let settings = r#""mig":"19*2,20","power-limit":"default","clocks":"default","memory-clock":"default""#;
    let (good, lines) = gpus.apply(ONE, settings);
    assert!(good, "{lines:?}");
    assert_eq!(gpus.instances(ONE), [[19, 0, 0], [19, 1, 0], [20, 2, 0]]);
    assert_eq!((gpus.has(ONE, "power"), gpus.has(ONE, "clocks")), ("700000".into(), "free".into()));
}

#[test]
fn layout_is_changed_only_if_different() {
    let gpus = Gpus::new();
    gpus.step(r#""mig":"1g.35gb*4""#, "mig", Outcome::Done);
    let before = gpus.has(ONE, "instances");
    assert_eq!(gpus.step(r#""mig":"1g.35gb,1g.35gb*3""#, "mig", Outcome::Unchanged).matches("1g.35gb").count(), 4);
    assert_eq!(gpus.has(ONE, "instances"), before);
    // If MIG is on, `on` leaves the instances unchanged.
    gpus.step(r#""mig":"on""#, "mig", Outcome::Unchanged);
    let detail = gpus.step(r#""mig":"7g.141gb""#, "mig", Outcome::Done);
    assert_eq!(detail, "7g.141gb (previously 1g.35gb,1g.35gb,1g.35gb,1g.35gb)");
    assert_eq!(gpus.instances(ONE), [[0, 0, 6]]);

    // A missing compute instance is created; a GPU instance with a partial one is created again.
    gpus.write(&format!("{ONE}/instances"), "1 0 0 99");
    let detail = gpus.step(r#""mig":"7g.141gb""#, "mig", Outcome::Done);
    assert_eq!(
        (detail.as_str(), gpus.instances(ONE)),
        ("7g.141gb (previously without all compute instances)", vec![[0, 0, 6]])
    );
    gpus.write(&format!("{ONE}/instances"), "1 0 0 0");
    gpus.step(r#""mig":"7g.141gb""#, "mig", Outcome::Done);
    assert_eq!(gpus.instances(ONE), [[0, 0, 6]]);

    assert_eq!(gpus.step(r#""mig":"off""#, "mig", Outcome::Done), "off (previously on)");
    assert_eq!((gpus.has(ONE, "mig"), gpus.has(ONE, "instances")), ("0".into(), String::new()));
    gpus.step(r#""mig":"off""#, "mig", Outcome::Unchanged);
}

#[test]
fn unsupported_layout_then_error_lists_profiles() {
    let gpus = Gpus::new();
    gpus.step(r#""mig":"on""#, "mig", Outcome::Done);
    for (layout, part) in [
        ("5g.99gb", "unknown profile 5g.99gb; this GPU has 1g.18gb (19: 7 free of 7)"),
        ("77", "unknown profile 77"),
        ("4g.71gb*2", "requested 2 of 4g.71gb, but this GPU has"),
        ("7g.141gb,1g.18gb", "7g.141gb,1g.18gb do not fit on this GPU, which has"),
    ] {
        let detail = gpus.step(&format!(r#""mig":"{layout}""#), "mig", Outcome::Failed);
        assert!(detail.contains(part), "{detail}");
        assert!(detail.contains("3g.71gb (9: 2 free of 2)"), "{detail}");
    }
    assert_eq!(gpus.has(ONE, "instances"), "");
}

#[test]
fn instances_in_use_are_not_destroyed() {
    let gpus = Gpus::new();
    gpus.step(r#""mig":"3g.71gb""#, "mig", Outcome::Done);
    let before = gpus.has(ONE, "instances");
    gpus.write(&format!("{ONE}/processes"), "2");
    for layout in ["4g.71gb", "off"] {
        let detail = gpus.step(&format!(r#""mig":"{layout}""#), "mig", Outcome::Failed);
        assert!(
            detail.contains("2 compute processes use the GPU (4000, 4001)") && detail.contains("terminate them"),
            "{detail}"
        );
        assert_eq!(gpus.has(ONE, "instances"), before);
    }
    gpus.step(r#""mig":"3g.71gb""#, "mig", Outcome::Unchanged);
    // If NVML does not report the processes, destroying an instance in use fails.
    gpus.write("faults", "nvmlDeviceGetComputeRunningProcesses_v3 * 3\n");
    let detail = gpus.step(r#""mig":"4g.71gb""#, "mig", Outcome::Failed);
    assert!(detail.contains("failed to destroy compute instance 0 of GPU instance 1"), "{detail}");
    assert!(detail.contains("In use by another client (19)"), "{detail}");
    assert_eq!(gpus.has(ONE, "instances"), before);
}

#[test]
fn creation_fails_then_created_instances_are_destroyed() {
    let gpus = Gpus::new();
    gpus.write("faults", "nvmlGpuInstanceCreateComputeInstance * 23\n");
    let detail = gpus.step(r#""mig":"3g.71gb*2""#, "mig", Outcome::Failed);
    assert!(detail.contains("failed to create 3g.71gb at slice 0 of 3g.71gb,3g.71gb"), "{detail}");
    assert!(detail.contains("Insufficient Resources (23); all instances were destroyed again"), "{detail}");
    assert_eq!(gpus.has(ONE, "instances"), "");
}

#[test]
fn mode_change_needs_a_reset_then_error_and_no_reset() {
    let gpus = Gpus::new();
    gpus.write("ampere", "");
    let detail = gpus.step(r#""mig":"3g.71gb""#, "mig", Outcome::Failed);
    assert!(detail.contains("GPU requires reset (16)") && detail.contains("power the VM off and on"), "{detail}");
    assert_eq!((gpus.has(ONE, "mig"), gpus.has(ONE, "pending")), (String::new(), "1".into()));
    // After the reset MIG is on, and the layout can be applied.
    gpus.write(&format!("{ONE}/mig"), "1");
    gpus.step(r#""mig":"3g.71gb""#, "mig", Outcome::Done);

    let gpus = Gpus::new();
    gpus.write(&format!("{ONE}/processes"), "1");
    let detail = gpus.step(r#""mig":"3g.71gb""#, "mig", Outcome::Failed);
    assert!(detail.contains("In use by another client (19)") && detail.contains("firstlight.dcgm"), "{detail}");
}

#[test]
fn ready_state_is_set_only_if_confidential_gpus_wait_for_it() {
    let gpus = Gpus::new();
    let ready = |word: &str| {
        let (good, lines) = gpus.run(&["apply", &format!(r#"{{"ready":"{word}"}}"#)]);
        let line = lines.into_iter().find(|line| line.step == "ready").unwrap();
        (good, line.result, line.detail)
    };
    assert_eq!(ready("auto").1, Outcome::Unchanged);
    let (good, result, detail) = ready("yes");
    assert!(!good && result == Outcome::Failed && detail.contains("Not Supported (3)"), "{detail}");
    gpus.write("confidential", "");
    assert_eq!(ready("no").1, Outcome::Unchanged);
    assert_eq!(gpus.has("system", "ready"), "");
    assert_eq!(ready("auto").1, Outcome::Done);
    assert_eq!(gpus.has("system", "ready"), "1");
    assert_eq!(ready("yes").1, Outcome::Unchanged);
    gpus.write("system/ready", "0");
    gpus.write("faults", "nvmlSystemSetConfComputeGpusReadyState * 4\n");
    let (_, _, detail) = ready("auto");
    assert!(detail.contains("Insufficient Permissions (4)") && detail.contains("do not accept work"), "{detail}");
}

#[test]
fn lost_gpu_does_not_affect_other_gpus() {
    let gpus = Gpus::new();
    gpus.write("faults", &format!("nvmlDeviceGetHandleByPciBusId_v2 {ONE} 15\n"));
    let request = format!(
        r#"{{"gpus":[{{"pci":"{ONE}","power-limit":"500"}},{{"pci":"{TWO}","power-limit":"500"}},{{"pci":"0000:09:00.0","clocks":"345"}}]}}"#
    );
    let (good, lines) = gpus.run(&["apply", &request]);
    let failed: Vec<(&str, &str)> = lines
        .iter()
        .filter(|line| line.result == Outcome::Failed)
        .map(|line| (line.object.as_str(), line.step.as_str()))
        .collect();
    assert!(!good && failed.len() == 2 && failed.contains(&(ONE, "find")), "{lines:?}");
    assert!(lines.iter().any(|line| line.object == ONE && line.detail.contains("GPU is lost (15)")), "{lines:?}");
    assert!(
        lines.iter().any(|line| line.object == "0000:09:00.0" && line.detail.contains("Not Found (6)")),
        "{lines:?}"
    );
    assert_eq!(gpus.has(TWO, "power"), "500000");
}

#[test]
fn hanging_step_is_reported_as_started_and_other_gpus_finish() {
    let gpus = Gpus::new();
    gpus.write("faults", &format!("nvmlDeviceSetPowerManagementLimit {ONE} hang\n"));
    let request = format!(
        r#"{{"gpus":[{{"pci":"{ONE}","power-limit":"500"}},{{"pci":"{TWO}","power-limit":"500","clocks":"1980"}}]}}"#
    );
    let mut child = gpus.program(&["apply", &request]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // The program does not exit, so wait for the last setting of the other GPU.
    let begin = std::time::Instant::now();
    while gpus.has(TWO, "clocks").is_empty() && begin.elapsed().as_secs() < 60 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(child.try_wait().unwrap(), None, "it waits for the GPU that hangs");
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    let of: Vec<(String, Outcome)> =
        lines(&output).into_iter().filter(|line| line.object == ONE).map(|line| (line.step, line.result)).collect();
    assert_eq!(of, [("power-limit".to_owned(), Outcome::Started)]);
    assert_eq!((gpus.has(TWO, "power"), gpus.has(TWO, "clocks")), ("500000".into(), "1980,1980".into()));
}

#[test]
fn missing_or_failing_nvml_is_reported_with_the_cause() {
    let program = env!("CARGO_BIN_EXE_firstlight-gpu-settings");
    let output = Command::new(program).args(["--library", "/nowhere/libnvidia-ml.so.1", "check"]).output().unwrap();
    let all = lines(&output);
    assert_eq!((output.status.code(), all.last().unwrap().result), (Some(1), Outcome::Failed));
    assert!(all.last().unwrap().detail.contains("add the driver's libraries to the image"), "{all:?}");
    let gpus = Gpus::new();
    gpus.write("faults", "nvmlInit_v2 * 9\n");
    let (good, lines) = gpus.run(&["check"]);
    assert!(!good && lines[0].detail.contains("is the driver loaded"), "{lines:?}");
    assert_eq!(Command::new(program).arg("apply").output().unwrap().status.code(), Some(2));
}

#[test]
fn inventory_is_accepted_by_fmctl() {
    let gpus = Gpus::new();
    gpus.write(&format!("{ONE}/module-id"), "5");
    gpus.write(&format!("{ONE}/serial"), "1650123");
    gpus.write(&format!("{TWO}/module-id"), "7");
    let output = gpus.program(&["inventory"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let measured = firstlight_module_map::measurements(&output.stdout).unwrap();
    let host = |text: &str| text.parse::<firstlight_pci::Address>().unwrap();
    let at = [(host(ONE), host("0000:0f:00.0")), (host(TWO), host("0000:10:00.0"))].into();
    let claims = firstlight_module_map::placed(&measured, &at).unwrap();
    let first = &claims[0];
    assert_eq!(
        (first.module, first.pci.to_string().as_str(), first.serial.as_deref()),
        (5, "0000:0f:00.0", Some("1650123"))
    );
    assert_eq!(first.uuid.as_deref(), Some("GPU-00000000-0000-0000-0000-000000010000"));
    assert_eq!((claims[1].module, claims[1].serial.as_ref()), (7, None), "not every GPU has a serial number");
    // A GPU without a module id is reported; the others are printed.
    gpus.write("faults", &format!("nvmlDeviceGetModuleId {ONE} 3\n"));
    let output = gpus.program(&["inventory"]).output().unwrap();
    let (text, error) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1));
    assert!(
        error.contains(&format!("failed to read the module id of {ONE}: nvmlDeviceGetModuleId: Not Supported (3)")),
        "{error}"
    );
    gpus.write("gpus", "");
    let output = gpus.program(&["inventory"]).output().unwrap();
    assert!(!output.status.success() && String::from_utf8(output.stderr).unwrap().contains("NVML reports no GPUs"));
}
