//! Parser of uevent messages.

/// A uevent: a kernel message about one kobject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uevent<'a> {
    /// `add`, `remove`, `change`, `move`, `online`, `offline`, `bind` or `unbind`.
    pub action: &'a str,
    /// The kobject's path below `/sys`, e.g. `/devices/pci0000:00/0000:00:02.0`.
    pub path: &'a str,
    /// The subsystem, e.g. `block`.
    pub subsystem: &'a str,
    /// All variables, as `NAME=value`, with NULs between them.
    variables: &'a str,
}

impl<'a> Uevent<'a> {
    /// Parses a message: `ACTION@DEVPATH` and variables, each terminated by a NUL.
    /// `None` if it does not have the kernel's format.
    #[must_use]
    pub fn parse(message: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(message).ok()?;
        let (head, variables) = text.split_once('\0')?;
        let (action, path) = head.split_once('@')?;
        let mut event = Self { action, path, subsystem: "", variables };
        let variable = |name| event.variable(name);
        // The kernel repeats both as variables; a message in which they differ is not the kernel's.
        if !path.starts_with('/') || variable("ACTION") != Some(action) || variable("DEVPATH") != Some(path) {
            return None;
        }
        event.subsystem = event.variable("SUBSYSTEM")?;
        Some(event)
    }

    /// Returns the value of a variable.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&'a str> {
        let mut all = self.variables.split('\0').filter_map(|entry| entry.split_once('='));
        all.find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    /// Returns whether it can add a device. A removal never satisfies a wait for a device.
    #[must_use]
    pub fn can_add_device(&self) -> bool {
        !matches!(self.action, "remove" | "unbind" | "offline")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DISK: &[u8] = b"add@/devices/pci0000:00/0000:00:02.0/0000:01:00.0/virtio5/block/vda\0ACTION=add\0\
        DEVPATH=/devices/pci0000:00/0000:00:02.0/0000:01:00.0/virtio5/block/vda\0SUBSYSTEM=block\0MAJOR=254\0MINOR=0\0\
        DEVNAME=vda\0DEVTYPE=disk\0SEQNUM=812\0";

    #[test]
    fn disk_uevent_is_parsed() {
        let event = Uevent::parse(DISK).unwrap();
        assert_eq!((event.action, event.subsystem, event.variable("DEVNAME")), ("add", "block", Some("vda")));
        assert!(event.path.ends_with("/block/vda") && event.can_add_device());
        assert_eq!(event.variable("DEV"), None);
    }

    #[test]
    fn malformed_messages_are_ignored() {
        for message in [
            &b""[..],
            b"add@/x",
            b"add@/x\0",
            b"add@x\0ACTION=add\0DEVPATH=x\0SUBSYSTEM=block\0",
            b"add@/x\0ACTION=remove\0DEVPATH=/x\0SUBSYSTEM=block\0",
            b"add@/x\0ACTION=add\0DEVPATH=/y\0SUBSYSTEM=block\0",
            b"add@/x\0ACTION=add\0DEVPATH=/x\0",
            b"libudev\0\xfe\xed\xca\xfe",
        ] {
            assert_eq!(Uevent::parse(message), None, "{:?}", String::from_utf8_lossy(message));
        }
        let gone = b"remove@/x\0ACTION=remove\0DEVPATH=/x\0SUBSYSTEM=block\0";
        assert!(!Uevent::parse(gone).unwrap().can_add_device());
    }

    proptest! {
        #[test]
        fn parsing_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), at in 0usize..250) {
            let _ = Uevent::parse(&bytes);
            let mut spliced = DISK.to_vec();
            spliced.splice(at.min(DISK.len())..(at + 3).min(DISK.len()), bytes);
            if let Some(event) = Uevent::parse(&spliced) {
                prop_assert!(event.path.starts_with('/'));
            }
        }
    }
}
