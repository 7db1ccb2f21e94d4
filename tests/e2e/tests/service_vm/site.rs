//! A host for a service VM: libvirt, synthetic switches, and the firstlight command.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use firstlight_boot_record::{Assembler, BootRecord};
use firstlight_e2e::lab;
use firstlight_lab::{Lab, Libvirt, SyntheticGpus, binaries};

/// Timeout for a TCG guest on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

const PAUSE: Duration = Duration::from_millis(50);

/// The host's command, built once.
pub(crate) fn firstlight() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| binaries::host_command(&binaries::workspace()).unwrap())
}

/// Requires libvirt and virt-xml-validate: the tests fail without them.
pub(crate) fn packages() {
    static THERE: OnceLock<()> = OnceLock::new();
    THERE.get_or_init(|| Lab::install_libvirt_packages(true).unwrap());
}

pub(crate) fn until(what: &str, timeout: Duration, mut is: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < timeout, "{what}: not in {} s", timeout.as_secs());
        std::thread::sleep(PAUSE);
    }
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Failed {
    fn of(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}

pub(crate) struct Site {
    // Dropped first: domains before the processes that serve their devices.
    pub(crate) libvirt: Libvirt,
    switches: SyntheticGpus,
    vsock: Child,
}

impl Site {
    /// Starts libvirt, four switches, and vsock.
    pub(crate) fn new() -> Self {
        packages();
        let lab = lab();
        let libvirt = Libvirt::start(&lab.toolbox.qemu).unwrap();
        let devices: Vec<_> = (0..4).map(|_| "nvswitch".parse().unwrap()).collect();
        let switches = SyntheticGpus::start(&lab.binaries.synthetic_gpu, libvirt.dir(), &devices).unwrap();
        let at = |name: &str| libvirt.dir().join(name).display().to_string();
        let mut command = lab.toolbox.vhost_device_vsock.command();
        command.arg("--vm").arg(format!("guest-cid=100,socket={},uds-path={}", at("vsock-backend"), at("vsock")));
        let vsock = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        until("vhost-device-vsock listens", TIMEOUT, || Path::new(&at("vsock-backend")).exists());
        Self { libvirt, switches, vsock }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.libvirt.dir().join(name)
    }

    /// Runs `firstlight service-vm COMMAND` with this libvirt.
    pub(crate) fn firstlight(&self, command: &str, arguments: &[&str]) -> Failed {
        let mut line = Command::new(firstlight());
        line.args(["service-vm", command, "--connect", &self.libvirt.uri(), "--name", "fabric"]).args(arguments);
        let said = Failed::of(&line.stdin(Stdio::null()).output().unwrap());
        println!("service-vm {command}: {said:?}");
        said
    }

    /// QEMU arguments for switches and vsock.
    fn hardware(&self) -> Vec<String> {
        let mut message = Vec::new();
        let mut pair = |option: &str, value: String| message.extend([option.to_owned(), value]);
        for (at, socket) in self.switches.sockets().iter().enumerate() {
            let port = format!("pcie-root-port,id=switch{at},chassis={0},slot={0},bus=pcie.0,addr=10.{at}", 100 + at);
            pair("-device", port + if at == 0 { ",multifunction=on" } else { "" });
            let socket = socket.display();
            pair(
                "-device",
                format!(
                    r#"{{"driver":"vfio-user-pci","bus":"switch{at}","socket":{{"type":"unix","path":"{socket}"}}}}"#
                ),
            );
        }
        pair("-chardev", format!("socket,id=vsock,path={}", self.file("vsock-backend").display()));
        pair("-device", "vhost-user-vsock-pci,chardev=vsock,bus=pcie.0,addr=11.0,event_idx=off".to_owned());
        message.into_iter().map(|word| format!("--qemu-arg={word}")).collect()
    }

    /// Defines the domain with the image in that directory.
    pub(crate) fn define(&self, image: &Path, more: &[&str]) -> Failed {
        let text = |path: PathBuf| path.display().to_string();
        let (qemu, console, disk) =
            (text(self.libvirt.qemu()), text(self.file("console.log")), text(self.file("state.img")));
        let image = text(image.to_owned());
        let mut arguments = vec!["--image", &image, "--emulator", &qemu, "--console", &console, "--state-disk", &disk];
        arguments.extend(["--accelerator", "tcg", "--memory", "1024"]);
        let hardware = self.hardware();
        arguments.extend(hardware.iter().map(String::as_str));
        arguments.extend(more);
        self.firstlight("define", &arguments)
    }

    /// Runs virsh with this libvirt.
    pub(crate) fn virsh(&self, arguments: &[&str]) -> Failed {
        let mut line = Command::new("virsh");
        line.args(["--quiet", "--connect", &self.libvirt.uri()]).args(arguments).env("LC_ALL", "C");
        Failed::of(&line.stdin(Stdio::null()).output().unwrap())
    }

    pub(crate) fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.file("console.log")).unwrap_or_default()).into_owned()
    }

    /// Reads the boot record from the console.
    pub(crate) fn record(&self) -> Option<BootRecord> {
        let mut assembler = Assembler::new();
        self.console().lines().for_each(|line| assembler.feed(line));
        assembler.record().cloned()
    }

    /// Collects logs for a failed test.
    pub(crate) fn logs(&self) -> String {
        format!("{}\nconsole:\n{}", self.libvirt.log(), self.console())
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}", self.logs());
        }
        let _ = self.vsock.kill();
        let _ = self.vsock.wait();
    }
}
