//! Reads and replaces iptables rules by the image's own programs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ttrpc::Code;

use super::tool::{Tool, run};
use crate::error::{Error, Result};

/// Directories of the programs.
const DIRECTORIES: &[&str] = &["usr/sbin", "sbin", "usr/bin", "usr/local/sbin"];

/// Variants in order of preference: nftables works on every current kernel; the plain name is the
/// image's default.
const KINDS: &[&str] = &["-nft", "", "-legacy"];

/// Timeout of a program, including the `WAIT` for the xtables lock.
const LIMIT: Duration = Duration::from_secs(10);
const WAIT: &[&str] = &["--wait", "5"];

/// Maximum output; a ttrpc reply has at most 4 MiB.
const MAX_OUTPUT: usize = 3 << 20;

fn find(root: &Path, is_ipv6: bool, job: &str) -> Result<PathBuf> {
    let family = if is_ipv6 { "ip6tables" } else { "iptables" };
    let names = KINDS.iter().map(|kind| format!("{family}{kind}-{job}"));
    let all: Vec<String> = names.flat_map(|name| DIRECTORIES.iter().map(move |dir| format!("{dir}/{name}"))).collect();
    let found = all.iter().map(|path| root.join(path)).find(|path| path.is_file());
    found.ok_or_else(|| {
        let message = format!(
            "the guest's image has no program for {family}: none of /{} exists; add the package iptables to the image",
            all.join(", /")
        );
        Error::new(Code::FAILED_PRECONDITION, message)
    })
}

pub(super) fn save(root: &Path, is_ipv6: bool) -> Result<Vec<u8>> {
    let program = find(root, is_ipv6, "save")?;
    run(&Tool { program: &program, arguments: &[], input: &[], limit: LIMIT, max_output: MAX_OUTPUT })
}

pub(super) fn restore(root: &Path, is_ipv6: bool, rules: &[u8]) -> Result<Vec<u8>> {
    let program = find(root, is_ipv6, "restore")?;
    run(&Tool { program: &program, arguments: WAIT, input: rules, limit: LIMIT, max_output: MAX_OUTPUT })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn plant(root: &Path, path: &str, script: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn program_is_chosen_by_family_and_operation() {
        let root = tempfile::tempdir().unwrap();
        let found = |is_ipv6, job| {
            find(root.path(), is_ipv6, job).map(|path| path.strip_prefix(root.path()).unwrap().display().to_string())
        };
        let error = found(false, "save").unwrap_err();
        assert_eq!(error.code, Code::FAILED_PRECONDITION);
        for part in ["/usr/sbin/iptables-nft-save", "/sbin/iptables-save", "iptables-legacy-save", "package iptables"] {
            assert!(error.message.contains(part), "{part}: {error}");
        }
        plant(root.path(), "usr/sbin/iptables-save", "");
        plant(root.path(), "sbin/ip6tables-legacy-restore", "");
        assert_eq!(found(false, "save").unwrap(), "usr/sbin/iptables-save");
        assert_eq!(found(true, "restore").unwrap(), "sbin/ip6tables-legacy-restore");
        assert!(found(true, "save").unwrap_err().message.contains("/usr/sbin/ip6tables-nft-save"));
        assert!(found(false, "restore").is_err());
        plant(root.path(), "sbin/iptables-nft-save", "");
        assert_eq!(found(false, "save").unwrap(), "sbin/iptables-nft-save");
    }

    #[test]
    fn rules_are_passed_by_pipes_without_deadlock() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("rules");
        plant(
            root.path(),
            "usr/sbin/ip6tables-nft-restore",
            &format!("[ \"$*\" = '--wait 5' ] && cat > {}", file.display()),
        );
        plant(root.path(), "usr/sbin/ip6tables-nft-save", &format!("cat {}", file.display()));
        // Larger than a pipe, so writes and reads must alternate.
        let rules: Vec<u8> =
            (0..500_000u32).flat_map(|number| [b'0' + u8::try_from(number % 10).unwrap(), b'\n']).collect();
        assert_eq!(restore(root.path(), true, &rules).unwrap(), b"");
        assert_eq!(save(root.path(), true).unwrap(), rules);
    }
}
