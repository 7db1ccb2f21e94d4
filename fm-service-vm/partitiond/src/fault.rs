//! SXid and Xid lines of the kernel log: errors of NVSwitches and GPUs.
//!
//! `nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up`,
//! `NVRM: Xid (PCI:0000:04:00): 79, pid=1, GPU has fallen off the bus.` Only records of the kernel itself count: any
//! process that may write to the log could forge them.

use std::fmt;

/// Maximum length of a fault's text, in characters.
const MAX_TEXT: usize = 160;

/// The kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A fatal SXid: a switch's links are down until an operator intervenes.
    FatalSxid,
    /// A non-fatal SXid.
    NonFatalSxid,
    /// An Xid of a GPU of this machine.
    Xid,
}

/// One SXid or Xid line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The kind.
    pub kind: Kind,
    /// The device's PCI address in this machine, as the driver writes it; a GPU's has no function.
    pub device: String,
    /// NVIDIA's error number.
    pub code: u32,
    /// The rest of the line.
    pub text: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.kind == Kind::Xid { "Xid" } else { "SXid" };
        write!(f, "{name} {}, {}", self.code, self.text)
    }
}

impl Fault {
    /// Parses a line. Continuation lines of an SXid (severity, data) return `None`.
    #[must_use]
    pub fn of_line(line: &str) -> Option<Self> {
        let (is_switch, rest) = match line.split_once("SXid (PCI:") {
            Some((before, rest)) if before.contains("nvswitch") => (true, rest),
            Some(_) => return None,
            None => (false, line.strip_prefix("NVRM: Xid (PCI:")?),
        };
        let (device, rest) = rest.split_once("): ")?;
        let is_address = (7..=16).contains(&device.len())
            && device.bytes().all(|byte| byte.is_ascii_hexdigit() || matches!(byte, b':' | b'.'));
        if !is_address {
            return None;
        }
        let (code, rest) = rest.split_once(',')?;
        let code = code.trim().parse().ok()?;
        let text: String = rest.trim().chars().filter(|letter| !letter.is_control()).take(MAX_TEXT).collect();
        let kind = match (is_switch, text.split(',').next().unwrap_or_default().trim()) {
            (false, _) => Kind::Xid,
            (true, "Fatal") => Kind::FatalSxid,
            (true, "Non-fatal") => Kind::NonFatalSxid,
            // A continuation line: severity, engine, data.
            (true, _) => return None,
        };
        Some(Self { kind, device: device.to_ascii_lowercase(), code, text })
    }
}

/// Returns sequence number and text of a `/dev/kmsg` record of the kernel itself.
#[must_use]
pub fn of_kernel(record: &str) -> Option<(u64, &str)> {
    let (head, text) = record.split_once(';')?;
    let mut fields = head.split(',');
    let priority: u32 = fields.next()?.parse().ok()?;
    let number = fields.next()?.parse().ok()?;
    // Records of user-space processes have another facility.
    (priority >> 3 == 0).then(|| (number, text.lines().next().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fault(line: &str) -> Option<(Kind, String, u32)> {
        Fault::of_line(line).map(|fault| (fault.kind, fault.device, fault.code))
    }

    #[test]
    fn sxid_and_xid_lines_are_classified() {
        for (line, kind, device, code) in [
            (
                "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
                Kind::FatalSxid,
                "0000:05:00.0",
                20034,
            ),
            (
                "nvidia-nvswitch0: SXid (PCI:0000:C1:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
                Kind::NonFatalSxid,
                "0000:c1:00.0",
                12028,
            ),
            ("NVRM: Xid (PCI:0000:04:00): 79, pid=1, GPU has fallen off the bus.", Kind::Xid, "0000:04:00", 79),
        ] {
            assert_eq!(fault(line), Some((kind, device.to_owned(), code)), "{line}");
        }
        let fault = Fault::of_line("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up");
        assert_eq!(fault.unwrap().to_string(), "SXid 20034, Fatal, Link 30 LTSSM Fault Up");
    }

    #[test]
    fn continuation_and_unrelated_lines_are_ignored() {
        for line in [
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Data {0x00000000, 0x00000000}",
            "nvidia-nvswitch3: open (major=510)",
            "something: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30",
            "a guest says: NVRM: Xid (PCI:0000:04:00): 79, x",
            "NVRM: Xid (PCI:../../etc/passwd): 79, x",
            "NVRM: Xid (PCI:0000:04:00): many, x",
            "NVRM: Xid (PCI:0000:04:00)",
        ] {
            assert_eq!(fault(line), None, "{line}");
        }
    }

    #[test]
    fn only_the_kernels_own_records_count() {
        assert_eq!(of_kernel("3,71,8,-;NVRM: x\n SUBSYSTEM=pci\n"), Some((71, "NVRM: x")));
        assert_eq!(of_kernel("6,9,1,-,caller=T1;a"), Some((9, "a")));
        // Facility "user".
        assert_eq!(of_kernel("11,72,8,-;NVRM: x"), None);
        assert_eq!(of_kernel("no record"), None);
        assert_eq!(of_kernel("x,y;z"), None);
    }

    proptest! {
        #[test]
        fn any_line_is_a_bounded_fault_or_ignored(text in "\\PC{0,400}", fatal in any::<bool>()) {
            let _ = of_kernel(&text);
            let _ = Fault::of_line(&text);
            let severity = if fatal { "Fatal" } else { "Non-fatal" };
            let line = format!("nvidia-nvswitch1: SXid (PCI:0000:05:00.0): 1, {severity}, {text}");
            let fault = Fault::of_line(&line).unwrap();
            prop_assert!(fault.text.chars().count() <= MAX_TEXT && !fault.text.chars().any(char::is_control));
            prop_assert_eq!(fault.kind == Kind::FatalSxid, fatal);
        }
    }
}
