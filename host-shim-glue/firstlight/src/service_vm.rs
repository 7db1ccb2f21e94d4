//! `firstlight service-vm`: manages the libvirt domain of the VM that owns the NVLink fabric.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use firstlight_devices::HostRoots;
use firstlight_image::BootFiles;
use firstlight_pci::Address;
use firstlight_service_vm::Name;
use firstlight_service_vm::members::Selection;
use firstlight_service_vm::service::{Change, Service, State, Status, passthrough};
use firstlight_service_vm::state_disk::{self, StateDisk};
use firstlight_service_vm::virsh::Virsh;
use firstlight_service_vm::xml::{Console, Domain, Hardware, serial_of};
use firstlight_vm::Accelerator;

/// Exit code of `status` for a domain that is not running, as of `systemctl status`.
const NOT_RUNNING: u8 = 3;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the domain XML; nothing is changed.
    Xml(Box<DomainArgs>),
    /// Define or redefine the domain, and create its state disk if there is none.
    Define(Box<DomainArgs>),
    /// Start the domain after checking the host.
    Start(ServiceArgs),
    /// Show state, devices and problems; exit code 3 if it is not running.
    Status {
        #[command(flatten)]
        service: ServiceArgs,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Destroy the domain, and wait until its PCI functions are released.
    Destroy(ServiceArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ServiceArgs {
    /// The domain's name.
    #[arg(long, default_value = "firstlight-service-vm")]
    name: Name,
    /// libvirt's connection URI.
    #[arg(long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
    /// The virsh program.
    #[arg(long, value_name = "FILE", default_value = "virsh")]
    virsh: PathBuf,
    /// Timeout of a libvirt operation, seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    timeout: u64,
    /// The host's sysfs.
    #[arg(long, value_name = "DIR", default_value = "/sys", hide = true)]
    sysfs: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct DomainArgs {
    #[command(flatten)]
    service: ServiceArgs,
    /// The image directory that image-builder wrote.
    #[arg(long, value_name = "DIR")]
    image: PathBuf,
    /// The directory of an opener for it, where its kernel failed to open dm-verity itself.
    #[arg(long, value_name = "DIR")]
    opener: Option<PathBuf>,
    /// Additional kernel parameters.
    #[arg(long, value_name = "TEXT", default_value = "")]
    append: String,
    /// The baseboard's serial number: a module map of another board, such as on a moved state disk, is ignored.
    #[arg(long, value_name = "SERIAL", value_parser = serial)]
    baseboard_serial: Option<String>,
    /// The guest's vsock context id, unique on the host.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(3..))]
    cid: u32,
    /// Memory, MiB.
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    memory: u32,
    /// Virtual processors.
    #[arg(long, value_name = "N", default_value_t = 2)]
    cpus: u32,
    /// Back the memory with the host's huge pages.
    #[arg(long)]
    huge_pages: bool,
    /// The state disk file, which outlives the VM; created if missing, never formatted again.
    #[arg(long, value_name = "FILE", default_value = "/var/lib/firstlight/service-vm-state.img")]
    state_disk: PathBuf,
    /// The size of a new state disk, MiB.
    #[arg(long, value_name = "MIB", default_value_t = 64)]
    state_size: u32,
    /// No state disk: the daemon's state is lost with the VM.
    #[arg(long, conflicts_with_all = ["state_disk", "state_size"])]
    no_state_disk: bool,
    /// The console file, or `pty` for virsh console; /var/log/libvirt/qemu/NAME-console.log by default.
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// Only this NVSwitch or bridge, on hosts with two boards; repeated for each.
    #[arg(long = "device", value_name = "PCI-ADDRESS")]
    devices: Vec<Address>,
    /// The functions are bound to vfio-pci externally, not by libvirt.
    #[arg(long)]
    unmanaged: bool,
    /// KVM or emulation.
    #[arg(long, value_enum, default_value_t = AcceleratorChoice::Auto)]
    accelerator: AcceleratorChoice,
    /// The QEMU binary; libvirt's default if not given.
    #[arg(long, value_name = "FILE")]
    emulator: Option<PathBuf>,
    /// An argument for QEMU that names a device served by another process (vfio-user, vhost-user), repeated for each.
    /// The VM then has no PCI functions and no vsock of the host, and shares its memory with these processes.
    #[arg(
        long = "qemu-arg",
        value_name = "ARGUMENT",
        allow_hyphen_values = true,
        hide = true,
        conflicts_with_all = ["devices", "unmanaged", "cid"]
    )]
    qemu_args: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AcceleratorChoice {
    /// KVM if available.
    Auto,
    /// KVM.
    Kvm,
    /// TCG emulation: slow.
    Tcg,
}

impl ServiceArgs {
    fn service(&self) -> Service {
        let timeout = Duration::from_secs(self.timeout);
        let virsh = Virsh { program: self.virsh.clone(), uri: self.connect.clone(), timeout };
        Service { name: self.name.clone(), virsh, host: self.host() }
    }

    fn host(&self) -> HostRoots {
        HostRoots { sysfs: self.sysfs.clone(), ..HostRoots::default() }
    }
}

/// Validates a serial number as the daemon in the VM does.
fn serial(text: &str) -> Result<String, String> {
    let is_word = (1..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"');
    if is_word {
        Ok(text.to_owned())
    } else {
        Err("it is 1 to 64 printable characters, no space and no quote".to_owned())
    }
}

/// Returns the kernel parameters beyond the image's own.
fn parameters(append: &str, serial: Option<&str>) -> String {
    let serial = serial.map(|serial| format!("firstlight.baseboard-serial={serial}"));
    let message = [append.to_owned(), serial.unwrap_or_default()];
    message.iter().filter(|word| !word.is_empty()).map(String::as_str).collect::<Vec<_>>().join(" ")
}

/// Makes a path absolute, because libvirt has another working directory.
fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("failed to make {} absolute", path.display()))
}

impl DomainArgs {
    fn domain(&self) -> anyhow::Result<Domain> {
        let image = absolute(&self.image)?;
        let opener = self.opener.as_deref().map(absolute).transpose()?;
        let boot_files = BootFiles::open(&image, opener.as_deref(), &[])?;
        for file in boot_files.files() {
            fs::metadata(file)
                .with_context(|| format!("image {}: {}: build it again", image.display(), file.display()))?;
        }
        let named = || format!("/var/log/libvirt/qemu/{}-console.log", self.service.name).into();
        Ok(Domain {
            name: self.service.name.clone(),
            boot_files,
            append: parameters(&self.append, self.baseboard_serial.as_deref()),
            memory_mib: self.memory,
            cpus: self.cpus,
            huge_pages: self.huge_pages,
            accelerator: match self.accelerator {
                AcceleratorChoice::Auto => Accelerator::detect(),
                AcceleratorChoice::Kvm => Accelerator::Kvm,
                AcceleratorChoice::Tcg => Accelerator::Tcg,
            },
            emulator: self.emulator.as_deref().map(absolute).transpose()?,
            console: match &self.console {
                Some(word) if word == Path::new("pty") => Console::Pty,
                Some(file) => Console::File(absolute(file)?),
                None => Console::File(named()),
            },
            state_disk: (!self.no_state_disk).then(|| absolute(&self.state_disk)).transpose()?,
            hardware: self.hardware()?,
        })
    }

    fn hardware(&self) -> anyhow::Result<Hardware> {
        if !self.qemu_args.is_empty() {
            return Ok(Hardware::External { arguments: self.qemu_args.clone() });
        }
        let selection = Selection { only: self.devices.clone(), unmanaged: self.unmanaged };
        let passthrough = passthrough(&self.service.name, &self.service.host(), &selection)?;
        let functions = passthrough.passed.iter().map(|function| function.address).collect();
        Ok(Hardware::Host { functions, managed: !self.unmanaged, cid: self.cid })
    }

    fn define(&self) -> anyhow::Result<ExitCode> {
        let domain = self.domain()?;
        let xml = domain.xml()?;
        if let Some(disk) = &domain.state_disk
            && state_disk::ensure(disk, self.state_size)? == StateDisk::Created
        {
            eprintln!("firstlight: state disk {}: created, {} MiB", disk.display(), self.state_size);
        }
        self.service.service().define(&xml)?;
        eprintln!("firstlight: domain {} is defined at {}", domain.name, self.service.connect);
        match &domain.console {
            Console::File(file) => {
                eprintln!(
                    "firstlight: its console is {}, with early messages in {}",
                    file.display(),
                    serial_of(file).display()
                );
            }
            Console::Pty => eprintln!("firstlight: its console is virsh console {}", domain.name),
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Formats a duration.
fn span(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

fn status_text(status: &Status, now: u64) -> String {
    let mut text = format!("{}: {}", status.name, status.reason);
    if let Some(started_at) = status.started_at {
        text.push_str(&format!(", for {}", span(now.saturating_sub(started_at))));
    }
    if let Some(pid) = status.pid {
        text.push_str(&format!(", process {pid}"));
    }
    if let Some(cid) = status.cid {
        text.push_str(&format!(", vsock context id {cid}"));
    }
    text.push('\n');
    if !status.devices.is_empty() {
        text.push_str(&format!("{:<14}{:<11}{:<14}{:<7}DRIVER\n", "ADDRESS", "ID", "TYPE", "GROUP"));
    }
    for device in &status.devices {
        let group = device.group.map_or("-".to_owned(), |group| group.to_string());
        let (id, driver) = (device.id.as_deref().unwrap_or("-"), device.driver.as_deref().unwrap_or("-"));
        let address = device.address.to_string();
        text.push_str(&format!("{address:<14}{id:<11}{:<14}{group:<7}{driver}\n", device.kind));
    }
    for problem in &status.problems {
        text.push_str(&format!("problem: {problem}\n"));
    }
    text
}

fn status(service: &Service, json: bool) -> anyhow::Result<ExitCode> {
    let status = service.status()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        print!("{}", status_text(&status, now));
    }
    let runs = matches!(status.state, State::Running | State::Other);
    Ok(if runs { ExitCode::SUCCESS } else { ExitCode::from(NOT_RUNNING) })
}

/// Runs the command.
pub(crate) fn service_vm(command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Xml(args) => print!("{}", args.domain()?.xml()?),
        Command::Define(args) => return args.define(),
        Command::Start(args) => match args.service().start()? {
            Change::Applied => eprintln!("firstlight: domain {} is running", args.name),
            Change::AlreadyDone => eprintln!("firstlight: domain {} is already running", args.name),
        },
        Command::Status { service, json } => return status(&service.service(), *json),
        Command::Destroy(args) => match args.service().destroy()? {
            Change::Applied => eprintln!("firstlight: domain {} is off, and its functions are released", args.name),
            Change::AlreadyDone => eprintln!("firstlight: domain {} was off already", args.name),
        },
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_devices::Problem;
    use firstlight_service_vm::service::Device;

    #[test]
    fn baseboard_serial_is_passed_as_kernel_parameter() {
        assert_eq!(parameters("", None), "");
        assert_eq!(parameters("panic=1", Some("S1")), "panic=1 firstlight.baseboard-serial=S1");
        assert_eq!(parameters("", Some("S1")), "firstlight.baseboard-serial=S1");
        for text in ["", "S 1", "S\"1", &"S".repeat(65)] {
            assert!(serial(text).is_err(), "{text}");
        }
        assert_eq!(serial("1650-A/7").as_deref(), Ok("1650-A/7"));
    }

    #[test]
    fn status_text_shows_state_devices_and_problems() {
        let device = Device {
            address: "0000:05:00.0".parse().unwrap(),
            id: Some("10de:22a3".into()),
            kind: "NVSwitch",
            group: Some(30),
            driver: None,
        };
        let status = Status {
            name: "fabric".into(),
            state: State::Running,
            reason: "running (booted)".into(),
            started_at: Some(1000),
            pid: Some(7),
            cid: Some(100),
            devices: vec![device],
            problems: vec![Problem { message: "it burns".into(), remedy: "water".into() }],
        };
        let text = "fabric: running (booted), for 1 h 1 min, process 7, vsock context id 100\n\
                    ADDRESS       ID         TYPE          GROUP  DRIVER\n\
                    0000:05:00.0  10de:22a3  NVSwitch      30     -\n\
                    problem: it burns: water\n";
        assert_eq!(status_text(&status, 1000 + 3661), text);
    }
}
