//! The kernel's log: when it reached what, and what the GPU driver said last about a GPU.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt as _;

use firstlight_boot_record::Milestone;
use firstlight_pci::Address;

/// One record of `/dev/kmsg`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// When, µs.
    pub at_us: u64,
    /// The message.
    pub text: &'a str,
}

impl<'a> Entry<'a> {
    /// Reads `PRIORITY,SEQUENCE,TIME,FLAGS[,...];TEXT`; further lines are left out.
    #[must_use]
    pub fn parse(record: &'a str) -> Option<Self> {
        let (head, text) = record.split_once(';')?;
        let at_us = head.split(',').nth(2)?.parse().ok()?;
        Some(Self { at_us, text: text.lines().next().unwrap_or_default() })
    }

    fn milestone(&self) -> Option<&'static str> {
        let row = MILESTONES.iter().find(|(start, end, _)| self.text.starts_with(start) && self.text.ends_with(end));
        row.map(|(_, _, name)| *name)
    }
}

/// Moments of the kernel's boot: how their message begins and ends, and their names.
const MILESTONES: &[(&str, &str, &str)] = &[
    ("Unpacking initramfs...", "", "initramfs-unpack"),
    ("Freeing initrd memory", "", "initramfs-unpacked"),
    ("Run ", " as init process", "init-exec"),
];

/// How the GPU driver's messages begin.
const DRIVER: &[&str] = &["NVRM: ", "nvidia "];

/// How many messages are kept per GPU. The last line of a failure often says
/// only that there was one; the line before has the code.
const KEPT: usize = 2;

/// What is kept of the log.
#[derive(Debug, Clone, Default)]
pub struct Log {
    milestones: Vec<Milestone>,
    words: BTreeMap<Address, Vec<String>>,
}

impl Log {
    /// Takes one record of `/dev/kmsg`.
    pub fn feed(&mut self, record: &str) {
        let Some(entry) = Entry::parse(record) else { return };
        if let Some(name) = entry.milestone() {
            if !self.milestones.iter().any(|known| known.name == name) {
                self.milestones.push(Milestone { name: name.to_owned(), at_us: entry.at_us });
            }
        } else if DRIVER.iter().any(|start| entry.text.starts_with(start)) {
            let Some(pci) = address_in(entry.text) else { return };
            let words = self.words.entry(pci).or_default();
            if words.len() >= KEPT {
                words.remove(0);
            }
            words.push(entry.text.chars().take(200).collect());
        }
    }

    /// The kernel's milestones so far.
    #[must_use]
    pub fn milestones(&self) -> &[Milestone] {
        &self.milestones
    }

    /// The driver's last words about a GPU, on one line.
    #[must_use]
    pub fn last_words(&self, pci: Address) -> Option<String> {
        self.words.get(&pci).map(|words| words.join(" / "))
    }
}

/// The first PCI address in a message. The driver writes `0000:03:00.0`, and
/// `PCI:0000:03:00` in its Xid messages.
fn address_in(text: &str) -> Option<Address> {
    text.split(|c: char| !c.is_ascii_hexdigit() && c != ':' && c != '.').find_map(|word| {
        let word = word.trim_matches(|c| c == ':' || c == '.');
        word.parse().ok().or_else(|| {
            // The whole word has to be domain, bus and device: `12:34:56` is a time, not a GPU.
            (word.len() >= 10).then(|| format!("{word}.0").parse().ok()).flatten()
        })
    })
}

/// `/dev/kmsg`, from its first record on.
#[derive(Debug)]
pub struct Reader {
    file: File,
    buffer: Vec<u8>,
}

impl Reader {
    /// Opens the log.
    ///
    /// # Errors
    /// The device is not there.
    pub fn open() -> io::Result<Self> {
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg")?;
        // The kernel hands out whole records and none is longer.
        Ok(Self { file, buffer: vec![0; 8192] })
    }

    /// Takes what is there, at most `most` records. `Ok(false)` when nothing is left.
    ///
    /// # Errors
    /// The log cannot be read any more.
    pub fn read(&mut self, log: &mut Log, most: usize) -> io::Result<bool> {
        for _ in 0..most {
            match self.file.read(&mut self.buffer) {
                Ok(0) => return Ok(false),
                Ok(length) => log.feed(&String::from_utf8_lossy(&self.buffer[..length])),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Records were overwritten before they could be read; the next ones are there.
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
    fn milestones_are_taken_once() {
        let mut log = Log::default();
        log.feed("6,339,1140900,-;Run /init as init process\n");
        log.feed("6,340,1140901,-;  with arguments:\n");
        log.feed("6,341,9,c,caller=T1;Run /init as init process\n SUBSYSTEM=x\n");
        log.feed("6,1,500,-;Unpacking initramfs...\n");
        let names: Vec<_> = log.milestones().iter().map(|m| (m.name.as_str(), m.at_us)).collect();
        assert_eq!(names, [("init-exec", 1_140_900), ("initramfs-unpack", 500)]);
    }

    #[test]
    fn the_drivers_last_words_go_to_their_gpu() {
        let mut log = Log::default();
        log.feed("4,1,1,-;NVRM: GPU 0000:03:00.0: something early");
        log.feed("3,1,1,-;NVRM: GPU 0000:03:00.0: RmInitAdapter failed! (0x22:0x56:894)");
        log.feed("3,2,2,-;NVRM: GPU 0000:03:00.0: rm_init_adapter failed, device minor number 2");
        log.feed("3,3,3,-;NVRM: Xid (PCI:0000:04:00): 79, pid=1, GPU has fallen off the bus.");
        log.feed("6,4,4,-;pci 0000:04:00.0: BAR 0 assigned");
        let words = |pci: &str| log.last_words(pci.parse().unwrap());
        let text = words("0000:03:00.0").unwrap();
        assert!(text.contains("(0x22:0x56:894) / NVRM") && !text.contains("early"), "{text}");
        assert!(words("0000:04:00.0").unwrap().contains("Xid"));
        assert_eq!(words("0000:05:00.0"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_taken(text in "([0-9],){0,4}[;]?(NVRM: )?[0-9a-f:. ]{0,30}\\PC{0,20}") {
            Log::default().feed(&text);
        }
    }
}
