//! `image-builder boot` as a command.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use firstlight_boot_record::{BootRecord, State};
use firstlight_e2e::lab;
use firstlight_lab::binaries::target;
use firstlight_vm::Tool;

/// Builds image-builder; returns its path.
fn image_builder() -> PathBuf {
    lab();
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let arguments = ["build", "--quiet", "--locked", "--package", "firstlight-image-builder"];
    assert!(Command::new(cargo).args(arguments).status().unwrap().success());
    target().join("debug/image-builder")
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

fn boot(dir: &Path, arguments: &[&str]) -> Output {
    let tools = tempfile::tempdir().unwrap();
    let toolbox = &lab().toolbox;
    Command::new(image_builder())
        .arg("boot")
        .arg(dir)
        .arg("--qemu")
        .arg(as_file(&toolbox.qemu, &tools.path().join("qemu")))
        .arg("--vhost-device-vsock")
        .arg(as_file(&toolbox.vhost_device_vsock, &tools.path().join("vsock")))
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn base_image_boots_and_failed_boots_are_reported() {
    let image = lab().shipped("base").unwrap();
    let dir = image.record.parent().unwrap();
    let logs = tempfile::tempdir().unwrap();
    let log = logs.path().join("console.log");

    let good = boot(dir, &["--json", "--console", log.to_str().unwrap()]);
    assert_eq!(good.status.code(), Some(0), "{}", text(&good.stderr));
    let record = BootRecord::from_json(&text(&good.stdout)).unwrap();
    assert_eq!((record.state, record.mode.as_ref().map(|mode| mode.name.as_str())), (State::Ready, Some("cpu")));
    assert!(record.event("agent-listening").is_some());
    assert!(fs::metadata(&log).unwrap().len() > 0);

    let degraded = boot(dir, &["--append", "firstlight.mode=service-vm-nvl4"]);
    assert_eq!(degraded.status.code(), Some(1), "{}", text(&degraded.stdout));
    assert!(text(&degraded.stdout).contains("modules-nvidia"), "{}", text(&degraded.stdout));
    assert!(text(&degraded.stderr).contains("every unit"), "{}", text(&degraded.stderr));

    let dead = boot(dir, &["--append", "rdinit=/nothing"]);
    assert_eq!(dead.status.code(), Some(1));
    let stderr = text(&dead.stderr);
    assert!(stderr.contains("the guest ended") && stderr.contains("Kernel panic"), "{stderr}");

    let silent = boot(dir, &["--timeout", "0"]);
    assert_eq!(silent.status.code(), Some(1));
    assert!(text(&silent.stderr).contains("PID 1 said nothing within 0 s"), "{}", text(&silent.stderr));
}

#[test]
fn disk_image_boots_with_the_opener() {
    let (disk, opener) = (lab().disk().unwrap(), lab().opener().unwrap());
    let dir = disk.record.parent().unwrap();
    let good = boot(dir, &["--opener", opener.record.parent().unwrap().to_str().unwrap()]);
    assert_eq!(good.status.code(), Some(0), "{}", text(&good.stderr));
    assert!(text(&good.stdout).contains("boot-done"), "{}", text(&good.stdout));

    // Debian's kernel cannot open the dm-verity root without the opener.
    let alone = boot(dir, &[]);
    assert_eq!(alone.status.code(), Some(1));
    assert!(text(&alone.stderr).contains("VFS: "), "{}", text(&alone.stderr));
}

#[test]
fn extension_is_attached_to_its_base_image() {
    let (base, extension) = (lab().shipped("base").unwrap(), lab().shipped("gpu-550-extension").unwrap());
    let (base, extension) = (base.record.parent().unwrap(), extension.record.parent().unwrap());
    let good = boot(base, &["--json", "--extension", extension.to_str().unwrap()]);
    assert_eq!(good.status.code(), Some(0), "{}", text(&good.stderr));
    let record = BootRecord::from_json(&text(&good.stdout)).unwrap();
    let mounted = &record.unit("extensions").unwrap().detail;
    assert!(mounted.contains("on /run/kata-extensions/gpu"), "{mounted}");

    let wrong = boot(extension, &[]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(
        text(&wrong.stderr).contains("boot the image that it extends, with --extension"),
        "{}",
        text(&wrong.stderr)
    );
}
