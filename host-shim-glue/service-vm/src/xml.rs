//! Writes the domain XML.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use firstlight_image::BootFiles;
use firstlight_pci::Address;
use firstlight_vm::Accelerator;

use crate::Name;
use crate::state_disk::LABEL;

/// The guest's console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Console {
    /// A file; early kernel messages go to a second file beside it.
    File(PathBuf),
    /// A pty for `virsh console`.
    Pty,
}

/// The guest's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hardware {
    /// PCI functions of the host, and vsock.
    Host {
        /// The functions.
        functions: Vec<Address>,
        /// Whether libvirt binds them to vfio-pci and releases them.
        managed: bool,
        /// The guest's vsock context id, 3 or more.
        cid: u32,
    },
    /// Devices that other processes serve, over vfio-user and vhost-user. QEMU arguments name them, and the processes
    /// share the guest's memory.
    External {
        /// The arguments.
        arguments: Vec<String>,
    },
}

/// A service VM's domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    /// Its name.
    pub name: Name,
    /// Kernel, initial RAM file system and disk of the image.
    pub boot_files: BootFiles,
    /// Additional kernel parameters.
    pub append: String,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// Whether its memory is backed by huge pages.
    pub huge_pages: bool,
    /// KVM or emulation.
    pub accelerator: Accelerator,
    /// QEMU; libvirt's default if `None`.
    pub emulator: Option<PathBuf>,
    /// The console.
    pub console: Console,
    /// The state disk.
    pub state_disk: Option<PathBuf>,
    /// The devices.
    pub hardware: Hardware,
}

/// Why the XML cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum XmlError {
    /// A text that is invalid in XML, or a path that is invalid for libvirt.
    #[error("{what} {text:?} {why}")]
    Text {
        /// Its purpose.
        what: &'static str,
        /// The text.
        text: String,
        /// What is wrong with it, and what to do.
        why: &'static str,
    },
    /// The image's disk is not protected by dm-verity.
    #[error("image {}: its disk has no dm-verity: build it with image.verity", disk.display())]
    NoVerity {
        /// The disk.
        disk: PathBuf,
    },
    /// A reserved vsock context id.
    #[error("vsock context id {0} is not a guest's: those are 3 to 4294967294")]
    Cid(u32),
    /// Too little memory or no processor.
    #[error("{0} MiB of memory and {1} processors are no virtual machine: give it 512 MiB and 1 at least")]
    Size(u32, u32),
}

/// Minimum memory in MiB: no image starts with less.
const MIN_MEMORY_MIB: u32 = 512;

/// Escapes a text for elements and attributes with either quote.
fn escaped(what: &'static str, text: &str) -> Result<String, XmlError> {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            letter if letter.is_control() || matches!(letter, '\u{fffe}' | '\u{ffff}') => {
                let why = "has a control character: rename it";
                return Err(XmlError::Text { what, text: text.escape_debug().take(200).collect(), why });
            }
            letter => out.push(letter),
        }
    }
    Ok(out)
}

fn path(what: &'static str, path: &Path) -> Result<String, XmlError> {
    let wrong = |why| XmlError::Text { what, text: path.to_string_lossy().escape_debug().take(200).collect(), why };
    let text = path.to_str().ok_or_else(|| wrong("is not UTF-8: rename it"))?;
    if !path.is_absolute() {
        return Err(wrong("does not begin with /: libvirt has another working directory"));
    }
    escaped(what, text)
}

/// Returns the file beside the console's for early kernel messages.
#[must_use]
pub fn serial_of(console: &Path) -> PathBuf {
    let mut name = console.as_os_str().to_owned();
    name.push(".serial");
    name.into()
}

/// An XML writer, one line per element.
struct Lines {
    text: String,
    depth: usize,
}

impl Lines {
    fn line(&mut self, line: impl AsRef<str>) {
        let _ = writeln!(self.text, "{:1$}{2}", "", self.depth * 2, line.as_ref());
    }

    fn open(&mut self, tag: &str) {
        self.line(format!("<{tag}>"));
        self.depth += 1;
    }

    fn close(&mut self, tag: &str) {
        self.depth -= 1;
        self.line(format!("</{tag}>"));
    }

    fn disk(&mut self, file: &str, target: &str, more: &str) {
        self.open("disk type='file' device='disk'");
        self.line("<driver name='qemu' type='raw'/>");
        self.line(format!("<source file='{file}'/>"));
        self.line(format!("<target dev='{target}' bus='virtio'/>"));
        self.line(more);
        self.close("disk");
    }
}

