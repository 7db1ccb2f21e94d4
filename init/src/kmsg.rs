//! Reads the kernel log: boot milestones, the driver's last messages about each GPU,
//! and lines to forward.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt as _;

use firstlight_boot_record::{Level, Milestone};
use firstlight_pci::Address;

use crate::log::Source;
use crate::root::Root;

/// One record of `/dev/kmsg`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Facility times eight plus level. Facility 0 is the kernel; processes cannot use it.
    pub priority: u32,
    /// Time of the record, µs since boot.
    pub at_us: u64,
    /// The message.
    pub text: &'a str,
}

impl<'a> Entry<'a> {
    /// Parses `PRIORITY,SEQUENCE,TIME,FLAGS[,...];TEXT`; continuation lines are dropped.
    #[must_use]
    pub fn parse(record: &'a str) -> Option<Self> {
        let (head, text) = record.split_once(';')?;
        let mut fields = head.split(',');
        let priority = fields.next()?.parse().ok()?;
        let at_us = fields.nth(1)?.parse().ok()?;
        Some(Self { priority, at_us, text: text.lines().next().unwrap_or_default() })
    }

    /// Returns whether the kernel logged it, as opposed to a process by `/dev/kmsg`.
    #[must_use]
    pub fn is_kernels(&self) -> bool {
        self.priority < 8
    }

    /// Returns the level.
    #[must_use]
    pub fn level(&self) -> Level {
        Level::from_priority(self.priority)
    }

    fn is_drivers(&self) -> bool {
        self.is_kernels() && DRIVER.iter().any(|start| self.text.starts_with(start))
    }

    /// Returns its source and text.
    #[must_use]
    pub fn source(&self) -> (Source, &'a str) {
        match self.text.strip_prefix("agent: ") {
            _ if self.is_drivers() => (Source::Driver, self.text),
            _ if self.is_kernels() => (Source::Kernel, self.text),
            Some(text) => (Source::Agent, text),
            None => (Source::Kmsg, self.text),
        }
    }

    fn milestone(&self) -> Option<&'static str> {
        let row = MILESTONES.iter().find(|(start, end, _)| self.text.starts_with(start) && self.text.ends_with(end));
        row.map(|(_, _, name)| *name)
    }
}

/// Milestones of the kernel's boot: start and end of their message, and their names.
const MILESTONES: &[(&str, &str, &str)] = &[
    ("Unpacking initramfs...", "", "initramfs-unpack"),
    ("Freeing initrd memory", "", "initramfs-unpacked"),
    ("Run ", " as init process", "init-exec"),
];

/// Prefixes of the GPU driver's messages.
const DRIVER: &[&str] = &["NVRM: ", "nvidia ", "nvidia-", "nvidia: "];

/// Number of messages that are kept per GPU. The last line of a failure is often generic; the line
/// before it has the error code.
const KEPT: usize = 2;

/// Maximum number of characters of a kept message.
const LONGEST: usize = 200;

/// Data that is kept from the log.
#[derive(Debug, Clone, Default)]
pub struct Log {
    milestones: Vec<Milestone>,
    messages: BTreeMap<Address, Vec<String>>,
    /// GPUs with driver messages since the last [`Log::take_gpus_with_messages`].
    gpus_with_messages: BTreeSet<Address>,
}

impl Log {
    /// Parses a record of `/dev/kmsg`.
    pub fn feed(&mut self, record: &str) {
        let Some(entry) = Entry::parse(record) else { return };
        if !entry.is_kernels() {
            return;
        }
        if let Some(name) = entry.milestone() {
            if !self.milestones.iter().any(|known| known.name == name) {
                self.milestones.push(Milestone { name: name.to_owned(), at_us: entry.at_us });
            }
        } else if entry.is_drivers() {
            let Some(pci) = address_in(entry.text) else { return };
            self.gpus_with_messages.insert(pci);
            let words = self.messages.entry(pci).or_default();
            if words.len() >= KEPT {
                words.remove(0);
            }
            words.push(on_one_line(entry.text).chars().take(LONGEST).collect());
        }
    }

    /// Returns the kernel's milestones so far.
    #[must_use]
    pub fn milestones(&self) -> &[Milestone] {
        &self.milestones
    }

    /// Takes the GPUs with driver messages since the last call.
    pub fn take_gpus_with_messages(&mut self) -> BTreeSet<Address> {
        std::mem::take(&mut self.gpus_with_messages)
    }

    /// Returns the driver's last messages about a GPU, on one line.
    #[must_use]
    pub fn last_message(&self, pci: Address) -> Option<String> {
        self.messages.get(&pci).map(|words| words.join(" / "))
    }
}

/// Joins a message of several lines. The kernel writes line ends as `\x0a`; the driver starts each
/// of its lines with the same prefix.
fn on_one_line(text: &str) -> String {
    text.trim_end_matches(r"\x0a").replace(r"\x0aNVRM: ", " ").replace(r"\x0a", " ")
}

/// Returns the first PCI address in a message. The driver writes `0000:03:00.0`, and
/// `PCI:0000:03:00` in its Xid messages.
fn address_in(text: &str) -> Option<Address> {
    text.split(|c: char| !c.is_ascii_hexdigit() && c != ':' && c != '.').find_map(|word| {
        let word = word.trim_matches(|c| c == ':' || c == '.');
        word.parse().ok().or_else(|| {
            // The word must consist of domain, bus and device: `12:34:56` is a time, not a GPU.
            (word.len() >= 10).then(|| format!("{word}.0").parse().ok()).flatten()
        })
    })
}

