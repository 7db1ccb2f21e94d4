//! What the kernel says of NVSwitches and GPUs that are not well: SXid and Xid lines.
//!
//! `nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up`,
//! `NVRM: Xid (PCI:0000:04:00): 79, pid=1, GPU has fallen off the bus.` Only lines of
//! the kernel itself count: any process that may write to its log can write the same.

use std::fmt;

/// Letters of a text that is kept.
const MOST: usize = 160;

/// Who is not well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A switch, with an error that takes links from tenants until somebody has done something.
    FatalOfSwitch,
    /// A switch, with an error that it has got over by itself.
    OfSwitch,
    /// A GPU that this machine has.
    OfGpu,
}

/// One line of the kernel's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Who.
    pub kind: Kind,
    /// Its PCI address in this machine, as the driver writes it; a GPU's has no function.
    pub device: String,
    /// NVIDIA's number of the error.
    pub code: u32,
    /// The line from there on.
    pub text: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.kind == Kind::OfGpu { "Xid" } else { "SXid" };
        write!(f, "{name} {}, {}", self.code, self.text)
    }
}

impl Fault {
    /// The fault that a line tells of. Lines that only say more of one that was told are none.
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
        let text: String = rest.trim().chars().filter(|letter| !letter.is_control()).take(MOST).collect();
        let kind = match (is_switch, text.split(',').next().unwrap_or_default().trim()) {
            (false, _) => Kind::OfGpu,
            (true, "Fatal") => Kind::FatalOfSwitch,
            (true, "Non-fatal") => Kind::OfSwitch,
            // Severity, engine, data: of the line before.
            (true, _) => return None,
        };
        Some(Self { kind, device: device.to_ascii_lowercase(), code, text })
    }
}

/// A record of `/dev/kmsg` that is the kernel's own: its number, and its text.
#[must_use]
pub fn of_kernel(record: &str) -> Option<(u64, &str)> {
    let (head, text) = record.split_once(';')?;
    let mut fields = head.split(',');
    let priority: u32 = fields.next()?.parse().ok()?;
    let number = fields.next()?.parse().ok()?;
    // What a process writes has another facility, whatever it says.
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
    fn switches_and_gpus_are_told_apart_and_fatal_from_not() {
        for (line, kind, device, code) in [
            (
                "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
                Kind::FatalOfSwitch,
                "0000:05:00.0",
                20034,
            ),
            (
                "nvidia-nvswitch0: SXid (PCI:0000:C1:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
                Kind::OfSwitch,
                "0000:c1:00.0",
                12028,
            ),
            ("NVRM: Xid (PCI:0000:04:00): 79, pid=1, GPU has fallen off the bus.", Kind::OfGpu, "0000:04:00", 79),
        ] {
            assert_eq!(fault(line), Some((kind, device.to_owned(), code)), "{line}");
        }
        let fault = Fault::of_line("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up");
        assert_eq!(fault.unwrap().to_string(), "SXid 20034, Fatal, Link 30 LTSSM Fault Up");
    }

    #[test]
    fn what_says_more_of_one_or_is_none_is_none() {
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
        fn any_line_is_a_bounded_fault_or_none(text in "\\PC{0,400}", fatal in any::<bool>()) {
            let _ = of_kernel(&text);
            let _ = Fault::of_line(&text);
            let severity = if fatal { "Fatal" } else { "Non-fatal" };
            let line = format!("nvidia-nvswitch1: SXid (PCI:0000:05:00.0): 1, {severity}, {text}");
            let fault = Fault::of_line(&line).unwrap();
            prop_assert!(fault.text.chars().count() <= MOST && !fault.text.chars().any(char::is_control));
            prop_assert_eq!(fault.kind == Kind::FatalOfSwitch, fatal);
        }
    }
}
