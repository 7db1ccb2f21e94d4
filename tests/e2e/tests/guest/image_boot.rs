//! `firstlight boot` and `firstlight run` of built images, as commands.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use firstlight_boot_record::{BootRecord, State};
use firstlight_e2e::lab;
use firstlight_lab::binaries::target;
use firstlight_vm::Tool;

/// Builds the host's command; returns its path.
fn firstlight() -> PathBuf {
    lab();
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let arguments = ["build", "--quiet", "--locked", "--package", "firstlight"];
    assert!(Command::new(cargo).args(arguments).status().unwrap().success());
    target().join("debug/firstlight")
}

/// Writes a script that runs a tool of the lab with its environment and arguments, because the flags take one path.
fn as_file(tool: &Tool, to: &Path) -> PathBuf {
    let mut script = String::from("#!/bin/sh\n");
    for (name, value) in &tool.env {
        writeln!(script, "export {}='{}'", name.to_string_lossy(), value.to_string_lossy()).unwrap();
    }
    write!(script, "exec '{}'", tool.program.display()).unwrap();
    for argument in &tool.args {
        write!(script, " '{}'", argument.to_string_lossy()).unwrap();
    }
    script.push_str(" \"$@\"\n");
    fs::write(to, script).unwrap();
    fs::set_permissions(to, fs::Permissions::from_mode(0o755)).unwrap();
    to.to_owned()
}

/// Results of the command, with its output directory.
struct Ran {
    output: Output,
    dir: tempfile::TempDir,
}

impl Ran {
    fn code(&self) -> Option<i32> {
        self.output.status.code()
    }

    fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    fn record(&self) -> BootRecord {
        BootRecord::from_json(&fs::read_to_string(self.dir.path().join("out/boot-record.json")).unwrap()).unwrap()
    }
}

/// Runs a subcommand with the guest image in `image` and the lab's tools.
fn command(subcommand: &str, image: &Path, arguments: &[&str]) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let toolbox = &lab().toolbox;
    let output = Command::new(firstlight())
        .arg(subcommand)
        .arg("--guest")
        .arg(image)
        .arg("--qemu")
        .arg(as_file(&toolbox.qemu, &dir.path().join("qemu")))
        .arg("--vhost-device-vsock")
        .arg(as_file(&toolbox.vhost_device_vsock, &dir.path().join("vsock")))
        .arg("--virtiofsd")
        .arg(as_file(&toolbox.virtiofsd, &dir.path().join("virtiofsd")))
        .arg("--out")
        .arg(dir.path().join("out"))
        .args(arguments)
        .output()
        .unwrap();
    Ran { output, dir }
}

fn boot(image: &Path, arguments: &[&str]) -> Ran {
    command("boot", image, arguments)
}

#[test]
fn base_image_boots_and_failed_boots_are_reported() {
    let image = lab().shipped("base").unwrap();
    let dir = image.record.parent().unwrap();

    let good = boot(dir, &[]);
    assert_eq!(good.code(), Some(0), "{}", good.stderr());
    let record = good.record();
    assert_eq!((record.state, record.mode.as_ref().map(|mode| mode.name.as_str())), (State::Ready, Some("cpu")));
    assert!(record.event("agent-listening").is_some());
    assert!(good.stdout().contains("boot-done"), "{}", good.stdout());
    assert!(fs::metadata(good.dir.path().join("out/console.log")).unwrap().len() > 0);

    let degraded = boot(dir, &["--append", "firstlight.mode=gpu"]);
    assert_eq!(degraded.code(), Some(3), "{}", degraded.stdout());
    assert!(degraded.stderr().contains("unit modules-nvidia"), "{}", degraded.stderr());

    // A service VM needs its fabric manager.
    let failed = boot(dir, &["--append", "firstlight.mode=service-vm-nvl4"]);
    assert_eq!(failed.code(), Some(1), "{}", failed.stdout());
    assert!(failed.stderr().contains("boot failed in fabricmanager: "), "{}", failed.stderr());

    let dead = boot(dir, &["--append", "rdinit=/nothing"]);
    assert_eq!(dead.code(), Some(1));
    assert!(dead.stderr().contains("the guest exited") && dead.stderr().contains("Kernel panic"), "{}", dead.stderr());

    let silent = boot(dir, &["--deadline", "boot=0"]);
    assert_eq!(silent.code(), Some(1));
    assert!(silent.stderr().contains("PID 1 printed nothing within 0 s"), "{}", silent.stderr());

    let small = boot(dir, &["--memory", "48"]);
    assert_eq!(small.code(), Some(1));
    assert!(small.stderr().contains("cannot boot with 48 MiB"), "{}", small.stderr());
    assert!(!small.dir.path().join("out").exists(), "nothing was started");
}

#[test]
fn disk_image_boots_with_the_opener() {
    let (disk, opener) = (lab().disk().unwrap(), lab().opener().unwrap());
    let dir = disk.record.parent().unwrap();
    // Two guests at once: neither can write to the disk.
    let opener = ["--opener", opener.record.parent().unwrap().to_str().unwrap()];
    std::thread::scope(|scope| {
        for guest in [0, 1].map(|_| scope.spawn(|| boot(dir, &opener))) {
            let good = guest.join().unwrap();
            assert_eq!(good.code(), Some(0), "{}", good.stderr());
            assert!(good.stdout().contains("boot-done"), "{}", good.stdout());
        }
    });

    // Debian's kernel cannot open the dm-verity root without the opener.
    let alone = boot(dir, &[]);
    assert_eq!(alone.code(), Some(1));
    assert!(alone.stderr().contains("VFS: "), "{}", alone.stderr());
}

#[test]
fn container_runs_in_a_base_image_with_an_extension() {
    let (base, extension) = (lab().shipped("base").unwrap(), lab().shipped("gpu-550-extension").unwrap());
    let (base, extension) = (base.record.parent().unwrap(), extension.record.parent().unwrap());
    let busybox = lab().busybox_image.to_str().unwrap().to_owned();
    let script = "echo from the container; echo problem >&2; exit 42";
    let extension = extension.to_str().unwrap();
    let image = ["--image", &busybox, "--extension", extension];
    let good = command("run", base, &[&image[..], &["--", "/bin/sh", "-c", script]].concat());
    assert_eq!(good.code(), Some(42), "{}", good.stderr());
    let stdout = good.stdout();
    assert!(stdout.contains("  | from the container\n") && stdout.contains("  ! problem\n"), "{stdout}");
    let mounted = &good.record().unit("extensions").unwrap().detail.clone();
    assert!(mounted.contains("on /run/kata-extensions/gpu"), "{mounted}");

    let absent = command("run", base, &[&image[..2], &["--", "/bin/absent"]].concat());
    assert_eq!(absent.code(), Some(127), "{}\n{}", absent.stdout(), absent.stderr());

    let too_many = command("run", base, &["--image", &busybox, "--request", "0"]);
    assert_eq!(too_many.code(), Some(1));
    assert!(too_many.stderr().contains("--request 0: 0 devices are attached"), "{}", too_many.stderr());

    let wrong = boot(Path::new(extension), &[]);
    assert_eq!(wrong.code(), Some(1));
    assert!(wrong.stderr().contains("boot the image that it extends, with --extension"), "{}", wrong.stderr());
}