/// Returns the console log level: the kernel itself prints messages with lower levels, so they are
/// not forwarded.
#[must_use]
pub fn printed_below(root: &Root) -> u32 {
    let text = std::fs::read_to_string(root.path("/proc/sys/kernel/printk")).unwrap_or_default();
    text.split_ascii_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or_default()
}

/// A reader of `/dev/kmsg`, from the oldest record.
#[derive(Debug)]
pub struct Reader {
    file: File,
    buffer: Vec<u8>,
}

impl Reader {
    /// Opens the kernel log.
    ///
    /// # Errors
    /// The device does not exist.
    pub fn open() -> io::Result<Self> {
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg")?;
        // The kernel returns whole records, which are never longer.
        Ok(Self { file, buffer: vec![0; 8192] })
    }

    /// Passes the available records to `take`, at most `most`. Returns `false` if no further record
    /// is available.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn read(&mut self, most: usize, mut take: impl FnMut(&str)) -> io::Result<bool> {
        for _ in 0..most {
            match self.file.read(&mut self.buffer) {
                Ok(0) => return Ok(false),
                Ok(length) => take(&String::from_utf8_lossy(&self.buffer[..length])),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Records were overwritten before they were read; reading continues at the oldest
                // one.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

impl AsFd for Reader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn milestones_are_recorded_once() {
        let mut log = Log::default();
        log.feed("6,339,1140900,-;Run /init as init process\n");
        log.feed("6,340,1140901,-;  with arguments:\n");
        log.feed("6,341,9,c,caller=T1;Run /init as init process\n SUBSYSTEM=x\n");
        log.feed("6,1,500,-;Unpacking initramfs...\n");
        let names: Vec<_> = log.milestones().iter().map(|m| (m.name.as_str(), m.at_us)).collect();
        assert_eq!(names, [("init-exec", 1_140_900), ("initramfs-unpack", 500)]);
    }

    #[test]
    fn driver_messages_are_assigned_to_their_gpu() {
        let mut log = Log::default();
        log.feed("4,1,1,-;NVRM: GPU 0000:03:00.0: something early");
        log.feed("3,1,1,-;NVRM: GPU 0000:03:00.0: RmInitAdapter failed! (0x22:0x56:894)");
        log.feed("3,2,2,-;NVRM: GPU 0000:03:00.0: rm_init_adapter failed, device minor number 2");
        log.feed("3,3,3,-;NVRM: Xid (PCI:0000:04:00): 79, pid=1, GPU has fallen off the bus.");
        log.feed("6,4,4,-;pci 0000:04:00.0: BAR 0 assigned");
        let words = |pci: &str| log.last_message(pci.parse().unwrap());
        let text = words("0000:03:00.0").unwrap();
        assert!(text.contains("(0x22:0x56:894) / NVRM") && !text.contains("early"), "{text}");
        assert!(words("0000:04:00.0").unwrap().contains("Xid"));
        assert_eq!(words("0000:05:00.0"), None);
    }

    #[test]
    fn multi_line_message_is_joined() {
        let mut log = Log::default();
        log.feed(
            "3,1,1,-;NVRM: The NVIDIA GPU 0000:03:00.0 (PCI ID: 10de:15f8)\\x0aNVRM: installed in this system is not \
             supported by open\\x0aNVRM: nvidia.ko because of its age.\\x0a",
        );
        assert_eq!(
            log.last_message("0000:03:00.0".parse().unwrap()).unwrap(),
            "NVRM: The NVIDIA GPU 0000:03:00.0 (PCI ID: 10de:15f8) installed in this system is not supported by open \
             nvidia.ko because of its age."
        );
    }

    #[test]
    fn processes_cannot_impersonate_kernel_or_driver() {
        let of = |record: &'static str| Entry::parse(record).map(|entry| (entry.source(), entry.level())).unwrap();
        assert_eq!(of("3,1,1,-;NVRM: Xid 79"), ((Source::Driver, "NVRM: Xid 79"), Level::Error));
        assert_eq!(of("4,1,1,-;agent: x"), ((Source::Kernel, "agent: x"), Level::Warning));
        assert_eq!(of("12,1,1,-;agent: x"), ((Source::Agent, "x"), Level::Warning));
        assert_eq!(of("11,1,1,-;NVRM: Xid 79"), ((Source::Kmsg, "NVRM: Xid 79"), Level::Error));
        let mut log = Log::default();
        log.feed("11,1,1,-;NVRM: GPU 0000:03:00.0: RmInitAdapter failed!");
        log.feed("14,1,1,-;Run /init as init process");
        assert_eq!((log.last_message("0000:03:00.0".parse().unwrap()), log.milestones().len()), (None, 0));
    }

    #[test]
    fn console_level_is_read_from_printk() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        assert_eq!(printed_below(&root), 0);
        std::fs::create_dir_all(root.path("/proc/sys/kernel")).unwrap();
        std::fs::write(root.path("/proc/sys/kernel/printk"), "4\t4\t1\t7\n").unwrap();
        assert_eq!(printed_below(&root), 4);
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "([0-9],){0,4}[;]?(NVRM: )?[0-9a-f:. ]{0,30}\\PC{0,20}") {
            Log::default().feed(&text);
        }
    }
}
