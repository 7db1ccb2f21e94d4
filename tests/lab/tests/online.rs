//! Runs the prepared programs and images. Needs the cache, or a network.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use firstlight_image_builder::cache;
use firstlight_image_builder::image;
use firstlight_image_builder::image::manifest::{Manifest, Variables};
use firstlight_image_builder::packages::Packages;
use firstlight_lab::Toolbox;
use firstlight_progress::Progress;
use firstlight_vm::Tool;

/// Timeout of a boot, for TCG on a busy machine; the boot itself takes two to nine seconds.
const BOOT_LIMIT: Duration = Duration::from_mins(2);

fn toolbox() -> Toolbox {
    Toolbox::prepare(&cache::root().unwrap(), Progress::stderr("lab")).unwrap()
}

fn output_of(tool: &Tool, arguments: &[&str]) -> String {
    let output = tool.command().args(arguments).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{tool:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_program_of_the_toolbox_runs() {
    let toolbox = toolbox();
    assert!(output_of(&toolbox.qemu, &["--version"]).starts_with("QEMU emulator version 1"));
    assert!(output_of(&toolbox.qemu, &["-device", "help"]).contains("\"vfio-user-pci\""));
    assert!(output_of(&toolbox.virtiofsd, &["--version"]).starts_with("virtiofsd"));
    assert!(output_of(&toolbox.vhost_device_vsock, &["--version"]).starts_with("vhost-device-vsock"));
    let busybox = Command::new(&toolbox.busybox).output().unwrap();
    assert!(String::from_utf8(busybox.stdout).unwrap().starts_with("BusyBox v1."));
}

#[test]
fn prepare_with_a_complete_cache_is_fast() {
    drop(toolbox());
    let started = Instant::now();
    drop(toolbox());
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

const TINY: &str = r##"
[image]
name = "tiny"
format = "initramfs"
[kernel]
package = "linux-image-cloud-amd64"
suite = "bookworm-backports"
series = "6.12"
modules = ["overlay", "vmw_vsock_virtio_transport"]
[[extra-modules]]
path = "${HELLO}"
[[directory]]
path = "/proc"
[[file]]
path = "/bin/busybox"
source = "${BUSYBOX}"
mode = 0o755
[[file]]
path = "/init"
mode = 0o755
content = """
#!/bin/busybox sh
busybox mount -t proc proc /proc
echo "release: $(busybox uname -r)"
cd /lib/modules/*
for module in kernel/fs/overlayfs/overlay.ko extra/hello.ko \
    kernel/net/vmw_vsock/vsock.ko kernel/net/vmw_vsock/vmw_vsock_virtio_transport_common.ko \
    kernel/net/vmw_vsock/vmw_vsock_virtio_transport.ko; do
    busybox insmod $module && echo "loaded: $module"
done
busybox poweroff -f
"""
"##;

/// A minimal module, built like the stand-ins.
const HELLO: &str = "#include <linux/module.h>\n\
    static int __init hello_init(void) { pr_emerg(\"hello from a module\\n\"); return 0; }\n\
    module_init(hello_init);\nMODULE_LICENSE(\"GPL\");\nMODULE_DESCRIPTION(\"hello\");\n";

#[test]
fn built_image_boots_and_loads_modules() {
    let toolbox = toolbox();
    let dir = tempfile::tempdir().unwrap();
    let hello = hello_module(&toolbox, dir.path());
    let variables = Variables::from([
        ("BUSYBOX".to_owned(), toolbox.busybox.to_str().unwrap().to_owned()),
        ("HELLO".to_owned(), hello),
    ]);
    // TOML drops the line break after the quotes, so the file begins with "#!".
    let manifest = Manifest::parse(TINY, &dir.path().join("tiny.toml"), &variables).unwrap();
    let mut packages = Packages::new(dir.path(), None, Progress::quiet());
    let first = image::build_with(&manifest, &toolbox.kernel, &mut packages, &dir.path().join("one")).unwrap();
    let second = image::build_with(&manifest, &toolbox.kernel, &mut packages, &dir.path().join("two")).unwrap();
    assert_eq!(std::fs::read(&first.initrd).unwrap(), std::fs::read(&second.initrd).unwrap());
    assert_eq!(first.contents, second.contents);

    let console = boot(&toolbox, &first.kernel, &first.initrd);
    assert!(console.contains(&format!("release: {}", toolbox.kernel.facts.release)), "{console}");
    for module in ["overlay.ko", "hello.ko", "vmw_vsock_virtio_transport.ko"] {
        assert!(
            console.lines().any(|line| line.starts_with("loaded: ") && line.contains(module)),
            "{module}: {console}"
        );
    }
    assert!(console.contains("hello from a module"), "{console}");
}

/// Builds the module under both names of the stand-ins, to test the public function.
fn hello_module(toolbox: &Toolbox, dir: &Path) -> String {
    let source = dir.join("source");
    std::fs::create_dir(&source).unwrap();
    for name in ["nvidia.c", "nvidia-uvm.c"] {
        std::fs::write(source.join(name), HELLO).unwrap();
    }
    std::fs::write(source.join("Kbuild"), "obj-m := nvidia.o nvidia-uvm.o\n").unwrap();
    let release = &toolbox.kernel.facts.release;
    let built = firstlight_lab::stand_in::build(toolbox, &source, release).unwrap();
    let again = firstlight_lab::stand_in::build(toolbox, &source, release).unwrap();
    assert_eq!(built, again);

    std::fs::write(source.join("nvidia.c"), "this is not C\n").unwrap();
    let error = firstlight_lab::stand_in::build(toolbox, &source, release).unwrap_err().to_string();
    assert!(error.contains("nvidia.c"), "{error}");

    let hello = dir.join("hello.ko");
    std::fs::copy(&built.nvidia_ko, &hello).unwrap();
    hello.to_str().unwrap().to_owned()
}

fn boot(toolbox: &Toolbox, kernel: &Path, initrd: &Path) -> String {
    let mut qemu = toolbox
        .qemu
        .command()
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"])
        .args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "1", "-m", "512"])
        .args(["-append", "console=ttyS0 panic=-1 quiet"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initrd)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let started = Instant::now();
    let stdout = qemu.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let mut reader = BufReader::new(stdout.take(1 << 20));
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            let shown = String::from_utf8_lossy(&line).replace('\r', "");
            eprint!("{:6.2} {shown}", started.elapsed().as_secs_f64());
            text.push_str(&shown);
            line.clear();
        }
        text
    });
    while qemu.try_wait().unwrap().is_none() {
        if started.elapsed() > BOOT_LIMIT {
            qemu.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    reader.join().unwrap()
}