impl Domain {
    /// Returns the domain XML; deterministic.
    ///
    /// # Errors
    /// A path or parameter is invalid, or the disk is unprotected.
    pub fn xml(&self) -> Result<String, XmlError> {
        if self.memory_mib < MIN_MEMORY_MIB || self.cpus == 0 {
            return Err(XmlError::Size(self.memory_mib, self.cpus));
        }
        let kind = if self.accelerator == Accelerator::Kvm { "kvm" } else { "qemu" };
        let mut out = Lines { text: String::new(), depth: 0 };
        match &self.hardware {
            Hardware::Host { .. } => out.open(&format!("domain type='{kind}'")),
            Hardware::External { .. } => {
                out.open(&format!("domain type='{kind}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"))
            }
        }
        out.line(format!("<name>{}</name>", escaped("name", self.name.as_str())?));
        out.line(format!("<uuid>{}</uuid>", self.name.uuid()));
        out.line("<description>Firstlight's service VM: it owns the NVLink fabric of this host</description>");
        out.line(format!("<memory unit='MiB'>{}</memory>", self.memory_mib));
        self.memory(&mut out);
        out.line(format!("<vcpu>{}</vcpu>", self.cpus));
        self.boot(&mut out)?;
        out.line("<features><acpi/></features>");
        self.processor(&mut out);
        for end in ["poweroff", "reboot", "crash"] {
            out.line(format!("<on_{end}>destroy</on_{end}>"));
        }
        self.devices(&mut out)?;
        if let Hardware::External { arguments } = &self.hardware {
            out.open("qemu:commandline");
            for argument in arguments {
                out.line(format!("<qemu:arg value='{}'/>", escaped("QEMU's argument", argument)?));
            }
            out.close("qemu:commandline");
        }
        out.close("domain");
        Ok(out.text)
    }

    fn memory(&self, out: &mut Lines) {
        // Processes that serve devices have to map the guest's memory.
        let shared = matches!(self.hardware, Hardware::External { .. });
        if !(shared || self.huge_pages) {
            return;
        }
        out.open("memoryBacking");
        if self.huge_pages {
            out.line("<hugepages/>");
        }
        if shared {
            out.line("<source type='memfd'/>");
            out.line("<access mode='shared'/>");
        }
        out.close("memoryBacking");
    }

    fn boot(&self, out: &mut Lines) -> Result<(), XmlError> {
        out.open("os");
        out.line("<type arch='x86_64' machine='q35'>hvm</type>");
        out.line(format!("<kernel>{}</kernel>", path("the image's kernel", &self.boot_files.kernel)?));
        if let Some(initrd) = &self.boot_files.initrd {
            out.line(format!("<initrd>{}</initrd>", path("the image's initial RAM file system", initrd)?));
        }
        let blank = if self.append.is_empty() { "" } else { " " };
        let command_line = format!("{}{blank}{}", self.boot_files.command_line, self.append);
        out.line(format!("<cmdline>{}</cmdline>", escaped("the kernel's command line", &command_line)?));
        out.close("os");
        Ok(())
    }

    fn processor(&self, out: &mut Lines) {
        if self.accelerator == Accelerator::Kvm {
            out.line("<cpu mode='host-passthrough' check='none' migratable='off'/>");
            return;
        }
        // TCG's `cmpxchg16b` has been seen to corrupt flags.
        out.open("cpu mode='maximum'");
        out.line("<feature policy='disable' name='cx16'/>");
        out.close("cpu");
    }

    fn devices(&self, out: &mut Lines) -> Result<(), XmlError> {
        out.open("devices");
        if let Some(emulator) = &self.emulator {
            out.line(format!("<emulator>{}</emulator>", path("QEMU", emulator)?));
        }
        if let Some(disk) = &self.boot_files.disk {
            if !self.boot_files.verity {
                return Err(XmlError::NoVerity { disk: disk.clone() });
            }
            out.disk(&path("the image's disk", disk)?, "vda", "<readonly/>");
        }
        if let Some(disk) = &self.state_disk {
            let target = if self.boot_files.disk.is_some() { "vdb" } else { "vda" };
            out.disk(&path("the state disk", disk)?, target, &format!("<serial>{LABEL}</serial>"));
        }
        out.line("<controller type='usb' model='none'/>");
        self.console(out)?;
        if let Hardware::Host { functions, managed, cid } = &self.hardware {
            if !(3..u32::MAX).contains(cid) {
                return Err(XmlError::Cid(*cid));
            }
            for function in functions {
                hostdev(out, *function, *managed);
            }
            out.line(format!("<vsock model='virtio'><cid auto='no' address='{cid}'/></vsock>"));
        }
        out.line("<memballoon model='none'/>");
        out.close("devices");
        Ok(())
    }

