//! `cargo xtask run` as a command: output, files, Ctrl-C.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use firstlight_e2e::lab;
use firstlight_lab::binaries::{target, workspace};
use rustix::process::{Pid, Signal, kill_process};

/// Builds xtask; returns its path.
fn xtask() -> PathBuf {
    lab();
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let built = Command::new(cargo).args(["build", "--quiet", "--locked", "--package", "xtask"]).status().unwrap();
    assert!(built.success());
    target().join("debug/xtask")
}

fn run(out: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(xtask());
    command.current_dir(workspace()).args(["run", "--yes", "--shipped", "--out"]).arg(out).args(arguments);
    command
}

#[test]
fn run_shows_the_container_and_the_boot_and_writes_its_files() {
    let out = tempfile::tempdir().unwrap();
    let json = out.path().join("report.json");
    let arguments = ["--gpus", "2", "--request", "1", "--attach-ms", "200", "--json", json.to_str().unwrap()];
    let output = run(out.path(), &arguments).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    for part in [
        "sees /dev/nvidia0: 0000:01:00.0",
        "access to every GPU that was not requested was denied",
        "gpu-attach[0000:02:00.0]",
        "resident: ",
    ] {
        assert!(stdout.contains(part), "{part} in {stdout}");
    }
    for file in ["boot-record.json", "boot.svg", "console.log"] {
        assert!(fs::metadata(out.path().join(file)).unwrap().len() > 0, "{file}");
    }
    let report: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["container"]["exit_code"], 0);
    assert_eq!(report["container"]["denied_open"], true);
    assert_eq!(report["gpus"][1]["pci"], "0000:02:00.0");
    assert_eq!(report["gpus"][1]["outcome"], "ready");
    assert_eq!(report["boot_record"]["schema"], "firstlight.boot-record/1");
    for key in [
        "kernel_start_us",
        "pid1_start_us",
        "agent_listening_us",
        "first_gpu_ready_us",
        "all_gpus_ready_us",
        "container_started_us",
        "container_exited_us",
        "power_off_us",
    ] {
        assert!(report["timeline"][key].is_u64(), "{key}: {}", report["timeline"]);
    }
}

#[test]
fn invalid_image_is_rejected_before_the_boot() {
    let out = tempfile::tempdir().unwrap();
    let output = run(out.path(), &["--image", out.path().to_str().unwrap()]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(stderr.contains("not an OCI image layout") && stderr.contains("oci-layout"), "{stderr}");
}

#[test]
fn request_for_more_gpus_than_the_guest_has_is_rejected() {
    let out = tempfile::tempdir().unwrap();
    let output = run(out.path(), &["--gpus", "1", "--request", "2"]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("--request 2"));
}

/// Returns the command lines of processes that contain the path `dir`.
fn processes(dir: &Path) -> Vec<String> {
    let dir = dir.to_str().unwrap();
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " ")).filter(|line| line.contains(dir)).collect()
}

fn wait_until(what: &str, limit: Duration, done: impl Fn() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Sends `signal` to a run as soon as `moment` returns true, and asserts that it leaves no process, directory or mount.
/// Returns its exit code.
fn interrupted(signal: Signal, moment: impl Fn(&Path) -> bool) -> Option<i32> {
    let out = tempfile::tempdir().unwrap();
    // All temporary directories of the run are below this one.
    let temporary = tempfile::Builder::new().prefix("fl").tempdir_in("/tmp").unwrap();
    let mut command = run(out.path(), &["--gpus", "2", "--attach-ms", "4000"]);
    command.env("TMPDIR", temporary.path()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    wait_until("QEMU runs", Duration::from_secs(90), || {
        processes(temporary.path()).iter().any(|line| line.contains("qemu"))
    });
    wait_until("the moment", Duration::from_secs(60), || moment(out.path()));
    kill_process(Pid::from_raw(child.id().try_into().unwrap()).unwrap(), signal).unwrap();
    let status = child.wait().unwrap();
    wait_until("every process ends", Duration::from_secs(20), || processes(temporary.path()).is_empty());
    if signal != Signal::KILL {
        let left: Vec<_> = fs::read_dir(temporary.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.is_empty(), "directories left: {left:?}");
    }
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(temporary.path().to_str().unwrap()), "mounts left");
    status.code()
}

#[test]
fn ctrl_c_while_the_kernel_boots_leaves_nothing() {
    assert_eq!(interrupted(Signal::INT, |_| true), Some(130));
}

#[test]
fn ctrl_c_while_gpus_attach_leaves_nothing() {
    let attaching = |out: &Path| fs::read_to_string(out.join("console.log")).is_ok_and(|text| text.contains("agent"));
    assert_eq!(interrupted(Signal::INT, attaching), Some(130));
}

#[test]
fn killed_run_leaves_no_process() {
    assert_eq!(interrupted(Signal::KILL, |_| true), None);
}
