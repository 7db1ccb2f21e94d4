//! Detects whether this is a confidential VM, whose memory is encrypted against the host.

use std::fs::File;
use std::io::Read as _;

use crate::root::Root;

/// CPU flags that the kernel sets in a confidential VM, with their names.
const FLAGS: &[(&str, &str)] =
    &[("tdx_guest", "Intel TDX"), ("sev_snp", "AMD SEV-SNP"), ("sev_es", "AMD SEV-ES"), ("sev", "AMD SEV")];

/// Maximum number of bytes read of `/proc/cpuinfo`; enough for the first CPU.
const FIRST: u64 = 16 << 10;

/// Returns the flag and its name from the first CPU in `/proc/cpuinfo`: `tdx_guest (Intel TDX)`.
#[must_use]
pub fn detect(root: &Root) -> Option<String> {
    let mut text = Vec::new();
    // If the file cannot be read, `firstlight.confidential` decides.
    File::open(root.path("/proc/cpuinfo")).ok()?.take(FIRST).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let (_, flags) = text.lines().find_map(|line| line.split_once(':').filter(|(name, _)| name.trim() == "flags"))?;
    let has = |flag: &str| flags.split_ascii_whitespace().any(|word| word == flag);
    FLAGS.iter().find(|(flag, _)| has(flag)).map(|(flag, what)| format!("{flag} ({what})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidential_mode_is_decided_by_processor_flags() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        assert_eq!(detect(&root), None, "no such file");
        std::fs::create_dir(dir.path().join("proc")).unwrap();
        for (flags, expected) in [
            ("fpu sev sev_es sev_snp lm", Some("sev_snp (AMD SEV-SNP)")),
            ("fpu tdx_guest", Some("tdx_guest (Intel TDX)")),
            ("fpu sevenths lm", None),
            ("", None),
        ] {
            let text = format!("processor\t: 0\nbugs\t: sev_snp\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t: sev\n");
            std::fs::write(dir.path().join("proc/cpuinfo"), text).unwrap();
            assert_eq!(detect(&root).as_deref(), expected, "{flags}");
        }
    }
}