    fn console(&self, out: &mut Lines) -> Result<(), XmlError> {
        match &self.console {
            Console::File(file) => {
                out.open("serial type='file'");
                out.line(format!("<source path='{}'/>", path("the console's file", &serial_of(file))?));
                out.line("<target port='0'/>");
                out.close("serial");
                out.open("console type='file'");
                out.line(format!("<source path='{}'/>", path("the console's file", file)?));
            }
            Console::Pty => out.open("console type='pty'"),
        }
        out.line("<target type='virtio' port='0'/>");
        out.close("console");
        Ok(())
    }
}

/// libvirt adds a root port for each function.
fn hostdev(out: &mut Lines, function: Address, managed: bool) {
    let Address { domain, bus, device, function } = function;
    out.open(&format!("hostdev mode='subsystem' type='pci' managed='{}'", if managed { "yes" } else { "no" }));
    out.open("source");
    out.line(format!(
        "<address domain='0x{domain:04x}' bus='0x{bus:02x}' slot='0x{device:02x}' function='0x{function:x}'/>"
    ));
    out.close("source");
    out.close("hostdev");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn domain() -> Domain {
        Domain {
            name: "fabric".parse().unwrap(),
            boot_files: BootFiles {
                kernel: "/i/vmlinux".into(),
                initrd: None,
                disk: Some("/i/rootfs.img".into()),
                verity: true,
                extensions: Vec::new(),
                command_line: "console=hvc0 quiet panic=-1 dm-mod.create=\"a, <b>\"".into(),
            },
            append: "x='1'".into(),
            memory_mib: 4096,
            cpus: 2,
            huge_pages: false,
            accelerator: Accelerator::Kvm,
            emulator: None,
            console: Console::Pty,
            state_disk: Some("/s/state & more.img".into()),
            hardware: Hardware::Host { functions: vec!["0000:07:00.0".parse().unwrap()], managed: true, cid: 100 },
        }
    }

    #[test]
    fn xml_special_characters_are_escaped() {
        let text = domain().xml().unwrap();
        assert!(text.contains("dm-mod.create=&quot;a, &lt;b&gt;&quot; x=&apos;1&apos;</cmdline>"), "{text}");
        assert!(text.contains("file='/s/state &amp; more.img'"), "{text}");
    }

    #[test]
    fn domain_invalid_for_libvirt_is_refused() {
        let mut relative = domain();
        relative.state_disk = Some("state.img".into());
        let mut broken = domain();
        broken.console = Console::File("/log/a\n<b>".into());
        let mut open = domain();
        open.boot_files.verity = false;
        let mut host = domain();
        host.hardware = Hardware::Host { functions: Vec::new(), managed: true, cid: 2 };
        let mut small = domain();
        small.memory_mib = 4;
        for (domain, word) in [
            (relative, "does not begin with /"),
            (broken, "control character"),
            (open, "no dm-verity"),
            (host, "context id 2"),
            (small, "4 MiB"),
        ] {
            let error = domain.xml().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    proptest! {
        /// Written XML is parsed back unchanged.
        #[test]
        fn any_text_is_refused_or_round_trips(text in "\\PC{0,40}|.{0,40}|[<>&'\"/ a]{0,40}") {
            let mut domain = domain();
            domain.append = text.clone();
            domain.state_disk = Some(format!("/s/{text}").into());
            let Ok(xml) = domain.xml() else {
                let bad = |c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}');
                prop_assert!(text.chars().any(bad));
                return Ok(());
            };
            let read = crate::definition::Definition::read(&xml).unwrap();
            prop_assert!(read.files.contains(&PathBuf::from(format!("/s/{text}"))), "{:?}", read.files);
            // The number of tags does not depend on the text.
            domain.append.clear();
            domain.state_disk = Some("/s/x".into());
            prop_assert_eq!(xml.matches('<').count(), domain.xml().unwrap().matches('<').count());
        }
    }
}
