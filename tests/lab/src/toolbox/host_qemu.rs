//! Finds a suitable QEMU of the host.

use std::path::PathBuf;
use std::process::{Command, Stdio};

const NAME: &str = "qemu-system-x86_64";
/// The first version with `vfio-user-pci`, which synthetic GPUs need.
const OLDEST: (u32, u32) = (10, 1);

/// Returns the host's QEMU, if it is new enough and was built with `vfio-user-pci`.
pub(super) fn find() -> Option<PathBuf> {
    let program =
        std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(NAME)).find(|path| path.is_file())?;
    let output_of = |arguments: &[&str]| {
        let output = Command::new(&program).args(arguments).stdin(Stdio::null()).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let new_enough = version(&output_of(&["--version"])?)? >= OLDEST;
    (new_enough && output_of(&["-device", "help"])?.contains("\"vfio-user-pci\"")).then_some(program)
}

/// Parses major and minor number from `QEMU emulator version 11.1.3 (Debian ...)`.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_once("version ")?.1.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_parsed_from_qemu_output() {
        assert_eq!(version("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)\nCopyright"), Some((11, 1)));
        assert_eq!(version("QEMU emulator version 7.2.22"), Some((7, 2)));
        assert!(version("QEMU emulator version 10.0.2") < Some(OLDEST));
        assert_eq!(version("no such program"), None);
    }
}
