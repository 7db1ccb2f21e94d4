//! The host guest: its board, its disks, its run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use firstlight_e2e::lab;
use firstlight_lab::{SyntheticGpus, binaries};

/// The host's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Board {
    /// Four switches and two functions of the PCIe switch's endpoint in one group, and a GPU.
    Switches,
    /// A management bridge of four functions, and another ConnectX-7.
    Bridge,
}

/// Hardware virtualisation is emulated too. 46 address bits hold large BARs.
const CPU: &str = "max,+svm,phys-bits=46,-cx16";

/// Timeout of the host.
const DEADLINE: Duration = Duration::from_secs(400);

/// Timeout without console output; the longest regular silence, the boots of two guests, is a fifth of this.
const SILENCE: Duration = Duration::from_secs(100);

/// The last line of the host's script.
pub(crate) const END: &str = "host: the end";

/// A host without the last line may be a stuck emulator, which was seen in one run of five with two guests, so it is
/// retried. A host that completes is judged by its output.
const TRIES: usize = 3;

fn vfio_user(bus: &str, socket: &Path, more: &str) -> String {
    let socket = socket.display();
    format!(r#"{{"driver":"vfio-user-pci","bus":"{bus}","socket":{{"type":"unix","path":"{socket}"}}{more}}}"#)
}

/// A port of the root complex.
fn port(name: &str, at: u32) -> String {
    let first = if at == 0 { ",multifunction=on" } else { "" };
    format!("pcie-root-port,id={name},chassis={0},slot={0},bus=pcie.0,addr=10.{at}{first}", at + 1)
}

impl Board {
    fn devices(self) -> &'static [&'static str] {
        match self {
            Self::Switches => {
                &["nvswitch", "nvswitch", "nvswitch", "nvswitch", "pmc", "pmc", "h100:bar=256M:attach-ms=100"]
            }
            Self::Bridge => &["cx7", "cx7", "cx7", "cx7", "cx7-nic"],
        }
    }

    /// QEMU arguments. Ports that are functions of one device share a group with all devices behind them.
    fn arguments(self, sockets: &[PathBuf]) -> Vec<String> {
        let mut devices = vec!["intel-iommu,intremap=on,caching-mode=on".to_owned(), port("root", 0), port("other", 1)];
        let function = |at: usize| format!(r#","addr":"0.{at}","multifunction":{}"#, at == 0);
        match self {
            Self::Switches => {
                devices.push("x3130-upstream,id=up,bus=root".to_owned());
                for at in 0..5 {
                    let (first, slot) = (if at == 0 { ",multifunction=on" } else { "" }, 20 + at);
                    devices.push(format!(
                        "xio3130-downstream,id=down{at},bus=up,chassis={slot},slot={slot},addr=0.{at}{first}"
                    ));
                }
                let (switches, rest) = sockets.split_at(4);
                devices.extend(switches.iter().enumerate().map(|(at, it)| vfio_user(&format!("down{at}"), it, "")));
                devices.extend((0..2).map(|at| vfio_user("down4", &rest[at], &function(at))));
                devices.push(vfio_user("other", &rest[2], ""));
            }
            Self::Bridge => {
                devices.extend((0..4).map(|at| vfio_user("root", &sockets[at], &function(at))));
                devices.push(vfio_user("other", &sockets[4], ""));
            }
        }
        devices
    }
}

fn start(board: Board, dir: &Path, disks: [&Path; 2], console: &Path) -> (Child, SyntheticGpus) {
    let lab = lab();
    let image = lab.variant("gpu-host").unwrap();
    let mut command = lab.toolbox.qemu.command();
    command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-accel", "tcg,thread=multi"]);
    command.args(["-cpu", CPU, "-smp", "2", "-m", "4096M", "-machine", "q35,memory-backend=mem"]);
    command.args(["-object", "memory-backend-memfd,id=mem,size=4096M,share=on"]);
    command.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initrd);
    command.args(["-append", "console=ttyS0 loglevel=1 panic=-1 intel_iommu=on hugepages=560"]);
    command.arg("-serial").arg(format!("file:{}", console.display()));
    for (at, disk) in disks.iter().enumerate() {
        let read_only = format!("if=none,id=disk{at},format=raw,readonly=on,file={}", disk.display());
        command.arg("-drive").arg(read_only).arg("-device").arg(format!("virtio-blk-pci,drive=disk{at}"));
    }
    let devices: Vec<_> = board.devices().iter().map(|device| device.parse().unwrap()).collect();
    let gpus = SyntheticGpus::start(&lab.binaries.synthetic_gpu, dir, &devices).unwrap();
    for device in board.arguments(gpus.sockets()) {
        command.arg("-device").arg(device);
    }
    let log = fs::File::create(dir.join("qemu.log")).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    (command.spawn().unwrap(), gpus)
}

/// Writes the second disk: the command under test, images, and the host's script.
fn second_disk(dir: &Path, script: &str) -> PathBuf {
    let content = dir.join("content");
    for (name, image) in [("image", lab().variant("daemons")), ("service", lab().service_vm())] {
        let image = image.unwrap();
        let (from, to) = (image.record.parent().unwrap(), content.join(name));
        fs::create_dir_all(&to).unwrap();
        for name in ["vmlinux", "initrd.cpio", "image.json"] {
            fs::copy(from.join(name), to.join(name)).unwrap();
        }
    }
    fs::copy(binaries::host_command(&binaries::workspace()).unwrap(), content.join("firstlight")).unwrap();
    fs::copy(lab().fmctl().unwrap(), content.join("fmctl")).unwrap();
    fs::write(content.join("host.sh"), include_str!("host.sh")).unwrap();
    fs::write(content.join("scenario.sh"), script).unwrap();
    let disk = dir.join("lab.ext4");
    lab().toolbox.disk_tools().unwrap().pack(&content, &disk, 512).unwrap();
    disk
}

/// Runs the script in the host; returns the console.
pub(crate) fn run(board: Board, script: &str) -> String {
    let disk = lab().toolbox.host_disk().unwrap();
    let dir = tempfile::Builder::new().prefix("firstlight-host-").tempdir().unwrap();
    let second = second_disk(dir.path(), script);
    let mut text = String::new();
    for attempt in 1..=TRIES {
        let console = dir.path().join("console.log");
        let (mut qemu, _gpus) = start(board, dir.path(), [&disk, &second], &console);
        let begin = Instant::now();
        let (mut over, mut said) = (false, (0, begin));
        while !over && begin.elapsed() < DEADLINE && said.1.elapsed() < SILENCE {
            std::thread::sleep(Duration::from_millis(200));
            let length = fs::metadata(&console).map_or(0, |data| data.len());
            if length != said.0 {
                said = (length, Instant::now());
            }
            over = qemu.try_wait().unwrap().is_some();
        }
        let _ = qemu.kill();
        let _ = qemu.wait();
        text = String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
        println!("host, try {attempt}: {} s", begin.elapsed().as_secs());
        if text.contains(END) {
            return text;
        }
        let said = fs::read_to_string(dir.path().join("qemu.log")).unwrap_or_default();
        said.lines().rev().take(5).for_each(|line| println!("QEMU: {line}"));
        println!("{text}\nhost: no end");
    }
    text
}
